import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import tensor

from vlarl.algos.grpo import GrpoConfig, credit, loss
from vlarl.batch import LossBatch, PolicyEval
from vlarl.testing import alone, made_up_rollout, on_ranks, part_of


def rollout_of(lengths, success, *, group_size, num_t=2, chunk=2):
    """Episodes of given lengths in actions; a success earns 1 at its last action."""
    rollout = made_up_rollout(
        episodes=len(lengths), group_size=group_size, num_t=num_t, chunk=chunk, dims=1
    )
    step = torch.arange(num_t * chunk)[:, None]
    length, won = tensor(lengths), tensor(success)

    def chunked(flat):
        return flat.view(num_t, chunk, len(lengths)).transpose(1, 2)

    last = step == length - 1
    return replace(
        rollout,
        valid=chunked(step < length),
        reward=chunked((last & won).float()),
        terminated=chunked(last & won),
        truncated=chunked(last & ~won),
    )


def batch_of(logprob, advantage, weight):
    return LossBatch(logprob=logprob, advantage=advantage, weight=weight, value=None, returns=None)


def scored(logprob, entropy=None):
    return PolicyEval(
        logprob=logprob,
        entropy=torch.zeros_like(logprob) if entropy is None else entropy,
        value=None,
    )


def test_success_is_good_and_failure_bad():
    rollout = rollout_of([1, 4], [True, False], group_size=2)
    got = credit(rollout, GrpoConfig(group_size=2), alone)
    # Scores 1 and 0: mean 0.5, unbiased std sqrt(0.5).
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert got.advantage[0, :, 0].tolist() == pytest.approx([expected, -expected])
    # The first episode ended in its first decision.
    assert got.advantage[1, :, 0].tolist() == pytest.approx([0.0, -expected])


def test_every_episode_and_every_action_in_it_counts_the_same():
    rollout = rollout_of([1, 4], [True, False], group_size=2)
    weight = credit(rollout, GrpoConfig(group_size=2), alone).weight
    assert weight[:, 0].tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert weight[:, 1].tolist() == [[0.125, 0.125], [0.125, 0.125]]


@pytest.mark.parametrize(("denominator", "total"), [("kept", 1.0), ("all", 0.5)])
def test_filtered_groups_and_the_denominator(denominator, total):
    # Groups with success rates 0 and 1/2; the filter is in success-rate units, not in reward.
    rollout = rollout_of([4, 4, 2, 4], [False, False, True, False], group_size=2)
    rollout = replace(rollout, reward=5 * rollout.reward)
    cfg = GrpoConfig(group_size=2, filter_low=0.1, filter_high=0.9, denominator=denominator)
    got = credit(rollout, cfg, alone)
    assert got.kept.tolist() == [False, False, True, True]
    assert got.weight.sum().item() == pytest.approx(total)
    assert not got.weight[:, :2].any()
    num, den = got.metrics["train/actor/kept_fraction"]
    assert num / den == 0.5
    num, den = got.metrics["train/actor/varied_fraction"]
    assert num / den == 0.5


def test_all_groups_filtered_gives_zero_weight_not_nan():
    rollout = rollout_of([4, 4], [False, False], group_size=2)
    got = credit(rollout, GrpoConfig(group_size=2, filter_low=0.5), alone)
    assert not got.weight.any()
    assert not got.kept.any()


def test_kept_episodes_are_counted_over_all_ranks():
    rollout = rollout_of([4, 4, 2, 4, 2, 4], [False, False] + [True, False] * 2, group_size=2)
    parts = [part_of(rollout, [0, 1, 2, 3]), part_of(rollout, [4, 5])]
    cfg = GrpoConfig(group_size=2, filter_low=0.1, filter_high=0.9)
    weights = [c.weight for c in on_ranks(2, lambda rank, s: credit(parts[rank], cfg, s))]
    assert [w.sum().item() for w in weights] == pytest.approx([0.5, 0.5])


def test_the_scale_of_the_reward_does_not_matter():
    rollout = rollout_of([1, 4], [True, False], group_size=2)
    cfg = GrpoConfig(group_size=2)
    once = credit(rollout, cfg, alone).advantage
    five = credit(replace(rollout, reward=5 * rollout.reward), cfg, alone).advantage
    torch.testing.assert_close(once, five, rtol=1e-5, atol=0)


def test_rewards_after_the_end_do_not_count():
    # A success predicate that flickers off again after the episode was over.
    rollout = rollout_of([1, 4], [True, False], group_size=2)
    flicker = rollout.reward.clone()
    flicker[0, 0, 1] = -1.0
    cfg = GrpoConfig(group_size=2)
    expected = credit(rollout, cfg, alone).advantage
    assert torch.equal(credit(replace(rollout, reward=flicker), cfg, alone).advantage, expected)


def test_a_group_that_mixes_tasks_is_refused():
    rollout = rollout_of([1, 4], [True, False], group_size=2)
    other = replace(rollout.episodes[1], task="push")
    mixed = replace(rollout, episodes=(rollout.episodes[0], other))
    with pytest.raises(AssertionError, match="mixes"):
        credit(mixed, GrpoConfig(group_size=2), alone)


def test_a_better_action_becomes_likelier():
    logprob = torch.zeros(2, 1, 1, requires_grad=True)
    weight = torch.full((2, 1), 0.5)
    out = loss(
        scored(logprob),
        batch_of(torch.zeros(2, 1, 1), tensor([[2.0], [-2.0]]), weight),
        GrpoConfig(),
    )
    out.loss.backward()
    # d loss / d logp = -weight * advantage; a step downhill raises the first.
    assert logprob.grad.flatten().tolist() == [-1.0, 1.0]


# Two decisions of two actions of two numbers; the last action was never executed.
OLD = torch.zeros(2, 2, 2)
NEW = tensor([[[0.1, 0.3], [0.0, 0.0]], [[-0.4, 0.1], [9.0, 9.0]]])
ADVANTAGE = tensor([[1.0], [-1.0]])
WEIGHT = tensor([[0.25, 0.25], [0.5, 0.0]])
# Log-ratios and their weights at each level, by hand.
BY_LEVEL = {
    "token": ([0.1, 0.3, 0.0, 0.0, -0.4, 0.1], [1 / 8] * 4 + [1 / 4] * 2, [1] * 4 + [-1] * 2),
    "action": ([0.4, 0.0, -0.3], [0.25, 0.25, 0.5], [1, 1, -1]),
    "chunk": ([0.4, -0.3], [0.5, 0.5], [1, -1]),
}


@pytest.mark.parametrize("level", BY_LEVEL)
def test_metrics_by_hand_at_every_level(level):
    cfg = GrpoConfig(clip_low=0.2, clip_high=0.28, logprob_level=level, entropy_bonus=0.1)
    out = loss(scored(NEW, torch.ones_like(NEW)), batch_of(OLD, ADVANTAGE, WEIGHT), cfg)
    got = {name: float(num / den) for name, (num, den) in out.metrics.items()}
    log_ratios, weights, signs = BY_LEVEL[level]
    rows = [(w, math.exp(x), x, a) for x, w, a in zip(log_ratios, weights, signs, strict=True)]
    clip = [(w, r, min(max(r, 0.8), 1.28), a) for w, r, _, a in rows]
    policy = sum(w * max(-a * r, -a * c) for w, r, c, a in clip)
    entropy = {"token": 1.0, "action": 2.0, "chunk": 0.5 * 4 + 0.5 * 2}[level]
    expected = {
        "train/actor/policy_loss": policy,
        "train/entropy_loss": entropy,
        "train/loss": policy - 0.1 * entropy,
        "train/actor/ratio": sum(w * r for w, r, _, _ in rows),
        "train/actor/ratio_abs": sum(w * abs(r - 1) for w, r, _, _ in rows),
        "train/actor/clipped_ratio": sum(w * c for w, _, c, _ in clip),
        "train/actor/clip_fraction": sum(w for w, r, c, a in clip if -a * c > -a * r),
        "train/actor/dual_clip_fraction": 0.0,
        "train/actor/approx_kl": sum(w * (r - 1 - x) for w, r, x, _ in rows),
    }
    assert got == pytest.approx(expected, rel=1e-5)
    assert out.loss.item() == pytest.approx(policy - 0.1 * entropy, rel=1e-5)


@pytest.mark.parametrize("level", BY_LEVEL)
def test_what_was_not_executed_has_no_gradient(level):
    logprob, entropy = NEW.clone().requires_grad_(), torch.ones_like(NEW).requires_grad_()
    cfg = GrpoConfig(logprob_level=level, entropy_bonus=0.1)
    loss(scored(logprob, entropy), batch_of(OLD, ADVANTAGE, WEIGHT), cfg).loss.backward()
    assert not logprob.grad[1, 1].any()
    assert not entropy.grad[1, 1].any()
    assert entropy.grad[0].abs().min() > 0


def test_clip_fraction_is_a_fraction_when_everything_is_clipped():
    new = torch.full((3, 4, 7), 2.0)
    weight = torch.full((3, 4), 1 / 12)
    out = loss(scored(new), batch_of(torch.zeros(3, 4, 7), torch.ones(3, 1), weight), GrpoConfig())
    num, den = out.metrics["train/actor/clip_fraction"]
    assert float(num / den) == pytest.approx(1.0)


def test_masked_garbage_does_not_reach_the_loss():
    new = NEW.clone()
    new[1, 1] = float("nan")
    logprob = new.requires_grad_()
    out = loss(scored(logprob), batch_of(OLD, ADVANTAGE, WEIGHT), GrpoConfig())
    out.loss.backward()
    assert out.loss.isfinite()
    assert logprob.grad.isfinite().all()


def test_log_probs_in_half_precision_are_refused():
    half = torch.zeros(2, 2, 2, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="bfloat16"):
        loss(scored(half), batch_of(OLD, ADVANTAGE, WEIGHT), GrpoConfig())


@pytest.mark.parametrize(
    "bad",
    [
        {"group_size": 1},
        {"filter_low": 0.6, "filter_high": 0.4},
        {"filter_high": 4.5},
        {"dual_clip": 1.0},
        {"reward_coef": 5.0},
        {"clip_low": 1.0},
    ],
)
def test_settings_without_meaning_are_refused(bad):
    with pytest.raises(ValidationError):
        GrpoConfig(**bad)


def test_episodes_come_in_groups():
    assert GrpoConfig(group_size=4).episodes_multiple == 4
    assert GrpoConfig().value_width(8) == 0
