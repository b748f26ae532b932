"""What `vlarl train` refuses before anything starts."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vlarl import registry
from vlarl.errors import DeviceMissing
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


def test_a_run_directory_that_cannot_be_is_found_by_a_dry_run(train):
    Path("link").symlink_to("nowhere")
    for words in ((), ("--dry-run",)):
        assert "link is a link to nowhere, which is not there" in train("--run-dir", "link", *words)
        assert "cannot be: File name too long" in train("--run-dir", "a" * 300, *words)


def test_shared_trials_are_shown_as_what_they_are(train, monkeypatch):
    toy = registry.module("env", "toy_env")
    many = {"reach-left": tuple(range(10))}
    monkeypatch.setattr(toy, "trials", lambda cfg, split: many)
    assert "(reach-left: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more)" in train("--dry-run")


def test_a_machine_that_cannot_render_is_named_by_dry_run_and_run(train, monkeypatch):
    def lacking(cfg):
        raise DeviceMissing("nothing to render with", fix="apt-get install -y libegl1")

    toy = registry.module("env", "toy_env")
    monkeypatch.setattr(toy, "require_device", lacking, raising=False)
    assert "missing: nothing to render with" in train("--dry-run", code=0)
    assert "run: apt-get install -y libegl1" in train(code=3)


def test_a_damaged_metrics_line_is_named_before_anything_starts(train):
    train("--prepare", code=0)
    Path("runs/mine/metrics.jsonl").write_text('{"step": 0}\n{"step": 1\n')
    Path("runs/mine/status.json").write_text("garbage")
    said = train("--resume", code=1)
    assert "metrics.jsonl, line 2: not a metrics line" in said


def test_a_gpu_that_is_not_there_is_missed_at_once_unless_only_prepared(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "run: vlarl doctor" in train("compute.device=cuda", code=3)
    assert "run: vlarl doctor" in train("--dry-run", "compute.device=cuda", code=0)
    assert not Path("runs").exists()
    train("--prepare", "compute.device=cuda", code=0)


def test_a_relative_checkpoint_is_found_again_from_another_folder(train, tmp_path, monkeypatch):
    train("--prepare", code=0)
    stored = json.loads(Path("runs/mine/config.json").read_text())["config"]["policy"]
    assert stored["checkpoint"] == str(tmp_path / "toy")
    train("--prepare", "--resume", "policy.checkpoint=toy", "policy.chunk=1", code=0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = CliRunner().invoke(
        app, ["train", "--resume", "--dry-run", "--run-dir", str(tmp_path / "runs/mine")]
    )
    assert done.exit_code == 0, done.output


def said_by(*words):
    """stderr of a command that has to succeed."""
    done = CliRunner().invoke(app, ["train", "--preset", "mine.yaml", *words])
    assert done.exit_code == 0, done.output
    return done.stderr


def trained(steps, pending=None):
    """As if so many iterations were done."""
    folder = Path(f"runs/mine/ckpt/step_{steps:06d}")
    folder.mkdir()
    state = json.dumps({"trainer": {"step": steps, "pending": pending}})
    (folder / "state.json").write_text(state)
    manifest = {"format": 1, "step": steps, "ranks": 1, "files": {"state.json": len(state)}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_beyond_its_max_steps_has_nothing_to_do(train):
    train("--prepare", "max_steps=5", code=0)
    trained(5)
    for words in ((), ("--dry-run",)):
        said = train("--resume", "max_steps=4", *words)
        assert "has done 5 iterations and max_steps is 4; raise it" in said
    assert "no checkpoint '3'" in train("--resume-from", 3, "max_steps=2")


def test_a_run_that_is_complete_says_so_and_starts_nothing(train, monkeypatch):
    train("--prepare", "max_steps=5", code=0)
    trained(5)
    monkeypatch.setattr("vlarl_cli.launch.launch", lambda *_, **__: pytest.fail("started"))
    done = CliRunner().invoke(app, ["train", "--preset", "mine.yaml", "--resume"])
    assert done.exit_code == 0, done.output
    assert "complete: all 5 iterations are done; max_steps=N goes on" in done.stderr
    assert f"checkpoint: {Path('runs/mine/ckpt/step_000005/policy').absolute()}" in done.stdout
    train("--prepare", "--resume", "max_steps=6", code=0)


def test_a_last_evaluation_that_was_stopped_is_still_to_do(train, monkeypatch):
    train("--prepare", "max_steps=5", code=0)
    trained(5, pending={"env/return": 0.5})
    started = []
    monkeypatch.setattr("vlarl_cli.launch.launch", lambda *_, **__: started.append(1) or 0)
    train("--resume", code=0)
    assert started


def test_checkpoints_that_are_gone_are_missed_before_metrics_are(train):
    train("--prepare", "max_steps=50", "save.every=10", code=0)
    metrics = Path("runs/mine/metrics.jsonl")
    metrics.write_text('{"step": 0}\n{"step": 9}\n')
    assert "going on from the beginning" in said_by("--resume", "--dry-run")
    metrics.write_text('{"step": 0}\n{"step": 12}\n')
    for words in ((), ("--dry-run",)):
        said = train("--resume", *words)
        assert "goes to iteration 12, but" in said
        assert "holds no complete checkpoint: put it back, or start over with --overwrite" in said
    assert len(metrics.read_text().splitlines()) == 2


@pytest.mark.parametrize("content", ["null", "{", '{"format": 2}', '{"format": 1, "files": 3}'])
def test_a_damaged_checkpoint_is_named_before_a_resume_starts(train, content):
    train("--prepare", code=0)
    trained(3)
    Path("runs/mine/ckpt/step_000003/manifest.json").write_text(content)
    for words in ((), ("--dry-run",)):
        said = train("--resume", *words, code=1)
        assert "step_000003/manifest.json: " in said
        assert "resume from another checkpoint (--resume-from)" in said


def test_a_run_is_resumed_by_its_own_kind_of_preset(train):
    train("--prepare", code=0)
    Path("other.yaml").write_text(PRESET.replace("{name: grpo, group_size: 4}", "{name: ppo}"))
    line = ["train", "--preset", "other.yaml", "--resume", "--run-dir", "runs/mine"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 2
    assert "is a run of toy_env, toy_policy, grpo, and preset other.yaml is of" in done.stderr


def test_a_name_that_is_no_word_is_explained_in_words(train):
    said = train("--dry-run", "--name", "a/b")
    assert "name: a run's name is one word" in said
    assert "got 'a/b'" in said
    assert "pattern" not in said


def test_a_truncated_checkpoint_is_named_before_anything_starts(train):
    path = Path("toy/model.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    assert "model.safetensors" in train("--dry-run", code=1)
    assert not Path("runs").exists()
