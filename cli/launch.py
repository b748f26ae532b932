"""Starts the ranks of a run, passes signals on, and says why they ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlarl import errors, run_dir
from vlarl.errors import ConfigError, RunFailed
from vlarl.run_dir import RunDir
from vlarl.signals import INTERRUPTED, Requests

_POLL_S = 0.2
_LAST_LINES = 15
_LEAST_FREE = 1 << 16
"""Bytes on the disk without which a rank cannot say why it ended."""
_GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks, and where. rdzv: HOST:PORT where the hosts of a run meet."""

    nproc: int = 1
    nnodes: int = 1
    rdzv: str | None = None


def layout(nproc: str, nnodes: int = 1, rdzv: str | None = None) -> Layout:
    """The values of --nproc, --nnodes and --rdzv, checked. Raises ConfigError.

    nproc `auto` is the number of CUDA devices, or 1 on a CPU.
    """
    if nproc != "auto" and not (nproc.isdecimal() and int(nproc) > 0):
        raise ConfigError(f"--nproc: expected a number from 1 on or auto, got '{nproc}'")
    if nnodes < 1:
        raise ConfigError(f"--nnodes: expected a number from 1 on, got {nnodes}")
    if (nnodes > 1) != (rdzv is not None):
        raise ConfigError(
            "--nnodes and --rdzv go together: --nnodes 2 --rdzv FIRST_HOST:29400, "
            "the same on every host"
        )
    return Layout(nproc=_num_gpus() if nproc == "auto" else int(nproc), nnodes=nnodes, rdzv=rdzv)


def _num_gpus() -> int:
    """CUDA devices, at least 1. Asks torch only where there is a device file at all."""
    if not any(next(Path("/dev").glob(name), None) for name in _GPU_DEVICES):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def refuse_nested(environ: Mapping[str, str], run: RunDir) -> None:
    """Raise ConfigError when torchrun or Slurm has started this process as a rank already."""
    if "RANK" in environ:
        raise ConfigError(
            "this is a rank of torchrun already (RANK is set), and the command starts its own. "
            "Give it --prepare once, then start the ranks: "
            f"torchrun ... -m vlarl.worker {run.path}"
        )


def command(run: RunDir, where: Layout, *, module: str = "vlarl.worker") -> list[str]:
    """The line that starts the ranks by hand; `launch` differs in where their output goes.

    A single rank needs no torchrun, which would import torch twice and so double the start-up.
    """
    return _command(where, ["-m", module, str(run.path)], run)


def _command(where: Layout, program: list[str], run: RunDir) -> list[str]:
    if where.nproc == where.nnodes == 1:
        return [sys.executable, *program]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(where.nproc)]
    # A rank that is told to stop writes a checkpoint first.
    line += ["--shutdown-timeout", "600"]
    if where.nnodes == 1:
        return [*line, "--standalone", *program]
    assert where.rdzv is not None
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where.rdzv, "--rdzv-id", run.path.name]
    return [*line, "--nnodes", str(where.nnodes), *meet, *program]


def launch(
    run: RunDir,
    where: Layout,
    *,
    module: str = "vlarl.worker",
    watch: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Start the ranks and wait for them; 0 when all went well, 130 after Ctrl-C or SIGTERM.

    module: has main([RUN_DIR]) -> exit code. watch: called a few times a second. say: takes what a
    person should read now. The first signal reaches every rank once, so that they stop together and
    save; the second one kills them. Raises the error of the first rank that failed, with the place
    of its log; the ranks are gone when this returns or raises.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    run_dir.clear_exits(run)
    program = ["-m", "vlarl.distributed.launched", module, str(run.path)]
    with (run.logs / "launcher.log").open("wb") as words, Requests() as signals:
        # A session of its own: the terminal's Ctrl-C comes here alone, and is passed on once.
        process = subprocess.Popen(
            _command(where, program, run),
            stdin=subprocess.PIPE,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _supervise(process, where, signals, watch, say)
        finally:
            if process.poll() is None:
                _kill(process, where)
            assert process.stdin is not None
            process.stdin.close()
    watch()
    return _outcome(run, where, process.returncode, interrupted=signals.count > 0)


def _supervise(
    process: subprocess.Popen[bytes],
    where: Layout,
    signals: Requests,
    watch: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    passed_on = 0
    while process.poll() is None:
        time.sleep(_POLL_S)
        watch()
        if signals.count > passed_on:
            passed_on += 1
            if passed_on == 1:
                say("stopping: a checkpoint is written first; once more to stop at once")
                _signal(_ranks(process, where), signal.SIGINT)
            else:
                _kill(process, where)


def _ranks(process: subprocess.Popen[bytes], where: Layout) -> list[int]:
    """Process ids of this host's ranks: the process itself, or the children of torchrun.

    Signals go to them and not to torchrun, which would pass them on to their whole process groups
    and so to the simulators, and would kill what has not ended after a while.
    """
    if where.nproc == where.nnodes == 1:
        return [process.pid]
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    # Without /proc, or before the ranks are there, torchrun is told after all.
    return [int(pid) for path in children for pid in path.read_text().split()] or [process.pid]


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill(process: subprocess.Popen[bytes], where: Layout) -> None:
    # torchrun first, so that it does not take the end of its ranks for a failure.
    _signal([*{process.pid: None, **dict.fromkeys(_ranks(process, where))}], signal.SIGKILL)
    process.wait()


def _outcome(run: RunDir, where: Layout, code: int, *, interrupted: bool) -> int:
    """0 or 130; raises what went wrong otherwise."""
    notes = [note for note in run_dir.read_exits(run) if note.code]
    for note in notes:
        text = f"rank {note.rank}: {note.message} (log: {run.log(note.rank)})"
        error = errors.rebuilt(note.kind, text, note.fix)
        if error is not None:
            raise error
    if any(note.code == INTERRUPTED for note in notes):
        return INTERRUPTED
    if code == 0:
        return 0
    if interrupted:  # killed before it could leave a note
        return INTERRUPTED
    died = _killed_rank(run, where, code)
    if died is not None:
        raise died
    if notes:
        first = notes[0]
        raise RunFailed(
            f"rank {first.rank}: {first.kind}: {first.message}\n{_tail(run.log(first.rank))}"
        )
    raise _without_a_note(run, code)


def _without_a_note(run: RunDir, code: int) -> RunFailed:
    free = shutil.disk_usage(run.path).free
    if free < _LEAST_FREE:  # the note itself found no room
        return RunFailed(
            f"the disk of {run.path} is full, {free:,} bytes are free. Finished checkpoints are "
            f"untouched; make room and continue with --resume\n{_tail(run.log(0))}"
        )
    said = run.logs / "launcher.log"
    log = said if said.stat().st_size else run.log(0)
    return RunFailed(f"the ranks ended with code {code} and left no note\n{_tail(log)}")


_FIRST_FAILURE = re.compile(
    r"Root Cause.*?\brank\s*: (\d+).*?\bexitcode\s*: (-?\d+)", flags=re.DOTALL
)


def _killed_rank(run: RunDir, where: Layout, code: int) -> RunFailed | None:
    """The rank that a signal ended: it could leave no note, and its peers failed after it."""
    rank = 0
    if where.nproc * where.nnodes > 1:
        found = _FIRST_FAILURE.search((run.logs / "launcher.log").read_text(errors="replace"))
        if found is None:
            return None
        rank, code = int(found[1]), int(found[2])
    if code >= 0:
        return None
    name = signal.Signals(-code).name
    hint = "; the system may be out of memory" if name == "SIGKILL" else ""
    if run_dir.latest_checkpoint(run) is not None:
        hint += "; --resume goes on from the latest checkpoint"
    return RunFailed(f"rank {rank} was ended by {name}{hint}\n{_tail(run.log(rank))}")


def _tail(path: Path) -> str:
    """The last words of the latest start in a log, and where it is."""
    whole = path.read_text(errors="replace") if path.exists() else ""
    lines = whole.rpartition("--- started ")[2].splitlines()
    return "\n".join([*(f"  {line}" for line in lines[-_LAST_LINES:]), f"log: {path}"])
