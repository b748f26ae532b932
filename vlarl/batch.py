"""The types that travel between env, policy, algorithm and trainer.

Legend, used in all docstrings: T decisions · B episodes · N flattened decisions (only real ones) ·
n slots in one message · C actions per chunk · A action dims · S state dims · V value width (1 or C)
· H W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vlarl.episode import Episode
from vlarl.errors import RunFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a policy sees. Raw: never normalised, cropped or tokenised.

    images: camera name -> [n, H, W, 3] uint8, upright, in the order the policy reads them.
    state: [n, S] float32 (S may be 0). instruction: n strings.
    """

    images: Mapping[str, Tensor]
    state: Tensor
    instruction: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instruction)

    def select(self, rows: Sequence[int] | Tensor) -> Observation:
        """The given rows, in the given order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return Observation(
            images={name: frame[index] for name, frame in self.images.items()},
            state=self.state[index],
            instruction=tuple(self.instruction[i] for i in index.tolist()),
        )

    def to(self, device: torch.device) -> Observation:
        """The same observation with its tensors on `device`."""
        return replace(
            self,
            images={
                name: frame.to(device, non_blocking=True) for name, frame in self.images.items()
            },
            state=self.state.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStep:
    """What a policy decided, without gradient.

    action: [n, C, A] float32 in the canonical units of the policy's ActionSpec.
    logprob: [n, C, A] float32 of what was sampled, at the temperature it was sampled with.
    value: [n, V] float32, or None without a value head.
    trace: what was *sampled* ([n, ...] each): token ids, or the denoising chain. Opaque to everyone
    but the policy.
    """

    action: Tensor
    logprob: Tensor
    value: Tensor | None
    trace: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEval:
    """Stored decisions seen through the current weights; carries gradient.

    logprob, entropy: [N, C, A] float32. value: [N, V] float32 or None.
    """

    logprob: Tensor
    entropy: Tensor
    value: Tensor | None


def require_finite(action: Tensor, episodes: Sequence[Episode]) -> None:
    """Raise RunFailed, naming the episode, unless all actions are finite; for `VecEnv.send`.

    action: [n, C, A]. episodes: the n episodes they are for.
    """
    bad = (~action.isfinite()).flatten(1).any(dim=1).tolist()
    if True in bad:
        raise RunFailed(
            f"the policy emitted non-finite actions in {episodes[bad.index(True)]}; its weights or "
            "its input are not finite either"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """The answer of n slots to a reset or to one chunk of actions.

    obs: what to decide on next. Meaningless for slots whose episode ended by termination; for slots
    cut by the horizon it is the true last observation when the env was made with
    `final_frames=True`. reward, terminated, truncated: [n, C]. At most one of the two flags is set,
    at the step that ended the episode; after it the slot is parked: reward 0, flags False. An
    answer to `reset` has zeros everywhere and first=True. num_clipped: [n] int32, how many of the
    executed actions had a component outside the action bounds. diverged: [n] bool, the simulator
    produced non-finite numbers; such an episode is truncated with reward 0. frames: per slot uint8
    [F, H, W, 3], the recorded frames since the last message; None when recording is off.
    """

    obs: Observation
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    first: Tensor
    num_clipped: Tensor
    diverged: Tensor
    frames: tuple[Tensor, ...] | None = None

    @property
    def done(self) -> Tensor:
        """[n] bool: the episode in this slot is over."""
        return (self.terminated | self.truncated).any(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All episodes of one iteration, as this rank played them.

    Per decision, only real ones, ordered by episode then decision:
      obs (N rows), trace ([N, ...]), logprob [N, C, A] float32, t [N] int64, b [N] int64 (position
      in T and B).
    Padded, zero or False outside an episode:
      reward [T, B, C] float32; valid, terminated, truncated [T, B, C] bool. `valid` is True up to
      **and including** the step that ended the episode.
      value: [T + 1, B, V] float32 or None. Row t is V(observation before decision t). The row after
      an episode's last decision holds V(last observation) when the horizon cut it, and 0 otherwise.
    group: [B] int64, groups are contiguous and of equal size; -1 outside of groups. episodes: the B
    episodes. num_clipped: [B] int64, executed actions with a component outside the bounds.
    diverged: [B] bool.
    """

    obs: Observation
    trace: Mapping[str, Tensor]
    logprob: Tensor
    t: Tensor
    b: Tensor
    reward: Tensor
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    value: Tensor | None
    group: Tensor
    episodes: tuple[Episode, ...]
    num_clipped: Tensor
    diverged: Tensor
    temperature: float

    @property
    def num_decisions(self) -> int:
        """N."""
        return len(self.t)

    @property
    def episode_len(self) -> Tensor:
        """[B] int64: executed actions per episode."""
        return self.valid.sum(dim=(0, 2))

    @property
    def success(self) -> Tensor:
        """[B] bool: the episode ended by termination.

        All envs here terminate on success and on nothing else.
        """
        return self.terminated.any(dim=2).any(dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What an algorithm makes of a rollout. All masks, filters and normalisers live in `weight`.

    advantage: [T, B, K] float32, K = C (action level) or 1 (chunk level).
    weight: [T, B, C] float32, zero off `valid`; summed over the *global* rollout it is in [0, 1]:
    exactly 1 unless filtered episodes stay in the denominator.
    returns: [T, B, V] float32, targets of the value head; None without one.
    kept: [B] bool, episodes that were not filtered out.
    metrics: (numerator, denominator) pairs as in LossOutput, known once per rollout; add them over
    ranks.
    """

    advantage: Tensor
    weight: Tensor
    returns: Tensor | None
    kept: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """The stored side of a micro-batch of decisions: what the loss needs besides PolicyEval.

    logprob: [N, C, A] at collection time. advantage: [N, K]. weight: [N, C].
    value: [N, V] at collection time, returns: [N, V]; both None without a value head.
    """

    logprob: Tensor
    advantage: Tensor
    weight: Tensor
    value: Tensor | None
    returns: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A scalar that is *additive* over micro-batches and ranks, and metrics as pairs.

    A pair is (numerator, denominator). A metric's value is sum(numerators) / sum(denominators) over
    all micro-batches and ranks, 0 / 0 = absent: means are exact however the batch was cut.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
