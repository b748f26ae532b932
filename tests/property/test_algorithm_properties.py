"""What holds for any rollout: weights, masks, groups, cuts, ranks and order."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlarl.algos import functional as fn
from vlarl.algos import grpo, ppo
from vlarl.batch import PolicyEval
from vlarl.testing import alone, loss_batch, made_up_rollout, on_ranks, part_of

repeatable = settings(derandomize=True, deadline=None, max_examples=30)
LEVELS = st.sampled_from(["token", "action", "chunk"])
ALGORITHMS = st.sampled_from(["grpo", "ppo"])


@st.composite
def runs(draw, algo=ALGORITHMS):
    """(module, config, rollout) of any shape, level and setting."""
    name, level = draw(algo), draw(LEVELS)
    size = draw(st.sampled_from([2, 3, 4, 8]))
    shape = {
        "num_t": draw(st.integers(1, 4)),
        "chunk": draw(st.integers(2, 5)),
        "dims": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 1000)),
    }
    shared = {
        "logprob_level": level,
        "entropy_bonus": draw(st.sampled_from([0.0, 0.1])),
        "dual_clip": draw(st.sampled_from([None, 1.5])),
    }
    if name == "grpo":
        cfg = grpo.GrpoConfig(
            group_size=size,
            denominator=draw(st.sampled_from(["kept", "all"])),
            filter_low=draw(st.sampled_from([0.0, 0.1])),
            filter_high=draw(st.sampled_from([0.9, 1.0])),
            **shared,
        )
    else:
        rewards = "chunk" if level == "chunk" else draw(st.sampled_from(["chunk", "action"]))
        cfg = ppo.PpoConfig(reward_level=rewards, **shared)
    rollout = made_up_rollout(
        episodes=size * draw(st.integers(2, 6)),
        group_size=cfg.episodes_multiple,
        value_width=cfg.value_width(shape["chunk"]),
        **shape,
    )
    return {"grpo": grpo, "ppo": ppo}[name], cfg, rollout


def evaluation_of(rollout, rows, seed=0):
    """Random current numbers of the given decisions, as leaves; the same whatever the rows."""
    gen = torch.Generator().manual_seed(seed)
    shape = rollout.logprob.shape
    logprob = rollout.logprob + 0.5 * torch.randn(shape, generator=gen)
    entropy = torch.rand(shape, generator=gen)
    value = None
    if rollout.value is not None:
        stored = rollout.value[rollout.t, rollout.b]
        value = (stored + torch.randn(stored.shape, generator=gen))[rows].requires_grad_()
    return PolicyEval(
        logprob=logprob[rows].requires_grad_(), entropy=entropy[rows].requires_grad_(), value=value
    )


def backward(module, cfg, rollout, credit, evaluation, rows):
    """(loss, gradients of logprob, entropy and value, summed metric pairs)."""
    out = module.loss(evaluation, loss_batch(rollout, credit, rows), cfg)
    leaves = [evaluation.logprob, evaluation.entropy]
    leaves += [evaluation.value] if evaluation.value is not None else []
    grads = torch.autograd.grad(out.loss, leaves, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    pairs = {k: torch.stack([n.double(), d.double()]) for k, (n, d) in out.metrics.items()}
    return out.loss.detach(), zeros, pairs


@repeatable
@given(runs())
def test_weights_sum_to_the_kept_share_and_live_on_executed_actions(run):
    module, cfg, rollout = run
    credit = module.credit(rollout, cfg, alone)
    kept = credit.kept.float().mean().item()
    expected = kept if getattr(cfg, "denominator", "kept") == "all" else float(kept > 0)
    assert credit.weight.sum().item() == pytest.approx(expected, abs=1e-6)
    assert not credit.weight[~rollout.valid].any()
    assert torch.equal((credit.weight > 0).any(2).any(0), credit.kept)
    per_episode = credit.weight.sum(dim=(0, 2))[credit.kept]
    torch.testing.assert_close(per_episode, per_episode[:1].expand_as(per_episode))
    assert not credit.advantage[~rollout.valid.any(dim=2)].any()


@repeatable
@given(runs(), st.integers(1, 40))
def test_loss_gradient_and_metrics_do_not_depend_on_the_micro_batch(run, cut):
    module, cfg, rollout = run
    credit = module.credit(rollout, cfg, alone)
    rows = torch.arange(rollout.num_decisions)
    loss, grads, pairs = backward(module, cfg, rollout, credit, evaluation_of(rollout, rows), rows)
    parts = [
        backward(module, cfg, rollout, credit, evaluation_of(rollout, part), part)
        for part in rows.split(cut)
    ]
    torch.testing.assert_close(torch.stack([p[0] for p in parts]).sum(), loss, rtol=0, atol=1e-5)
    for k, grad in enumerate(grads):
        torch.testing.assert_close(torch.cat([p[1][k] for p in parts]), grad, rtol=0, atol=1e-6)
    for name, (num, den) in pairs.items():
        part_num, part_den = sum(p[2][name] for p in parts)
        torch.testing.assert_close(part_den, den, rtol=0, atol=1e-5)
        torch.testing.assert_close(part_num, num, rtol=1e-4, atol=1e-5)


@repeatable
@given(runs(), st.data())
def test_loss_and_gradient_do_not_depend_on_the_ranks(run, data):
    module, cfg, rollout = run
    num_groups = len(rollout.episodes) // cfg.episodes_multiple
    owner = data.draw(
        st.lists(st.integers(0, 2), min_size=num_groups, max_size=num_groups), label="owner"
    )
    owner = [sorted(set(owner)).index(rank) for rank in owner]  # ranks without episodes drop out
    groups = torch.arange(len(rollout.episodes)).view(num_groups, -1)
    episodes = [
        groups[torch.tensor(owner) == rank].flatten().tolist() for rank in range(max(owner) + 1)
    ]
    rows = [torch.cat([(rollout.b == b).nonzero()[:, 0] for b in mine]) for mine in episodes]
    parts = [part_of(rollout, mine) for mine in episodes]

    def work(rank, all_sum):
        credit = module.credit(parts[rank], cfg, all_sum)
        every = torch.arange(parts[rank].num_decisions)
        return backward(module, cfg, parts[rank], credit, evaluation_of(rollout, rows[rank]), every)

    every = torch.arange(rollout.num_decisions)
    credit = module.credit(rollout, cfg, alone)
    loss, grads, _ = backward(module, cfg, rollout, credit, evaluation_of(rollout, every), every)
    split = on_ranks(len(parts), work)
    torch.testing.assert_close(torch.stack([s[0] for s in split]).sum(), loss, rtol=0, atol=1e-5)
    for k, grad in enumerate(grads):
        got = torch.cat([s[1][k] for s in split])
        torch.testing.assert_close(got, grad[torch.cat(rows)], rtol=1e-4, atol=1e-6)


@repeatable
@given(runs(), st.randoms(use_true_random=False))
def test_credit_follows_its_episode_when_groups_are_reordered(run, random):
    module, cfg, rollout = run
    groups = list(torch.arange(len(rollout.episodes)).view(-1, cfg.episodes_multiple).tolist())
    random.shuffle(groups)
    order = [b for group in groups for b in group]
    credit, moved = (module.credit(r, cfg, alone) for r in (rollout, part_of(rollout, order)))
    assert moved.kept.tolist() == [bool(credit.kept[b]) for b in order]
    num_t = len(moved.weight)
    torch.testing.assert_close(moved.weight, credit.weight[:num_t, order])
    torch.testing.assert_close(
        moved.advantage, credit.advantage[:num_t, order], rtol=1e-5, atol=1e-6
    )


@repeatable
@given(runs(), st.integers(0, 100))
def test_nothing_off_the_mask_matters(run, seed):
    """Garbage rewards, log-probs and entropies where no action was executed."""
    module, cfg, rollout = run
    gen = torch.Generator().manual_seed(seed)
    off = ~rollout.valid
    dirty = replace(
        rollout,
        reward=torch.where(off, torch.randn(off.shape, generator=gen) * 9, rollout.reward),
    )
    skipped = off[rollout.t, rollout.b][:, :, None]
    rows = torch.arange(rollout.num_decisions)
    clean = evaluation_of(rollout, rows)
    junk = replace(
        clean,
        logprob=torch.where(skipped, 99.0, clean.logprob.detach()).requires_grad_(),
        entropy=torch.where(skipped, float("nan"), clean.entropy.detach()).requires_grad_(),
    )
    expected = backward(module, cfg, rollout, module.credit(rollout, cfg, alone), clean, rows)
    got = backward(module, cfg, dirty, module.credit(dirty, cfg, alone), junk, rows)
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[1], expected[1], strict=True):
        assert torch.equal(a, b)
    assert not got[1][0][skipped.expand_as(got[1][0])].any()


@repeatable
@given(runs(algo=st.just("grpo")), st.floats(-5, 5, width=32))
def test_equal_returns_give_exactly_no_gradient(run, score):
    module, cfg, rollout = run
    end = rollout.terminated | rollout.truncated
    flat = replace(rollout, reward=score * end.float())
    credit = module.credit(flat, cfg, alone)
    assert not credit.advantage.any()
    num, _ = credit.metrics["train/actor/varied_fraction"]
    assert num == 0


@repeatable
@given(
    st.integers(2, 9).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.floats(-10, 10, width=32), min_size=size, max_size=4 * size),
        )
    )
)
def test_zscores_of_a_group_sum_to_zero_and_are_bounded(case):
    size, scores = case
    score = torch.tensor(scores[: len(scores) // size * size], dtype=torch.float64)
    got = fn.group_zscore(score, size).view(-1, size)
    torch.testing.assert_close(got.sum(dim=1), torch.zeros(len(got)).double(), rtol=0, atol=1e-6)
    # One against all others is the most extreme case: (G - 1) / sqrt(G).
    assert got.abs().max() <= (size - 1) / size**0.5 + 1e-6


@repeatable
@given(runs(), st.integers(0, 3))
def test_metrics_are_fractions_and_divergences(run, seed):
    module, cfg, rollout = run
    credit = module.credit(rollout, cfg, alone)
    rows = torch.arange(rollout.num_decisions)
    evaluation = evaluation_of(rollout, rows, seed)
    _, _, pairs = backward(module, cfg, rollout, credit, evaluation, rows)
    fractions = ["train/actor/clip_fraction", "train/actor/dual_clip_fraction"]
    fractions += ["train/critic/value_clip_ratio"] if module is ppo else []
    if not credit.weight.any():
        return
    for name in fractions:
        num, den = pairs[name]
        assert 0 <= num / den <= 1 + 1e-6
    num, den = pairs["train/actor/approx_kl"]
    assert num / den > 0
