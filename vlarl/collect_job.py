"""Trajectories of a scripted expert or of a policy, from words to a data set on disk."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vlarl import dataset, registry
from vlarl.assets import store
from vlarl.batch import EnvStep
from vlarl.config.explain import validate
from vlarl.config.schema import (
    Bool,
    ComputeSection,
    EnvT,
    Float,
    Int,
    PolicySection,
    PolicyT,
    Section,
    Temperature,
)
from vlarl.dataset import DataSet, Entry, EntryKey, Origin
from vlarl.distributed.world import World
from vlarl.episode import Episode
from vlarl.errors import ConfigError, SpecMismatch
from vlarl.evaluate import checkpoint_hash, versions
from vlarl.interfaces import Policy, VecEnv
from vlarl.noise import normal, stream
from vlarl.rollout.plan import eval_plan
from vlarl.specs import EnvSpec, check_temperature, match
from vlarl.trajectories import Trajectory

EXPERT = "expert"
"""Name of the env's scripted expert as a teacher."""


class CollectJob(Section, Generic[EnvT, PolicyT]):
    """Everything a collection is made of."""

    env: EnvT
    policy: PolicyT | None = None
    """Who plays; none means the env's scripted expert."""
    compute: ComputeSection = ComputeSection()
    split: Literal["train", "eval"] = "train"
    """Whose trials are played."""
    episodes: Annotated[Int, Field(ge=1)] = 10
    """Episodes per task: the first so many trials of the split, each once."""
    noise: Annotated[Float, Field(ge=0)] = 0.0
    """Standard deviation of Gaussian noise on executed actions, in action units. It shows states
    off the teacher's path; what the teacher wanted is stored beside."""
    temperature: Annotated[Temperature, Field(ge=0)] = 0.0
    """Sampling temperature of a policy, 0 = greedy."""
    keep_failures: Bool = False
    """Write the failed episodes, too."""
    seed: Annotated[Int, Field(ge=0)] = 0
    """Root of the noise."""
    to: Path
    """Folder of the data set; a collection with the same settings is continued there."""


def build_job(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> CollectJob:
    """The validated job. values: nested plain values with env.name, and policy.name or no policy.

    Raises ConfigError with every problem, one a line.
    """
    env = registry.module("env", values["env"]["name"]).Config
    policy = PolicySection
    if values.get("policy") is not None:
        policy = registry.module("policy", values["policy"]["name"]).Config
    model = cast("type[CollectJob]", CollectJob.__class_getitem__((env, policy)))
    return validate(model, values, sources)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that was found to fit together; nothing heavy is loaded yet. plan: all episodes."""

    job: CollectJob
    env_module: ModuleType
    env_spec: EnvSpec
    plan: tuple[Episode, ...]
    origin: Origin


def prepare(job: CollectJob) -> Prepared:
    """Look everything up and check it, without starting a simulator or writing anything.

    Raises:
        SpecMismatch: policy and env disagree; every reason is listed.
        ConfigError: unknown tasks, too few trials, no expert, or the folder holds something else.
        AssetMissing: the checkpoint is not on this machine.
    """
    env_module = registry.module("env", job.env.name)
    env_spec = env_module.spec(job.env)
    if job.policy is None:
        teacher = EXPERT
        if not hasattr(env_module, "demonstrate"):
            raise ConfigError(f"env '{job.env.name}' has no scripted expert; name a --policy")
        if hasattr(env_module, "check_expert"):
            env_module.check_expert(job.env)
    else:
        policy_spec = registry.module("policy", job.policy.name).spec(job.policy)
        check_temperature(policy_spec, job.temperature)
        problems = match(policy_spec, env_spec)
        if problems:
            raise SpecMismatch("\n".join(problems))
        if env_spec.chunks and 1 not in env_spec.chunks:
            raise ConfigError(
                f"env '{env_spec.name}' plays whole chunks only, and trajectories need every step"
            )
        folder = store.resolve(job.policy.checkpoint)
        teacher = f"{folder.resolve().name}@{checkpoint_hash(folder)[:16]}"
    trials = env_module.trials(job.env, job.split)
    for task, ids in trials.items():
        if job.episodes > len(ids):
            raise ConfigError(
                f"task '{task}' has {len(ids)} trials in split '{job.split}' but {job.episodes} "
                f"episodes were asked for; lower --episodes or raise env.{job.split}_trials"
            )
    origin = Origin(
        env=job.env.model_dump(mode="json"),
        spec=env_spec,
        teacher=teacher,
        noise=job.noise,
        temperature=job.temperature,
        seed=job.seed,
        split=job.split,
        keep_failures=job.keep_failures,
        versions=versions(),
    )
    dataset.check_usable(job.to, origin)
    plan = tuple(eval_plan(trials, episodes=job.episodes))
    return Prepared(job, env_module, env_spec, plan, origin)


def remaining(prepared: Prepared) -> list[Episode]:
    """Planned episodes that the folder does not have yet."""
    folder = prepared.job.to
    done = {e.key for e in dataset.open_(folder).entries} if dataset.exists(folder) else set()
    return [e for e in prepared.plan if EntryKey.of(e) not in done]


def collect(
    prepared: Prepared,
    world: World,
    *,
    on_episode: Callable[[Entry], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> DataSet:
    """Play what is missing and write it, episode by episode; returns the whole data set.

    on_episode: called as each episode is finished. should_stop: asked after each; once true the
    rest is left for a later call.
    """
    job = prepared.job
    data = dataset.create(job.to, prepared.origin)
    todo = [e for e in prepared.plan if EntryKey.of(e) not in data]
    try:
        with closing(_play(prepared, todo, world)) as played:
            for episode, trajectory in played:
                entry = data.add(trajectory, episode.member)
                if on_episode is not None:
                    on_episode(entry)
                if should_stop is not None and should_stop():
                    break
    finally:
        data.flush()
    return data


def _play(
    prepared: Prepared, todo: Sequence[Episode], world: World
) -> Generator[tuple[Episode, Trajectory]]:
    job = prepared.job
    if not todo:
        return
    if job.policy is None:
        stream_ = prepared.env_module.demonstrate(job.env, todo, noise_std=job.noise, seed=job.seed)
        yield from zip(todo, stream_, strict=True)
        return
    policy = registry.module("policy", job.policy.name).load(
        job.policy, device=world.device, needs_value=False, train=False
    )
    env = prepared.env_module.make(
        job.env, num_slots=min(job.env.num_slots, len(todo)), final_frames=True
    )
    try:
        yield from record(
            env, policy, todo, temperature=job.temperature, noise=job.noise, seed=job.seed
        )
    finally:
        env.close()


class _Recording:
    """One episode on its way: what was seen, wanted and done at every step."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.chunk: Tensor = torch.zeros(0, 0)  # actions decided and not played yet
        self.decisions = 0
        self.images: dict[str, list[Tensor]] = {}
        self.states: list[Tensor] = []
        self.instruction = ""
        self.actions: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.rewards: list[float] = []

    def see(self, step: EnvStep, i: int) -> None:
        """Keep observation i, which the next action answers."""
        for name, frames in step.obs.images.items():
            self.images.setdefault(name, []).append(frames[i].cpu())
        self.states.append(step.obs.state[i].cpu())
        self.instruction = step.obs.instruction[i]

    def next_action(self, noise: float, seed: int, low: float, high: float) -> Tensor:
        """[A]: the next decided action plus noise, inside the bounds."""
        target, self.chunk = self.chunk[0].clamp(low, high), self.chunk[1:]
        action = target
        if noise > 0:
            e = self.episode
            path = (seed, "collect-noise", e.task, e.trial, e.member, len(self.actions))
            draw = normal(torch.tensor([stream(*path)]), tuple(target.shape))[0]
            action = (target + noise * draw).clamp(low, high)
        self.targets.append(target)
        self.actions.append(action)
        return action

    def finish(self, step: EnvStep, i: int) -> Trajectory:
        seen = bool(step.truncated[i].any()) and not bool(step.diverged[i])
        last = {name: frames[i].cpu().numpy() for name, frames in step.obs.images.items()}
        return Trajectory(
            task=self.episode.task,
            trial=self.episode.trial,
            instruction=self.instruction,
            frames={name: torch.stack(list_).numpy() for name, list_ in self.images.items()},
            state=torch.stack(self.states).numpy(),
            action=torch.stack(self.actions).numpy(),
            target=torch.stack(self.targets).numpy(),
            reward=np.array(self.rewards, dtype=np.float32),
            success=bool(step.terminated[i].any()),
            last_frames=last if seen else None,
        )


def record(
    env: VecEnv,
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    temperature: float,
    noise: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[Episode, Trajectory]]:
    """Play every episode once, one action per message, and yield each as it ends.

    The policy decides every C steps as in training; the steps between are played singly, so that
    each has its frame and state. An env made with `final_frames` gives the last frame of episodes
    that the horizon cut. Neither slots nor batches change what an episode does (up to the last
    bits).
    """
    queue = list(episodes)[::-1]
    playing: dict[int, _Recording] = {}
    free = list(range(env.num_slots))
    low, high = env.spec.action.low, env.spec.action.high
    while queue or playing:
        started = free[: len(queue)]
        if started:
            fresh = [queue.pop() for _ in started]
            env.reset(started, fresh)
            playing.update({s: _Recording(e) for s, e in zip(started, fresh, strict=True)})
        slots, step = env.recv(len(playing), sorted(playing))
        done = step.done.tolist()
        finished = []
        for i, slot in enumerate(slots):
            if not bool(step.first[i]):
                playing[slot].rewards.append(float(step.reward[i].sum()))
            if done[i]:
                recording = playing.pop(slot)
                finished.append((recording.episode, recording.finish(step, i)))
            else:
                playing[slot].see(step, i)
        going = [i for i in range(len(slots)) if not done[i]]
        _decide(policy, step, {i: playing[slots[i]] for i in going}, temperature, seed)
        if going:
            still = [playing[slots[i]] for i in going]
            action = torch.stack([r.next_action(noise, seed, low, high) for r in still])
            env.send([slots[i] for i in going], action[:, None])
        free = [slot for slot in range(env.num_slots) if slot not in playing]
        yield from finished


def _decide(
    policy: Policy,
    step: EnvStep,
    playing: Mapping[int, _Recording],
    temperature: float,
    seed: int,
) -> None:
    """One forward for the episodes whose chunk is used up."""
    rows = [i for i, recording in playing.items() if len(recording.chunk) == 0]
    if not rows:
        return
    keys = None
    if temperature > 0:
        paths = [
            (seed, "collect", e.task, e.trial, e.group, e.member, playing[i].decisions)
            for i in rows
            for e in [playing[i].episode]
        ]
        keys = torch.tensor([stream(*path) for path in paths], dtype=torch.int64)
    decided = policy.act(step.obs.select(rows), temperature=temperature, keys=keys).action.cpu()
    for i, chunk in zip(rows, decided, strict=True):
        playing[i].chunk = chunk
        playing[i].decisions += 1
