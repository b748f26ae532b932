"""Plays an evaluation, in this process or on several ranks under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vlarl import eval_journal
from vlarl.atomic import write_atomic
from vlarl.errors import RunFailed

from .launch import Layout, command, launch
from .output import Output
from .progress import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from vlarl.eval_job import EvalJob, Prepared
    from vlarl.results import EvalResult

_MODULE = "vlarl.eval_worker"


def worker_line(job: EvalJob, where: Layout) -> str:
    """The line that starts the ranks; for people."""
    return " ".join(command(eval_journal.work_dir(job.out), where, module=_MODULE))


def play_all(prepared: Prepared, where: Layout, output: Output) -> Path | None:
    """Play the plan and write the result; which file it is in, or None without an episode.

    Whatever ends it early, what was played is in the partial file.
    """
    job = prepared.job
    progress = Progress(len(prepared.share), quiet=output.quiet)

    def say(text: str) -> None:
        progress.break_line()
        output.warn(text)

    def told(left: EvalResult, where: Path) -> None:
        from vlarl.eval_job import is_finished

        whole = "that is the whole result, and it only needs another name"
        is_whole = is_finished(job, left) and where == eval_journal.partial_file(job.out)
        say(
            f"{len(left.episodes)} of {len(left.plan)} episodes are kept in {where}; "
            + (whole if is_whole else go_on(job))
        )

    with eval_journal.kept(job.out, prepared.before, on_failure=told):
        if prepared.before is not None and not prepared.share:
            from vlarl.eval_job import save

            output.hint("everything was played already; only the result is written")
            return save(job, prepared.before)
        output.hint("loading the policy and starting simulators")
        if where.nproc > 1:
            return _play_on_ranks(job, where, progress)
        return _play_here(prepared, progress, say)


def go_on(job: EvalJob) -> str:
    """How a stopped evaluation is continued, in words."""
    return f"the same command with --out {job.out} --resume plays the rest"


def _play_here(prepared: Prepared, progress: Progress, say: Callable[[str], None]) -> Path | None:
    from vlarl.distributed.world import init_world
    from vlarl.eval_job import play, save
    from vlarl.signals import stop_on_signals

    world = init_world(prepared.job.compute, {})
    told = False
    with stop_on_signals() as asked:

        def should_stop() -> bool:
            nonlocal told
            if asked() and not told:
                told = True
                say("stopping after the decision under way; once more to stop at once")
            return asked()

        result = play(
            prepared, world, on_episode=lambda o: progress.add(o.success), should_stop=should_stop
        )
        progress.break_line()
        return save(prepared.job, result) if result.episodes else None


def _play_on_ranks(job: EvalJob, where: Layout, progress: Progress) -> Path | None:
    """Play under torchrun; rank 0 writes the result.

    Raises the error of the first rank that failed, with the place of its log.
    """
    work = eval_journal.work_dir(job.out)
    write_atomic(work.config, job.model_dump_json())
    code = launch(
        work,
        where,
        module=_MODULE,
        watch=lambda: progress.set(*eval_journal.count(work, where.nproc)),
        say=lambda _: progress.break_line(),
    )
    progress.break_line()
    if code == 0:
        return job.out
    # Ranks that were killed have not put together what they played.
    left = eval_journal.keep(job.out)
    if left is None:
        return None
    _, where_kept = left
    if where_kept != eval_journal.partial_file(job.out):
        raise RunFailed(f"{where_kept} has no room for what was played; is the disk full?")
    return where_kept
