"""Every registered plug-in, and the toys, keep the contracts of vlarl.testing."""

import functools
from pathlib import Path

import pytest
import torch

from vlarl import registry
from vlarl.algos.grpo import GrpoConfig
from vlarl.algos.ppo import PpoConfig
from vlarl.episode import Episode
from vlarl.models.openvla_oft.tiny import TinySizes, init_tiny
from vlarl.testing import (
    check_algorithm,
    check_env,
    check_policy,
    flow_policy,
    made_up_observation,
    reach,
    token_policy,
)

CPU = torch.device("cpu")

# Settings that walk through the branches of each algorithm; every registered one must be here.
ALGORITHMS = {
    "grpo": [
        GrpoConfig(),
        GrpoConfig(logprob_level="action", filter_low=0.1, filter_high=0.9),
        GrpoConfig(logprob_level="chunk", group_size=4, denominator="all", filter_high=0.8),
    ],
    "ppo": [
        PpoConfig(),
        PpoConfig(reward_level="action", logprob_level="action", dual_clip=3.0),
        PpoConfig(logprob_level="chunk", entropy_bonus=0.001),
    ],
}
ALGORITHM_CASES = [(name, cfg) for name, cfgs in ALGORITHMS.items() for cfg in cfgs]


@pytest.mark.parametrize(
    ("name", "cfg"),
    ALGORITHM_CASES,
    ids=[f"{name}-{cfg.logprob_level}" for name, cfg in ALGORITHM_CASES],
)
def test_algorithm(name, cfg):
    check_algorithm(registry.module("algo", name).ALGORITHM, cfg)


def metaworld():
    module = registry.module("env", "metaworld")
    cfg = module.Config(
        tasks=("button-press-topdown-v3", "reach-v3"),
        frame_size=64,
        video_size=64,
        render_quality="fast",
        settle_steps=3,
        max_steps=20,
    )
    return module, cfg


def libero():
    module = registry.module("env", "libero")
    cfg = module.Config(
        tasks=("pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate",),
        eval_trials="40-49",
        cameras=("agentview", "wrist"),
        frame_size=64,
        video_size=64,
        render_quality="fast",
        settle_steps=2,
        max_steps=20,
    )
    return module, cfg


ENVS = {
    "metaworld": metaworld,
    "libero": libero,
    "reach": lambda: (reach, reach.ReachConfig()),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "reach" else pytest.mark.sim) for n in ENVS]
)
def test_env(name):
    module, cfg = ENVS[name]()
    train, held_out = module.trials(cfg, "train"), module.trials(cfg, "eval")
    assert set(train) == set(held_out) == set(module.spec(cfg).tasks)
    assert not any(set(train[task]) & set(held_out[task]) for task in train)
    starts = [(task, train[task][k]) for k in (1, 2) for task in list(train)[:2]][:2]
    episodes = [Episode(task=t, trial=i, index=k) for k, (t, i) in enumerate(starts)]

    def make(num_slots):
        return module.make(cfg, num_slots=num_slots, final_frames=True)

    check_env(make, episodes, chunk=8)


def openvla_oft(folder: Path, overrides):
    module = registry.module("policy", "openvla_oft")
    checkpoint = folder / "checkpoint"
    quantiles = {"q01": [-1.0] * 4, "q99": [1.0] * 4, "mask": [True] * 4}
    extremes = {"min": [-1.0] * 4, "max": [1.0] * 4, "mean": [0.0] * 4, "std": [1.0] * 4}
    init_tiny(
        checkpoint,
        prompts=["push the button", "push the red button from above slowly"],
        statistics={"action": {**quantiles, **extremes}},
        key="toy",
        action_dims=4,
        image_size=28,
        sizes=TinySizes(
            hidden=32,
            mlp=48,
            layers=2,
            heads=2,
            vision_dim=16,
            vision_depth=1,
            vision_heads=2,
            vision_mlp=24,
        ),
    )
    return module, module.Config(checkpoint=str(checkpoint), **overrides)


POLICIES = {
    "openvla_oft": openvla_oft,
    "token_toy": lambda _, overrides: (token_policy, token_policy.Config(**overrides)),
    "flow_toy": lambda _, overrides: (flow_policy, flow_policy.Config(**overrides)),
}


@pytest.mark.parametrize("value", [None, "chunk", "action"])
@pytest.mark.parametrize("name", POLICIES)
def test_policy(name, value, tmp_path):
    module, cfg = POLICIES[name](tmp_path, {} if value is None else {"value": value})
    load = functools.partial(module.load, device=CPU, needs_value=value is not None)
    policy = load(cfg)
    assert policy.spec == module.spec(cfg, needs_value=value is not None)
    check_policy(
        policy,
        made_up_observation(policy.spec),
        folder=tmp_path / "saved",
        reload=lambda folder: load(cfg.model_copy(update={"checkpoint": str(folder)})),
    )


def test_everything_registered_is_checked():
    assert set(registry.names("algo")) <= set(ALGORITHMS)
    assert set(registry.names("env")) <= set(ENVS)
    assert set(registry.names("policy")) <= set(POLICIES)
