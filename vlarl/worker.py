"""One rank of a training run: `python -m vlarl.worker RUN_DIR`, under torchrun or alone.

Reads RUN_DIR/config.json, continues from the latest complete checkpoint if there is one, and leaves
a note of how it ended for the launcher.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from vlarl import run_dir
from vlarl.config import resolved
from vlarl.config.compose import build
from vlarl.config.schema import RunConfig
from vlarl.distributed import checkpoint
from vlarl.distributed.shard import shard
from vlarl.distributed.world import World, init_world
from vlarl.errors import VlarlError
from vlarl.metrics import open_sinks
from vlarl.noise import stream
from vlarl.run_dir import RankExit, RunDir, Status
from vlarl.signals import INTERRUPTED, stop_on_signals
from vlarl.train.setup import resolve
from vlarl.train.state import TrainState
from vlarl.train.trainer import Stopped, Trainer
from vlarl.train.update import count_parameters, make_optimizer

log = logging.getLogger("vlarl.worker")


def run(folder: RunDir, config: RunConfig, world: World, should_stop: Callable[[], bool]) -> None:
    """Build everything and train. Cheap checks come first; simulators start last."""
    parts = resolve(config)
    latest = run_dir.latest_checkpoint(folder)
    torch.manual_seed(stream(config.seed, "init"))  # what the checkpoint lacks, e.g. a value head
    policy = parts.policy_module.load(
        config.policy, device=world.device, needs_value=parts.algo.needs_value, train=True
    )
    shard(policy.module, policy.shard_units, world, config.compute)
    optimizer = make_optimizer(policy, config.optim)
    state = TrainState()
    if latest is not None:
        saved = checkpoint.load(latest, module=policy.module, optimizer=optimizer, world=world)
        state = TrainState(**saved)
        log.info("continuing after iteration %d from %s", state.step, latest)
    total, trainable = count_parameters(policy.module)
    log.info("%s: %d parameters, %d trainable", config.policy.name, total, trainable)
    values = config.model_dump(mode="json")
    # The line of a pending iteration is still to come, even if an earlier resume has written it.
    resume_step = None if latest is None else state.step - (state.pending is not None)
    sink = (
        open_sinks(folder, config.log, values, resume_step=resume_step) if world.is_main else None
    )
    env = parts.env_module.make(
        config.env, num_slots=config.env.num_slots, final_frames=parts.policy_spec.has_value
    )
    try:
        Trainer(
            run=config,
            parts=parts,
            env=env,
            policy=policy,
            optimizer=optimizer,
            state=state,
            world=world,
            sink=sink,
            folder=folder,
            should_stop=should_stop,
        ).train()
    finally:
        env.close()
        if sink is not None:
            sink.close()


def main(argv: list[str] | None = None) -> int:
    """Train the run in argv[0]; returns 0, the error's exit code, or 130 when interrupted."""
    (path,) = sys.argv[1:] if argv is None else argv
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with stop_on_signals() as should_stop:
        return _run_to_its_end(RunDir(Path(path)), should_stop)


def _run_to_its_end(folder: RunDir, should_stop: Callable[[], bool]) -> int:
    """The exit code; the note of how it ended is on disk."""
    rank = int(os.environ.get("RANK", "0"))
    world = None
    try:
        config = build(resolved.load(folder.config))
        world = init_world(config.compute)
        if not world.is_main:
            logging.getLogger().setLevel(logging.WARNING)
        run(folder, config, world, should_stop)
        end = RankExit(rank=rank, code=0)
    except Stopped:
        log.warning("stopped on request")
        end = RankExit.interrupted(rank)
    except VlarlError as error:
        log.error("%s", error)
        end = RankExit.of(rank, error)
    if end.code and rank == 0:
        _publish_end(folder, end)
    run_dir.write_exit(folder, end)
    if world is not None:
        world.close()
    return end.code


def _publish_end(folder: RunDir, end: RankExit) -> None:
    before = run_dir.read_status(folder)
    step, max_steps = (before.step, before.max_steps) if before else (0, 0)
    if end.code == INTERRUPTED:
        status = Status(phase="interrupted", step=step, max_steps=max_steps)
    else:
        status = Status(phase="failed", step=step, max_steps=max_steps, message=end.message)
    run_dir.write_status(folder, status)


if __name__ == "__main__":
    sys.exit(main())
