"""What can be said about a run before it starts: how it is divided, and where a resume goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from vlarl import checkpoint_manifest, metrics
from vlarl.config.schema import RunConfig
from vlarl.errors import ConfigError
from vlarl.run_dir import (
    RunDir,
    checkpoint_step,
    checkpoints,
    find_checkpoint,
    latest_checkpoint,
    read_json,
)
from vlarl.train.memory import most_decisions
from vlarl.train.setup import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """An iteration divided among ranks, optimizer steps and forwards.

    rank_episodes: of the rank that has most. decisions: of all ranks, if every episode lasts to the
    horizon. step_decisions: the part of an optimizer step. micro_batches: forwards of such a step
    on a rank. eval_episodes: of one evaluation. notes: what divides badly, with the nearest values
    that divide well.
    """

    ranks: int
    episodes: int
    rank_episodes: int
    decisions: int
    steps: int
    step_decisions: int
    micro_batches: int
    eval_episodes: int
    notes: tuple[str, ...]


def divide(run: RunConfig, parts: Parts, *, ranks: int) -> Division:
    """How an iteration is divided. Raises ConfigError when there is nothing to do for a rank."""
    size, episodes = run.algo.episodes_multiple, run.rollout.episodes
    groups = episodes // size
    if groups < ranks:
        raise ConfigError(
            f"{groups} groups of episodes cannot be shared by {ranks} ranks; raise "
            f"rollout.episodes ({episodes}; the nearest is {ranks * size}) or lower --nproc"
        )
    per_episode = math.ceil(parts.env_spec.max_steps / parts.policy_spec.chunk)
    decisions = episodes * per_episode
    step_decisions = math.ceil(decisions / run.optim.minibatches)
    trials = parts.eval_trials.values()
    limit = run.eval.episodes
    largest = most_decisions(run, parts, ranks)
    return Division(
        ranks=ranks,
        episodes=episodes,
        rank_episodes=math.ceil(groups / ranks) * size,
        decisions=decisions,
        steps=run.optim.epochs * run.optim.minibatches,
        step_decisions=step_decisions,
        micro_batches=math.ceil(largest / run.optim.minibatches / run.optim.micro_batch),
        eval_episodes=sum(len(ids) if limit is None else min(limit, len(ids)) for ids in trials),
        notes=(*_uneven_ranks(episodes, size, ranks), *_idle_slots(run, size, ranks)),
    )


def _near(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"


def _uneven_ranks(episodes: int, size: int, ranks: int) -> tuple[str, ...]:
    if episodes % (size * ranks) == 0:
        return ()
    unit = f"groups of {size}" if size > 1 else "episodes"
    return (
        f"{episodes // size} {unit} do not divide evenly among {ranks} ranks, and all wait for the "
        f"slowest; rollout.episodes that do: {_near(episodes, size * ranks)}",
    )


def _idle_slots(run: RunConfig, size: int, ranks: int) -> tuple[str, ...]:
    share = math.ceil(run.rollout.episodes // size / ranks) * size
    slots = run.env.num_slots
    if slots > share:
        return (f"{slots - share} of {slots} slots stay idle; env.num_slots={share} is enough",)
    if slots % run.rollout.stages:
        return (
            f"{slots} slots do not divide into {run.rollout.stages} equal stages; env.num_slots "
            f"that do: {_near(slots, run.rollout.stages)}",
        )
    return ()


def resume_point(folder: RunDir, run: RunConfig, step: int | None) -> Path | None:
    """The checkpoint that a resumed run goes on from, verified; None starts from the beginning.

    step: of the checkpoint to go back to; None takes the latest.

    Raises:
        ConfigError: there is none of that step, or none at all although the metrics say that one
            was written. CorruptFile: a file of it is damaged.
    """
    which = None if step is None else str(step)
    if step is None and not checkpoints(folder):
        done = max((line["step"] for line in metrics.read(folder.metrics)), default=0)
        if done >= run.save.every:
            raise ConfigError(
                f"{folder.metrics} goes to iteration {done}, but {folder.ckpt} holds no complete "
                "checkpoint: put it back, or start over with --overwrite"
            )
        return None
    point = find_checkpoint(folder, which)
    checkpoint_manifest.verify(point)
    return point


def is_complete(folder: RunDir, run: RunConfig, point: Path | None) -> bool:
    """Whether nothing is left to do from a checkpoint on, its evaluation included.

    Raises ConfigError when the run has gone beyond its max_steps.
    """
    done = None if point is None else checkpoint_step(point)
    if point is None or done is None or done < run.max_steps:
        return False
    if done > run.max_steps:
        raise ConfigError(
            f"nothing to do: {folder.path} has done {done} iterations and max_steps is "
            f"{run.max_steps}; raise it with --max-steps, or go back with --resume-from STEP"
        )
    pending = read_json(point / "state.json")["trainer"]["pending"] is not None
    return point == latest_checkpoint(folder) and not pending
