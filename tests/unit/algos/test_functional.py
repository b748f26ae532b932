"""Expected values are worked out by hand; golden comparisons are in test_golden_algorithms.py."""

import math

import pytest
import torch
from torch import tensor

from vlarl.algos import functional as fn
from vlarl.testing import alone, on_ranks


def test_gae_by_hand():
    # One episode of three rows, gamma 0.5, lambda 0.5, terminated: V after it is 0.
    value = tensor([[1.0], [2.0], [4.0]])
    following = tensor([[2.0], [4.0], [0.0]])
    reward = tensor([[0.0], [0.0], [10.0]])
    done = tensor([[False], [False], [True]])
    # delta = 0 + 0.5*2 - 1 = 0;  0.5*4 - 2 = 0;  10 - 4 = 6.  A = 6, 0 + 0.25*6, 0 + 0.25*1.5
    got = fn.gae(reward, value, following, done, gamma=0.5, gae_lambda=0.5)
    assert got[:, 0].tolist() == [0.375, 1.5, 6.0]


def test_gae_stops_at_the_end_of_an_episode():
    ones = torch.ones(2, 1)
    done = tensor([[True], [True]])
    got = fn.gae(ones, 0 * ones, 0 * ones, done, gamma=1.0, gae_lambda=1.0)
    assert got[:, 0].tolist() == [1.0, 1.0]


def test_group_zscore_uses_the_unbiased_std():
    # Two of four succeed: mean 0.5, unbiased variance 4 * 0.25 / 3.
    got = fn.group_zscore(tensor([1.0, 0.0, 1.0, 0.0]), 4)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(got, expected * tensor([1.0, -1.0, 1.0, -1.0]))


def test_groups_are_judged_separately():
    got = fn.group_zscore(tensor([1.0, 0.0, 5.0, 5.0]), 2)
    assert got[0] > 0 > got[1]
    assert got[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3, 2.3, 5.0])
@pytest.mark.parametrize("size", [3, 7, 8])
def test_a_group_that_agrees_gets_exactly_zero_in_float32(score, size):
    assert fn.group_zscore(torch.full((size,), score), size).tolist() == [0.0] * size


def test_scores_that_differ_by_rounding_agree():
    # 0.9 reached by one step, and by ten steps of 0.09.
    stepwise = sum([tensor(0.09)] * 10, start=tensor(0.0))
    assert stepwise != tensor(0.9)
    assert fn.group_zscore(torch.stack([stepwise, tensor(0.9)]), 2).tolist() == [0.0, 0.0]


def test_filter_bounds_are_success_rates_and_inclusive():
    # 0, 1, ... 8 of 8 succeed. With bounds in units of return (reward 5 per success) only 1 of 8
    # would pass 0.1..0.9.
    rate = torch.cat([tensor([1.0] * k + [0.0] * (8 - k)) for k in range(9)])
    assert fn.groups_between(rate, 8, 0.1, 0.9).tolist() == [False] + [True] * 7 + [False]
    assert fn.groups_between(rate, 8, 0.125, 0.875).tolist() == [False] + [True] * 7 + [False]
    assert fn.groups_between(rate, 8, 0.0, 1.0).all()


def test_a_bound_of_three_tenths_includes_three_of_ten():
    rate = tensor([1.0] * 3 + [0.0] * 7)
    assert fn.groups_between(rate, 10, 0.3, 0.3).tolist() == [True]


def test_masked_mean_std_by_hand():
    mean, std = fn.masked_mean_std(tensor([1.0, 3.0, 100.0]), tensor([True, True, False]), alone)
    assert float(mean) == 2.0
    assert float(std) == pytest.approx(math.sqrt(2))


def test_one_valid_entry_normalises_to_zero_not_nan():
    got = fn.standardize(tensor([3.0, 9.0]), tensor([True, False]), alone)
    assert got.tolist() == [0.0, 0.0]


def test_no_valid_entry_normalises_to_zero():
    assert fn.standardize(tensor([3.0]), tensor([False]), alone).tolist() == [0.0]


def test_statistics_are_those_of_all_ranks():
    # An easy rank and a hard one keep their order, which normalising per rank would lose.
    parts = [tensor([10.0, 12.0]), tensor([0.0, 2.0, 6.0])]
    mask = torch.ones(3, dtype=torch.bool)

    def work(rank, all_sum):
        return fn.standardize(parts[rank], mask[: len(parts[rank])], all_sum)

    whole = torch.cat(parts)
    expected = (whole - whole.mean()) / (whole.std() + 1e-5)
    torch.testing.assert_close(torch.cat(on_ranks(2, work)), expected)


# Columns: log-ratio, advantage -> loss. Bounds 0.2 and 0.3, dual clip 3.
SURROGATE = [
    (1.1, 1.0, -1.1, False, False),  # inside
    (1.5, 1.0, -1.3, True, False),  # a rise beyond the upper bound earns no more
    (0.5, 1.0, -0.5, False, False),  # a fall of a good action is not limited
    (0.5, -1.0, 0.8, True, False),  # a fall beyond the lower bound earns no more
    (1.5, -1.0, 1.5, False, False),  # a rise of a bad action is not limited
    (5.0, -1.0, 3.0, False, True),  # until the dual bound
    (5.0, -2.0, 6.0, False, True),
    (5.0, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "dual"), SURROGATE)
def test_clipped_surrogate_case_by_case(ratio, advantage, loss, clipped, dual):
    log_ratio = tensor(math.log(ratio), requires_grad=True)
    got = fn.clipped_surrogate(
        log_ratio, tensor(advantage), clip_low=0.2, clip_high=0.3, dual_clip=3.0
    )
    assert got.loss.item() == pytest.approx(loss, abs=1e-6)
    assert bool(got.is_clipped) == clipped
    assert bool(got.is_dual_clipped) == dual
    got.loss.backward()
    expected = 0.0 if clipped or dual else -advantage * ratio
    assert float(log_ratio.grad) == pytest.approx(expected, abs=1e-6)


def test_value_loss_by_hand():
    old, target = tensor([0.0, 0.0, 0.0]), tensor([1.0, 1.0, 4.0])
    value = tensor([0.1, 0.9, 0.1])
    loss, is_clipped = fn.clipped_value_loss(value, old, target, clip=0.2, huber_delta=2.0)
    # 0.9²/2; max(0.1²/2, 0.8²/2); linear: 2 * (3.9 - 1)
    torch.testing.assert_close(loss, tensor([0.405, 0.32, 5.8]))
    # The second moved by 0.9, more than 0.2: that, and not the clamped step, is what is counted.
    assert is_clipped.tolist() == [False, True, False]


def test_without_value_clip_the_loss_is_huber():
    loss, is_clipped = fn.clipped_value_loss(
        tensor([0.9]), tensor([0.0]), tensor([1.0]), clip=None, huber_delta=10.0
    )
    torch.testing.assert_close(loss, tensor([0.005]))
    assert not is_clipped.any()


def test_a_chunk_logprob_is_that_of_its_executed_actions():
    logprob = tensor([[[-1.0, -2.0], [-4.0, -8.0]]])
    valid = tensor([[True, False]])
    assert fn.reduce_actions(logprob, valid, "chunk").tolist() == [-3.0]
    assert fn.reduce_actions(logprob, valid, "action").tolist() == [[-3.0, 0.0]]
    assert fn.reduce_actions(logprob, valid, "token").tolist() == [[[-1.0, -2.0], [0.0, 0.0]]]


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_weight_keeps_its_sum_at_every_level(level):
    weight = tensor([[0.1, 0.2], [0.3, 0.0]])
    assert float(fn.spread_weight(weight, level, 3).sum()) == pytest.approx(0.6)


def test_chunk_ratios_refuse_one_advantage_per_action():
    with pytest.raises(AssertionError, match="one advantage"):
        fn.spread_advantage(torch.zeros(2, 4), "chunk")


def test_kl_estimators_by_hand():
    p, q = tensor([0.0]), tensor([math.log(2.0)])
    assert float(fn.kl(p, q, "k1")) == pytest.approx(-math.log(2.0))
    assert float(fn.kl(p, q, "k2")) == pytest.approx(math.log(2.0) ** 2 / 2)
    assert float(fn.kl(p, q, "k3")) == pytest.approx(1 - math.log(2.0))


def test_k3_estimates_the_true_kl_of_two_coins():
    # Exact expectation under p over both outcomes.
    p, q = tensor([0.7, 0.3]).double(), tensor([0.4, 0.6]).double()
    true = float((p * (p.log() - q.log())).sum())
    for estimator in ("k1", "k3"):
        assert float((p * fn.kl(p.log(), q.log(), estimator)).sum()) == pytest.approx(true)


def test_explained_variance_by_hand():
    target, mask = tensor([1.0, 2.0, 3.0, 99.0]), tensor([True, True, True, False])
    # Errors -0.5, 0, 0.5: variance 1/6 against 2/3.
    num, den = fn.explained_variance(fn.variance_sums(target, tensor([1.5, 2.0, 2.5, 0.0]), mask))
    assert float(num / den) == pytest.approx(0.75)


@pytest.mark.parametrize("target", [[0.7] * 5, [3.0], []])
def test_explained_variance_is_absent_when_undefined(target):
    target = tensor(target)
    sums = fn.variance_sums(target, target + 1, torch.ones(len(target), dtype=torch.bool))
    assert [float(x) for x in fn.explained_variance(sums)] == [0.0, 0.0]
