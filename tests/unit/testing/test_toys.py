"""What the toys promise, by hand."""

import math

import pytest
import torch

from vlarl.algos import grpo
from vlarl.batch import Observation
from vlarl.episode import Episode
from vlarl.errors import RunFailed
from vlarl.noise import stream
from vlarl.rollout.collect import collect
from vlarl.rollout.plan import train_plan
from vlarl.specs import match
from vlarl.testing import (
    FlowConfig,
    FlowPolicy,
    ReachConfig,
    ReachEnv,
    TokenConfig,
    TokenPolicy,
    learning_curve,
    made_up_observation,
    made_up_rollout,
    part_of,
    reach,
)

RIGHT = Episode(task="reach-right", trial=8, index=0)  # the goal lies 0.4 to the right


def start(*episodes, max_steps=12):
    env = ReachEnv(ReachConfig(max_steps=max_steps), num_slots=len(episodes))
    env.reset(range(len(episodes)), episodes)
    env.recv(len(episodes))
    return env


def chunk_of(x, y, n=1):
    return torch.tensor([x, y]).expand(n, 8, 2)


def test_walking_to_the_goal_terminates_with_one_reward():
    env = start(RIGHT)
    env.send([0], chunk_of(1.0, 0.0))
    _, step = env.recv(1)
    # 0.5 -> 0.8 in three steps; the goal at 0.898, 0.539 is then 0.106 away.
    assert step.terminated[0].nonzero().flatten().tolist() == [2]
    assert step.reward[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert not step.truncated.any()


def test_walking_away_is_cut_at_the_horizon():
    env = start(RIGHT)
    env.send([0], chunk_of(-1.0, 0.0))
    assert not env.recv(1)[1].done.any()
    env.send([0], chunk_of(-1.0, 0.0))
    _, step = env.recv(1)
    assert step.truncated[0].nonzero().flatten().tolist() == [3]  # the twelfth action
    assert not step.reward.any()


def test_slots_do_not_touch_each_other():
    left = Episode(task="reach-left", trial=8, index=1)
    env = start(RIGHT, left)
    env.send([0, 1], torch.cat([chunk_of(1.0, 0.0), chunk_of(1.0, 0.0)]))
    slots, step = env.recv(2)
    assert slots == [0, 1]
    assert step.done.tolist() == [True, False]


def test_a_non_finite_action_is_refused_and_the_episode_goes_on():
    env = start(RIGHT)
    action = chunk_of(1.0, 0.0).clone()
    action[0, 1, 0] = float("nan")
    with pytest.raises(RunFailed, match=r"non-finite actions in .*trial=8"):
        env.send([0], action)
    env.send([0], chunk_of(1.0, 0.0))
    assert env.recv(1)[1].terminated.any()


def test_recording_shows_the_start_and_every_executed_action():
    env = ReachEnv(ReachConfig(), num_slots=2)
    env.reset([0, 1], [RIGHT, Episode(task="reach-left", trial=8, index=1, record=True)])
    assert [len(f) for f in env.recv(2)[1].frames] == [0, 1]
    env.send([0, 1], torch.cat([chunk_of(-1.0, 0.0), chunk_of(-1.0, 0.0)]))
    assert [len(f) for f in env.recv(2)[1].frames] == [0, 3]


def test_training_and_held_out_goals_differ():
    cfg = ReachConfig()
    train, held_out = reach.trials(cfg, "train"), reach.trials(cfg, "eval")
    assert all(not set(train[task]) & set(held_out[task]) for task in train)


def test_toys_fit_the_toy_env():
    env = reach.spec(ReachConfig())
    for policy in (TokenPolicy(TokenConfig()), FlowPolicy(FlowConfig())):
        assert match(policy.spec, env) == []


def test_tokens_are_sampled_as_often_as_their_log_prob_says():
    policy = TokenPolicy(TokenConfig(chunk=1, dims=1))
    with torch.no_grad():
        policy.module.get_parameter("actor.2.bias").copy_(torch.tensor([0.0, 1.0, -1.0]))
    n = 4000
    obs = made_up_observation(policy.spec, n=1).select([0] * n)
    keys = torch.tensor([stream("draw", i) for i in range(n)])
    step = policy.act(obs, temperature=1.6, keys=keys)
    for token in range(3):
        chosen = step.trace["token"].flatten() == token
        probability = step.logprob.flatten()[chosen][0].exp().item()
        # five standard deviations
        margin = 5 * math.sqrt(probability * (1 - probability) / n)
        assert chosen.float().mean().item() == pytest.approx(probability, abs=margin)


def test_a_flow_log_prob_is_the_sum_of_its_gaussian_steps():
    policy = FlowPolicy(FlowConfig(chunk=1, dims=1, steps=3, noisy_steps=2, sigma=0.4))
    for name, parameter in policy.module.named_parameters():
        if name != "actor.log_sigma":
            torch.nn.init.zeros_(parameter)  # no velocity: every jump is pure noise
    obs = made_up_observation(policy.spec, n=6)
    keys = torch.tensor([stream("flow", i) for i in range(6)])
    step = policy.act(obs, temperature=1.5, keys=keys)
    jumps = step.trace["chain"].diff(dim=1)[:, :, 0, 0]
    for i in range(6):
        noisy = step.trace["step"][i].tolist()
        assert [k for k in range(3) if jumps[i, k] != 0] == noisy
        density = torch.distributions.Normal(0.0, 0.4 * 1.5)
        expected = density.log_prob(jumps[i, noisy]).sum().item()
        assert step.logprob[i].item() == pytest.approx(expected, rel=1e-5)


def test_rows_take_different_noisy_steps():
    policy = FlowPolicy(FlowConfig())
    keys = torch.tensor([stream("flow", i) for i in range(20)])
    obs = made_up_observation(policy.spec, n=20)
    steps = policy.act(obs, temperature=1.0, keys=keys).trace["step"]
    assert {tuple(row) for row in steps.tolist()} == {(0, 1), (0, 2), (1, 2)}


def test_the_flow_policy_learns_through_the_same_seams():
    policy = FlowPolicy(FlowConfig())
    rates = learning_curve(grpo.ALGORITHM, grpo.GrpoConfig(), policy, iterations=30)
    assert sum(rates[-5:]) / 5 > sum(rates[:5]) / 5 + 0.3


def test_a_collected_rollout_scores_to_ratio_one():
    env = ReachEnv(ReachConfig(), num_slots=5)
    plan = train_plan(
        reach.trials(ReachConfig(), "train"), episodes=16, group_size=4, seed=0, step=0
    )
    for policy in (TokenPolicy(TokenConfig()), FlowPolicy(FlowConfig())):
        rollout = collect(env, policy, plan, temperature=1.3)
        scored = policy.evaluate(rollout.obs, rollout.trace, temperature=rollout.temperature)
        torch.testing.assert_close(scored.logprob.detach(), rollout.logprob, rtol=0, atol=1e-5)


def test_part_of_a_rollout_keeps_decisions_with_their_episodes():
    rollout = made_up_rollout(episodes=8, value_width=1)
    part = part_of(rollout, [5, 2])
    for new, old in enumerate([5, 2]):
        assert torch.equal(part.logprob[part.b == new], rollout.logprob[rollout.b == old])
        num_t = len(part.reward)
        assert torch.equal(part.reward[:, new], rollout.reward[:num_t, old])
        assert not rollout.valid[num_t:, old].any()
    assert isinstance(part.obs, Observation)
    assert len(part.obs) == part.num_decisions
