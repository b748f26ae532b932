"""The loop: plan, play, judge, update, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vlarl import run_dir
from vlarl.batch import Credit, Rollout
from vlarl.config.schema import RunConfig
from vlarl.distributed import checkpoint
from vlarl.distributed.placement import owned
from vlarl.distributed.precision import autocast
from vlarl.distributed.shard import full_weights
from vlarl.distributed.world import World
from vlarl.errors import ConfigError, NothingToLearn, RunFailed
from vlarl.evaluate import evaluate, make_protocol
from vlarl.interfaces import MetricSink, Policy, VecEnv
from vlarl.rollout.collect import collect
from vlarl.rollout.plan import eval_plan, train_plan
from vlarl.rollout.play import Outcome
from vlarl.run_dir import RunDir, Status
from vlarl.train.measure import experience, judgement
from vlarl.train.setup import Parts
from vlarl.train.state import TrainState
from vlarl.train.update import update
from vlarl.video import Clip, write_grid

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was asked to stop between two iterations; the last finished one is saved."""


@dataclass
class Clock:
    """Wall-clock seconds by phase, as `time/*` metrics."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Add the time spent inside to `time/<phase>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.seconds.get(f"time/{phase}", 0.0) + time.perf_counter() - start
            self.seconds[f"time/{phase}"] = spent


@dataclass
class Trainer:
    """One rank's live parts of a run."""

    run: RunConfig
    parts: Parts
    env: VecEnv
    policy: Policy
    optimizer: torch.optim.Optimizer
    state: TrainState
    world: World
    sink: MetricSink | None
    folder: RunDir
    should_stop: Callable[[], bool] = lambda: False

    def train(self) -> None:
        """Run to max_steps.

        Raises:
            Stopped: should_stop became true; a checkpoint of the last finished iteration exists.
            NothingToLearn: `patience` iterations in a row gave no learning signal.
            NonFiniteLoss: see `update`.
        """
        run, state = self.run, self.state
        if state.step == 0 and run.eval.ends:
            self.sink_write(0, self.evaluate(0))
        while True:
            if state.pending is not None:
                self.finish(state.step, state.pending)
            if state.step >= run.max_steps:
                break
            state.pending = self.iterate()
        self.publish("done", 0, 0)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Everything that is due after an iteration: evaluation, metrics line, checkpoint.

        The line is on disk before the checkpoint, so a resumed run lacks no line.
        """
        run, last = self.run, step == self.run.max_steps
        if (run.eval.every and step % run.eval.every == 0) or (last and run.eval.ends):
            metrics = {**metrics, **self.evaluate(step)}
        self.sink_write(step, metrics)
        self.state.pending = None
        if step % run.save.every == 0 or last:
            self.save()

    def iterate(self) -> dict[str, float]:
        """One iteration: a rollout and its updates."""
        run, world, step, clock = self.run, self.world, self.state.step, Clock()
        with clock("generate_rollouts"):
            rollout = self.play(step)
        with clock("cal_adv_and_returns"):
            credit = self.parts.algo.credit(rollout, run.algo, world.all_sum)
            metrics = {**experience(rollout, world), **judgement(rollout, credit, world)}
        self.watch(rollout, credit)
        with clock("actor_training"), autocast(world, run.compute):
            numbers, self.state.num_updates = update(
                self.policy,
                self.optimizer,
                self.parts.algo,
                run.algo,
                rollout,
                credit,
                run.optim,
                world=world,
                seed=run.seed,
                step=step,
                num_updates=self.state.num_updates,
                on_update=lambda done, total: self.publish("update", done, total),
            )
        self.state.step += 1
        spent = clock.seconds
        spent["time/step"] = sum(spent.values())
        actions = metrics["env/episode_len"] * metrics["env/num_trajectories"]
        spent["time/env_steps_per_s"] = actions / spent["time/generate_rollouts"]
        return {**metrics, **numbers, **spent}

    def play(self, step: int) -> Rollout:
        """This rank's share of the iteration's plan, played."""
        run = self.run
        group_size = run.algo.episodes_multiple
        plan = train_plan(
            self.parts.train_trials,
            episodes=run.rollout.episodes,
            group_size=group_size,
            seed=run.seed,
            step=step,
        )
        mine = owned(plan, self.world)
        if not mine:
            raise ConfigError(
                f"{len(plan) // group_size} groups cannot be shared by {self.world.size} ranks; "
                "raise rollout.episodes or lower --nproc"
            )
        counter = self.counter("rollout", len(mine))
        with full_weights(self.policy.module), autocast(self.world, run.compute):
            rollout = collect(
                self.env,
                self.policy,
                mine,
                temperature=run.rollout.temperature,
                noise=(run.seed, "act", step),
                deterministic=run.rollout.deterministic,
                stages=run.rollout.stages,
                should_stop=self.should_stop,
                on_episode=counter,
            )
        self.stop_together(rollout is None)
        assert rollout is not None
        return rollout

    def watch(self, rollout: Rollout, credit: Credit) -> None:
        """Count iterations in a row that teach nothing, and give up when patience is over."""
        informative = (credit.weight > 0).any(dim=2) & (credit.advantage != 0).any(dim=2)
        parts = (informative, rollout.reward != 0, rollout.success, torch.ones_like(credit.kept))
        counts = torch.stack([part.sum().float() for part in parts])
        signal, rewarded, wins, total = self.world.all_sum(counts).tolist()
        # Without any reward the advantages of PPO are nothing but the errors of its value head.
        if signal and rewarded:
            self.state.barren = 0
            return
        self.state.barren += 1
        reason = (
            "every episode failed"
            if wins == 0
            else "every episode succeeded"
            if wins == total
            else "within each group all episodes ended alike, or their group was filtered"
        )
        log.warning("iteration %d teaches nothing: %s", self.state.step, reason)
        if self.state.barren >= self.run.patience:
            raise NothingToLearn(
                f"{self.state.barren} iterations in a row had no learning signal; in the last one "
                f"{reason} ({int(wins)}/{int(total)} successes). Choose tasks or a checkpoint with "
                "success between 10 % and 90 %, or raise rollout.temperature or patience"
            )

    def evaluate(self, step: int) -> dict[str, float]:
        """Play the held-out plan; write the result file, and a video after the last iteration."""
        run, world, clock = self.run, self.world, Clock()
        last = step == run.max_steps
        trials = self.parts.eval_trials
        plan = eval_plan(trials, episodes=run.eval.episodes, record=run.eval.video if last else 0)
        chosen = run.eval.temperature
        temperature = run.rollout.temperature if chosen is None else chosen
        protocol = make_protocol(
            self.env,
            self.policy,
            plan,
            env_section=run.env,
            policy_section=run.policy,
            temperature=temperature,
            seed=run.seed,
            split="eval",
            train_trials=self.parts.train_trials,
            step=step,
            num_ranks=world.size,
        )
        clips: list[Clip] = []
        weights, precision = full_weights(self.policy.module), autocast(world, run.compute)
        with clock("eval"), weights, precision:
            result = evaluate(
                self.env,
                self.policy,
                plan,
                temperature=temperature,
                seed=run.seed,
                world=world,
                stages=run.rollout.stages,
                protocol=protocol,
                groups=self.parts.groups,
                on_episode=self.counter("evaluate", len(plan[world.rank :: world.size])),
                on_frames=lambda outcome: clips.append(Clip.of(outcome, self.parts.env_spec)),
                should_stop=self.should_stop,
            )
        self.stop_together(not result.is_complete)
        shown = world.gather_object(clips)
        if shown is not None:
            result.save(self.folder.eval / f"step_{step:06d}.json", overwrite=True)
            self.write_video([clip for part in shown for clip in part], step)
        return {**result.metrics(), **clock.seconds}

    def write_video(self, clips: list[Clip], step: int) -> None:
        """A grid of the recorded episodes; a failing encoder costs the video, not the run."""
        if not clips:
            return
        path = self.folder.video / f"step_{step:06d}.mp4"
        fps = self.parts.env_spec.control_hz / self.parts.env_spec.video_every
        try:
            write_grid(sorted(clips, key=lambda c: c.episode), path, fps=fps, overwrite=True)
        except RunFailed as error:
            log.warning("no video: %s", error)

    def save(self) -> None:
        """Write a checkpoint of the current state, and drop old ones."""
        self.publish("save", 0, 0)
        checkpoint.save(
            self.folder.checkpoint(self.state.step),
            module=self.policy.module,
            optimizer=self.optimizer,
            state=self.state.as_dict(),
            world=self.world,
            policy_saver=self.policy.save,
        )
        if self.world.is_main:
            checkpoint.prune(self.folder, self.run.save.keep)

    def stop_together(self, wanted: bool) -> None:
        """Leave the loop on all ranks when one wants to; save what is finished."""
        if self.world.all_max(torch.tensor(float(wanted))) == 0:
            return
        if self.state.step and not self.folder.checkpoint(self.state.step).is_dir():
            self.save()
        raise Stopped

    def sink_write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 records a line."""
        if self.sink is not None:
            self.sink.write(step, metrics)

    def counter(self, phase: run_dir.Phase, total: int) -> Callable[[Outcome], None]:
        """A callback that publishes how many of this rank's episodes have ended."""
        done = 0

        def count(_: Outcome) -> None:
            nonlocal done
            done += 1
            self.publish(phase, done, total)

        return count

    def publish(self, phase: run_dir.Phase, done: int, total: int) -> None:
        """Tell the live view where we are; rank 0 speaks for all."""
        if self.world.rank == 0:
            status = Status(
                phase=phase,
                step=self.state.step,
                max_steps=self.run.max_steps,
                done=done,
                total=total,
            )
            run_dir.write_status(self.folder, status)
