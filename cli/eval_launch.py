"""Plays an evaluation, in this process or on several ranks under torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vlarl import run_dir
from vlarl.errors import MissingError, RunFailed, VlarlError
from vlarl.run_dir import RankExit, RunDir

from .progress import Progress

if TYPE_CHECKING:
    from vlarl.eval_job import EvalJob, Prepared
    from vlarl.results import EvalResult

_POLL_S = 0.2
_LAST_LINES = 15


def number_of_ranks(nproc: str) -> int:
    """The value of --nproc as a number. Raises ConfigError for anything but `auto` or 1, 2, ..."""
    from vlarl.errors import ConfigError

    if nproc == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if not nproc.isdecimal() or int(nproc) == 0:
        raise ConfigError(f"--nproc: expected a number from 1 on or auto, got '{nproc}'")
    return int(nproc)


def command(work: Path, ranks: int) -> list[str]:
    """The line that starts `ranks` processes."""
    python = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*python, "--nproc-per-node", str(ranks), "-m", "vlarl.eval_worker", str(work)]


def work_dir(job: EvalJob) -> Path:
    """Where the ranks leave their logs; removed after success."""
    return job.out.with_suffix(".work")


def play_here(prepared: Prepared, progress: Progress) -> EvalResult:
    """Play in this process. Ctrl-C ends it early with what there is."""
    from vlarl.distributed.world import init_world
    from vlarl.eval_job import play, stop_on_signals

    world = init_world(prepared.job.compute, {})
    with stop_on_signals() as stop:
        result = play(
            prepared, world, on_episode=lambda o: progress.add(o.success), should_stop=stop
        )
    progress.break_line()
    return result


def play_on_ranks(prepared: Prepared, ranks: int, progress: Progress) -> EvalResult:
    """Play under torchrun and read the result that rank 0 wrote.

    Raises the error of the first rank that failed, with the place of its log.
    """
    from vlarl.eval_job import stop_on_signals
    from vlarl.results import load

    job = prepared.job
    work = RunDir(work_dir(job))
    shutil.rmtree(work.path, ignore_errors=True)
    work.logs.mkdir(parents=True)
    run_dir.write_atomic(work.config, job.model_dump_json())
    log = work.logs / "launcher.log"
    with log.open("wb") as words, stop_on_signals() as stop:
        process = subprocess.Popen(
            command(work.path, ranks),
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(work.logs / "torchelastic.json")},
        )
        told = False
        while process.poll() is None:
            time.sleep(_POLL_S)
            progress.set(*_count(work, ranks))
            if stop() and not told:
                process.send_signal(signal.SIGTERM)
                told = True
    progress.set(*_count(work, ranks))
    progress.break_line()
    found = job.out if job.out.exists() and not told else job.partial_out
    if process.returncode != 0 and not told:
        raise _failure(work, log)
    if not found.exists():
        raise RunFailed(f"interrupted before an episode was finished; the log is {log}")
    result = load(found)
    shutil.rmtree(work.path)
    return result


def _count(work: RunDir, ranks: int) -> tuple[int, int]:
    """Episodes and successes in the journals so far."""
    from vlarl.eval_worker import journal

    done = wins = 0
    for rank in range(ranks):
        path = journal(work, rank)
        for line in path.read_bytes().splitlines(True) if path.exists() else ():
            if line.endswith(b"\n"):
                done += 1
                wins += json.loads(line)["success"]
    return done, wins


def _failure(work: RunDir, log: Path) -> VlarlError:
    """The error of the first rank that left one, else the last words of the launcher."""
    failed = [end for end in run_dir.read_exits(work) if end.code and end.kind]
    if failed:
        return _rebuilt(failed[0], log)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    return RunFailed(f"the evaluation failed; the whole log is {log}\n{last}")


def _rebuilt(end: RankExit, log: Path) -> VlarlError:
    from vlarl import errors

    kind = getattr(errors, end.kind)
    text = f"rank {end.rank}: {end.message} (log: {log})"
    return kind(text, fix=end.fix) if issubclass(kind, MissingError) else kind(text)
