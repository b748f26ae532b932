from hypothesis import given
from hypothesis import strategies as st

from vlarl.config.compose import Composed, merge
from vlarl.config.resolved import differences, flatten, to_yaml
from vlarl.config.sources import Leaf, read_tree

KEYS = st.sampled_from(["name", "a", "b", "lr"])
TEXT = st.text("ab1eyn0é.-+_#:'\"[]{},&*!|>%@` \\~?=<\n\t", max_size=10)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["true", "1e-5", "- a", "a: b", "#", "~", "'", " x ", "null", "a #b", "é"])
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3)
PLAIN = st.dictionaries(
    KEYS, VALUES | st.dictionaries(KEYS, VALUES, min_size=1, max_size=3), max_size=4
)


def plain(tree):
    return {k: v.value if isinstance(v, Leaf) else plain(v) for k, v in tree.items()}


def leaves(values):
    return {k: leaves(v) if isinstance(v, dict) else Leaf(v, "x") for k, v in values.items()}


@given(PLAIN)
def test_yaml_reads_back_as_what_was_written(values):
    sources = {key: "some/file.yaml:3" for key, _ in flatten(values)}
    for with_sources in (False, True):
        text = to_yaml(Composed("x", values, sources), with_sources=with_sources)
        assert plain(read_tree(text, "x")) == values


@given(PLAIN, PLAIN)
def test_the_upper_tree_always_wins(under, over):
    merged = plain(merge(leaves(under), leaves(over)))
    top = dict(flatten(over))
    assert {k: v for k, v in flatten(merged) if k in top} == top
    assert set(flatten_keys(merged)) <= set(flatten_keys(under)) | set(top)


@given(PLAIN)
def test_nothing_changes_by_merging_a_tree_with_itself_or_with_nothing(values):
    tree = leaves(values)
    assert merge(tree, tree) == merge(tree, {}) == merge({}, tree) == tree
    assert differences(values, values) == []


def flatten_keys(values):
    return [key for key, _ in flatten(values)]
