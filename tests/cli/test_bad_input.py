"""What people get wrong: one message with what to do, nothing started, nothing written."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vlarl.models.openvla_oft.tiny import TinySizes, init_tiny
from vlarl_cli.main import app

LIBERO = "libero_goal_grpo_openvlaoft"
SIZES = TinySizes(
    hidden=32,
    mlp=48,
    layers=1,
    heads=2,
    vision_dim=16,
    vision_depth=1,
    vision_heads=2,
    vision_mlp=24,
)
NUMBERS = {"q01": [-1.0] * 6 + [0.0], "q99": [1.0] * 7, "mask": [True] * 6 + [False]}


@pytest.fixture
def error(tmp_path, monkeypatch):
    """error(line, code=2) -> stderr of a `vlarl` line that has to end with `code`."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("VLARL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("VLARL_RUNS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def run(line, code=2):
        done = CliRunner().invoke(app, line.split())
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        assert done.stdout == "" or code == 0
        assert list(Path().iterdir()) == []
        return done.stderr if code else done.stdout

    return run


@pytest.fixture
def goal_checkpoint(tmp_path):
    """A small checkpoint of LIBERO-Goal in the released layout."""
    folder = tmp_path / "goal"
    init_tiny(
        folder,
        prompts=("open the drawer",),
        statistics={"action": {**NUMBERS, "min": [-1.0] * 7, "max": [1.0] * 7}},
        key="libero_goal_no_noops",
        action_dims=7,
        sizes=SIZES,
    )
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "eval tiny-oft-metaworld --suite libero_spatail --dry-run",
        "eval tiny-oft-metaworld --suite LIBERO_SPATIAL --dry-run",
        "collect --suite libero_spatail --dry-run",
        f"train --preset {LIBERO} env.suite=libero_spatail --dry-run",
        f"train --preset {LIBERO} env.suite=libero_spatail",
    ],
)
def test_a_suite_with_a_typo(error, line):
    assert "did you mean 'libero_spatial'?" in error(line)


def test_a_checkpoint_that_knows_its_env_is_offered_its_suites(error):
    said = error("eval tiny-oft-libero --dry-run")
    assert "libero_spatial" in said
    assert "mt10" not in said


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"train --preset {LIBERO} --dry-run env.train_trials=0-50", "train_trials"),
        (f"train --preset {LIBERO} env.eval_trials=40-50", "eval_trials"),
        ("eval tiny-oft-metaworld --suite libero_goal --dry-run env.eval_trials=50", "eval_trials"),
    ],
)
def test_trials_above_50_name_their_key_and_where_it_was_set(error, line, key):
    said = error(line)
    assert f"env.{key}: " in said
    assert "50 initial states a task, which have the numbers 0 to 49 (cli)" in said


def test_training_and_evaluation_on_the_same_states(error):
    assert "share trials of 10 tasks" in error(
        f"train --preset {LIBERO} --dry-run env.train_trials=0-49"
    )
    shared = "env.train_trials=0-49 env.eval_trials=0-49 env.share_trials=true"
    error(f"train --preset {LIBERO} --dry-run {shared}", code=0)


@pytest.mark.parametrize(
    "line",
    [
        "train --preset tiny_metaworld_grpo --dry-run policy.unnorm_key=libero_goal",
        "eval tiny-oft-metaworld --suite mt10 --dry-run policy.unnorm_key=libero_goal",
    ],
)
def test_statistics_that_are_not_there(error, line):
    assert "no statistics of 'libero_goal'; there are: vlarl" in error(line)


@pytest.mark.parametrize(
    "line",
    [
        "train --preset tiny_metaworld_grpo",
        "train --preset tiny_metaworld_grpo --dry-run",
        "train --preset tiny_metaworld_grpo --dry-run --run-dir deep/below/run",
        "eval tiny-oft-metaworld --suite mt10 --dry-run --out r.json",
        "eval tiny-oft-metaworld --suite mt10 --out deep/below/r.json",
    ],
)
def test_a_folder_that_may_not_be_written(error, monkeypatch, line):
    may = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: not mode & os.W_OK and may(p, mode))
    assert f"no permission to write in {Path.cwd()}" in error(line)


# ------------------------------------------------------- a checkpoint that is here, but wrong


def dry(checkpoint, *words):
    return f"train --preset {LIBERO} policy.checkpoint={checkpoint} {' '.join(words)} --dry-run"


def test_a_checkpoint_that_fits(error, goal_checkpoint):
    said = error(dry(goal_checkpoint, "compute.device=cpu"), code=0)
    assert "missing" not in said
    assert "the network of the released 7B" not in said


def test_a_checkpoint_of_another_suite(error, goal_checkpoint):
    words = "env.suite=libero_spatial", "policy.unnorm_key=null"
    said = error(dry(goal_checkpoint, *words))
    assert "statistics are those of 'libero_goal_no_noops'" in said
    assert "tasks of libero_spatial" in said
    line = dry(goal_checkpoint, "env.suite=libero_spatial", "policy.unnorm_key=libero_spatial")
    assert "there are: libero_goal_no_noops" in error(line)
    line = f"eval {goal_checkpoint} --suite libero_spatial --dry-run"
    assert "policy.unnorm_key=libero_goal_no_noops" in error(line)
    chosen = "policy.unnorm_key=libero_goal_no_noops"
    error(f"{line} {chosen} --out {goal_checkpoint.parent}/r.json", code=0)


def test_a_checkpoint_of_another_robot(error, goal_checkpoint):
    line = f"train --preset metaworld_50_grpo_openvlaoft policy.checkpoint={goal_checkpoint}"
    said = error(f"{line} policy.unnorm_key=null policy.action_format=null --dry-run")
    assert "emits 7 numbers per action but env 'metaworld' takes 4" in said


def test_an_l1_head(error, goal_checkpoint):
    torch.save({}, goal_checkpoint / "action_head--1_checkpoint.pt")
    assert "was trained with an L1 regression head" in error(dry(goal_checkpoint))
    line = f"eval {goal_checkpoint} --suite libero_goal --temperature 1.6 --dry-run"
    assert "does not draw its actions (head: l1)" in error(line)


def test_a_checkpoint_without_a_tokenizer(error, goal_checkpoint):
    (goal_checkpoint / "tokenizer.json").unlink()
    assert "missing: no 'tokenizer.json' in" in error(dry(goal_checkpoint), code=0)
    line = dry(goal_checkpoint).removesuffix(" --dry-run")
    assert "no 'tokenizer.json' in" in error(line, code=3)


def test_a_checkpoint_without_weights(error, goal_checkpoint):
    for path in goal_checkpoint.glob("*.safetensors*"):
        path.unlink()
    assert "missing: no model.safetensors.index.json" in error(dry(goal_checkpoint), code=0)
    line = dry(goal_checkpoint).removesuffix(" --dry-run")
    assert "no model.safetensors.index.json" in error(line, code=3)
