import json
import logging
import math
import sys
from types import SimpleNamespace

import pytest

from vlarl import metrics
from vlarl.config.schema import LogSection
from vlarl.errors import CorruptFile, ExtraMissing, RunFailed
from vlarl.run_dir import RunDir

QUIET = LogSection(tensorboard=False)


def write(path, *steps):
    sink = metrics.JsonlSink(path)
    for step in steps:
        sink.write(step, {"train/loss": step / 2})
    sink.close()


def steps(path):
    return [line["step"] for line in metrics.read(path)]


def test_lines_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = metrics.JsonlSink(path)
    sink.write(0, {"eval/success_once": 0.25, "eval/episodes": 200})
    assert path.read_bytes() == b'{"step": 0, "eval/success_once": 0.25, "eval/episodes": 200}\n'
    sink.close()
    sink.close()


def test_non_finite_numbers_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics.JsonlSink(path).write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1, "a": None, "b": None, "c": None, "d": 1.5,
    }  # fmt: skip


def test_a_step_is_written_once(tmp_path):
    write(tmp_path / "m", 1, 2)
    with pytest.raises(AssertionError, match="one line per step"):
        write(tmp_path / "m", 2)
    assert steps(tmp_path / "m") == [1, 2]


def test_resume_drops_what_is_newer_than_the_checkpoint(tmp_path):
    path = tmp_path / "m"
    write(path, 0, 1, 2, 3, 4)
    assert metrics.truncate_after(path, 2) == 2
    write(path, 3)
    assert steps(path) == [0, 1, 2, 3]
    assert metrics.truncate_after(path, 3) == 0
    assert metrics.truncate_after(tmp_path / "absent", 3) == 0


@pytest.mark.parametrize("cut", [1, 2, 10])
def test_a_line_cut_by_a_kill_is_dropped(tmp_path, cut):
    path = tmp_path / "m"
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    write(path, 3)
    assert steps(path) == [1, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(CorruptFile, match=r"m, line 2"):
        metrics.JsonlSink(path)


def test_full_disk_is_an_error_with_the_way_out():
    sink = metrics.JsonlSink.__new__(metrics.JsonlSink)
    sink._path, sink._last, sink._fd = "/dev/full", -1, metrics.os.open("/dev/full", 1)
    with pytest.raises(RunFailed, match=r"step 1 .*No space left.*--resume"):
        sink.write(1, {"a": 1.0})
    sink.close()


def test_strip_timing():
    line = {"step": 1, "time/rollout_s": 2.0, "train/loss": 0.5}
    assert metrics.strip_timing(line) == {"step": 1, "train/loss": 0.5}


def test_tensorboard_reads_back_and_a_resume_hides_newer_steps(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator as loader

    run, section = RunDir(tmp_path), LogSection(tensorboard=True)
    for first, last, resume in ((1, 5, None), (3, 4, 2)):
        sink = metrics.open_sinks(run, section, {}, resume_step=resume)
        for step in range(first, last):
            sink.write(step, {"train/loss": step + 0.5})
        sink.close()
    events = loader.EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1.5), (2, 2.5), (3, 3.5),
    ]  # fmt: skip
    assert steps(run.metrics) == [1, 2, 3]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_missing_backend_is_found_before_the_run(tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda _: None)
    section = LogSection(tensorboard=False, **{name: "project"})
    with pytest.raises(ExtraMissing) as caught:
        metrics.require(section)
    assert caught.value.fix == f"pip install 'vlarl[{name}]'"
    metrics.require(QUIET)


class Tracker:
    """Stands in for wandb and swanlab; fails from the second log on."""

    def __init__(self):
        self.logged, self.finished, self.settings = [], 0, []

    def init(self, **settings):
        self.settings.append(settings)
        return self

    def log(self, values, step):
        if self.logged:
            raise ConnectionError("server is down")
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_failing_backend_warns_once_and_the_run_goes_on(tmp_path, name, monkeypatch, caplog):
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(
        init=tracker.init, log=tracker.log, finish=tracker.finish))  # fmt: skip
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda _: object())
    section = LogSection(tensorboard=False, **{name: "project"})
    with caplog.at_level(logging.WARNING, "vlarl.metrics"):
        sink = metrics.open_sinks(RunDir(tmp_path), section, {"seed": 1}, resume_step=None)
        for step in (1, 2, 3):
            sink.write(step, {"a": float(step)})
        sink.close()
    assert tracker.logged == [(1, {"a": 1.0})]
    assert tracker.settings[0]["config"] == {"seed": 1}
    assert [r for r in caplog.messages if "server is down" in r] == caplog.messages
    assert len(caplog.messages) == 1
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    again = metrics.open_sinks(RunDir(tmp_path), section, {}, resume_step=3)
    again.close()
    assert tracker.settings[1]["id"] == tracker.settings[0]["id"], "a resumed run is the same run"
    assert tracker.finished == 1


def test_a_restart_without_a_checkpoint_starts_an_empty_record(tmp_path):
    run = RunDir(tmp_path)
    write(run.metrics, 0, 1, 2)
    sink = metrics.open_sinks(run, QUIET, {}, resume_step=None)
    sink.write(0, {"eval/success_once": 0.5})
    sink.close()
    assert steps(run.metrics) == [0]
