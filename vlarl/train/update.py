"""The update: minibatches, micro-batches, backward, clip, step. Knows no algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlarl.batch import Credit, LossBatch, Rollout
from vlarl.config.schema import OptimSection
from vlarl.distributed.shard import clip_grad_norm, reduce_gradients
from vlarl.distributed.world import World
from vlarl.errors import NonFiniteLoss
from vlarl.interfaces import Algorithm, Policy
from vlarl.noise import stream, uniform
from vlarl.train.measure import Means


def make_optimizer(policy: Policy, optim: OptimSection) -> torch.optim.Optimizer:
    """AdamW with one group per part of the policy: "actor" at `lr`, "critic" at `critic_lr`."""
    rates = {"actor": optim.lr, "critic": optim.critic_lr}
    groups = [
        {"params": params, "lr": rates[name], "base_lr": rates[name], "name": name}
        for name, params in policy.param_groups().items()
        if params
    ]
    return torch.optim.AdamW(
        groups, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """The decisions of a rollout that carry weight, flattened: N rows of everything stored."""

    rollout: Rollout
    batch: LossBatch
    keys: Tensor
    index: Tensor

    @staticmethod
    def of(rollout: Rollout, credit: Credit) -> Rows:
        """Gather [T, B, ...] credit to the decisions; rows of weight zero are left out."""
        t, b = rollout.t, rollout.b
        weight = credit.weight[t, b]
        episode = torch.tensor([e.index for e in rollout.episodes])
        return Rows(
            rollout=rollout,
            batch=LossBatch(
                logprob=rollout.logprob,
                advantage=credit.advantage[t, b],
                weight=weight,
                value=None if rollout.value is None else rollout.value[t, b],
                returns=None if credit.returns is None else credit.returns[t, b],
            ),
            # Identity of a decision over all ranks; T is far below 2^20.
            keys=(episode[b] << 20) + t,
            index=(weight.sum(dim=1) > 0).nonzero().flatten(),
        )

    def minibatches(self, num: int, *path: object) -> Iterator[Tensor]:
        """`num` disjoint index tensors that cover all rows, by a keyed hash of each decision.

        The global minibatches are therefore the same on any number of ranks.
        """
        draw = uniform(self.keys[self.index] + stream(*path), (1,)).flatten()
        order = draw.argsort()
        part = (draw[order] * num).long()
        for m in range(num):
            yield self.index[order[part == m]]

    def take(self, rows: Tensor, device: torch.device, scale: float) -> LossBatch:
        """The stored side of some rows on `device`, weights times `scale`."""
        x = self.batch
        return LossBatch(
            logprob=x.logprob[rows].to(device),
            advantage=x.advantage[rows].to(device),
            weight=x.weight[rows].to(device) * scale,
            value=None if x.value is None else x.value[rows].to(device),
            returns=None if x.returns is None else x.returns[rows].to(device),
        )


def backward(
    policy: Policy,
    algo: Algorithm,
    algo_cfg: Any,
    rows: Rows,
    index: Tensor,
    *,
    micro_batch: int,
    scale: float,
    world: World,
) -> tuple[Tensor, Means]:
    """Accumulate the gradient of one minibatch; returns this rank's loss and metrics.

    Every rank runs the same number of forwards, since sharded modules communicate in them; a rank
    that is short of rows repeats its first row with weight zero.
    """
    device = world.device
    num = int(world.all_max(torch.tensor(math.ceil(len(index) / micro_batch))))
    parts = list(index.split(micro_batch)) if len(index) else []
    loss_sum = torch.zeros((), device=device)
    means = Means()
    for i in range(num):
        part = parts[i] if i < len(parts) else torch.zeros(1, dtype=torch.long)
        batch = rows.take(part, device, scale if i < len(parts) else 0.0)
        trace = {name: x[part].to(device) for name, x in rows.rollout.trace.items()}
        scored = policy.evaluate(
            rows.rollout.obs.select(part).to(device), trace, temperature=rows.rollout.temperature
        )
        output = algo.loss(scored, batch, algo_cfg)
        output.loss.backward()
        loss_sum += output.loss.detach()
        means.add(output.metrics)
    return loss_sum, means


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    algo: Algorithm,
    algo_cfg: Any,
    rollout: Rollout,
    credit: Credit,
    optim: OptimSection,
    *,
    world: World,
    seed: int,
    step: int,
    num_updates: int,
    on_update: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, float], int]:
    """All optimizer steps of one iteration; returns metrics and the new count of optimizer steps.

    num_updates: optimizer steps taken before. The loss of a minibatch is multiplied by the number
    of minibatches, since weights sum to 1 over the whole rollout.

    Raises:
        NonFiniteLoss: before the weights are touched by a NaN or infinite loss or gradient.
    """
    rows = Rows.of(rollout, credit)
    every, total = Means(), optim.epochs * optim.minibatches
    done = skipped = 0
    for index in _minibatches(rows, optim, seed, step):
        if world.all_sum(torch.tensor(len(index))) == 0:
            skipped += 1
            continue
        _set_lr(optimizer, optim, num_updates, step)
        means = _take_step(
            policy,
            optimizer,
            algo,
            algo_cfg,
            rows,
            index,
            optim,
            world=world,
            where=f"iteration {step}, optimizer step {num_updates}",
        )
        num_updates += 1
        done += 1
        every.merge(means)
        if on_update is not None:
            on_update(done + skipped, total)
        if optim.target_kl is not None:
            kl = means.reduce(world).get("train/actor/approx_kl", 0.0)
            if kl > optim.target_kl:
                skipped = total - done
                break
    optimizer.zero_grad(set_to_none=True)
    return _summary(every.reduce(world), optimizer, done, skipped), num_updates


def _minibatches(rows: Rows, optim: OptimSection, seed: int, step: int) -> Iterator[Tensor]:
    """Index tensors of all optimizer steps of an iteration, pass by pass."""
    for epoch in range(optim.epochs):
        yield from rows.minibatches(optim.minibatches, seed, "minibatch", step, epoch)


def _take_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    algo: Algorithm,
    algo_cfg: Any,
    rows: Rows,
    index: Tensor,
    optim: OptimSection,
    *,
    world: World,
    where: str,
) -> Means:
    """One optimizer step on one minibatch; returns this rank's metrics. where: for the error."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad(set_to_none=True)
    loss, means = backward(
        policy,
        algo,
        algo_cfg,
        rows,
        index,
        micro_batch=optim.micro_batch,
        scale=float(optim.minibatches),
        world=world,
    )
    reduce_gradients(params, world)
    norm = clip_grad_norm(params, optim.grad_clip, world)
    loss = world.all_sum(loss)
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise NonFiniteLoss(
            f"loss {loss.item():g} with gradient norm {norm.item():g} in {where}; weights are "
            "those before the step. Try a lower optim.lr, or resume from the last checkpoint with "
            "another seed"
        )
    optimizer.step()
    means.add({"train/actor/grad_norm": (norm, torch.ones((), device=norm.device))})
    return means


def _summary(
    metrics: dict[str, float], optimizer: torch.optim.Optimizer, done: int, skipped: int
) -> dict[str, float]:
    rates = {f"train/{g['name']}/lr": float(g["lr"]) for g in optimizer.param_groups}
    return {
        **metrics,
        **rates,
        "train/optimizer_steps": float(done),
        "train/skipped_steps": float(skipped),
    }


def _set_lr(optimizer: torch.optim.Optimizer, optim: OptimSection, taken: int, step: int) -> None:
    """Linear warm-up over optimizer steps; the actor rests while only the critic is trained."""
    warm = min(1.0, (taken + 1) / optim.warmup_steps) if optim.warmup_steps else 1.0
    for group in optimizer.param_groups:
        resting = group["name"] == "actor" and step < optim.critic_warmup
        group["lr"] = 0.0 if resting else group["base_lr"] * warm


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters of a module."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, grad in sizes if grad)
