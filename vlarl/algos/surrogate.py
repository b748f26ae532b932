"""What PPO and GRPO share: the clipped policy loss with its fields, and the episode weights."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vlarl.algos.functional import (
    LogprobLevel,
    clipped_surrogate,
    kl,
    reduce_actions,
    spread_advantage,
    spread_weight,
)
from vlarl.batch import LossBatch, LossOutput, PolicyEval
from vlarl.config.schema import AlgoSection, Float
from vlarl.interfaces import AllSum


class SurrogateSection(AlgoSection):
    """The clipped policy loss."""

    clip_low: Annotated[Float, Field(gt=0, lt=1)] = 0.2
    """Ratios below 1 - clip_low earn nothing more by falling further."""
    clip_high: Annotated[Float, Field(gt=0)] = 0.28
    """Ratios above 1 + clip_high earn nothing more by rising further."""
    dual_clip: Annotated[Float, Field(gt=1)] | None = None
    """Caps the loss of a negative advantage at dual_clip times its size; none means no cap."""
    logprob_level: LogprobLevel = "token"
    """What one importance ratio covers: token (one action number), action (all its numbers) or
    chunk (the executed actions of one decision)."""
    entropy_bonus: Annotated[Float, Field(ge=0)] = 0.0
    """Coefficient of the mean entropy in the objective (nats per ratio: it depends on
    logprob_level)."""


def episode_weight(valid: Tensor, kept: Tensor, all_sum: AllSum, *, keep_filtered: bool) -> Tensor:
    """[T, B, C] float32: every kept episode counts the same, and so does every valid action in it.

    valid: [T, B, C] bool. kept: [B] bool. The global sum is 1, or the kept share of all episodes
    with keep_filtered (filtered episodes stay in the denominator); all zeros when none is kept.
    """
    length = valid.sum(dim=(0, 2)).clamp(min=1)
    counted = torch.ones_like(kept) if keep_filtered else kept
    episodes = all_sum(counted.sum().double()).clamp(min=1)
    share = kept.double() / (length * episodes)
    return (valid * share[:, None]).float()


def policy_loss(evaluation: PolicyEval, batch: LossBatch, cfg: SurrogateSection) -> LossOutput:
    """Sum of weight times clipped surrogate, minus the entropy bonus; additive over micro-batches.

    Metrics are means with the weights of the loss. Entries of weight 0 (not executed, or filtered)
    enter neither values nor gradients, whatever they hold.
    """
    assert evaluation.logprob.dtype.itemsize >= 4, f"log-probs are {evaluation.logprob.dtype}"
    level, dims = cfg.logprob_level, evaluation.logprob.shape[2]
    executed = batch.weight > 0
    log_ratio = reduce_actions(evaluation.logprob - batch.logprob, executed, level)
    entropy = reduce_actions(evaluation.entropy, executed, level)
    weight = spread_weight(batch.weight, level, dims)
    surrogate = clipped_surrogate(
        log_ratio,
        spread_advantage(batch.advantage, level),
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip,
    )
    policy = (weight * surrogate.loss).sum()
    mean_entropy = (weight * entropy).sum()
    loss = policy - cfg.entropy_bonus * mean_entropy
    ratio = surrogate.ratio
    sums = {
        "train/loss": loss,
        "train/entropy_loss": mean_entropy,
        "train/actor/policy_loss": policy,
        "train/actor/ratio": (weight * ratio).sum(),
        "train/actor/ratio_abs": (weight * (ratio - 1).abs()).sum(),
        "train/actor/clipped_ratio": (weight * surrogate.clipped_ratio).sum(),
        "train/actor/clip_fraction": (weight * surrogate.is_clipped).sum(),
        "train/actor/dual_clip_fraction": (weight * surrogate.is_dual_clipped).sum(),
        "train/actor/approx_kl": (weight * kl(-log_ratio, torch.zeros_like(log_ratio), "k3")).sum(),
    }
    total = batch.weight.sum()
    return LossOutput(loss=loss, metrics={k: (v.detach(), total) for k, v in sums.items()})
