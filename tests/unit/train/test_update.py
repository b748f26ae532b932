import math
from dataclasses import replace

import pytest
import torch

from vlarl.batch import LossOutput
from vlarl.config.schema import OptimSection
from vlarl.errors import NonFiniteLoss
from vlarl.testing import part_of
from vlarl.train.update import Rows, backward, count_parameters, make_optimizer, update


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.module.named_parameters()}


def gradient(policy):
    return torch.cat([p.grad.flatten() for p in policy.module.parameters()])


def step(judged, world, optim, *, policy=None, optimizer=None, **other):
    """Updates of one iteration: (policy, metrics, number of optimizer steps so far)."""
    policy = policy or judged.policy()
    arguments = {"algo": judged.algo, "rollout": judged.rollout, "credit": judged.credit}
    arguments |= {"seed": 0, "step": 0, "num_updates": 0} | other
    metrics, taken = update(
        policy,
        optimizer=optimizer or make_optimizer(policy, optim),
        algo_cfg=judged.cfg,
        optim=optim,
        world=world,
        **arguments,
    )
    return policy, metrics, taken


class Constant:
    """An algorithm whose loss is the summed weight, and whose KL is what the test says."""

    def __init__(self, kls=()):
        self.losses, self.kls = [], list(kls)

    def loss(self, scored, batch, cfg):
        loss = batch.weight.sum() + 0 * scored.logprob.sum()
        self.losses.append(loss.item())
        metrics = {"train/loss": (loss, torch.tensor(1.0))}
        if self.kls:
            metrics["train/actor/approx_kl"] = (torch.tensor(self.kls.pop(0)), torch.tensor(1.0))
        return LossOutput(loss=loss, metrics=metrics)


# --- minibatches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 7])
def test_minibatches_are_disjoint_and_cover_the_rows_that_count(judged, num):
    it = judged()
    rows = Rows.of(it.rollout, it.credit)
    parts = list(rows.minibatches(num, 0, "minibatch"))
    assert len(parts) == num
    every = torch.cat(parts).tolist()
    counted = (it.credit.weight[it.rollout.t, it.rollout.b].sum(dim=1) > 0).nonzero()[:, 0]
    assert sorted(every) == counted.tolist()
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) < 6 * math.sqrt(len(every) / num)


def test_rows_of_filtered_episodes_are_left_out(judged):
    it = judged(filter_low=0.2, filter_high=0.8)
    kept = it.credit.kept
    assert 0 < kept.sum() < len(kept)
    rows = Rows.of(it.rollout, it.credit)
    assert set(it.rollout.b[rows.index].tolist()) == set(kept.nonzero()[:, 0].tolist())


def test_minibatches_differ_by_path_only(judged):
    it = judged()
    rows = Rows.of(it.rollout, it.credit)

    def split(*path):
        return [part.tolist() for part in rows.minibatches(3, *path)]

    assert split(0, "minibatch", 0, 0) == split(0, "minibatch", 0, 0)
    assert split(0, "minibatch", 0, 0) != split(0, "minibatch", 0, 1)
    assert split(0, "minibatch", 0, 0) != split(0, "minibatch", 1, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_minibatches_are_the_same_on_any_number_of_ranks(judged, size):
    it = judged()

    def named(rollout, credit):
        """Each minibatch as a set of (episode, decision)."""
        rows = Rows.of(rollout, credit)
        index = [e.index for e in rollout.episodes]
        return [
            {(index[rollout.b[i]], int(rollout.t[i])) for i in part}
            for part in rows.minibatches(4, 7, "minibatch")
        ]

    whole = named(it.rollout, it.credit)
    together = [set() for _ in whole]
    for rank in range(size):
        mine = [b for b in range(24) if b // 4 % size == rank]
        part = part_of(it.rollout, mine)
        num_t = len(part.reward)
        credit = replace(
            it.credit,
            advantage=it.credit.advantage[:num_t, mine],
            weight=it.credit.weight[:num_t, mine],
            kept=it.credit.kept[mine],
        )
        for all_, own in zip(together, named(part, credit), strict=True):
            assert not all_ & own
            all_ |= own
    assert together == whole


# --- gradients -----------------------------------------------------------------------------------


def measured(judged, world, *, micro_batch, policy=None, rows=None):
    policy = policy or judged.policy()
    rows = rows or Rows.of(judged.rollout, judged.credit)
    loss, means = backward(
        policy,
        judged.algo,
        judged.cfg,
        rows,
        rows.index,
        micro_batch=micro_batch,
        scale=1.0,
        world=world,
    )
    return loss, gradient(policy), means.reduce(world)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("micro_batch", [1, 7, 64])
def test_gradient_loss_and_metrics_do_not_depend_on_the_micro_batch(
    judged, world, name, micro_batch
):
    it = judged(name)
    loss, grad, metrics = measured(it, world, micro_batch=10_000)
    loss2, grad2, metrics2 = measured(it, world, micro_batch=micro_batch)
    assert grad.norm() > 1e-3
    torch.testing.assert_close(loss2, loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(grad2, grad, atol=1e-6, rtol=0)
    assert metrics2 == pytest.approx(metrics, abs=1e-6)


def test_the_gradient_is_that_of_the_loss_over_all_rows(judged, world):
    it = judged("ppo")
    policy = it.policy()
    scored = policy.evaluate(it.rollout.obs, it.rollout.trace, temperature=1.0)
    rows = Rows.of(it.rollout, it.credit)
    it.algo.loss(scored, rows.batch, it.cfg).loss.backward()
    expected = gradient(policy)
    torch.testing.assert_close(measured(it, world, micro_batch=5)[1], expected, atol=1e-6, rtol=0)


def test_a_step_raises_what_did_well_and_lowers_what_did_badly(judged, world):
    """Goes red when the sign of the advantage is flipped anywhere on the way."""
    it = judged()
    optim = OptimSection(lr=1e-3)
    policy, _, _ = step(it, world, optim, policy=it.policy(0))
    scored = policy.evaluate(it.rollout.obs, it.rollout.trace, temperature=1.0)
    change = (scored.logprob.detach() - it.rollout.logprob).sum(dim=(1, 2))
    advantage = it.credit.advantage[it.rollout.t, it.rollout.b, 0]
    assert (advantage * change).sum() > 0
    assert change[advantage > 0].mean() > 0 > change[advantage < 0].mean()


def test_ranks_with_unequal_shares_do_the_same_number_of_forwards(judged, world, ranks):
    it = judged("ppo")
    rows = Rows.of(it.rollout, it.credit)
    alone_loss, alone_grad, alone_metrics = measured(it, world, micro_batch=4, rows=rows)
    cuts = (rows.index[:3], rows.index[3:])
    policies = [it.policy(), it.policy()]  # here, since threads share torch's random numbers

    def work(rank_world):
        share, policy = replace(rows, index=cuts[rank_world.rank]), policies[rank_world.rank]
        return measured(it, rank_world, micro_batch=4, rows=share, policy=policy)

    (loss0, grad0, metrics0), (loss1, grad1, metrics1) = ranks(2, work)
    torch.testing.assert_close(loss0 + loss1, alone_loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(grad0 + grad1, alone_grad, atol=1e-6, rtol=0)
    assert metrics0 == metrics1 == pytest.approx(alone_metrics, abs=1e-6)


def test_a_rank_without_rows_takes_part_with_weight_zero(judged, ranks):
    it = judged()
    rows = Rows.of(it.rollout, it.credit)
    cuts = (rows.index, rows.index[:0])
    policies = [it.policy(), it.policy()]

    def work(w):
        share, policy = replace(rows, index=cuts[w.rank]), policies[w.rank]
        return measured(it, w, micro_batch=8, rows=share, policy=policy)

    results = ranks(2, work)
    assert results[1][0] == 0
    assert not results[1][1].any()


# --- a whole iteration ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("micro_batch", [3, 1000])
def test_the_micro_batch_changes_no_weight(judged, world, name, micro_batch):
    it = judged(name)
    optim = OptimSection(lr=1e-3, minibatches=3, epochs=2, micro_batch=16)
    one, m1, _ = step(it, world, optim)
    two, m2, _ = step(it, world, optim.model_copy(update={"micro_batch": micro_batch}))
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(two)[name], atol=2e-5, rtol=0)
    assert m1 == pytest.approx(m2, abs=1e-4)


def test_the_loss_of_a_minibatch_is_scaled_by_their_number(judged, world):
    it = judged()
    algo = Constant()
    optim = OptimSection(minibatches=4, micro_batch=1000)
    step(it, world, optim, algo=algo)
    assert len(algo.losses) == 4
    # The weights sum to 1, hence the four scaled sums to 4.
    assert sum(algo.losses) == pytest.approx(4.0)
    rows = Rows.of(it.rollout, it.credit)
    first = next(rows.minibatches(4, 0, "minibatch", 0, 0))
    own = it.credit.weight[it.rollout.t[first], it.rollout.b[first]].sum().item()
    assert algo.losses[0] == pytest.approx(4 * own)


def test_every_epoch_goes_through_all_minibatches_in_a_new_order(judged, world):
    it, algo, seen = judged(), Constant(), []
    optim = OptimSection(minibatches=3, epochs=2, micro_batch=1000)
    _, metrics, taken = step(
        it, world, optim, algo=algo, num_updates=10, on_update=lambda *at: seen.append(at)
    )
    assert taken == 16
    assert metrics["train/optimizer_steps"] == 6
    assert metrics["train/skipped_steps"] == 0
    assert seen == [(i, 6) for i in range(1, 7)]
    assert sorted(algo.losses[:3]) != pytest.approx(sorted(algo.losses[3:]))


def test_nothing_that_counts_means_no_step(judged, world):
    it = judged()
    nothing = replace(it.credit, weight=torch.zeros_like(it.credit.weight))
    optim = OptimSection(minibatches=2, epochs=2)
    policy, metrics, taken = step(it, world, optim, credit=nothing)
    assert taken == 0
    assert metrics["train/optimizer_steps"] == 0
    assert metrics["train/skipped_steps"] == 4
    assert all(torch.equal(p, weights(it.policy())[n]) for n, p in weights(policy).items())


def test_a_large_kl_skips_the_rest_of_the_iteration(judged, world):
    it = judged()
    optim = OptimSection(minibatches=2, epochs=3, micro_batch=1000, target_kl=0.25)
    for kls, done in (
        ([0.0, 0.25, 0.26, 0.0, 0.0, 0.0], 3),
        ([0.3] * 6, 1),
        ([0.0] * 5 + [0.3], 6),
    ):
        algo = Constant(kls=kls)
        _, metrics, taken = step(it, world, optim, algo=algo)
        assert taken == done
        assert metrics["train/optimizer_steps"] == done
        assert metrics["train/skipped_steps"] == 6 - done
        assert len(algo.losses) == done


def test_a_real_kl_stops_a_large_learning_rate(judged, world):
    it = judged()
    optim = OptimSection(lr=0.5, minibatches=2, epochs=3, target_kl=0.05)
    _, metrics, _ = step(it, world, optim, policy=it.policy(0))
    assert metrics["train/skipped_steps"] > 0
    _, free, _ = step(it, world, optim.model_copy(update={"target_kl": None}), policy=it.policy(0))
    assert free["train/skipped_steps"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_before_the_weights_change(judged, world, bad):
    it = judged()
    advantage = it.credit.advantage.clone()
    t, b = (int(x[-1]) for x in (it.rollout.t, it.rollout.b))
    advantage[t, b] = bad
    policy = it.policy()
    before = weights(policy)
    with pytest.raises(NonFiniteLoss, match="in iteration 3, optimizer step 5; weights are those"):
        step(
            it,
            world,
            OptimSection(),
            policy=policy,
            credit=replace(it.credit, advantage=advantage),
            step=3,
            num_updates=5,
        )
    assert all(torch.equal(p, before[n]) for n, p in weights(policy).items())


def test_a_gradient_that_is_not_finite_counts_too(judged, world):
    it = judged()
    policy = it.policy()
    before = weights(policy)

    class Exploding(Constant):
        def loss(self, scored, batch, cfg):
            # sqrt has an infinite slope at 0, whatever it is multiplied with is finite.
            return LossOutput(loss=(scored.logprob * 0).sum().abs().sqrt())

    with pytest.raises(NonFiniteLoss, match="loss 0 with gradient norm nan"):
        step(it, world, OptimSection(), policy=policy, algo=Exploding())
    assert all(torch.equal(p, before[n]) for n, p in weights(policy).items())


# --- learning rates ------------------------------------------------------------------------------


def rates(judged, world, optim, *, iterations):
    """{group: learning rate of the last optimizer step} of each iteration."""
    policy = judged.policy()
    optimizer, taken, found = make_optimizer(policy, optim), 0, []
    for i in range(iterations):
        _, metrics, taken = step(
            judged, world, optim, policy=policy, optimizer=optimizer, step=i, num_updates=taken
        )
        found.append((metrics["train/actor/lr"], metrics["train/critic/lr"]))
    return found


def test_the_warm_up_is_linear_in_optimizer_steps(judged, world):
    optim = OptimSection(lr=1e-3, critic_lr=2e-3, warmup_steps=4, minibatches=1)
    actor, critic = zip(*rates(judged("ppo"), world, optim, iterations=6), strict=True)
    assert actor == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    assert critic == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3, 2e-3])


def test_the_warm_up_goes_on_over_minibatches_and_iterations(judged, world):
    optim = OptimSection(lr=1e-3, warmup_steps=10, minibatches=2, epochs=2)
    actor = [a for a, _ in rates(judged("ppo"), world, optim, iterations=3)]
    assert actor == pytest.approx([4e-4, 8e-4, 1e-3])


def test_the_actor_rests_while_the_critic_warms_up(judged, world):
    it = judged("ppo")
    optim = OptimSection(lr=1e-3, critic_lr=2e-3, critic_warmup=2, weight_decay=0.1)
    assert rates(it, world, optim, iterations=3) == [(0, 2e-3), (0, 2e-3), (1e-3, 2e-3)]
    policy, fresh = it.policy(), weights(it.policy())
    optimizer = make_optimizer(policy, optim)
    for i in range(2):
        step(it, world, optim, policy=policy, optimizer=optimizer, step=i)
    moved = {name for name, p in weights(policy).items() if not torch.equal(p, fresh[name])}
    assert moved == {name for name in fresh if name.startswith("critic.")}
    step(it, world, optim, policy=policy, optimizer=optimizer, step=2)
    assert all(not torch.equal(p, fresh[name]) for name, p in weights(policy).items())


def test_the_first_step_of_adam_is_the_learning_rate(judged, world):
    it = judged()
    optim = OptimSection(lr=1e-3, minibatches=1, eps=1e-12)
    policy, _, _ = step(it, world, optim)
    fresh = weights(it.policy())
    change = torch.cat([(p - fresh[n]).flatten() for n, p in weights(policy).items()])
    assert change.abs().median().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_gradient_is_clipped_and_its_norm_reported_unclipped(judged, world):
    it = judged()
    loss, grad, _ = measured(it, world, micro_batch=64)
    seen = []

    class Sgd(torch.optim.SGD):
        def step(self):
            seen.append(
                torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])
            )

    policy = it.policy()
    groups = [
        {"params": params, "lr": 0.1, "base_lr": 0.1, "name": name}
        for name, params in policy.param_groups().items()
    ]
    limit = float(grad.norm()) / 4
    optim = OptimSection(grad_clip=limit)
    _, metrics, _ = step(it, world, optim, policy=policy, optimizer=Sgd(groups, lr=0.1))
    assert metrics["train/actor/grad_norm"] == pytest.approx(4 * limit, rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(float(loss), abs=1e-6)
    torch.testing.assert_close(seen[0], grad / 4, atol=1e-6, rtol=1e-4)


def test_the_optimizer_has_a_group_for_each_part(judged):
    optim = OptimSection(lr=1e-3, critic_lr=5e-3, betas=(0.8, 0.9), weight_decay=0.01, eps=1e-7)
    for name, expected in (
        ("grpo", {"actor": 1e-3}),
        ("ppo", {"actor": 1e-3, "critic": 5e-3}),
    ):
        policy = judged(name).policy()
        groups = make_optimizer(policy, optim).param_groups
        assert {g["name"]: g["lr"] for g in groups} == expected
        assert all(g["betas"] == (0.8, 0.9) and g["weight_decay"] == 0.01 for g in groups)
        assert sum(len(g["params"]) for g in groups) == len(list(policy.module.parameters()))


def test_parameters_are_counted():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    net[0].requires_grad_(False)
    assert count_parameters(net) == (16 + 10, 10)
