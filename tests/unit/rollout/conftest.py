"""Toys whose every step can be worked out by hand, and toys that count."""

from dataclasses import replace

import pytest
import torch

from vlarl.batch import PolicyStep
from vlarl.rollout.collect import collect
from vlarl.testing import ReachConfig, ReachEnv, TokenConfig, TokenPolicy


class Walker(TokenPolicy):
    """Goes the same way at every step; its value is the column the hand is seen in, 0 to 15."""

    def __init__(self, *way: float) -> None:
        super().__init__(TokenConfig(chunk=2), needs_value=True)
        self.way = torch.tensor(way)
        self.acted: list[int] = []
        self.valued: list[int] = []

    def act(self, obs, *, temperature, keys=None):
        self.acted.append(len(obs))
        shape = (len(obs), 2, 2)
        return PolicyStep(
            action=self.way.expand(shape).clone(),
            logprob=torch.zeros(shape),
            value=self._value(obs),
            trace={},
        )

    def value(self, obs):
        self.valued.append(len(obs))
        return self._value(obs)

    def _value(self, obs):
        red = obs.images["top"][..., 0].float()
        return red.amax(dim=1).argmax(dim=1, keepdim=True).float()


class Straggler(ReachEnv):
    """Answers as few slots as it may, picked at random, and counts what it was sent."""

    def __init__(self, cfg, *, num_slots, seed=0):
        super().__init__(cfg, num_slots=num_slots)
        self.random = torch.Generator().manual_seed(seed)
        self.sent = 0
        self.started = []

    def reset(self, slots, episodes):
        self.started += episodes
        super().reset(slots, episodes)

    def send(self, slots, action):
        self.sent += 1
        super().send(slots, action)

    def recv(self, min_slots, among=None):
        if among is None:
            order = torch.randperm(len(self._under_way), generator=self.random)
            among = [sorted(self._under_way)[i] for i in order[:min_slots]]
        return super().recv(min_slots, among)


class Unstable(ReachEnv):
    """Its physics break down at the first action of every episode."""

    def recv(self, min_slots, among=None):
        slots, step = super().recv(min_slots, among)
        broken = ~step.first
        for slot, over in zip(slots, broken.tolist(), strict=True):
            self._over[slot] |= over
        truncated = torch.zeros_like(step.truncated)
        truncated[broken, 0] = True
        none = torch.zeros_like(truncated)
        return slots, replace(
            step, reward=none.float(), terminated=none, truncated=truncated, diverged=broken
        )


@pytest.fixture
def unstable():
    """An env with two slots in which every episode diverges at once."""
    return Unstable(ReachConfig(chunk=2), num_slots=2)


@pytest.fixture
def walker():
    """walker(x, y): a policy that takes this step always."""
    return Walker


@pytest.fixture
def straggler():
    """straggler(num_slots=5): an env that answers late."""

    def make(num_slots=5, *, seed=0):
        return Straggler(ReachConfig(chunk=2), num_slots=num_slots, seed=seed)

    return make


@pytest.fixture
def gather():
    """gather(plan, num_slots=.., temperature=.., ...) -> Rollout, with the token policy."""

    def run(plan, *, num_slots=16, env=None, policy=None, **other):
        env = env or ReachEnv(ReachConfig(chunk=2), num_slots=num_slots)
        policy = policy or TokenPolicy(TokenConfig(chunk=2), needs_value=True)
        return collect(env, policy, plan, **{"temperature": 1.0, "noise": (0, "act", 0)} | other)

    return run
