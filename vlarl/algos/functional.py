"""The arithmetic of PPO and GRPO as pure functions of tensors; no config, no rank.

Dtype in = dtype out. Statistics over the global batch take `all_sum` and accumulate in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vlarl.interfaces import AllSum

LogprobLevel = Literal["token", "action", "chunk"]
"""What one importance ratio covers: an action number, an action, or the executed actions."""


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimates, one per row.

    All inputs [R, B], R rows in time order (a row is an action or a chunk; gamma is per row).
    value: V before the row. next_value: V after it; the caller puts 0 where the row terminated the
    episode and V(last observation) where the horizon cut it. done: bool, the row ended an episode,
    either way: nothing flows back over it.
    Source: arXiv:1506.02438, eq. 16.
    """
    delta = reward + gamma * next_value - value
    decay = gamma * gae_lambda * (~done).to(delta.dtype)
    advantage = torch.empty_like(delta)
    carry = torch.zeros_like(delta[0])
    for row in range(len(delta) - 1, -1, -1):
        carry = delta[row] + decay[row] * carry
        advantage[row] = carry
    return advantage


def group_zscore(score: Tensor, group_size: int, eps: float = 1e-6) -> Tensor:
    """Advantage of each episode against its group: (score - mean) / (std + eps).

    score: [B] of order 1, B a multiple of group_size, groups contiguous. Returns [B].
    std is the unbiased one; with group_size 8 the biased one is 6 % smaller.
    A group whose scores agree gives exactly 0. Scores within eps, relative and absolute, agree:
    sums of rewards that are equal on paper differ in their last bits, and dividing such a residue
    by eps would turn it into an advantage.
    Source: GRPO with outcome supervision, arXiv:2402.03300 sec. 4.1.2.
    """
    assert group_size > 1, group_size
    assert len(score) % group_size == 0, (len(score), group_size)
    groups = score.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    zscore = centred / (groups.std(dim=1, keepdim=True) + eps)
    return torch.where(groups_vary(score, group_size, eps)[:, None], zscore, 0).view(-1)


def groups_vary(score: Tensor, group_size: int, eps: float = 1e-6) -> Tensor:
    """[B / group_size] bool: the group's scores differ by more than eps, relative and absolute."""
    groups = score.view(-1, group_size)
    spread = groups.amax(dim=1) - groups.amin(dim=1)
    return spread > eps * (1 + groups.abs().amax(dim=1))


def groups_between(rate: Tensor, group_size: int, low: float, high: float) -> Tensor:
    """[B / group_size] bool: low <= mean rate of the group <= high, in float64.

    k / G rounds to the same double as the literal, so a bound of 0.3 includes 3 of 10.
    """
    mean = rate.double().view(-1, group_size).mean(dim=1)
    return (mean >= low) & (mean <= high)


def masked_mean_std(x: Tensor, mask: Tensor, all_sum: AllSum) -> tuple[Tensor, Tensor]:
    """Mean and unbiased std (float64 scalars) of x where mask is true, over all ranks.

    No entry gives 0 and 0; one entry has std 0, not NaN.
    """
    entries = torch.where(mask, x.double(), 0)
    total, count = all_sum(torch.stack([entries.sum(), mask.sum().double()])).unbind()
    mean = total / count.clamp(min=1)
    squares = all_sum(torch.where(mask, (x.double() - mean) ** 2, 0).sum())
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def standardize(x: Tensor, mask: Tensor, all_sum: AllSum, eps: float = 1e-5) -> Tensor:
    """(x - mean) / (std + eps) with the global statistics of x where mask is true; else 0."""
    mean, std = masked_mean_std(x, mask, all_sum)
    return torch.where(mask, (x.double() - mean) / (std + eps), 0).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Entry by entry: the loss, the ratio before and after clipping, and which bound decided.

    is_clipped: the clipped term is the larger one, so the entry has no gradient.
    is_dual_clipped: the dual bound cut the loss of a negative advantage, likewise.
    """

    loss: Tensor
    ratio: Tensor
    clipped_ratio: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)), at most dual_clip |A|; same shape as log_ratio.

    log_ratio: log-prob now minus log-prob at collection. advantage broadcasts against it.
    Source: arXiv:1707.06347 eq. 7; separate bounds arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    free, bound = -advantage * ratio, -advantage * clipped
    loss = torch.max(free, bound)
    is_dual = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        ceiling = (dual_clip * advantage.abs()).expand_as(loss)
        is_dual = loss > ceiling
        loss = torch.min(loss, ceiling)
    return Surrogate(
        loss=loss,
        ratio=ratio,
        clipped_ratio=clipped,
        is_clipped=free < bound,
        is_dual_clipped=is_dual,
    )


def clipped_value_loss(
    value: Tensor, old_value: Tensor, target: Tensor, *, clip: float | None, huber_delta: float
) -> tuple[Tensor, Tensor]:
    """(loss, is_clipped), both of the shape of `value`.

    loss: the larger Huber loss of value and of old_value + clip(value - old_value, ±clip) against
    target; Huber is e²/2 below huber_delta and linear above. is_clipped: value really moved by more
    than clip. clip None switches clipping off.
    """

    def huber(prediction: Tensor) -> Tensor:
        return F.huber_loss(prediction, target, reduction="none", delta=huber_delta)

    if clip is None:
        return huber(value), torch.zeros_like(value, dtype=torch.bool)
    step = value - old_value
    limited = old_value + step.clamp(-clip, clip)
    return torch.max(huber(value), huber(limited)), step.abs() > clip


def reduce_actions(x: Tensor, valid: Tensor, level: LogprobLevel) -> Tensor:
    """Sum a per-token quantity (log-prob, entropy) up to the level of one ratio.

    x: [N, C, A]. valid: [N, C] bool; what was not executed counts as 0, so a chunk's log-prob is
    the joint one of its executed actions. Returns [N, C, A], [N, C] or [N].
    """
    x = torch.where(valid[:, :, None], x, 0)
    if level == "token":
        return x
    return x.sum(dim=2) if level == "action" else x.sum(dim=(1, 2))


def spread_weight(weight: Tensor, level: LogprobLevel, action_dims: int) -> Tensor:
    """The weight [N, C] of executed actions as weight per ratio; the sum is kept at every level.

    token: [N, C, A], shared equally by the numbers of an action; action: [N, C]; chunk: [N].
    """
    if level == "token":
        return (weight / action_dims)[:, :, None].expand(-1, -1, action_dims)
    return weight if level == "action" else weight.sum(dim=1)


def spread_advantage(advantage: Tensor, level: LogprobLevel) -> Tensor:
    """The advantage [N, K] shaped to broadcast against the ratios of a level.

    K = 1 (chunk level) or C (action level); ratios of whole chunks need K = 1.
    """
    if level == "token":
        return advantage[:, :, None]
    if level == "action":
        return advantage
    assert advantage.shape[1] == 1, f"chunk ratios need one advantage, got {advantage.shape[1]}"
    return advantage[:, 0]


def kl(logprob: Tensor, other: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Entry-wise estimate of KL(p || q) from samples of p, scored by p (logprob) and q (other).

    With x = other - logprob: k1 = -x, unbiased and of either sign; k2 = x²/2, biased, of small
    variance; k3 = exp(x) - 1 - x, unbiased and never negative (x limited to ±20 to stay finite).
    Source: http://joschu.net/blog/kl-approx.html
    """
    x = other - logprob
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x**2 / 2
    x = x.clamp(-20, 20)
    return x.exp() - 1 - x


def variance_sums(target: Tensor, prediction: Tensor, mask: Tensor) -> Tensor:
    """[5] float64 sufficient statistics of `explained_variance`; add them over batches and ranks.

    Count, sums of target and of target - prediction, sums of their squares, where mask is true.
    """
    y = torch.where(mask, target.double(), 0)
    error = torch.where(mask, target.double() - prediction.double(), 0)
    count = mask.sum().double()
    return torch.stack([count, y.sum(), error.sum(), (y**2).sum(), (error**2).sum()])


def explained_variance(sums: Tensor) -> tuple[Tensor, Tensor]:
    """1 - Var(target - prediction) / Var(target) as (numerator, denominator).

    (0, 0) when there are fewer than two entries or the target is constant (up to rounding).
    """
    count, y, error, y_squares, error_squares = sums.unbind()
    n = count.clamp(min=1)
    var_y = y_squares / n - (y / n) ** 2
    var_error = error_squares / n - (error / n) ** 2
    defined = (count > 1) & (var_y > 1e-12 * y_squares / n)
    return torch.where(defined, var_y - var_error, 0), torch.where(defined, var_y, 0)
