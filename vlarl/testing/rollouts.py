"""Made-up experience, and ranks that are threads: what a test of an algorithm needs besides it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlarl.batch import Credit, LossBatch, Observation, Rollout
from vlarl.episode import Episode
from vlarl.interfaces import AllSum

R = TypeVar("R")


def alone(x: Tensor) -> Tensor:
    """`all_sum` of a single rank."""
    return x


def made_up_rollout(
    *,
    episodes: int = 32,
    group_size: int = 1,
    num_t: int = 4,
    chunk: int = 4,
    dims: int = 3,
    value_width: int = 0,
    seed: int = 0,
) -> Rollout:
    """Ragged episodes with reward 1 at success, a horizon inside the last chunk, random numbers.

    Of every eight episodes in turn none, some, most and all succeed. What happens does not depend
    on group_size, only the group labels do. Off `valid`, `logprob` is as random as elsewhere.
    """
    assert episodes % group_size == 0, (episodes, group_size)
    gen = torch.Generator().manual_seed(seed)
    horizon = num_t * chunk - (chunk // 2)
    rate = torch.tensor([0.0, 0.35, 0.7, 1.0])[torch.arange(episodes) // 8 % 4]
    success = torch.rand(episodes, generator=gen) < rate
    length = torch.randint(1, horizon + 1, (episodes,), generator=gen)
    length = torch.where(success, length, horizon)

    step = torch.arange(num_t * chunk)
    last = step[:, None] == length - 1
    terminated = last & success
    decisions = (length + chunk - 1) // chunk
    played = torch.arange(num_t)[:, None] < decisions
    b, t = played.T.nonzero().unbind(dim=1)
    value = _values(decisions, success, num_t, value_width, gen) if value_width else None

    def chunked(flat: Tensor) -> Tensor:
        return flat.view(num_t, chunk, episodes).transpose(1, 2)

    group = torch.arange(episodes) // group_size if group_size > 1 else torch.full((episodes,), -1)
    return Rollout(
        obs=Observation(
            images={"top": torch.zeros(len(t), 1, 1, 3, dtype=torch.uint8)},
            state=torch.zeros(len(t), 0),
            instruction=("reach",) * len(t),
        ),
        trace={},
        logprob=torch.randn(len(t), chunk, dims, generator=gen) - 2,
        t=t,
        b=b,
        reward=chunked(terminated.float()),
        valid=chunked(step[:, None] < length),
        terminated=chunked(terminated),
        truncated=chunked(last & ~success),
        value=value,
        group=group,
        episodes=tuple(
            Episode(
                task="reach", trial=int(i) // group_size, index=i, group=int(group[i]), member=i
            )
            for i in range(episodes)
        ),
        num_clipped=torch.zeros(episodes, dtype=torch.int64),
        diverged=torch.zeros(episodes, dtype=torch.bool),
        temperature=1.0,
    )


def _values(
    decisions: Tensor, success: Tensor, num_t: int, width: int, gen: torch.Generator
) -> Tensor:
    """[T+1, B, width]: random where an observation was seen, 0 elsewhere."""
    row = torch.arange(num_t + 1)[:, None]
    is_seen = (row < decisions) | ((row == decisions) & ~success)
    value = torch.randn(num_t + 1, len(decisions), width, generator=gen)
    return torch.where(is_seen[:, :, None], value, 0)


def part_of(rollout: Rollout, episodes: list[int]) -> Rollout:
    """What a rank that played only these episodes, in this order, would hold."""
    b = torch.tensor(episodes)
    rows = torch.cat([(rollout.b == i).nonzero()[:, 0] for i in episodes])
    num_t = int(rollout.valid[:, b].any(dim=2).sum(dim=0).max())
    new_b = torch.empty(len(rollout.episodes), dtype=torch.long)
    new_b[b] = torch.arange(len(b))
    padded = {
        name: getattr(rollout, name)[:num_t, b]
        for name in ("reward", "valid", "terminated", "truncated")
    }
    per_episode = {name: getattr(rollout, name)[b] for name in ("group", "num_clipped", "diverged")}
    return replace(
        rollout,
        obs=rollout.obs.select(rows),
        trace={name: tensor[rows] for name, tensor in rollout.trace.items()},
        logprob=rollout.logprob[rows],
        t=rollout.t[rows],
        b=new_b[rollout.b[rows]],
        value=None if rollout.value is None else rollout.value[: num_t + 1, b],
        episodes=tuple(rollout.episodes[i] for i in episodes),
        **padded,
        **per_episode,
    )


def loss_batch(rollout: Rollout, credit: Credit, rows: Tensor) -> LossBatch:
    """The stored side of the given decisions."""
    t, b = rollout.t[rows], rollout.b[rows]
    return LossBatch(
        logprob=rollout.logprob[rows],
        advantage=credit.advantage[t, b],
        weight=credit.weight[t, b],
        value=None if rollout.value is None else rollout.value[t, b],
        returns=None if credit.returns is None else credit.returns[t, b],
    )


def on_ranks(num_ranks: int, work: Callable[[int, AllSum], R]) -> list[R]:
    """work(rank, all_sum) of every rank, run in threads that meet in all_sum."""
    return in_threads(
        num_ranks,
        lambda rank, gather: work(rank, lambda x: torch.stack(gather(x)).sum(dim=0)),
    )


def in_threads(num_ranks: int, work: Callable[[int, Callable[[Any], list[Any]]], R]) -> list[R]:
    """work(rank, gather) of every rank, run in threads; gather(x) gives every rank the x of all.

    A rank that calls gather more often than the others is an error, not a hang.
    """
    barrier = threading.Barrier(num_ranks)
    box: list[Any] = [None] * num_ranks
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def gather(thing: Any) -> list[Any]:
            box[rank] = thing
            barrier.wait(timeout=20)
            everyone = list(box)
            barrier.wait(timeout=20)
            return everyone

        try:
            results[rank] = work(rank, gather)
        except BaseException as error:  # handed to the caller below, whatever it is
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [results[rank] for rank in range(num_ranks)]
