import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from vlarl import dataset, run_dir
from vlarl.dataset import Origin
from vlarl.specs import ActionSpec, EnvSpec
from vlarl.trajectories import Trajectory
from vlarl_cli.main import app

SPEC = EnvSpec(
    name="metaworld",
    action=ActionSpec(dims=4, format="delta_xyz", gripper="effort_close_positive"),
    cameras=("corner4",),
    frame_size=(28, 28),
    state_dims=4,
    state_format="hand_xyz_gripper_opening",
    max_steps=9,
    control_hz=80.0,
    tasks=("reach-v3",),
)
SMALL = [
    "init.image_size=28",
    "init.hidden=16",
    "init.mlp=16",
    "init.layers=1",
    "init.heads=2",
    "init.vision_dim=16",
    "init.vision_depth=1",
    "init.vision_heads=2",
    "init.vision_mlp=16",
    "optim.steps=2",
    "optim.batch=4",
    "optim.warmup_steps=0",
    "validation.fraction=0.0",
    "log.tensorboard=false",
]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origin = Origin(
        env={"name": "metaworld"},
        spec=SPEC,
        teacher="expert",
        noise=0.0,
        temperature=0.0,
        seed=0,
        split="train",
        keep_failures=False,
        versions={},
    )
    made = dataset.create(tmp_path / "data" / "tiny_metaworld", origin)
    numbers = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    for trial in range(2):
        made.add(
            Trajectory(
                task="reach-v3",
                trial=trial,
                instruction="Reach a goal position",
                frames={"corner4": np.zeros((4, 28, 28, 3), np.uint8)},
                state=numbers,
                action=numbers,
                target=numbers,
                reward=np.zeros(4, np.float32),
                success=True,
            )
        )
    made.flush()
    return made.folder


def sft(*args, code=0):
    words = ["sft", "--preset", "tiny_metaworld_sft", *SMALL, *map(str, args)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done


def test_a_run_ends_with_a_checkpoint_that_others_find(data):
    done = sft("--run-dir", "runs/a", "--json")
    found = json.loads(done.stdout)
    checkpoint = Path(found["checkpoint"])
    assert (checkpoint / "dataset_statistics.json").is_file()
    assert run_dir.latest_checkpoint(run_dir.RunDir(Path("runs/a"))) == Path(
        "runs/a/ckpt/step_000002"
    )
    assert 0 <= found["metrics"]["sft/token_accuracy"] <= 1
    assert "2 episodes, 8 samples" in done.stderr
    assert "step 2/2" in done.stderr
    assert json.loads(Path("runs/a/config.json").read_text())["sources"]["optim.steps"] == "cli"


def test_a_dry_run_writes_nothing(data):
    done = sft("--dry-run", "--seed", 4, "--json")
    assert json.loads(done.stdout)["config"]["seed"] == 4
    assert not Path("runs").exists()


def test_an_episode_that_is_gone_is_missed_by_a_dry_run(data):
    next(data.glob("*_trial_*.npy")).unlink()
    assert "lacks 1 of 2 episodes that its dataset.json names" in sft("--dry-run", code=3).stderr


def test_a_run_that_is_there_is_kept_unless_asked(data):
    sft("-q")
    done = sft(code=2)
    assert "is not empty" in done.stderr
    sft("--overwrite", "-q", "--seed", 7)
    assert (
        json.loads(Path("runs/tiny_metaworld_sft/config.json").read_text())["config"]["seed"] == 7
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("data=[nowhere]",), 3, "no data set in nowhere"),
        (("optim.stepz=1",), 2, "did you mean 'optim.steps'"),
        (("policy.checkpoint=x",), 2, "init makes a fresh checkpoint"),
        (("init.image_size=30",), 2, "init.image_size"),
        (
            ("data=[data/tiny_metaworld, ./data/tiny_metaworld]", "--dry-run"),
            2,
            "data: data/tiny_metaworld is named twice",
        ),
        (("optim.lr=true",), 2, "optim.lr: should be a valid number; got True"),
    ],
)
def test_bad_requests_are_one_message_and_leave_nothing(data, words, code, message):
    done = sft(*words, code=code)
    assert message in done.stderr
    assert done.stdout == ""
    assert not Path("runs").exists()
