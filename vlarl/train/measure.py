"""Numbers about experience: what an iteration's rollouts looked like, exact over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vlarl.batch import Credit, Rollout
from vlarl.distributed.world import World


class Means:
    """Sums (numerator, denominator) pairs by name; a mean is exact however the data was cut."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add one micro-batch; tensors may live on any device and carry gradient."""
        for name, (num, den) in pairs.items():
            pair = torch.stack([num.detach(), den.detach()]).to(torch.float64)
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def merge(self, other: Means) -> None:
        """Add everything another one has summed."""
        for name, pair in other._sums.items():
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def reduce(self, world: World) -> dict[str, float]:
        """The means over all ranks; a name whose denominator is 0 is left out.

        Collective: every rank must have added the same names.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        total = world.all_sum(torch.stack([self._sums[name] for name in names]))
        return {
            name: num / den
            for name, (num, den) in zip(names, total.tolist(), strict=True)
            if den != 0
        }


def experience(rollout: Rollout, world: World) -> dict[str, float]:
    """`env/*` and `rollout/rewards`: what happened, before any algorithm looks at it.

    Per-task success is `env/success_once/<task>`. An episode's length counts executed actions.
    """
    one = torch.ones(len(rollout.episodes))
    length = rollout.episode_len.float()
    total = rollout.reward.sum(dim=(0, 2))
    success = rollout.success.float()
    num_actions = length.sum()
    means = Means()
    means.add(
        {
            "env/success_once": (success.sum(), one.sum()),
            "env/episode_len": (length.sum(), one.sum()),
            "env/return": (total.sum(), one.sum()),
            "env/reward": ((total / length).sum(), one.sum()),
            "env/clipped_actions": (rollout.num_clipped.sum().float(), num_actions),
            "env/diverged": (rollout.diverged.float().sum(), one.sum()),
            "rollout/rewards": (total.sum(), num_actions),
        }
    )
    count = world.all_sum(one.sum())
    return {
        **means.reduce(world),
        **_per_task(rollout, world),
        "env/num_trajectories": count.item(),
    }


def _per_task(rollout: Rollout, world: World) -> dict[str, float]:
    mine: dict[str, tuple[int, int]] = {}
    for episode, success in zip(rollout.episodes, rollout.success.tolist(), strict=True):
        k, n = mine.get(episode.task, (0, 0))
        mine[episode.task] = (k + success, n + 1)
    total: dict[str, tuple[int, int]] = {}
    for part in world.all_gather_object(mine):
        for task, (k, n) in part.items():
            k0, n0 = total.get(task, (0, 0))
            total[task] = (k0 + k, n0 + n)
    if len(total) < 2:
        return {}
    return {f"env/success_once/{task}": k / n for task, (k, n) in sorted(total.items())}


def judgement(rollout: Rollout, credit: Credit, world: World) -> dict[str, float]:
    """`rollout/*`: advantages and returns over valid entries; and the credit's own metrics."""
    valid = credit.weight > 0
    entries = credit.advantage.expand(-1, -1, valid.shape[2])[valid].double()
    means = Means()
    means.add(credit.metrics)
    means.add({"rollout/advantages_mean": (entries.sum(), torch.tensor(float(len(entries))))})
    low = entries.min() if len(entries) else torch.tensor(float("inf"), dtype=torch.float64)
    high = entries.max() if len(entries) else torch.tensor(-float("inf"), dtype=torch.float64)
    ends = world.all_max(torch.stack([-low, high])).tolist()
    numbers = means.reduce(world)
    if "rollout/advantages_mean" in numbers:
        numbers |= {"rollout/advantages_min": -ends[0], "rollout/advantages_max": ends[1]}
    if credit.returns is not None:
        # The value head sees chunk-level targets where any action of the chunk is valid.
        mask = rollout.valid if credit.returns.shape[2] > 1 else rollout.valid.any(2, keepdim=True)
        returns = Means()
        targets = credit.returns[mask]
        returns.add({"rollout/returns_mean": (targets.sum(), torch.tensor(float(len(targets))))})
        numbers |= returns.reduce(world)
    return numbers
