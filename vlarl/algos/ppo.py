"""PPO with generalised advantage estimation and a value head.

Source: arXiv:1707.06347 and arXiv:1506.02438.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vlarl.algos.functional import (
    clipped_value_loss,
    explained_variance,
    gae,
    standardize,
    variance_sums,
)
from vlarl.algos.surrogate import SurrogateSection, episode_weight, policy_loss
from vlarl.batch import Credit, LossBatch, LossOutput, PolicyEval, Rollout
from vlarl.config.schema import Bool, Float
from vlarl.errors import ConfigError
from vlarl.interfaces import Algorithm, AllSum


class PpoConfig(SurrogateSection):
    """Proximal policy optimisation. Needs a policy with a value head."""

    name: Literal["ppo"] = "ppo"
    """Registered name of the algorithm."""
    clip_high: Annotated[Float, Field(gt=0)] = 0.2
    """Ratios above 1 + clip_high earn nothing more by rising further."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """What one row of returns and advantages is: a chunk (its rewards are summed; one value per
    decision) or an action (needs a value head as wide as the chunk)."""
    gamma: Annotated[Float, Field(ge=0, le=1)] = 0.99
    """Discount per row: per chunk or per action, see reward_level."""
    gae_lambda: Annotated[Float, Field(ge=0, le=1)] = 0.95
    """0 trusts the value head after one row, 1 uses the whole observed return."""
    normalize_advantage: Bool = True
    """Shift and scale advantages to mean 0 and standard deviation 1 over all rows of all ranks."""
    value_clip: Annotated[Float, Field(gt=0)] | None = 0.2
    """Farther than this from its value at collection a prediction earns nothing by moving on; in
    units of return. none switches it off."""
    huber_delta: Annotated[Float, Field(gt=0)] = 10.0
    """Value errors above this count linearly; in units of return."""
    value_coef: Annotated[Float, Field(gt=0)] = 1.0
    """Weight of the value loss beside the policy loss."""

    @model_validator(mode="after")
    def _levels_fit(self) -> PpoConfig:
        if self.reward_level == "action" and self.logprob_level == "chunk":
            raise ValueError(
                "logprob_level 'chunk' has one ratio per decision and needs reward_level 'chunk'"
            )
        return self

    def value_width(self, chunk: int) -> int:
        """1 at chunk level, `chunk` at action level."""
        return 1 if self.reward_level == "chunk" else chunk


def credit(rollout: Rollout, cfg: PpoConfig, all_sum: AllSum) -> Credit:
    """Advantages by GAE and returns = advantage + value, one row per chunk or per action (K = V).

    Nothing flows back from after the end of an episode. Its last row looks ahead to 0 when it
    terminated and to V(last observation) when the horizon cut it.

    Raises:
        ConfigError: when the rollout has no values or their width is not that of reward_level.
    """
    value = _checked_value(rollout, cfg)
    num_t, num_b, width = len(rollout.reward), len(rollout.episodes), value.shape[2]
    reward = rollout.reward * rollout.valid
    valid, terminated, truncated = rollout.valid, rollout.terminated, rollout.truncated
    if width == 1:
        reward = reward.sum(dim=2, keepdim=True)
        valid, terminated, truncated = (
            flag.any(dim=2, keepdim=True) for flag in (valid, terminated, truncated)
        )
    before = _rows(value[:-1])
    # The row after an episode's last decision belongs to the last observation of that episode.
    last_seen = _rows(value[1:, :, :1].expand(-1, -1, width))
    following = torch.cat([before[1:], value[-1:, :, 0]])
    after = torch.where(_rows(truncated), last_seen, following)
    after = torch.where(_rows(terminated), 0, after)

    rows = gae(
        _rows(reward),
        before,
        after,
        _rows(terminated | truncated),
        gamma=cfg.gamma,
        gae_lambda=cfg.gae_lambda,
    )
    advantage = torch.where(valid, rows.view(num_t, width, num_b).transpose(1, 2), 0)
    returns = torch.where(valid, advantage + value[:-1], 0)
    ev = explained_variance(all_sum(variance_sums(returns, value[:-1], valid)))
    if cfg.normalize_advantage:
        advantage = standardize(advantage, valid, all_sum)
    kept = torch.ones(num_b, dtype=torch.bool, device=value.device)
    return Credit(
        advantage=advantage,
        weight=episode_weight(rollout.valid, kept, all_sum, keep_filtered=False),
        returns=returns,
        kept=kept,
        metrics={"train/critic/explained_variance": ev},
    )


def loss(evaluation: PolicyEval, batch: LossBatch, cfg: PpoConfig) -> LossOutput:
    """The clipped policy loss plus value_coef times the clipped value loss, weighted alike."""
    assert evaluation.value is not None, "the policy gave no value"
    assert batch.value is not None, "the batch holds no values"
    assert batch.returns is not None, "the batch holds no returns"
    policy = policy_loss(evaluation, batch, cfg)
    by_action = evaluation.value.shape[1] == batch.weight.shape[1]
    weight = batch.weight if by_action else batch.weight.sum(dim=1, keepdim=True)
    error, is_clipped = clipped_value_loss(
        evaluation.value,
        batch.value,
        batch.returns,
        clip=cfg.value_clip,
        huber_delta=cfg.huber_delta,
    )
    value_loss = torch.where(weight > 0, weight * error, 0).sum()
    total_weight = batch.weight.sum()
    loss = policy.loss + cfg.value_coef * value_loss
    sums = {
        "train/loss": loss,
        "train/critic/value_loss": value_loss,
        "train/critic/value_clip_ratio": (weight * is_clipped).sum(),
    }
    metrics = {name: (value.detach(), total_weight) for name, value in sums.items()}
    return LossOutput(loss=loss, metrics={**policy.metrics, **metrics})


def _rows(x: Tensor) -> Tensor:
    """[T, B, K] -> [T * K, B], rows in time order."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def _checked_value(rollout: Rollout, cfg: PpoConfig) -> Tensor:
    width = cfg.value_width(rollout.reward.shape[2])
    got = 0 if rollout.value is None else rollout.value.shape[2]
    if rollout.value is None or got != width:
        raise ConfigError(
            f"algo.reward_level is '{cfg.reward_level}', which needs {width} values per decision, "
            f"but the policy gives {got}; set algo.reward_level or the policy's value head to match"
        )
    return rollout.value


Config = PpoConfig
ALGORITHM = Algorithm(name="ppo", needs_value=True, needs_groups=False, credit=credit, loss=loss)
