"""One iteration's experience: ragged episodes in, one padded Rollout out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vlarl.batch import Rollout
from vlarl.episode import Episode
from vlarl.interfaces import Policy, VecEnv
from vlarl.rollout.play import Decisions, Outcome, play


def collect(
    env: VecEnv,
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    temperature: float,
    noise: Sequence[object] = (),
    deterministic: bool = True,
    stages: int = 1,
    should_stop: Callable[[], bool] | None = None,
    on_episode: Callable[[Outcome], None] | None = None,
) -> Rollout | None:
    """Play all episodes and return them in plan order; None when `should_stop` cut it short.

    Arguments as in `play`. on_episode is called as each episode ends.
    """
    store = Decisions()
    outcomes: dict[int, Outcome] = {}
    for outcome in play(
        env,
        policy,
        episodes,
        temperature=temperature,
        noise=noise,
        deterministic=deterministic,
        stages=stages,
        store=store,
        should_stop=should_stop,
    ):
        outcomes[outcome.episode.index] = outcome
        if on_episode is not None:
            on_episode(outcome)
    if len(outcomes) < len(episodes):
        return None
    return assemble([outcomes[e.index] for e in episodes], store, policy, temperature)


def assemble(
    outcomes: Sequence[Outcome], store: Decisions, policy: Policy, temperature: float
) -> Rollout:
    """Pad episodes of different lengths to [T, B, C]; order decisions by episode, then time.

    The store's decisions are those of the outcomes; their observations are taken out of it.
    """
    lengths = [len(o.rows) for o in outcomes]
    num_t, num_b = max(lengths, default=0), len(outcomes)
    order = torch.tensor([row for o in outcomes for row in o.rows], dtype=torch.long)
    b = torch.repeat_interleave(torch.arange(num_b), torch.tensor(lengths, dtype=torch.long))
    t = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0).long()

    reward, terminated, truncated = (
        _pad([getattr(o, name) for o in outcomes], t, b, (num_t, num_b, policy.spec.chunk))
        for name in ("reward", "terminated", "truncated")
    )
    done = (terminated | truncated).flatten(2).transpose(0, 1).reshape(num_b, -1)
    played = torch.zeros(num_t, num_b, dtype=torch.bool)
    played[t, b] = True
    # True up to and including the first done: nothing before this step has ended the episode.
    before = done.cumsum(dim=1) - done.long()
    valid = (before == 0).view(num_b, num_t, -1).transpose(0, 1) & played[:, :, None]

    return Rollout(
        obs=store.take_obs(order),
        trace={
            name: torch.cat([s.trace[name] for s in store.steps])[order]
            for name in store.steps[0].trace
        },
        logprob=torch.cat([s.logprob for s in store.steps])[order],
        t=t,
        b=b,
        reward=reward,
        valid=valid,
        terminated=terminated,
        truncated=truncated,
        value=_values(outcomes, store, order, t, b, num_t),
        group=torch.tensor([o.episode.group for o in outcomes]),
        episodes=tuple(o.episode for o in outcomes),
        num_clipped=torch.tensor([o.num_clipped for o in outcomes]),
        diverged=torch.tensor([o.diverged for o in outcomes]),
        temperature=temperature,
    )


def _pad(ragged: list[Tensor], t: Tensor, b: Tensor, shape: tuple[int, int, int]) -> Tensor:
    flat = torch.cat(ragged)
    padded = flat.new_zeros(shape)
    padded[t, b] = flat
    return padded


def _values(
    outcomes: Sequence[Outcome], store: Decisions, order: Tensor, t: Tensor, b: Tensor, num_t: int
) -> Tensor | None:
    """[T + 1, B, V]: V before each decision, and V(last observation) where the horizon cut."""
    rows = [s.value for s in store.steps if s.value is not None]
    if not rows:
        return None
    flat = torch.cat(rows)[order]
    value = flat.new_zeros(num_t + 1, len(outcomes), flat.shape[1])
    value[t, b] = flat
    for i, outcome in enumerate(outcomes):
        if outcome.last_value is not None:
            value[len(outcome.rows), i] = outcome.last_value
    return value
