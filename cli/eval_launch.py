"""Plays an evaluation, in this process or on several ranks under torchrun."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vlarl.atomic import write_atomic
from vlarl.errors import RunFailed
from vlarl.run_dir import RunDir

from .launch import Layout, command, launch
from .progress import Progress

if TYPE_CHECKING:
    from vlarl.eval_job import EvalJob, Prepared
    from vlarl.results import EvalResult

_MODULE = "vlarl.eval_worker"


def worker_line(job: EvalJob, where: Layout) -> str:
    """The line that starts the ranks; for people."""
    return " ".join(command(_work_dir(job), where, module=_MODULE))


def _work_dir(job: EvalJob) -> RunDir:
    """Where the ranks leave their logs; removed after success."""
    return RunDir(job.out.with_suffix(".work"))


def play_here(prepared: Prepared, progress: Progress) -> EvalResult:
    """Play in this process. Ctrl-C ends it early with what there is."""
    from vlarl.distributed.world import init_world
    from vlarl.eval_job import play
    from vlarl.signals import stop_on_signals

    world = init_world(prepared.job.compute, {})
    with stop_on_signals() as stop:
        result = play(
            prepared, world, on_episode=lambda o: progress.add(o.success), should_stop=stop
        )
    progress.break_line()
    return result


def play_on_ranks(prepared: Prepared, where: Layout, progress: Progress) -> EvalResult:
    """Play under torchrun and read the result that rank 0 wrote.

    Raises the error of the first rank that failed, with the place of its log.
    """
    from vlarl.results import load

    job, work = prepared.job, _work_dir(prepared.job)
    shutil.rmtree(work.path, ignore_errors=True)
    work.logs.mkdir(parents=True)
    write_atomic(work.config, job.model_dump_json())
    code = launch(
        work,
        where,
        module=_MODULE,
        watch=lambda: progress.set(*_count(work, where.nproc)),
        say=lambda _: progress.break_line(),
    )
    progress.break_line()
    found = job.partial_out if code else job.out
    if not found.exists():
        raise RunFailed(f"interrupted before an episode was finished; the logs are in {work.logs}")
    result = load(found)
    shutil.rmtree(work.path)
    return result


def _count(work: RunDir, ranks: int) -> tuple[int, int]:
    """Episodes and successes in the journals so far."""
    from vlarl.eval_job import journal

    lines = [line for rank in range(ranks) for line in _whole_lines(journal(work, rank))]
    return len(lines), sum(json.loads(line)["success"] for line in lines)


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
