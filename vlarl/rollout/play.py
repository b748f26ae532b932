"""Plays a list of episodes with a policy: the one loop under training, evaluation and collection.

A slot whose episode ended takes the next one at once, and no policy forward is spent on a finished
episode. What an episode does depends on its (task, trial, group, member) and the noise path alone,
not on the number of slots or ranks nor on which episodes were batched together (up to
floating-point differences between batch shapes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlarl.batch import EnvStep, Observation, PolicyStep
from vlarl.episode import Episode
from vlarl.interfaces import Policy, VecEnv
from vlarl.noise import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One finished episode of L decisions.

    reward, terminated, truncated: [L, C]. rows: the L positions of its decisions in `Decisions`
    (empty when nothing is stored). last_value: [V], V(last observation) when the horizon cut the
    episode and the policy has a value head, else None. frames: uint8 [F, H, W, 3] if recorded.
    """

    episode: Episode
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    rows: tuple[int, ...]
    last_value: Tensor | None
    num_clipped: int
    diverged: bool
    frames: Tensor | None

    @property
    def success(self) -> bool:
        """Ended by termination, within the horizon."""
        return bool(self.terminated.any())

    @property
    def num_steps(self) -> int:
        """Executed actions, the last one included."""
        done = (self.terminated | self.truncated).flatten()
        return int(done.nonzero()[0]) + 1

    @property
    def total_reward(self) -> float:
        """Sum of the rewards."""
        return float(self.reward.sum())


@dataclass(slots=True)
class Decisions:
    """Everything that was observed and decided, in order of arrival, on the CPU."""

    obs: list[Observation] = field(default_factory=list)
    steps: list[PolicyStep] = field(default_factory=list)
    count: int = 0

    def add(self, obs: Observation, step: PolicyStep) -> range:
        """Store one batch; returns the positions of its rows."""
        self.obs.append(obs.to(torch.device("cpu")))
        self.steps.append(_to_cpu(step))
        self.count += len(obs)
        return range(self.count - len(obs), self.count)

    def take_obs(self, order: Tensor) -> Observation:
        """All observations in this order of their positions, [count] int64; none are left here.

        Frames are most of a rollout (512 episodes of 64 decisions at 256 px: 6 GB) and are not held
        twice: each batch is let go as soon as it is copied.
        """
        parts, self.obs = self.obs, []
        state = torch.cat([obs.state for obs in parts])[order]
        texts = [text for obs in parts for text in obs.instruction]
        frames = {name: [obs.images[name] for obs in parts] for name in parts[0].images}
        del parts
        return Observation(
            images={name: _cat_in_order(batches, order) for name, batches in frames.items()},
            state=state,
            instruction=tuple(texts[i] for i in order.tolist()),
        )


def _cat_in_order(parts: list[Tensor], order: Tensor) -> Tensor:
    """torch.cat(parts)[order], for a permutation; empties `parts` on the way."""
    places = order.argsort().split([len(part) for part in parts])
    whole = parts[0].new_empty((len(order), *parts[0].shape[1:]))
    parts.reverse()
    for place in places:
        whole[place] = parts.pop()
    return whole


def _to_cpu(step: PolicyStep) -> PolicyStep:
    return PolicyStep(
        action=step.action.cpu(),
        logprob=step.logprob.cpu(),
        value=None if step.value is None else step.value.cpu(),
        trace={name: tensor.cpu() for name, tensor in step.trace.items()},
    )


@dataclass(slots=True)
class _Playing:
    """The episode in one slot so far."""

    episode: Episode
    steps: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    frames: list[Tensor] = field(default_factory=list)
    num_clipped: int = 0
    diverged: bool = False
    decision: int = 0

    def add(self, step: EnvStep, i: int) -> None:
        if not bool(step.first[i]):
            self.steps.append((step.reward[i], step.terminated[i], step.truncated[i]))
        self.num_clipped += int(step.num_clipped[i])
        self.diverged |= bool(step.diverged[i])
        if step.frames is not None and self.episode.record:
            self.frames.append(step.frames[i])

    def finish(self, last_value: Tensor | None) -> Outcome:
        reward, terminated, truncated = (
            torch.stack(x).cpu() for x in zip(*self.steps, strict=True)
        )
        return Outcome(
            episode=self.episode,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            rows=tuple(self.rows),
            last_value=last_value,
            num_clipped=self.num_clipped,
            diverged=self.diverged,
            frames=torch.cat(self.frames) if self.frames else None,
        )


def play(
    env: VecEnv,
    policy: Policy,
    episodes: Iterable[Episode],
    *,
    temperature: float,
    noise: Sequence[object] = (),
    deterministic: bool = True,
    stages: int = 1,
    store: Decisions | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Outcome]:
    """Play every episode once and yield each as it ends.

    noise: the path of the sampling noise, e.g. (seed, "act", step); the episode and the decision
    number are appended. temperature 0 is greedy.
    deterministic: wait for every slot of a stage, so that batches, and with them the last bits of
    the results, do not depend on timing. stages: groups of slots that take turns.
    store: keep observations, traces and log-probs there. should_stop: asked between decisions; once
    true, nothing new is sent and the iterator ends early.
    """
    queue = _Queue(episodes, env.spec.tasks, env.num_slots)
    stages = max(1, min(stages, env.num_slots, len(queue)))
    waves = [range(s, env.num_slots, stages) for s in range(stages)]
    playing: dict[int, _Playing] = {}
    _refill(env, list(range(env.num_slots)), queue, playing)
    turn = 0
    while playing and not (should_stop is not None and should_stop()):
        if deterministic:
            among = [slot for slot in waves[turn % stages] if slot in playing]
            turn += 1
            if not among:
                continue
            ready, step = env.recv(len(among), among)
        else:
            ready, step = env.recv(max(1, len(playing) // stages))
        finished = _take(ready, step, policy, playing, bootstrap=store is not None)
        # Start the simulators before handing results out: the consumer's work overlaps with theirs.
        _refill(env, [slot for slot in ready if slot not in playing], queue, playing)
        _decide(env, policy, ready, step, playing, temperature, noise, store)
        yield from finished


class _Queue:
    """Waiting episodes, handed out so that slots rarely change task: a simulator compiles each task
    it does not know, which may take longer than the episode.

    A slot goes on with its task, then turns to those it is the home of (the k-th task lives in slot
    k modulo their number, in every call, so that compiled tasks are found again), then helps where
    most are waiting. The choice depends on the plan and on which slots were free, on nothing older:
    a resumed run makes the same one.
    """

    def __init__(self, episodes: Iterable[Episode], tasks: Sequence[str], num_slots: int) -> None:
        self._waiting: dict[str, deque[Episode]] = {}
        for episode in episodes:
            self._waiting.setdefault(episode.task, deque()).append(episode)
        self._home = {task: k % num_slots for k, task in enumerate(tasks)}
        self._last: dict[int, str] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take(self, slot: int) -> Episode:
        """The next episode for a slot; needs a waiting one."""
        task = self._last.get(slot, "")
        if task not in self._waiting:
            own = [t for t in self._waiting if self._home.get(t) == slot]
            task = own[0] if own else max(self._waiting, key=lambda t: len(self._waiting[t]))
        episode = self._waiting[task].popleft()
        if not self._waiting[task]:
            del self._waiting[task]
        self._last[slot] = task
        return episode


def _refill(env: VecEnv, free: list[int], queue: _Queue, playing: dict[int, _Playing]) -> None:
    """Give waiting episodes to the free slots."""
    slots = free[: len(queue)]
    if slots:
        episodes = [queue.take(slot) for slot in slots]
        env.reset(slots, episodes)
        playing.update({s: _Playing(episode=e) for s, e in zip(slots, episodes, strict=True)})


def _take(
    ready: list[int],
    step: EnvStep,
    policy: Policy,
    playing: dict[int, _Playing],
    *,
    bootstrap: bool,
) -> list[Outcome]:
    """Book the answers; episodes that are over leave `playing` and are returned, in slot order."""
    done = step.done.tolist()
    for i, slot in enumerate(ready):
        playing[slot].add(step, i)
    over = [i for i in range(len(ready)) if done[i]]
    cut = [i for i in over if bool(step.truncated[i].any()) and not bool(step.diverged[i])]
    values: Mapping[int, Tensor] = {}
    if bootstrap and cut and policy.spec.has_value:
        values = dict(zip(cut, policy.value(step.obs.select(cut)).cpu(), strict=True))
    return [playing.pop(ready[i]).finish(values.get(i)) for i in over]


def _decide(
    env: VecEnv,
    policy: Policy,
    ready: list[int],
    step: EnvStep,
    playing: dict[int, _Playing],
    temperature: float,
    noise: Sequence[object],
    store: Decisions | None,
) -> None:
    """One forward for the slots whose episode goes on, and their actions on the way."""
    done = step.done.tolist()
    rows = [i for i in range(len(ready)) if not done[i]]
    if not rows:
        return
    slots = [ready[i] for i in rows]
    obs = step.obs if len(rows) == len(ready) else step.obs.select(rows)
    keys = None
    if temperature > 0:
        keys = torch.tensor([_key(noise, playing[slot]) for slot in slots], dtype=torch.int64)
    decided = policy.act(obs, temperature=temperature, keys=keys)
    env.send(slots, decided.action)
    positions = store.add(obs, decided) if store is not None else ()
    for slot in slots:
        playing[slot].decision += 1
    for slot, position in zip(slots, positions, strict=False):
        playing[slot].rows.append(position)


def _key(noise: Sequence[object], playing: _Playing) -> int:
    e = playing.episode
    return stream(*noise, e.task, e.trial, e.group, e.member, playing.decision)
