from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import tensor

from vlarl.algos.ppo import PpoConfig, credit, loss
from vlarl.batch import LossBatch, PolicyEval
from vlarl.errors import ConfigError
from vlarl.testing import alone, made_up_rollout, on_ranks, part_of

PLAIN = {"gamma": 0.5, "gae_lambda": 0.5, "normalize_advantage": False}


def one_episode(value, *, length, ends, num_t=2, chunk=2):
    """One episode of `length` actions with reward 1 each; ends: "terminated" or "truncated"."""
    rollout = made_up_rollout(episodes=1, num_t=num_t, chunk=chunk)
    step = torch.arange(num_t * chunk).view(num_t, 1, chunk)
    last, none = step == length - 1, torch.zeros(num_t, 1, chunk, dtype=torch.bool)
    return replace(
        rollout,
        reward=(step < length).float(),
        valid=step < length,
        terminated=last if ends == "terminated" else none,
        truncated=last if ends == "truncated" else none,
        value=tensor(value)[:, None, :],
    )


def test_action_level_by_hand_terminated():
    # Values 1 2 | 3 .: three actions, V after the end is 0.
    rollout = one_episode([[1.0, 2.0], [3.0, 7.0], [0.0, 0.0]], length=3, ends="terminated")
    got = credit(rollout, PpoConfig(reward_level="action", **PLAIN), alone)
    # delta: 1 + 0.5*2 - 1 = 1;  1 + 0.5*3 - 2 = 0.5;  1 + 0 - 3 = -2.  A = -2, 0.5 - 0.5, 1 + 0
    assert got.advantage[:, 0].tolist() == [[1.0, 0.0], [-2.0, 0.0]]
    assert got.returns[:, 0].tolist() == [[2.0, 2.0], [1.0, 0.0]]


def test_action_level_by_hand_cut_inside_a_chunk():
    # V(last observation) = 8 is the row after the last decision, at its first action.
    rollout = one_episode([[1.0, 2.0], [3.0, 7.0], [8.0, 9.0]], length=3, ends="truncated")
    got = credit(rollout, PpoConfig(reward_level="action", **PLAIN), alone)
    # delta of the last action: 1 + 0.5*8 - 3 = 2.  A = 2, 0.5 + 0.25*2, 1 + 0.25*1
    assert got.advantage[:, 0].tolist() == [[1.25, 1.0], [2.0, 0.0]]


def test_chunk_level_by_hand():
    # Rewards per chunk 2 and 1; values 1, 3, then 8 after the cut.
    rollout = one_episode([[1.0], [3.0], [8.0]], length=3, ends="truncated")
    got = credit(rollout, PpoConfig(**PLAIN), alone)
    # delta: 2 + 0.5*3 - 1 = 2.5;  1 + 0.5*8 - 3 = 2.  A = 2, 2.5 + 0.25*2
    assert got.advantage[:, 0].tolist() == [[3.0], [2.0]]
    assert got.returns[:, 0].tolist() == [[4.0], [5.0]]


def test_a_termination_never_looks_ahead():
    # Even when the row after it holds a number, and when the horizon fell on the same step.
    values = [[1.0], [3.0], [8.0]]
    rollout = one_episode(values, length=3, ends="terminated")
    both = replace(rollout, truncated=rollout.terminated)
    for r in (rollout, both):
        got = credit(r, PpoConfig(**PLAIN), alone)
        # delta of the last chunk: 1 - 3 = -2.  A = -2, 2.5 - 0.5
        assert got.advantage[:, 0].tolist() == [[2.0], [-2.0]]


def test_episodes_shorter_than_the_padding_end_where_they_end():
    rollout = one_episode([[1.0], [5.0], [0.0]], length=2, ends="truncated")
    got = credit(rollout, PpoConfig(**PLAIN), alone)
    # 2 + 0.5*5 - 1; the second row is padding.
    assert got.advantage[:, 0].tolist() == [[3.5], [0.0]]
    assert got.returns[:, 0].tolist() == [[4.5], [0.0]]


def test_rewards_after_the_end_do_not_count():
    rollout = one_episode([[1.0], [3.0], [0.0]], length=3, ends="terminated")
    flicker = rollout.reward.clone()
    flicker[1, 0, 1] = -1.0
    expected = credit(rollout, PpoConfig(**PLAIN), alone).advantage
    got = credit(replace(rollout, reward=flicker), PpoConfig(**PLAIN), alone).advantage
    assert torch.equal(got, expected)


def test_normalised_advantages_have_mean_0_and_std_1_over_all_ranks():
    rollout = made_up_rollout(value_width=1)
    parts = [part_of(rollout, list(range(20))), part_of(rollout, list(range(20, 32)))]
    whole = credit(rollout, PpoConfig(), alone)
    split = on_ranks(2, lambda rank, all_sum: credit(parts[rank], PpoConfig(), all_sum))
    entries = torch.cat([c.advantage[p.valid.any(2)] for c, p in zip(split, parts, strict=True)])
    assert entries.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert entries.std().item() == pytest.approx(1.0, abs=1e-4)
    torch.testing.assert_close(split[1].advantage, whole.advantage[: parts[1].t.max() + 1, 20:])


def test_returns_are_never_normalised():
    rollout = made_up_rollout(value_width=1)
    plain, normalised = (
        credit(rollout, PpoConfig(normalize_advantage=flag), alone) for flag in (False, True)
    )
    assert torch.equal(plain.returns, normalised.returns)
    assert not torch.equal(plain.advantage, normalised.advantage)


def test_explained_variance_is_that_of_the_collected_values_over_all_ranks():
    rollout = made_up_rollout(value_width=1)
    cfg = PpoConfig(normalize_advantage=False)
    whole = credit(rollout, cfg, alone)
    mask = rollout.valid.any(dim=2, keepdim=True)
    target, value = whole.returns[mask].double(), rollout.value[:-1][mask].double()
    expected = 1 - (target - value).var() / target.var()
    parts = [part_of(rollout, list(range(20))), part_of(rollout, list(range(20, 32)))]
    split = on_ranks(2, lambda rank, all_sum: credit(parts[rank], cfg, all_sum))
    for credits in ([whole], split):
        pairs = [c.metrics["train/critic/explained_variance"] for c in credits]
        got = sum(num for num, _ in pairs) / sum(den for _, den in pairs)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("level", "width", "got"), [("chunk", 4, 4), ("action", 1, 1)])
def test_a_value_head_of_the_wrong_width_is_a_config_error(level, width, got):
    rollout = made_up_rollout(value_width=width, chunk=4)
    with pytest.raises(ConfigError, match=f"gives {got}"):
        credit(rollout, PpoConfig(reward_level=level), alone)


def test_no_value_head_is_a_config_error():
    with pytest.raises(ConfigError, match="gives 0"):
        credit(made_up_rollout(), PpoConfig(), alone)


def value_batch(value, old, returns, weight):
    zeros = torch.zeros(*weight.shape, 1)
    return PolicyEval(logprob=zeros, entropy=zeros, value=value), LossBatch(
        logprob=zeros,
        advantage=torch.zeros(len(weight), 1),
        weight=weight,
        value=old,
        returns=returns,
    )


def test_value_loss_and_clip_ratio_by_hand():
    weight = tensor([[0.25, 0.25], [0.5, 0.0]])
    value = tensor([[0.5], [1.0]], requires_grad=True)
    evaluation, batch = value_batch(value, tensor([[0.4], [0.0]]), tensor([[1.0], [2.0]]), weight)
    out = loss(evaluation, batch, PpoConfig(value_coef=0.5, value_clip=0.2))
    got = {name: float(num / den) for name, (num, den) in out.metrics.items()}
    # 0.5²/2 with weight 0.5; the second moved by 1 and is judged at 0.2: 1.8²/2 with weight 0.5.
    expected = 0.5 * 0.125 + 0.5 * 1.62
    assert got["train/critic/value_loss"] == pytest.approx(expected)
    assert got["train/critic/value_clip_ratio"] == pytest.approx(0.5)
    assert got["train/loss"] == pytest.approx(0.5 * expected)
    out.loss.backward()
    assert value.grad.flatten().tolist() == pytest.approx([0.5 * 0.5 * -0.5, 0.0])


def test_value_clip_ratio_is_one_when_all_were_clipped():
    weight = torch.full((8, 1), 1 / 8)
    old = torch.linspace(-3, 3, 8)[:, None]
    evaluation, batch = value_batch(old + 0.7, old, old, weight)
    out = loss(evaluation, batch, PpoConfig(value_clip=0.2))
    num, den = out.metrics["train/critic/value_clip_ratio"]
    assert float(num / den) == pytest.approx(1.0)


def test_action_level_values_are_weighted_action_by_action():
    weight = tensor([[0.75, 0.25, 0.0]])
    value = torch.ones(1, 3, requires_grad=True)
    evaluation, batch = value_batch(value, torch.ones(1, 3), torch.zeros(1, 3), weight)
    out = loss(evaluation, batch, PpoConfig(reward_level="action"))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5)
    assert value.grad.tolist() == [[0.75, 0.25, 0.0]]


def test_one_ratio_per_chunk_needs_one_reward_per_chunk():
    with pytest.raises(ValidationError, match="logprob_level 'chunk'"):
        PpoConfig(reward_level="action", logprob_level="chunk")


def test_value_width_follows_the_reward_level():
    assert PpoConfig().value_width(8) == 1
    assert PpoConfig(reward_level="action").value_width(8) == 8
    assert PpoConfig().episodes_multiple == 1
