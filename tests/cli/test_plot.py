import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from vlarl.results import EpisodeKey, EpisodeResult, EvalResult
from vlarl_cli.main import app


def vlarl(*args):
    return CliRunner().invoke(app, ["plot", *map(str, args)])


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs in the working directory: two seeds of one experiment and another one."""
    monkeypatch.chdir(tmp_path)
    for name, seed, lr in (("a_s0", 0, 1), ("a_s1", 1, 1), ("b", 0, 2)):
        folder = tmp_path / name
        folder.mkdir()
        config = {"name": name, "seed": seed, "optim": {"lr": lr}}
        (folder / "config.json").write_text(json.dumps({"config": config, "sources": {}}))
        lines = [
            {"step": s, "eval/success_once": (s + seed) / 20, "eval/num_trajectories": 20}
            for s in (0, 5, 10)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return ["a_s0", "a_s1", "b"]


def save_result(path, successes, plan=10):
    episodes = tuple(
        EpisodeResult(
            task="t",
            trial=i,
            repeat=0,
            success=i < successes,
            num_steps=1,
            total_reward=0.0,
            num_clipped=0,
            diverged=False,
        )
        for i in range(10)
    )
    keys = tuple(EpisodeKey("t", i, 0) for i in range(plan))
    EvalResult(plan=keys, episodes=episodes).save(Path(path))


def test_runs_become_one_curve_per_experiment(runs):
    done = vlarl(*runs, "--out", "c.png", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"out": "c.png", "shown": {"a": runs[:2], "b": ["b"]}}
    with Image.open("c.png") as picture:
        assert picture.size == (1024, 640)


def test_results_become_bars(runs):
    save_result("before.json", 3)
    save_result("after.json", 8)
    done = vlarl(
        "before.json", "after.json", "--out", "b.svg", "-q", "--label", "old", "--label", "new"
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == "b.svg\n"
    text = Path("b.svg").read_text()
    for words in ("old", "new", "3/10", "8/10", "+50.0 points"):
        assert words in text, words


def test_an_incomplete_result_is_pointed_out(runs):
    save_result("part.json", 3, plan=12)
    done = vlarl("part.json", "--out", "b.svg")
    words = "incomplete, 10 of 12 planned episodes"
    assert f"part.json is {words}" in done.stderr
    assert f"part: {words}" in Path("b.svg").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("a_s0", "before.json", "--out", "x.png"), "not both in one picture"),
        (("a_s0", "b", "--out", "x.png", "--label", "one"), "for each of a, b; got 1 of 2"),
        (("before.json", "before.json", "--out", "x.png"), "labels must differ"),
        (("before.json", "--metric", "x", "--out", "x.png"), "--metric goes with runs"),
        (("a_s0", "--metric", "nope", "--out", "x.png"), "never recorded 'nope'"),
        (("a_s0", "--out", "x.gif"), "name a .png"),
        (("missing", "--out", "x.png"), "missing/config.json does not exist"),
        (("missing.json", "--out", "x.png"), "there is no result file missing.json"),
        (("a_s0", "--out", "taken.png"), "not overwritten"),
        (("a_s0", "--out", "taken.png/x.png"), "taken.png is a file"),
    ],
)
def test_wrong_use_is_one_message_and_writes_nothing(runs, args, words):
    save_result("before.json", 3)
    Path("taken.png").write_text("mine")
    done = vlarl(*args)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert not Path("x.png").exists()
    assert Path("taken.png").read_text() == "mine"
