"""The whole command on the real simulator, with an untrained policy of the real architecture."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlarl.envs import metaworld
from vlarl.envs.metaworld_tasks import TASKS
from vlarl.models.openvla_oft.tiny import TinySizes, init_tiny
from vlarl.result_file import load
from vlarl.results import EpisodeKey
from vlarl_cli.main import app

pytestmark = pytest.mark.sim

SMALL = TinySizes(
    hidden=32,
    mlp=48,
    layers=1,
    heads=2,
    vision_dim=16,
    vision_depth=1,
    vision_heads=2,
    vision_mlp=24,
)
FAST = ("env.frame_size=64", "env.render_quality=fast", "env.max_steps=16", "env.settle_steps=2")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init_tiny(
        tmp_path / "oft",
        prompts=[metaworld.instruction(task) for task in TASKS],
        statistics={"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4, "mask": [True] * 4}},
        key="metaworld",
        action_dims=4,
        sizes=SMALL,
    )
    return tmp_path / "oft"


def vlarl_eval(*args):
    done = CliRunner().invoke(app, ["eval", "./oft", *map(str, args), *FAST])
    assert done.exit_code == 0, done.output
    return done


def test_three_and_seven_slots_play_the_same_episodes_of_mt50(checkpoint):
    tasks = ("reach-v3", "door-open-v3", "assembly-v3", "disassemble-v3", "button-press-v3")
    common = ("--suite", "mt50", "--tasks", ",".join(tasks), "--episodes", 2, "--temperature", 0)
    vlarl_eval(*common, "--num-slots", 3, "--out", "three.json")
    vlarl_eval(*common, "--num-slots", 7, "--out", "seven.json")
    three, seven = load(Path("three.json")), load(Path("seven.json"))
    assert three.plan == tuple(EpisodeKey(t, n, 0) for t in tasks for n in (1000, 1001))
    assert three.is_complete
    assert three.episodes == seven.episodes
    protocol = three.protocol
    assert protocol["gl"] in ("egl", "osmesa")
    assert protocol["env"]["render_quality"] == "fast"
    assert protocol["compute"]["renderer"]
    assert protocol["policy"]["head"] == "tokens"
    assert protocol["env"]["settle_steps"] == 2
    assert protocol["trials"]["numbered_by"] == "goal_seed=0"
    assert protocol["plan"]["start_from_training_trial"] == 0
    assert protocol["policy"]["resolved"]["jpeg"] == "off"
    assert protocol["policy"]["self_tests"] == {"attention": "bidirectional, blind to padding"}
    assert set(three.groups) == {"easy", "hard", "very_hard"}
    replace(three, episodes=three.episodes[:7]).save(Path("part.partial.json"))
    vlarl_eval(*common, "--num-slots", 3, "--out", "part.json", "--resume")
    assert load(Path("part.json")).episodes == three.episodes
    compared = CliRunner().invoke(app, ["compare", "three.json", "seven.json", "-q"])
    assert compared.stdout == "+0.0000\n"
    assert compared.stderr == ""


def test_a_wrong_action_width_is_found_before_weights_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init_tiny(
        tmp_path / "seven",
        prompts=["reach"],
        statistics={"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 7}},
        key="other",
        action_dims=7,
        sizes=SMALL,
    )
    for weights in (tmp_path / "seven").glob("*.safetensors"):
        weights.unlink()
    done = CliRunner().invoke(app, ["eval", "./seven", "--suite", "mt10"])
    assert done.exit_code == 2
    assert "emits 7 numbers per action but env 'metaworld' takes 4" in done.stderr
