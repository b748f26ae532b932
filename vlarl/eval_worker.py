"""One rank of an evaluation: `torchrun ... -m vlarl.eval_worker WORK_DIR`.

Reads WORK_DIR/config.json (an EvalJob) and leaves a note of how it ended. Rank 0 writes the result.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from vlarl import run_dir
from vlarl.distributed.world import World, init_world
from vlarl.errors import VlarlError
from vlarl.eval_job import EvalJob, build_job, is_finished, play, prepare, save
from vlarl.eval_journal import partial_file
from vlarl.result_file import load
from vlarl.run_dir import RankExit, RunDir
from vlarl.signals import INTERRUPTED, stop_on_signals

log = logging.getLogger("vlarl.eval_worker")


def run(job: EvalJob, world: World) -> int:
    """Play this rank's share; returns the exit code."""
    before = load(partial_file(job.out)) if job.resume else None
    with stop_on_signals() as stop:
        result = play(prepare(job, before), world, should_stop=stop)
    if world.is_main and result.episodes:
        save(job, result)
    return 0 if is_finished(job, result) else INTERRUPTED


def main(argv: list[str] | None = None) -> int:
    """Play the job in argv[0]; returns 0, 130 when interrupted, or the error's exit code."""
    (path,) = sys.argv[1:] if argv is None else argv
    work = RunDir(Path(path))
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    job = build_job(run_dir.read_json(work.config))
    world = init_world(job.compute)
    try:
        end = RankExit(rank=world.rank, code=run(job, world))
    except VlarlError as error:
        log.error("%s", error)
        end = RankExit.of(world.rank, error)
    run_dir.write_exit(work, end)
    world.close()
    return end.code


if __name__ == "__main__":
    sys.exit(main())
