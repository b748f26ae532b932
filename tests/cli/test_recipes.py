"""Every recipe passes its dry run on a machine without weights and without a GPU."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vlarl.assets import manifest
from vlarl.config import presets
from vlarl.config.compose import build, compose
from vlarl_cli.main import app

RECIPES = [name for name in presets.names() if name.endswith("_openvlaoft")]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(*words) -> the finished `vlarl train` on a bare laptop."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLARL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("VLARL_RUNS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def run(*words):
        done = CliRunner().invoke(app, ["train", "--preset", *map(str, words)])
        assert "Traceback" not in done.output
        assert list(tmp_path.iterdir()) == []
        return done

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_lists_what_is_missing_and_passes(train, monkeypatch, name):
    monkeypatch.setattr("vlarl.doctor.memory_bytes", lambda: 2**50)
    done = train(name, "--dry-run", "--nproc", 8)
    assert done.exit_code == 0, done.output
    checkpoint = build(compose(name)).policy.checkpoint
    for words in (
        f"missing: asset '{checkpoint}' is not in",
        f"run: vlarl download {checkpoint}",
        "torch sees no CUDA device",
        "not checked without it: statistics, head, tokenizer and weights",
        "memory, GiB, estimated, of rank 0 of 8",
        "exit code 3",
    ):
        assert words in done.stdout
    assert "note:" not in done.stdout  # everything divides
    assert "too little here" not in done.stdout


def test_a_machine_that_is_too_small_is_named(train, monkeypatch):
    monkeypatch.setattr("vlarl.doctor.memory_bytes", lambda: 20 * 2**30)
    done = train("libero_spatial_grpo_openvlaoft", "--dry-run", "--nproc", 8)
    assert "too little here: this machine has 20 of the" in done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_the_run_itself_ends_with_code_3_and_the_command_that_helps(train, name):
    done = train(name)
    assert done.exit_code == 3, done.output
    checkpoint = build(compose(name)).policy.checkpoint
    assert f"run: vlarl download {checkpoint}" in done.stderr
    assert "also missing: compute.device is cuda but torch sees no CUDA device" in done.stderr
    assert done.stdout == ""


def test_the_document_has_the_numbers(train):
    done = train("libero_10_ppo_openvlaoft", "--dry-run", "--nproc", 8, "--json")
    found = json.loads(done.stdout)
    assert [entry["fix"] for entry in found["missing"]] == [
        "vlarl download openvla-oft-libero-10-traj1",
        "vlarl doctor",
    ]
    assert found["division"]["step_decisions"] == 16_384
    assert {item["phase"] for item in found["memory"]["items"]} == {
        "load",
        "rollout",
        "update",
        "save",
    }


def test_what_the_config_declares_is_still_checked(train):
    done = train("libero_goal_grpo_openvlaoft", "--dry-run", "policy.action_format=metaworld_7d")
    assert done.exit_code == 2
    assert "emits 4 numbers per action but env 'libero' takes 7" in done.stderr
    done = train("libero_goal_grpo_openvlaoft", "--dry-run", "policy.num_images=2")
    assert "reads 2 cameras but env 'libero' renders 1" in done.stderr
    done = train("libero_goal_grpo_openvlaoft", "--dry-run", "rollout.episodes=1020")
    assert "nearest: 1016 or 1024" in done.stderr
    done = train("libero_goal_grpo_openvlaoft", "--dry-run", "--nproc", 129)
    assert "128 groups of episodes cannot be shared by 129 ranks" in done.stderr


def test_an_unfinished_copy_of_an_asset_is_missing_too(train, tmp_path, monkeypatch):
    folder = tmp_path.parent / f"{tmp_path.name}-home" / "openvla-oft-libero-goal-traj1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("VLARL_HOME", str(folder.parent))
    done = train("libero_goal_grpo_openvlaoft", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "is not complete: no *.safetensors" in done.stdout


def test_a_checkpoint_of_no_asset_is_missing_too(train):
    done = train("libero_goal_grpo_openvlaoft", "--dry-run", "policy.checkpoint=./my-own")
    assert done.exit_code == 0, done.output
    assert "missing: there is no folder './my-own'" in done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_its_asset_and_says_what_it_is_in_the_docs(name):
    values = compose(name).values
    assert values["policy"]["checkpoint"] in manifest.names()
    docs = Path(__file__).parents[2] / "docs" / "recipes.md"
    (row,) = re.findall(rf"^\| `{name}` \|.*$", docs.read_text(), flags=re.MULTILINE)
    run = build(compose(name))
    assert f"`{run.policy.checkpoint}`" in row
    assert f"| {run.rollout.episodes:,} |" in row
    assert f"| {run.optim.minibatches} |" in row
