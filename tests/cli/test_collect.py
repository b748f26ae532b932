import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlarl import dataset
from vlarl.testing.token_policy import TokenConfig, TokenPolicy
from vlarl.testing.toy import write
from vlarl_cli.main import app

PLUGINS = Path(__file__).parent / "plugins"
SINGLE = ("env.chunk=1", "policy.chunk=1")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A toy checkpoint in a fresh working directory; the toy plug-ins can be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PLUGINS))
    folder = tmp_path / "toy"
    write(folder, TokenPolicy(TokenConfig(seed=3, chunk=1)).module.state_dict())
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return "./toy"


def collect(*args, code=0):
    done = CliRunner().invoke(app, ["collect", *map(str, args)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done


def test_a_policy_fills_a_folder_and_a_table_says_how_it_did(toy):
    done = collect(
        "--suite",
        "toy_both",
        "--policy",
        toy,
        "--episodes",
        3,
        "--keep-failures",
        "--to",
        "d",
        *SINGLE,
    )
    data = dataset.open_(Path("d"))
    assert len(data.kept) == 6
    assert data.origin.split == "train"
    assert data.origin.teacher.startswith("toy@")
    wins = sum(e.success for e in data.kept)
    assert f"{wins}/6" in done.stdout
    for word in ("reach-left", "reach-right", "k/n", "steps"):
        assert word in done.stdout
    assert "6/6 episodes" in done.stderr


def test_the_same_command_continues_and_a_dry_run_writes_nothing(toy):
    words = ("--suite", "toy_both", "--policy", toy, "--keep-failures", *SINGLE)
    plan = collect(*words, "--episodes", 2, "--to", "d", "--dry-run", "--json")
    assert json.loads(plan.stdout)["episodes"] == 4
    assert not Path("d").exists()
    collect(*words, "--episodes", 2, "--to", "d")
    plan = collect(*words, "--episodes", 3, "--to", "d", "--dry-run", "--json")
    assert json.loads(plan.stdout)["episodes"] == 2
    done = collect(*words, "--episodes", 3, "--to", "d", "--json")
    assert json.loads(done.stdout)["episodes"] == 6


def test_tasks_alone_choose_the_env_and_the_folder_is_named_after_them(toy):
    done = collect("--tasks", "reach-left", "--policy", toy, "--episodes", 1, "-q", *SINGLE)
    assert done.stdout == "data/reach-left_toy\n"
    assert {e.task for e in dataset.open_(Path("data/reach-left_toy")).entries} == {"reach-left"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--suite", "toy_bath"), 2, "no suite or task named 'toy_bath'; did you mean 'toy_both'"),
        (("--tasks", "reach-lift"), 2, "did you mean 'reach-left'"),
        (("--suite", "toy_both"), 2, "env 'toy_env' has no scripted expert; name a --policy"),
        (("--suite", "toy_both", "policy.chunk=2"), 2, "the expert has no settings"),
        (("--suite", "libero_goal"), 2, "the scripted expert plays libero_spatial and libero_obj"),
        (("--suite", "libero_goal", "--dry-run"), 2, "not open_the_middle_drawer"),
        ((), 2, "name what to play: --suite, --tasks or --preset"),
        (("--preset", "tiny_libero_sft"), 2, "preset tiny_libero_sft has no env to play in"),
        (("--suite", "toy_both", "env.suite=toy_left"), 2, "--suite says it already"),
        (("--suite", "toy_both", "--noise", "0.1", "noise=0.2"), 2, "--noise says it already"),
        (("--suite", "toy_both", "--policy", "./none"), 3, "there is no folder './none'"),
        (("--suite", "toy_both", "--policy", "./toy"), 2, "plays whole chunks only"),
        (
            ("--suite", "toy_both", "--policy", "./toy", "--episodes", "9", *SINGLE),
            2,
            "has 8 trials in split 'train' but 9 episodes were asked for",
        ),
        (("--suite", "toy_both", "--policy", "./toy", "env.chunk=2"), 2, "emits chunks of 8"),
        (
            ("--suite", "toy_both", "--policy", "./toy", "env.chonk=2"),
            2,
            "did you mean 'env.chunk'",
        ),
    ],
)
def test_bad_requests_are_one_message_and_leave_nothing(toy, words, code, message):
    done = collect(*words, code=code)
    assert message in done.stderr
    assert done.stdout == ""
    assert not Path("data").exists()


def test_a_folder_with_other_settings_is_not_mixed(toy):
    words = ("--suite", "toy_left", "--policy", toy, "--episodes", 1, "--to", "d", *SINGLE)
    collect(*words)
    done = collect(*words, "--noise", 0.5, code=2)
    assert "noise: 0.0 here, 0.5 asked for" in done.stderr
