import pytest

from vlarl.config import resolved
from vlarl.config.compose import build, compose
from vlarl.config.resume import MAY_CHANGE, continued
from vlarl.errors import ConfigError

PRESET = """
env: {name: pond, tasks: [swim, dive]}
policy: {name: duck, checkpoint: ./toy}
algo: {name: herd, group_size: 4}
optim: {lr: 1e-5}
max_steps: 20
"""


@pytest.fixture
def stored(write, tmp_path):
    """The configuration of a run as it is on disk."""
    composed = compose(write("a.yaml", PRESET), ["seed=3"])
    (tmp_path / "config.json").write_text(resolved.dump(build(composed), composed.sources))
    return resolved.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("max_steps=40", ["max_steps"], 40),
        ("patience=3", ["patience"], 3),
        ("run_dir=elsewhere", ["run_dir"], "elsewhere"),
        ("eval.every=0", ["eval", "every"], 0),
        ("eval={every: 3}", ["eval", "every"], 3),
        ("save.keep=9", ["save", "keep"], 9),
        ("log.tensorboard=false", ["log", "tensorboard"], False),
        ("compute.threads=2", ["compute", "threads"], 2),
    ],
)
def test_how_long_and_how_often_may_change(stored, override, key, value):
    found = continued(stored, [override])
    built = build(found).model_dump(mode="json")
    for part in key:
        built = built[part]
    assert built == value
    assert found.sources[".".join(key)] == "cli"


def test_everything_else_stays_as_it_was(stored):
    before = build(stored).model_dump()
    after = build(continued(stored, ["max_steps=40", "eval.every=7"])).model_dump()
    assert (after.pop("max_steps"), before.pop("max_steps")) == (40, 20)
    assert (after["eval"].pop("every"), before["eval"].pop("every")) == (7, 10)
    assert before == after
    assert continued(stored, []).values == stored.values
    assert stored.values["max_steps"] == 20, "the argument must stay as it was"


def test_sources_of_the_rest_stay(stored):
    found = continued(stored, ["max_steps=40"])
    assert found.sources["optim.lr"] == "a.yaml:5"
    assert found.sources["seed"] == "cli"
    assert found.sources["rollout.episodes"] == "default"


@pytest.mark.parametrize(
    "override",
    [
        "seed=4",
        "optim.lr=2e-5",
        "optim={lr: 2e-5}",
        "env.tasks=[swim]",
        "algo.group_size=8",
        "policy.checkpoint=./other",
        "rollout.temperature=1.6",
        "algo={name: alone}",
        "optim.lrr=1e-5",
        "name=other",
    ],
)
def test_what_it_learns_may_not_change(stored, override):
    key = override.partition("=")[0].partition(".")[0]
    with pytest.raises(ConfigError, match=rf"--resume cannot change {key}.*may change max_steps"):
        continued(stored, ["max_steps=40", override])


def test_all_refusals_come_at_once_with_the_way_out(stored):
    with pytest.raises(ConfigError) as caught:
        continued(stored, ["seed=4", "max_steps=40", "optim.lr=1"])
    said = str(caught.value)
    assert "cannot change seed, optim.lr;" in said
    assert ", ".join(MAY_CHANGE) in said
    assert "policy.checkpoint=RUN_DIR/ckpt/step_N/policy" in said


def test_saying_again_what_holds_is_no_change(stored):
    same = ["seed=3", "optim.lr=1e-5", "env.tasks=[swim, dive]", "algo={group_size: 4}"]
    assert build(continued(stored, same)) == build(stored)


def test_a_wrong_value_of_a_free_key_is_still_an_error(stored):
    for override in ("max_steps=many", "eval.evry=2", "save=null"):
        with pytest.raises(ConfigError, match=override.partition("=")[0].partition(".")[0]):
            build(continued(stored, [override]))
    with pytest.raises(ConfigError, match="given twice"):
        continued(stored, ["max_steps=1", "max_steps=2"])
