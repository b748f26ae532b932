"""Where numbers go: metrics.jsonl always, TensorBoard by default, W&B and SwanLab on request.

metrics.jsonl is the record of a run. One line per iteration, strict JSON, `step` first:
    {"step": 12, "env/success_once": 0.5, "time/rollout_s": 9.1, ...}
`step` counts finished iterations; an evaluation before the first one is step 0. A number that is
not finite is written as null (JSON has no NaN; pandas and friends read null back as NaN). Whatever
differs between two runs of the same configuration has a name that starts with `time/`.

A line is written, and on disk, before the checkpoint of its step: after a crash the file holds at
least all steps of the latest checkpoint, and `truncate_after` removes what was played past it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlarl.atomic import write_atomic
from vlarl.config.schema import LogSection
from vlarl.errors import CorruptFile, ExtraMissing, RunFailed
from vlarl.run_dir import RunDir

if TYPE_CHECKING:  # the interfaces import torch, and reading metrics must not
    from vlarl.interfaces import MetricSink

log = logging.getLogger(__name__)


def open_sinks(
    run: RunDir, section: LogSection, config: Mapping[str, Any], *, resume_step: int | None
) -> MetricSink:
    """All sinks a run asked for, as one. Rank 0 only.

    config: the resolved configuration, for the backends that show it. resume_step: step of the
    checkpoint the run continues from; later lines are dropped everywhere. None drops all of them.
    Raises ExtraMissing like `require`.
    """
    require(section)
    # Without a checkpoint everything is played again, from before step 0.
    last = -1 if resume_step is None else resume_step
    truncate_after(run.metrics, last)
    sinks: list[MetricSink] = [JsonlSink(run.metrics)]
    if section.tensorboard:
        sinks.append(Guarded("TensorBoard", lambda: TensorBoardSink(run.tensorboard, last)))
    if section.wandb is not None:
        project = section.wandb
        sinks.append(Guarded("Weights & Biases", lambda: WandbSink(run.path, project, config)))
    if section.swanlab is not None:
        name = section.swanlab
        sinks.append(Guarded("SwanLab", lambda: SwanlabSink(run.path, name, config)))
    return fan_out(sinks)


def require(section: LogSection) -> None:
    """Check, before anything starts, that the packages of the chosen backends are installed.

    Raises ExtraMissing with the pip line.
    """
    for name, wanted in (("wandb", section.wandb), ("swanlab", section.swanlab)):
        if wanted is not None and importlib.util.find_spec(name) is None:
            raise ExtraMissing(
                f"log.{name} is set but the package '{name}' is not installed",
                fix=f"pip install 'vlarl[{name}]'",
            )


# --- the record ----------------------------------------------------------------------------------


class JsonlSink:
    """Appends to metrics.jsonl; a line that `write` returned from survives a power cut.

    Opening repairs a last line that was cut short. Steps must rise from line to line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = repair(path)
        self._last = lines[-1]["step"] if lines else -1
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Raises RunFailed when the disk does not take it."""
        assert step > self._last, f"step {step} after step {self._last}: one line per step"
        assert "step" not in metrics
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            # One write call, so that a killed process leaves a whole line or none.
            if os.write(self._fd, data) != len(data):
                raise OSError("the disk is full")
            os.fsync(self._fd)
        except OSError as error:
            raise RunFailed(
                f"cannot write metrics of step {step} to {self._path}: {error}; "
                "make room and continue with --resume"
            ) from error
        self._last = step

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _finite(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, in order; empty when there is no file.

    A last line without its newline is not whole. Raises CorruptFile naming any other bad line.
    """
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    lines = []
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text)
            line["step"] + 0  # every line has one
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptFile(
                f"{path}, line {number}: not a metrics line ({error}); remove that line"
            ) from None
        lines.append(line)
    return lines


def repair(path: Path) -> list[dict[str, Any]]:
    """Cut off a last line that a killed process left without its end; the lines that stay."""
    lines = read(path)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            log.warning("%s: dropped a last line that was cut short", path)
            os.truncate(path, whole)
    return lines


def truncate_after(path: Path, step: int) -> int:
    """Drop all lines of steps after `step`; how many were dropped.

    Called on resume, so that the iterations that are played again appear once.
    """
    lines = repair(path)
    dropped = sum(line["step"] > step for line in lines)
    if dropped:
        kept = [
            line for line in path.read_bytes().splitlines(True) if json.loads(line)["step"] <= step
        ]
        write_atomic(path, b"".join(kept))
        log.info("%s: dropped %d lines after step %d", path, dropped, step)
    return dropped


def strip_timing(line: Mapping[str, Any]) -> dict[str, Any]:
    """The line without what depends on the machine's speed: equal for two runs of one seed."""
    return {name: value for name, value in line.items() if not name.startswith("time/")}


# --- the others ----------------------------------------------------------------------------------


class _FanOut:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def fan_out(sinks: Sequence[MetricSink]) -> MetricSink:
    """One sink that writes to all, in order. Put the one that must not lose anything first."""
    return _FanOut(sinks)


class Guarded:
    """A sink that may fail without ending the run: the first failure warns and switches it off."""

    def __init__(self, name: str, make: Callable[[], MetricSink]) -> None:
        self._name = name
        self._sink: MetricSink | None = None
        self._attempt("start", lambda: setattr(self, "_sink", make()))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on, unless switched off."""
        if self._sink is not None:
            sink = self._sink
            self._attempt("write", lambda: sink.write(step, metrics))

    def close(self) -> None:
        """Pass on, unless switched off."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            self._attempt("close", sink.close)

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        # A third-party client can raise anything (its own errors, sockets, protobuf), and none of
        # it is worth a training run; metrics.jsonl has the numbers.
        except Exception as error:
            self._sink = None
            log.warning(
                "%s: %s failed (%s: %s); switched off for the rest of the run, "
                "metrics.jsonl is complete",
                self._name,
                what,
                type(error).__name__,
                error,
            )


class TensorBoardSink:
    """Event files for TensorBoard, written with the `tensorboard` package alone.

    What earlier files of the folder hold after step `last` is hidden.
    """

    def __init__(self, folder: Path, last: int = -1) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(str(folder))
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(last + 1, session_log=start)

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(step=step, wall_time=time.time(), **content))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric; non-finite ones as they are."""
        values = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
        ]
        self._add(step, summary=self._summary.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Flush and release."""
        self._writer.close()


def _run_id(folder: Path) -> str:
    """An id that stays with a run when it is resumed and is a new one after --overwrite."""
    path = folder / "run_id"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        write_atomic(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8")


class WandbSink:
    """Weights & Biases. A resumed run continues the same W&B run, found by the run directory."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        self._run = importlib.import_module("wandb").init(
            project=project,
            name=run_dir.name,
            id=_run_id(run_dir / "wandb"),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


class SwanlabSink:
    """SwanLab. A resumed run continues the same SwanLab experiment."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        self._module = importlib.import_module("swanlab")
        self._module.init(
            project=project,
            experiment_name=run_dir.name,
            id=_run_id(run_dir / "swanlog"),
            resume="allow",
            logdir=str(run_dir / "swanlog"),
            config=dict(config),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step."""
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._module.finish()
