import pytest

from vlarl.config.sources import Leaf, read_tree, read_value
from vlarl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("2E3", 2000.0),
        (".5", 0.5),
        ("-1.", -1.0),
        ("7", 7),
        ("010", 10),
        ("true", True),
        ("", None),
        ("null", None),
        ("yes", "yes"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("v3", "v3"),
        ("[a, 1e-3]", ["a", 1e-3]),
        ("{name: ppo}", {"name": "ppo"}),
        ("'1e-5'", "1e-5"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    read = read_value(text)
    assert read == value
    assert type(read) is type(value)


def test_leaves_know_file_and_line():
    tree = read_tree("# about\noptim:\n  lr: 1e-5\n  betas: [0.9,\n    0.95]\nseed: 3\n", "x.yaml")
    assert tree == {
        "optim": {"lr": Leaf(1e-5, "x.yaml:3"), "betas": Leaf([0.9, 0.95], "x.yaml:4")},
        "seed": Leaf(3, "x.yaml:6"),
    }


def test_empty_documents_are_empty_trees():
    assert read_tree("", "x") == {}
    assert read_tree("# nothing\n", "x") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\nc: 2\n", "x.yaml:3:2: expected ',' or ']', but got ':'"),
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3:1: key 'a' is already set on line 1"),
        ("s:\n  a: 1\n  a: 2\n", "x.yaml:3:3: key 'a' is already set on line 2"),
        ("l: [{a: 1, a: 2}]\n", "x.yaml:1:12: key 'a' is already set on line 1"),
        ("- a\n", "x.yaml:1:1: expected a mapping of keys to values"),
        ("a: &x {b: 1}\nc: *x\n", "x.yaml:2:4: anchors and aliases are not supported"),
        ("? [a]\n: 1\n", "x.yaml:1:3: a key must be a word"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: !!int word\n", "x.yaml: invalid literal"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2:1: but found another document"),
        ("a: \x00\n", "x.yaml: special characters are not allowed"),
    ],
)
def test_bad_yaml_is_one_message_with_the_line(text, message):
    with pytest.raises(ConfigError) as caught:
        read_tree(text, "x.yaml")
    assert message in str(caught.value)


def test_thousands_of_brackets_are_one_message():
    deep = "[" * 5000 + "]" * 5000
    with pytest.raises(ConfigError, match=r"x\.yaml: brackets are nested too deeply"):
        read_tree(f"a: {deep}", "x.yaml")
    with pytest.raises(ValueError, match="nested too deeply"):
        read_value(deep)


def test_a_bad_value_is_a_value_error():
    with pytest.raises(ValueError, match="expected"):
        read_value("[a")
