"""The contract of an env."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vlarl.batch import EnvStep, Observation
from vlarl.episode import Episode
from vlarl.errors import RunFailed
from vlarl.interfaces import VecEnv
from vlarl.noise import stream
from vlarl.specs import EnvSpec
from vlarl.testing.require import require


def check_env(make: Callable[[int], VecEnv], episodes: Sequence[Episode], *, chunk: int) -> None:
    """Raise ContractBroken unless the env keeps what the collector relies on.

    make: number of slots -> env made with final_frames=True. episodes: at least two, from different
    states and not recorded; they are played a few times each, to their ends, with random actions in
    chunks of `chunk`.

    Shapes, dtypes and the honesty of the spec; an episode depends on (task, trial) and its actions
    alone, not on slot, neighbours or earlier episodes; parking after the end; the horizon; clipping
    and its count; refusal of actions that are not finite; recorded frames; tensors that later
    messages leave alone; closing twice.
    """
    first, second = episodes[0], episodes[1]
    require(
        (first.task, first.trial) != (second.task, second.trial),
        "check_env needs two episodes that start differently",
    )
    env = make(3)
    try:
        _check_spec(env, chunk, episodes)
        before = _play(env, {0: first, 2: second}, chunk)
        twin = replace(first, index=first.index + 1000, member=first.member + 1, record=True)
        after = _play(env, {0: second, 1: first, 2: twin}, chunk)
        _require_same(before[0], after[1], "in another slot, beside other episodes, later")
        _require_same(before[0], after[2], "with another index and member, recorded")
        _require_same(before[2], after[0], "in another slot, beside other episodes, later")
        same = all(
            torch.equal(before[0].obs[0].images[c], before[2].obs[0].images[c])
            for c in before[0].obs[0].images
        )
        require(not same, "two episodes of different trials start with identical frames")
        require(before[0].num_frames == 0, "frames were recorded of an episode that did not ask")
        require(
            after[2].num_frames > 0, "no frames were recorded of an episode that asked for them"
        )
        _check_clipping(env, first, chunk)
        _check_refusal(env, first, chunk)
    finally:
        env.close()
        env.close()


@dataclass(slots=True)
class _Played:
    """What one slot answered: observations, and reward and flags of the chunks."""

    obs: list[Observation] = field(default_factory=list)
    copies: list[Observation] = field(default_factory=list)
    chunks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    num_frames: int = 0


def _actions(spec: EnvSpec, episode: Episode, chunk: int) -> Tensor:
    """[decisions, C, A] in bounds, the same for every episode of a (task, trial)."""
    decisions = -(-spec.max_steps // chunk)
    gen = torch.Generator().manual_seed(stream("check", episode.task, episode.trial))
    unit = torch.rand(decisions, chunk, spec.action.dims, generator=gen)
    return spec.action.low + (spec.action.high - spec.action.low) * unit


def _play(env: VecEnv, where: Mapping[int, Episode], chunk: int) -> dict[int, _Played]:
    """Play one episode in each of the given slots to its end."""
    played = {slot: _Played() for slot in where}
    actions = {slot: _actions(env.spec, episode, chunk) for slot, episode in where.items()}
    env.reset(list(where), list(where.values()))
    going = sorted(where)
    while going:
        slots, step = env.recv(len(going))
        require(slots == going, f"asked for {len(going)} of the slots {going}, recv gave {slots}")
        _check_step(env, step, len(slots), chunk, tuple(where[s].task for s in slots))
        done = step.done.tolist()
        for i, slot in enumerate(slots):
            _book(played[slot], step, i)
        going = [slot for i, slot in enumerate(slots) if not done[i]]
        if going:
            at = [len(played[slot].chunks) for slot in going]
            ended = [s for s, t in zip(going, at, strict=True) if t >= len(actions[s])]
            require(not ended, f"slots {ended} go on beyond max_steps ({env.spec.max_steps})")
            env.send(going, torch.stack([actions[s][t] for s, t in zip(going, at, strict=True)]))
    for p in played.values():
        _check_episode(p, env.spec)
    return played


def _book(played: _Played, step: EnvStep, i: int) -> None:
    obs = step.obs.select([i])
    view = Observation(
        images={name: image[i : i + 1] for name, image in step.obs.images.items()},
        state=step.obs.state[i : i + 1],
        instruction=obs.instruction,
    )
    require(bool(step.first[i]) == (not played.obs), "`first` marks answers to a reset, no others")
    played.obs.append(view)
    played.copies.append(obs)
    if step.frames is not None:
        film = step.frames[i]
        require(film.dtype == torch.uint8 and film.shape[3:] == (3,), "frames are not uint8 RGB")
        played.num_frames += len(film)
    if bool(step.first[i]):
        quiet = step.reward[i].any() | step.terminated[i].any() | step.truncated[i].any()
        require(not bool(quiet), "the answer to a reset carries a reward or a flag")
    else:
        played.chunks.append((step.reward[i], step.terminated[i], step.truncated[i]))


def _check_spec(env: VecEnv, chunk: int, episodes: Sequence[Episode]) -> None:
    spec = env.spec
    require(env.num_slots == 3, f"made for 3 slots, num_slots is {env.num_slots}")
    require(not spec.chunks or chunk in spec.chunks, f"chunk {chunk} is not among {spec.chunks}")
    require(spec.action.low < spec.action.high, "action bounds are not low < high")
    for episode in episodes:
        require(episode.task in spec.tasks, f"task '{episode.task}' is not in the spec's tasks")


def _check_step(env: VecEnv, step: EnvStep, n: int, chunk: int, tasks: tuple[str, ...]) -> None:
    spec, obs = env.spec, step.obs
    cameras = tuple(obs.images)
    require(set(cameras) <= set(spec.cameras), f"cameras {cameras} are not those of the spec")
    require(len(cameras) > 0, "no camera in the observation")
    for name, image in obs.images.items():
        want = (n, *spec.frame_size, 3)
        require(tuple(image.shape) == want, f"{name}: shape {tuple(image.shape)}, expected {want}")
        require(image.dtype == torch.uint8, f"{name}: {image.dtype}, expected uint8")
    want_state = (n, spec.state_dims)
    require(tuple(obs.state.shape) == want_state, f"state: {tuple(obs.state.shape)}, {want_state}")
    require(obs.state.dtype == torch.float32, f"state: {obs.state.dtype}, expected float32")
    require(len(obs.instruction) == n and all(obs.instruction), "an instruction is missing")
    # An env that takes any chunk length cannot know it before the first send.
    width = step.reward.shape[1] if bool(step.first.all()) else chunk
    kinds = {
        "reward": ((n, width), torch.float32),
        "terminated": ((n, width), torch.bool),
        "truncated": ((n, width), torch.bool),
        "first": ((n,), torch.bool),
        "num_clipped": ((n,), torch.int32),
        "diverged": ((n,), torch.bool),
    }
    for name, (shape, dtype) in kinds.items():
        tensor = getattr(step, name)
        require(tuple(tensor.shape) == shape, f"{name}: shape {tuple(tensor.shape)}, {shape}")
        require(tensor.dtype == dtype, f"{name}: {tensor.dtype}, expected {dtype}")
    require(step.frames is None or len(step.frames) == n, "frames are not one entry per slot")
    require(not bool(step.diverged.any()), f"tasks {tasks} diverged under bounded actions")


def _check_episode(played: _Played, spec: EnvSpec) -> None:
    reward, terminated, truncated = (torch.cat(parts) for parts in zip(*played.chunks, strict=True))
    ends = (terminated | truncated).nonzero()[:, 0]
    require(len(ends) == 1, f"an episode ended at steps {ends.tolist()}, expected exactly one")
    require(not bool((terminated & truncated).any()), "a step is both terminated and truncated")
    last = int(ends[0])
    require(not bool(reward[last + 1 :].any()), "reward after the end of an episode")
    require(last < spec.max_steps, f"an episode ran {last + 1} steps, max_steps {spec.max_steps}")
    if bool(truncated.any()):
        require(last == spec.max_steps - 1, f"cut at step {last + 1}, not at {spec.max_steps}")
    for seen, copy in zip(played.obs, played.copies, strict=True):
        kept = torch.equal(seen.state, copy.state) and all(
            torch.equal(seen.images[c], copy.images[c]) for c in seen.images
        )
        require(kept, "a later message changed the tensors of an earlier one")


def _require_same(a: _Played, b: _Played, how: str) -> None:
    require(len(a.obs) == len(b.obs), f"an episode played again {how} has another length")
    for t, (x, y) in enumerate(zip(a.obs, b.obs, strict=True)):
        is_over = t == len(a.obs) - 1
        require(x.instruction == y.instruction, f"an episode played again {how}: other instruction")
        if is_over and bool(a.chunks[-1][1].any()):
            continue  # the observation after a termination means nothing
        require(torch.equal(x.state, y.state), f"an episode played again {how}: other state at {t}")
        for c in x.images:
            gap = int((x.images[c].int() - y.images[c].int()).abs().max())
            require(
                gap == 0, f"an episode played again {how}: {c} differs by {gap} at decision {t}"
            )
    for x, y in zip(a.chunks, b.chunks, strict=True):
        same = all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
        require(same, f"an episode played again {how}: other reward or end")


def _check_clipping(env: VecEnv, episode: Episode, chunk: int) -> None:
    """An action beyond the bounds acts like the bound and is counted once, while executed."""
    spec = env.spec
    bound = torch.full((1, chunk, spec.action.dims), spec.action.high)
    answers = {}
    for name, action in (("bound", bound), ("beyond", 2 * bound + 1)):
        env.reset([1], [episode])
        env.recv(1, [1])
        env.send([1], action)
        _, answers[name] = env.recv(1, [1])
    at, over = answers["bound"], answers["beyond"]
    done = (at.terminated | at.truncated)[0]
    executed = int(done.nonzero()[0]) + 1 if bool(done.any()) else chunk
    require(int(at.num_clipped[0]) == 0, "an action at the bound counts as clipped")
    got = int(over.num_clipped[0])
    require(got == executed, f"{executed} actions out of bounds were executed, {got} counted")
    same = torch.equal(at.obs.state, over.obs.state) and torch.equal(at.reward, over.reward)
    require(same, "an action out of bounds does not act like the bound")


def _check_refusal(env: VecEnv, episode: Episode, chunk: int) -> None:
    """Actions that are not finite are refused before anything moves: the episode can go on."""
    low, high = env.spec.action.low, env.spec.action.high
    # Small, so that what a refused action did does not end at a wall.
    gentle = torch.full((1, chunk, env.spec.action.dims), (low + high) / 2 + (high - low) / 20)
    answers = []
    for bad in (None, float("nan"), float("inf")):
        env.reset([1], [episode])
        env.recv(1, [1])
        if bad is not None:
            broken = gentle.clone()
            broken[0, -1, -1] = bad
            try:
                env.send([1], broken)
            except RunFailed:
                pass
            else:
                require(False, f"send takes the action {bad}, expected RunFailed")
        env.send([1], gentle)
        answers.append(env.recv(1, [1])[1])
    require(
        all(_same_answer(answers[0], answer) for answer in answers[1:]),
        "a refused action has moved the episode",
    )


def _same_answer(a: EnvStep, b: EnvStep) -> bool:
    """Whether reward, flags and, unless the episode has ended, the observation are the same."""
    pairs = [(getattr(a, n), getattr(b, n)) for n in ("reward", "terminated", "truncated")]
    if not bool(a.done.any()):
        pairs += [(a.obs.state, b.obs.state)]
        pairs += [(image, b.obs.images[name]) for name, image in a.obs.images.items()]
    return all(torch.equal(x, y) for x, y in pairs)
