import math
from dataclasses import replace

import pytest
import torch

from vlarl.batch import Credit
from vlarl.testing import made_up_rollout, part_of
from vlarl.train.measure import Means, experience, judgement


def tensors(*numbers):
    return tuple(torch.tensor(float(x)) for x in numbers)


def by_hand():
    """Three episodes of 2, 5 and 6 actions in chunks of 2; the first two succeed."""
    valid = torch.zeros(3, 3, 2, dtype=torch.bool)
    for b, length in enumerate((2, 5, 6)):
        for i in range(length):
            valid[i // 2, b, i % 2] = True
    terminated, truncated = torch.zeros_like(valid), torch.zeros_like(valid)
    terminated[0, 0, 1] = terminated[2, 1, 0] = truncated[2, 2, 1] = True
    base = made_up_rollout(episodes=3, num_t=3, chunk=2)
    tasks = ("a", "b", "a")
    return replace(
        base,
        reward=terminated.float(),
        valid=valid,
        terminated=terminated,
        truncated=truncated,
        num_clipped=torch.tensor([1, 0, 3]),
        diverged=torch.tensor([False, False, True]),
        episodes=tuple(replace(e, task=task) for e, task in zip(base.episodes, tasks, strict=True)),
    )


def test_a_mean_is_exact_however_it_was_cut(world):
    means = Means()
    means.add({"x": tensors(3, 2), "empty": tensors(0, 0)})
    means.add({"x": tensors(5, 1), "y": tensors(1, 4)})
    assert means.reduce(world) == {"x": pytest.approx(8 / 3), "y": 0.25}


def test_merging_is_adding(world):
    one, two = Means(), Means()
    one.add({"x": tensors(1, 1)})
    two.add({"x": tensors(5, 2), "y": tensors(1, 1)})
    one.merge(two)
    assert one.reduce(world) == {"x": 2.0, "y": 1.0}
    assert two.reduce(world) == {"x": 2.5, "y": 1.0}


def test_no_sums_are_no_metrics(world):
    assert Means().reduce(world) == {}


def test_means_hold_no_graph(world):
    x = torch.ones((), requires_grad=True)
    means = Means()
    means.add({"x": (x * 2, torch.tensor(1.0))})
    assert means.reduce(world) == {"x": 2.0}
    assert not means._sums["x"].requires_grad


def test_experience_by_hand(world):
    assert experience(by_hand(), world) == pytest.approx(
        {
            "env/success_once": 2 / 3,
            "env/success_once/a": 1 / 2,
            "env/success_once/b": 1.0,
            "env/episode_len": 13 / 3,
            "env/return": 2 / 3,
            "env/reward": (1 / 2 + 1 / 5) / 3,
            "env/clipped_actions": 4 / 13,
            "env/diverged": 1 / 3,
            "env/num_trajectories": 3.0,
            "rollout/rewards": 2 / 13,
        }
    )


def test_a_single_task_is_not_listed_twice(world):
    assert not [name for name in experience(made_up_rollout(), world) if "once/" in name]


@pytest.mark.parametrize("size", [2, 3])
def test_experience_does_not_depend_on_ranks(world, ranks, size):
    rollout = made_up_rollout(episodes=32, group_size=4)
    tasks = tuple(replace(e, task=f"task-{e.index // 8}") for e in rollout.episodes)
    rollout = replace(rollout, episodes=tasks)

    def share(rank_world):
        mine = [b for b in range(32) if b // 4 % size == rank_world.rank]
        return experience(part_of(rollout, mine), rank_world)

    expected = experience(rollout, world)
    assert "env/success_once/task-3" in expected
    for found in ranks(size, share):
        assert found == pytest.approx(expected)


def credit_by_hand(returns=None):
    """Advantages of the three episodes; the last one is filtered out."""
    rollout = by_hand()
    advantage = torch.tensor([2.0, -1.0, 9.0]).expand(3, 3)[:, :, None]
    weight = rollout.valid.float()
    weight[:, 2] = 0
    return rollout, Credit(
        advantage=advantage,
        weight=weight / 7,
        returns=returns,
        kept=torch.tensor([True, True, False]),
        metrics={"train/actor/kept_fraction": tensors(2, 3)},
    )


def test_judgement_by_hand(world):
    assert judgement(*credit_by_hand(), world) == pytest.approx(
        {
            # Two actions of the first episode, five of the second.
            "rollout/advantages_mean": (2 * 2.0 - 5 * 1.0) / 7,
            "rollout/advantages_min": -1.0,
            "rollout/advantages_max": 2.0,
            "train/actor/kept_fraction": 2 / 3,
        }
    )


def test_returns_are_those_of_real_rows(world):
    returns = torch.full((3, 3, 1), 50.0)
    returns[0, 0], returns[:, 1], returns[:, 2] = 1.0, 2.0, 3.0
    found = judgement(*credit_by_hand(returns), world)
    assert found["rollout/returns_mean"] == pytest.approx((1 + 3 * 2 + 3 * 3) / 7)
    by_action = returns.expand(3, 3, 2)
    found = judgement(*credit_by_hand(by_action), world)
    assert found["rollout/returns_mean"] == pytest.approx((2 * 1 + 5 * 2 + 6 * 3) / 13)


def test_nothing_kept_has_no_advantages(world):
    rollout, credit = credit_by_hand()
    found = judgement(rollout, replace(credit, weight=torch.zeros(3, 3, 2)), world)
    assert set(found) == {"train/actor/kept_fraction"}


def test_judgement_does_not_depend_on_ranks_even_when_one_keeps_nothing(world, ranks):
    rollout, credit = credit_by_hand()

    def share(rank_world):
        mine = [[0, 1], [2]][rank_world.rank]
        own = replace(
            credit,
            advantage=credit.advantage[:, mine],
            weight=credit.weight[:, mine],
            kept=credit.kept[mine],
            metrics={"train/actor/kept_fraction": tensors(2 - 2 * rank_world.rank, len(mine))},
        )
        return judgement(part_of(rollout, mine), own, rank_world)

    expected = judgement(rollout, credit, world)
    assert all(math.isfinite(x) for x in expected.values())
    for found in ranks(2, share):
        assert found == pytest.approx(expected)
