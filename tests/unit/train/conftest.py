"""A collected rollout with its credit, and ranks that are threads."""

from dataclasses import dataclass

import pytest
import torch

from vlarl.algos import grpo, ppo
from vlarl.distributed.world import World
from vlarl.rollout.collect import collect
from vlarl.rollout.plan import train_plan
from vlarl.testing import ReachConfig, ReachEnv, TokenConfig, TokenPolicy, alone, reach
from vlarl.testing.rollouts import in_threads

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


@dataclass
class Judged:
    """A policy, what it did, and what an algorithm makes of it."""

    algo: object
    cfg: object
    rollout: object
    credit: object

    def policy(self, seed=1):
        """The collecting policy (seed 0) or another one: off-policy, so that ratios differ."""
        config = TokenConfig(chunk=2, hidden=16, seed=seed)
        return TokenPolicy(config, needs_value=self.algo.needs_value)


@pytest.fixture
def world():
    """The world of a single rank."""
    return ALONE


@pytest.fixture
def judged():
    """judged("ppo"): 24 episodes of the toys in groups of 4, some of which succeed."""

    def make(name="grpo", **fields):
        module = {"grpo": grpo, "ppo": ppo}[name]
        fields = {"group_size": 4} | fields if name == "grpo" else fields
        cfg, algo = module.Config(**fields), module.ALGORITHM
        made = Judged(algo, cfg, None, None)
        env_cfg = ReachConfig(chunk=2)
        plan = train_plan(reach.trials(env_cfg, "train"), episodes=24, group_size=4, seed=0, step=0)
        env = ReachEnv(env_cfg, num_slots=24)
        made.rollout = collect(env, made.policy(0), plan, temperature=1.0, noise=(0, "act", 0))
        made.credit = algo.credit(made.rollout, cfg, alone)
        return made

    return make


class _Rank:
    """A World of threads: what update and measure need of one."""

    def __init__(self, rank, size, gather):
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self.all_gather_object = gather

    def all_sum(self, x):
        return torch.stack(self.all_gather_object(x)).sum(dim=0)

    def all_max(self, x):
        return torch.stack(self.all_gather_object(x)).amax(dim=0)


@pytest.fixture
def ranks():
    """ranks(2, work) -> [work(world) of each rank]; ranks meet in the collectives."""

    def run(size, work):
        return in_threads(size, lambda rank, gather: work(_Rank(rank, size, gather)))

    return run
