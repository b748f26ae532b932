import pytest

from vlarl.config.compose import build, compose, parse_overrides
from vlarl.config.sources import Leaf
from vlarl.errors import ConfigError

RUN = """\
# A run.
env: {name: pond, depth: 2}
policy: {name: duck, checkpoint: quack}
algo: {name: herd}
"""


def problems(preset, overrides=()):
    with pytest.raises(ConfigError) as caught:
        build(compose(preset, overrides))
    return str(caught.value).splitlines()


def test_own_keys_win_over_later_bases_win_over_earlier_ones(write):
    write("a.yaml", "seed: 1\nmax_steps: 1\npatience: 1\n")
    write("b.yaml", "max_steps: 2\npatience: 2\n")
    write("c.yaml", "extends: [a.yaml, b.yaml]\npatience: 3\n")
    composed = compose("c.yaml", ["save.keep=9"])
    assert composed.values == {
        "seed": 1,
        "max_steps": 2,
        "patience": 3,
        "save": {"keep": 9},
        "name": "c",
    }
    assert composed.sources == {
        "seed": "a.yaml:1",
        "max_steps": "b.yaml:1",
        "patience": "c.yaml:2",
        "save.keep": "cli",
        "name": "c.yaml",
    }


def test_sections_merge_deeply_and_lists_replace(write):
    write("a.yaml", "env: {name: pond, tasks: [swim, dive], depth: 2}\n")
    write("b.yaml", "extends: a.yaml\nenv: {tasks: [hop]}\n")
    assert compose("b.yaml").values["env"] == {"name": "pond", "tasks": ["hop"], "depth": 2}


def test_a_new_name_replaces_the_section(write):
    write("a.yaml", "env: {name: pond, depth: 2}\nname: a\noptim: {lr: 1}\n")
    write("b.yaml", "extends: a.yaml\nenv: {name: sea}\nname: b\n")
    composed = compose("b.yaml")
    assert composed.values == {"env": {"name": "sea"}, "name": "b", "optim": {"lr": 1}}
    assert "env.depth" not in composed.sources
    # The same name changes nothing, and on the command line the order of keys does not matter.
    assert compose("a.yaml", ["env.name=pond"]).values["env"]["depth"] == 2
    changed = compose("a.yaml", ["env.salt=1", "env.name=sea"])
    assert changed.values["env"] == {"salt": 1, "name": "sea"}


def test_files_extend_relative_to_themselves_and_shipped_presets_by_name(write):
    write("base/one.yaml", "extends: two.yaml\nseed: 1\n")
    write("base/two.yaml", "max_steps: 2\n")
    write("c.yaml", "extends: [base/grpo, base/one.yaml]\n")
    composed = compose("c.yaml")
    assert composed.values["max_steps"] == 2
    assert composed.values["algo"]["name"] == "grpo"
    assert composed.sources["algo.name"].startswith("base/grpo.yaml:")
    assert composed.sources["max_steps"] == "base/two.yaml:1"


def test_extends_in_a_circle_is_an_error_and_a_diamond_is_not(write):
    write("top.yaml", "seed: 1\n")
    write("l.yaml", "extends: top.yaml\n")
    write("r.yaml", "extends: top.yaml\n")
    write("d.yaml", "extends: [l.yaml, r.yaml]\n")
    assert compose("d.yaml").values["seed"] == 1
    write("top.yaml", "extends: d.yaml\n")
    with pytest.raises(ConfigError, match="goes round in a circle"):
        compose("d.yaml")


@pytest.mark.parametrize("value", ["3", "{a: b}", "[1]", "[[a]]"])
def test_extends_must_name_presets(write, value):
    write("a.yaml", f"extends: {value}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml.*: extends: expected a preset name"):
        compose("a.yaml")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("tiny_metaworld_grop", "no preset named 'tiny_metaworld_grop'; did you mean"),
        ("zzz", "no preset named 'zzz'; there are: "),
        ("missing.yaml", "there is no file missing.yaml"),
        ("folder.yaml", "cannot read folder.yaml"),
    ],
)
def test_what_cannot_be_read_is_named(write, tmp_path, preset, message):
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=message):
        compose(preset)


def test_a_binary_file_is_named(write, tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.yaml is not UTF-8 text"):
        compose("x.yaml")


def test_overrides_are_yaml_and_dotted():
    tree = parse_overrides(["optim.lr=1e-5", "env.tasks=[a, b]", "log.wandb=", "env={depth: 3}"])
    assert tree == {
        "optim": {"lr": Leaf(1e-5, "cli")},
        "env": {"tasks": Leaf(["a", "b"], "cli"), "depth": Leaf(3, "cli")},
        "log": {"wandb": Leaf(None, "cli")},
    }


def test_every_bad_override_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["lr", "=3", "a..b=1", "x=[1", "y=1", "y=2", "s=1", "s.t=2", "a.b=x=y"])
    lines = str(caught.value).splitlines()
    assert [line.split("'")[1] for line in lines] == ["lr", "=3", "a..b=1", "x=[1", "y=2", "s.t=2"]
    assert "expected KEY=VALUE" in lines[0]
    assert "given twice" in lines[4]


def test_a_run_is_built_of_the_classes_its_sections_name(write):
    run = build(compose(write("a.yaml", RUN), ["rollout.episodes=24", "optim.lr=1e-5"]))
    assert type(run.env).__name__ == "Pond"
    assert (run.env.depth, run.optim.lr, run.rollout.episodes) == (2.0, 1e-5, 24)
    assert run.name == "a"


def test_lr_written_1e_5_is_a_number(write):
    assert build(compose(write("a.yaml", RUN + "optim:\n  lr: 1e-5\n"))).optim.lr == 1e-5
    # Even as text, which some editors write.
    assert build(compose(write("b.yaml", RUN + "optim:\n  lr: '1e-5'\n"))).optim.lr == 1e-5


def test_all_errors_come_at_once_with_their_lines(write):
    text = (
        "env:\n  name: pnd\n  whatever: 1\npolicy:\n  name: duck\nalgo:\n  name: herd\n"
        "optim:\n  lrr: 1\n  epochs: two\nrollout: {episodes: 50}\nlr: 3\n"
    )
    assert problems(write("a.yaml", text), ["save.every=0"]) == [
        "env.name: no env named 'pnd'; did you mean 'pond'? (a.yaml:2)",
        "rollout.episodes (50) must be a multiple of 8, the group size of algo 'herd'; "
        "nearest: 48 or 56",
        "policy.checkpoint: missing, and it has no default",
        "optim.epochs: should be a valid integer; got 'two' (a.yaml:10)",
        "optim.lrr: unknown key; did you mean 'optim.lr'? (a.yaml:9)",
        "save.every: should be greater than or equal to 1; got 0 (cli)",
        "lr: unknown key; did you mean 'optim.lr'? (a.yaml:12)",
    ]


def test_episodes_must_fill_groups_and_the_message_says_so_once(write):
    write("a.yaml", RUN)
    assert problems("a.yaml", ["algo.group_size=7"]) == [
        "rollout.episodes (64) must be a multiple of 7, the group size of algo 'herd'; "
        "nearest: 63 or 70"
    ]
    assert problems("a.yaml", ["rollout.episodes=3"])[0].endswith("nearest: 8")
    build(compose("a.yaml", ["algo.name=alone", "rollout.episodes=7"]))


def test_a_missing_section_is_named(write):
    found = problems(write("a.yaml", "algo: {gamma: 1}\nenv: pond\n"))
    assert "policy: missing, and it has no default" in found
    assert "algo.name: missing, and it has no default" in found
    assert "env: should be a section of keys and values; got 'pond' (a.yaml:2)" in found


def test_a_name_must_be_able_to_be_a_folder(write):
    write("a.yaml", RUN)
    assert problems("a.yaml", ["name=../x"])[0].startswith("name: ")
