"""What `vlarl train` refuses before anything starts."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vlarl.testing.token_policy import TokenConfig, TokenPolicy
from vlarl.testing.toy import write
from vlarl_cli.main import app

PLUGINS = Path(__file__).parent / "plugins"
PRESET = """
env: {name: toy_env, chunk: 1}
policy: {name: toy_policy, checkpoint: ./toy, chunk: 1}
algo: {name: grpo, group_size: 4}
rollout: {episodes: 8}
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(*words) -> stderr of a `vlarl train` that has to end with `code`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.delenv("VLARL_RUNS", raising=False)
    write(tmp_path / "toy", TokenPolicy(TokenConfig(seed=3, chunk=1)).module.state_dict())
    Path("toy/config.json").write_text('{"model_type": "toy"}')
    Path("mine.yaml").write_text(PRESET)

    def run(*words, code=2):
        done = CliRunner().invoke(app, ["train", "--preset", "mine.yaml", *map(str, words)])
        assert done.exit_code == code, done.output
        return done.stderr if code else done.stdout

    return run


def test_a_dry_run_refuses_what_the_run_would(train):
    train("--dry-run", code=0)
    train("--prepare", code=0)
    assert "is not empty" in train("--dry-run")
    assert "is not empty" in train()
    assert "exclude each other" in train("--dry-run", "--resume", "--overwrite")
    train("--dry-run", "--overwrite", code=0)
    assert Path("runs/mine/config.json").exists()


def test_names_and_folders_may_look_like_numbers(train):
    assert str(Path("2024").absolute()) in train("--dry-run", "--run-dir", "2024", code=0)
    assert str(Path("runs/7").absolute()) in train("--dry-run", "--name", "7", code=0)
    assert "run_dir" in train("--dry-run", "run_dir=5")


def test_overwrite_spares_a_checkpoint(train):
    before = sorted(Path("toy").iterdir())
    assert "does not look like a run" in train("--run-dir", "toy", "--overwrite")
    assert sorted(Path("toy").iterdir()) == before


def test_a_run_directory_that_cannot_be_made(train):
    assert "cannot write into run directory" in train("--run-dir", "mine.yaml/run")
    assert "is a file" in train("--run-dir", "mine.yaml")


def test_a_damaged_metrics_line_is_named_before_anything_starts(train):
    train("--prepare", code=0)
    Path("runs/mine/metrics.jsonl").write_text('{"step": 0}\n{"step": 1\n')
    Path("runs/mine/status.json").write_text("garbage")
    said = train("--resume", code=1)
    assert "metrics.jsonl, line 2: not a metrics line" in said


def test_a_gpu_that_is_not_there_is_missed_at_once_unless_only_prepared(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "run: vlarl doctor --gpu" in train("--dry-run", "compute.device=cuda", code=3)
    assert not Path("runs").exists()
    train("--prepare", "compute.device=cuda", code=0)
