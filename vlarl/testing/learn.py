"""A minimal training loop, to see whether an algorithm and a policy learn anything at all."""

from __future__ import annotations

import torch

from vlarl.config.schema import AlgoSection
from vlarl.interfaces import Algorithm, Policy
from vlarl.rollout.collect import collect
from vlarl.rollout.plan import train_plan
from vlarl.testing.reach import ReachConfig, ReachEnv, trials
from vlarl.testing.rollouts import alone, loss_batch
from vlarl.testing.token_policy import TokenConfig, TokenPolicy


def learning_curve(
    algorithm: Algorithm,
    cfg: AlgoSection,
    policy: Policy | None = None,
    *,
    iterations: int = 40,
    lr: float = 0.01,
    seed: int = 0,
) -> list[float]:
    """Success rate of each iteration of a minimal training loop on ReachEnv.

    64 episodes, rounded up to whole groups, and two optimizer steps per iteration.
    """
    env_cfg = ReachConfig()
    env = ReachEnv(env_cfg, num_slots=64)
    if policy is None:
        value = "chunk" if cfg.value_width(env_cfg.chunk) == 1 else "action"
        toy = TokenConfig.model_validate({"value": value, "seed": seed})
        policy = TokenPolicy(toy, needs_value=algorithm.needs_value)
    optimizer = torch.optim.Adam(policy.module.parameters(), lr=lr)
    multiple = cfg.episodes_multiple
    rates = []
    for step in range(iterations):
        plan = train_plan(
            trials(env_cfg, "train"),
            episodes=-(-64 // multiple) * multiple,
            group_size=multiple,
            seed=seed,
            step=step,
        )
        rollout = collect(env, policy, plan, temperature=1.0, noise=(seed, "act", step))
        assert rollout is not None
        credit = algorithm.credit(rollout, cfg, alone)
        batch = loss_batch(rollout, credit, torch.arange(rollout.num_decisions))
        for _ in range(2):
            evaluation = policy.evaluate(rollout.obs, rollout.trace, temperature=1.0)
            optimizer.zero_grad()
            algorithm.loss(evaluation, batch, cfg).loss.backward()
            optimizer.step()
        rates.append(float(rollout.success.float().mean()))
    return rates
