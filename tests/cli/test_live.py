import io
import json

import pytest
from rich.console import Console

from vlarl import run_dir
from vlarl.metrics import JsonlSink, truncate_after
from vlarl.run_dir import Status
from vlarl_cli import live


@pytest.fixture
def run(tmp_path):
    return run_dir.create(tmp_path / "reach")


def line(step, success=0.5, seconds=20.0):
    return {
        "step": step, "env/success_once": success, "train/loss": 0.0123,
        "train/actor/approx_kl": 0.00456, "time/step": seconds,
        "time/generate_rollouts": 0.75 * seconds, "time/actor_training": 0.25 * seconds,
    }  # fmt: skip


def write(run, *lines):
    sink = JsonlSink(run.metrics)
    for one in lines:
        sink.write(one["step"], {k: v for k, v in one.items() if k != "step"})
    sink.close()


def test_feed_gives_each_whole_line_once(run):
    feed = live.Feed(run)
    assert feed.poll() == []
    write(run, line(1), line(2))
    assert [x["step"] for x in feed.poll()] == [1, 2]
    with run.metrics.open("a") as file:
        file.write('{"step": 3, ')
        file.flush()
        assert feed.poll() == []
        file.write('"train/loss": 1.0}\n')
    assert feed.poll() == [{"step": 3, "train/loss": 1.0}]
    assert [x["step"] for x in feed.lines] == [1, 2, 3]


def test_feed_follows_a_resume_that_drops_lines(run):
    write(run, *map(line, range(1, 6)))
    feed = live.Feed(run)
    truncate_after(run.metrics, 3)
    write(run, line(4, success=0.9))
    assert [(x["step"], x["env/success_once"]) for x in feed.poll()] == [(4, 0.9)]
    assert [x["step"] for x in feed.lines] == [1, 2, 3, 4]


def test_an_iteration_in_a_line():
    lines = [line(12), line(13, seconds=30.0)]
    assert live.summary(lines[-1], 100, lines) == (
        "step 13/100  success 50.0%  loss 0.0123  kl 0.0046  30 s  36 min 15 s left"
    )
    assert live.summary({"step": 0, "eval/success_once": 0.25}, None) == "step 0  held-out 25.0%"


def test_a_number_that_was_not_finite_is_left_out():
    assert live.summary({"step": 1, "train/loss": None}, 2) == "step 1/2"


def test_durations():
    assert [live.duration(s) for s in (0.4, 59, 60, 3599, 3600, 7800)] == [
        "0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "2 h 10 min",
    ]  # fmt: skip


def test_sparkline_spans_zero_to_one():
    assert live.sparkline([0.0, 0.5, None, 1.0]) == "▁▅ █"
    assert live.sparkline([0.0] * 50 + [1.0], width=3) == "▁▁█"


def test_lines_on_stderr_and_old_ones_not_again(run, capsys):
    write(run, line(1))
    view = live.open_view(run)
    run_dir.write_status(run, Status(phase="rollout", step=1, max_steps=2))
    write(run, line(2))
    view.update()
    view.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"training in {run.path}\nstep 2/2  success 50.0%  loss 0.0123  kl 0.0046  20 s\n"


def test_a_long_silence_is_broken_by_what_the_run_is_doing(run, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    view = live.open_view(run, live=False)
    run_dir.write_status(run, Status(phase="evaluate", step=0, max_steps=9, done=5, total=50))
    for seconds in (1, 29, 2, 5):
        now[0] += seconds
        view.update()
    said = capsys.readouterr().err.splitlines()
    assert said == [f"training in {run.path}", "step 0/9  evaluate 5/50"]


def test_quiet_shows_only_what_is_said(run, capsys):
    view = live.open_view(run, quiet=True)
    write(run, line(1))
    view.update()
    view.say("stopping")
    view.close()
    assert capsys.readouterr() == ("", "stopping\n")


def test_the_panel_shows_the_whole_state(run):
    screen = io.StringIO()
    view = live.PanelView(run, Console(file=screen, width=100))
    write(run, line(1, success=0.25), {**line(2, success=1.0), "eval/success_once": 0.75})
    status = Status(phase="rollout", step=2, max_steps=10, done=5, total=64)
    run_dir.write_status(run, status)
    view.close()
    text = screen.getvalue()
    for piece in (
        "reach", "step 2/10  rollout 5/64", "100.0%  ▃█", "75.0%  ▇", "loss 0.0123  kl 0.00456",
        "20.0 s per step: rollout 75%, update 25%", "2 min 40 s left",
    ):  # fmt: skip
        assert piece in text, piece


def test_the_panel_starts_empty_and_shows_why_a_run_failed(run):
    screen = io.StringIO()
    view = live.PanelView(run, Console(file=screen, width=100, force_terminal=True))
    view.update()
    assert "starting" in screen.getvalue()
    run_dir.write_status(run, Status(phase="failed", step=0, max_steps=9, message="loss is nan"))
    view.close()
    assert "failed: loss is nan" in screen.getvalue()


def test_the_panel_tells_interrupted_from_failed(run):
    screen = io.StringIO()
    run_dir.write_status(run, Status(phase="interrupted", step=3, max_steps=9))
    live.PanelView(run, Console(file=screen, width=100, force_terminal=True)).close()
    assert "step 3/9  interrupted" in screen.getvalue()
    assert "failed" not in screen.getvalue()


def test_status_file_is_plain_json(run):
    run_dir.write_status(run, Status(phase="save", step=1, max_steps=2))
    assert json.loads(run.status.read_text())["phase"] == "save"
