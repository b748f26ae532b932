import json

import pytest

from vlarl.config.compose import build, compose
from vlarl.config.resolved import differences, dump, flatten, load, resolved, to_yaml
from vlarl.errors import ConfigError

RUN = """\
env: {name: pond, tasks: ["a b", "x: y", "3", "#", "- z", "", "true", "ü"]}
policy: {name: duck, checkpoint: ./some/dir, adapter: {rank: 2}}
algo: {name: herd}
"""


@pytest.fixture
def composed(write):
    return compose(write("a.yaml", RUN), ["optim.lr=1e-5"])


def test_every_leaf_has_a_source(composed):
    full = resolved(build(composed), composed.sources)
    assert set(full.sources) == {key for key, _ in flatten(full.values)}
    assert full.sources["optim.lr"] == "cli"
    assert full.sources["policy.adapter.rank"] == "a.yaml:2"
    assert full.sources["optim.epochs"] == "default"
    assert full.values["optim"]["lr"] == 1e-5


def test_a_dumped_run_loads_as_the_same_run(composed, tmp_path):
    run = build(composed)
    path = tmp_path / "config.json"
    path.write_text(dump(run, composed.sources))
    again = load(path)
    assert build(again) == run
    assert dump(build(again), again.sources) == path.read_text()
    assert json.loads(path.read_text())["sources"]["optim.lr"] == "cli"


def test_yaml_of_a_run_composes_to_the_same_run(composed, write):
    run = build(composed)
    full = resolved(run, composed.sources)
    for with_sources in (False, True):
        text = to_yaml(full, with_sources=with_sources)
        assert build(compose(write("b.yaml", text))) == run
    assert "  lr: 1e-05  # cli" in text
    assert '  tasks: [a b, "x: y", "3", "#", "- z", "", "true", ü]  # a.yaml:1' in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist; is .* a run directory"),
        ("{", "is not the config.json of a run"),
        ("[]", "is not the config.json of a run"),
        ('{"config": [], "sources": {}}', "is not the config.json of a run"),
        ('{"model_type": "llama"}', "is not the config.json of a run"),
        ("[" * 100_000, "is not the config.json of a run"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_differences_name_both_sides():
    a = {"x": 1, "s": {"t": 2, "u": 3}, "only": 0}
    b = {"x": 1, "s": {"t": 5, "u": 3, "v": [1]}}
    assert differences(a, b) == [("s.t", 2, 5), ("only", 0, None), ("s.v", None, [1])]
