"""GRPO: an episode is judged against the other episodes that started from the same state.

Source: arXiv:2402.03300; for embodied policies arXiv:2509.09674 and the public recipes of RLinf.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vlarl.algos.functional import group_zscore, groups_between, groups_vary
from vlarl.algos.surrogate import SurrogateSection, episode_weight, policy_loss
from vlarl.batch import Credit, LossBatch, LossOutput, PolicyEval, Rollout
from vlarl.config.schema import Float, Int
from vlarl.interfaces import Algorithm, AllSum


class GrpoConfig(SurrogateSection):
    """Group-relative policy optimisation. Needs no value head."""

    name: Literal["grpo"] = "grpo"
    """Registered name of the algorithm."""
    group_size: Annotated[Int, Field(ge=2)] = 8
    """Episodes that share a start state and are compared with each other."""
    filter_low: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Groups with a success rate below this are left out; 0 keeps all."""
    filter_high: Annotated[Float, Field(ge=0, le=1)] = 1.0
    """Groups with a success rate above this are left out; 1 keeps all."""
    denominator: Literal["kept", "all"] = "kept"
    """Episodes the loss is averaged over. kept: filtering leaves the size of a step alone; all: it
    shrinks with the share of filtered groups, as in the published recipes of RLinf."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> GrpoConfig:
        if self.filter_low > self.filter_high:
            raise ValueError(
                f"filter_low ({self.filter_low}) is above filter_high ({self.filter_high})"
            )
        return self

    @property
    def episodes_multiple(self) -> int:
        """The group size."""
        return self.group_size


def credit(rollout: Rollout, cfg: GrpoConfig, all_sum: AllSum) -> Credit:
    """The z-score of each episode's return in its group, the same at each of its decisions (K = 1).

    Groups lie whole on one rank, so only the denominator is communicated.
    """
    _check_groups(rollout, cfg.group_size)
    size, num_t = cfg.group_size, len(rollout.reward)
    score = (rollout.reward.double() * rollout.valid).sum(dim=(0, 2))
    varied = groups_vary(score, size)
    kept = groups_between(rollout.success, size, cfg.filter_low, cfg.filter_high)
    kept = kept.repeat_interleave(size)
    valid_chunk = rollout.valid.any(dim=2)
    advantage = (group_zscore(score, size) * valid_chunk).float()
    return Credit(
        advantage=advantage.view(num_t, -1, 1),
        weight=episode_weight(rollout.valid, kept, all_sum, keep_filtered=cfg.denominator == "all"),
        returns=None,
        kept=kept,
        metrics={
            "train/actor/kept_fraction": _share(kept),
            "train/actor/varied_fraction": _share(varied),
        },
    )


def loss(evaluation: PolicyEval, batch: LossBatch, cfg: GrpoConfig) -> LossOutput:
    """The clipped policy loss."""
    return policy_loss(evaluation, batch, cfg)


def _share(flags: Tensor) -> tuple[Tensor, Tensor]:
    return flags.sum().double(), torch.tensor(float(len(flags)), dtype=torch.float64)


def _check_groups(rollout: Rollout, size: int) -> None:
    """A baseline over episodes from different starts is silently wrong, so look at the plan."""
    assert len(rollout.episodes) % size == 0, (len(rollout.episodes), size)
    for first in range(0, len(rollout.episodes), size):
        members = rollout.episodes[first : first + size]
        starts = {(e.group, e.task, e.trial) for e in members}
        assert len(starts) == 1, f"a group of {size} mixes {sorted(starts)}"
        assert members[0].group >= 0, f"episode {members[0].index} is in no group"


Config = GrpoConfig
ALGORITHM = Algorithm(name="grpo", needs_value=False, needs_groups=True, credit=credit, loss=loss)
