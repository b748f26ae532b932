"""Each contract check goes red for the mistake it is there for, with a message that names it."""

from dataclasses import replace

import pytest
import torch

from vlarl.algos import grpo, ppo
from vlarl.algos.grpo import GrpoConfig
from vlarl.algos.ppo import PpoConfig
from vlarl.batch import LossOutput
from vlarl.episode import Episode
from vlarl.testing import (
    ContractBroken,
    FlowConfig,
    FlowPolicy,
    ReachConfig,
    ReachEnv,
    TokenConfig,
    TokenPolicy,
    check_algorithm,
    check_env,
    check_policy,
    made_up_observation,
    on_ranks,
    token_policy,
)


def with_credit(change):
    """GRPO with a changed credit."""

    def credit(rollout, cfg, all_sum):
        return change(grpo.credit(rollout, cfg, all_sum), rollout)

    return replace(grpo.ALGORITHM, credit=credit)


def with_loss(change):
    """GRPO with a changed loss."""

    def loss(evaluation, batch, cfg):
        return change(evaluation, batch, cfg)

    return replace(grpo.ALGORITHM, loss=loss)


def drop_mask(credit, rollout):
    played = rollout.valid.any(dim=2, keepdim=True).expand_as(rollout.valid)
    return replace(credit, weight=played / played.sum())


def ignore_ranks(credit, rollout):
    return replace(credit, weight=credit.weight / credit.weight.sum())


def mean_of_the_micro_batch(evaluation, batch, cfg):
    out = grpo.loss(evaluation, batch, cfg)
    return LossOutput(loss=out.loss / batch.weight.sum())


def scores_what_was_not_executed(evaluation, batch, cfg):
    everything = replace(batch, weight=batch.weight.clamp(min=1e-9))
    return grpo.loss(evaluation, everything, cfg)


def forgets_the_dual_clip(evaluation, batch, cfg):
    return grpo.loss(evaluation, batch, cfg.model_copy(update={"dual_clip": None}))


BROKEN_ALGORITHMS = [
    (with_credit(drop_mask), "not zero where no action was executed"),
    (with_credit(lambda c, r: replace(c, weight=2 * c.weight)), "sums to"),
    (with_credit(lambda c, r: replace(c, advantage=c.advantage.double())), "float64"),
    (with_credit(lambda c, r: replace(c, advantage=c.advantage + 0.1)), "yet the policy gradient"),
    (with_credit(ignore_ranks), "two ranks instead of one"),
    (with_loss(mean_of_the_micro_batch), "a micro-batch of 1 changes the loss"),
    (with_loss(scores_what_was_not_executed), "never executed"),
    (with_loss(forgets_the_dual_clip), "without effect on credit or loss: dual_clip"),
]


@pytest.mark.parametrize(("algorithm", "message"), BROKEN_ALGORITHMS)
def test_a_broken_algorithm_is_caught(algorithm, message):
    with pytest.raises(ContractBroken, match=message):
        check_algorithm(algorithm, GrpoConfig(), learn=False)


@pytest.mark.parametrize(
    ("module", "cfg"), [(grpo, GrpoConfig()), (ppo, PpoConfig())], ids=["grpo", "ppo"]
)
def test_a_flipped_advantage_does_not_learn(module, cfg):
    def credit(rollout, cfg, all_sum):
        right = module.credit(rollout, cfg, all_sum)
        return replace(right, advantage=-right.advantage)

    with pytest.raises(ContractBroken, match="does not learn the toy task"):
        check_algorithm(replace(module.ALGORITHM, credit=credit), cfg)


class Env(ReachEnv):
    """ReachEnv with one mistake."""

    def __init__(self, mistake):
        super().__init__(ReachConfig(), num_slots=3)
        self.mistake = mistake
        self.count = 0
        self.last = None

    def recv(self, min_slots, among=None):
        slots, step = super().recv(min_slots, among)
        self.count += 1
        changed = self.mistake(self, slots, step)
        self.last = changed
        return slots, changed


def noisy_frames(env, slots, step):
    images = {"top": step.obs.images["top"] ^ (env.count % 2)}
    return replace(step, obs=replace(step.obs, images=images))


def slot_in_the_picture(env, slots, step):
    image = step.obs.images["top"].clone()
    image[:, 0, 0, 0] = torch.tensor(slots, dtype=torch.uint8)
    return replace(step, obs=replace(step.obs, images={"top": image}))


def reused_buffer(env, slots, step):
    if env.last is not None and len(env.last.obs) == len(step.obs):
        env.last.obs.images["top"].copy_(step.obs.images["top"])
    return step


def paid_after_the_end(env, slots, step):
    done = (step.terminated | step.truncated).long()
    after = (done.cumsum(dim=1) - done) > 0
    return replace(step, reward=step.reward + after)


def never_counts_clipping(env, slots, step):
    return replace(step, num_clipped=torch.zeros_like(step.num_clipped))


def ends_both_ways(env, slots, step):
    return replace(step, terminated=step.terminated | step.truncated)


def float_frames(env, slots, step):
    images = {"top": step.obs.images["top"].float()}
    return replace(step, obs=replace(step.obs, images=images))


BROKEN_ENVS = [
    (noisy_frames, "top differs by 1"),
    (slot_in_the_picture, "top differs"),
    (reused_buffer, "a later message changed"),
    (paid_after_the_end, "reward after the end"),
    (never_counts_clipping, "0 counted"),
    (ends_both_ways, "both terminated and truncated"),
    (float_frames, "expected uint8"),
]
EPISODES = [
    Episode(task="reach-left", trial=0, index=0),
    Episode(task="reach-right", trial=2, index=1),
]


@pytest.mark.parametrize(("mistake", "message"), BROKEN_ENVS)
def test_a_broken_env_is_caught(mistake, message):
    with pytest.raises(ContractBroken, match=message):
        check_env(lambda num_slots: Env(mistake), EPISODES, chunk=8)


class TakesAnything(ReachEnv):
    def send(self, slots, action):
        super().send(slots, action.nan_to_num(0.0))


class MovesBeforeItRefuses(ReachEnv):
    def send(self, slots, action):
        self._hand[slots] -= 0.05
        super().send(slots, action)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (TakesAnything, "send takes the action nan, expected RunFailed"),
        (MovesBeforeItRefuses, "a refused action has moved the episode"),
    ],
)
def test_an_env_that_takes_non_finite_actions_is_caught(env, message):
    with pytest.raises(ContractBroken, match=message):
        check_env(lambda num_slots: env(ReachConfig(), num_slots=num_slots), EPISODES, chunk=8)


def test_an_env_that_overruns_its_horizon_is_caught():
    def make(num_slots):
        env = ReachEnv(ReachConfig(max_steps=20), num_slots=num_slots)
        env.spec = replace(env.spec, max_steps=10)
        return env

    with pytest.raises(ContractBroken, match="max_steps"):
        check_env(make, EPISODES, chunk=8)


class ScoresAtOne(TokenPolicy):
    def evaluate(self, obs, trace, *, temperature):
        return super().evaluate(obs, trace, temperature=1.0)


class MixesRows(TokenPolicy):
    def _logits(self, obs):
        logits = super()._logits(obs)
        return logits + logits.mean(dim=0, keepdim=True)


class OneNoiseForAll(TokenPolicy):
    def act(self, obs, *, temperature, keys=None):
        shared = None if keys is None else keys[:1].expand(len(keys))
        return super().act(obs, temperature=temperature, keys=shared)


class RandomWhenGreedy(TokenPolicy):
    def act(self, obs, *, temperature, keys=None):
        if temperature == 0 and keys is not None:
            return super().act(obs, temperature=1.0, keys=keys)
        return super().act(obs, temperature=temperature, keys=keys)


class ForgetsAParameter(TokenPolicy):
    def param_groups(self):
        return {name: params[:-1] for name, params in super().param_groups().items()}


class DetachesTheValue(TokenPolicy):
    def evaluate(self, obs, trace, *, temperature):
        scored = super().evaluate(obs, trace, temperature=temperature)
        return replace(scored, value=scored.value.detach())


class SavesOldWeights(TokenPolicy):
    def save(self, folder, state=None):
        super().save(folder, {k: torch.zeros_like(v) for k, v in self.module.state_dict().items()})


BROKEN_POLICIES = [
    (ScoresAtOne, "disagree about the log-prob"),
    (MixesRows, r"taking rows \[0\] of a batch changes the logprob"),
    (OneNoiseForAll, "in another batch|act alike"),
    (RandomWhenGreedy, "temperature 0 depends on the keys"),
    (ForgetsAParameter, "in no group: actor.2.bias, critic.2.bias"),
    (DetachesTheValue, "no gradient reaches critic"),
    (SavesOldWeights, "saving and loading again changes the logprob"),
]


@pytest.mark.parametrize(("kind", "message"), BROKEN_POLICIES)
def test_a_broken_policy_is_caught(kind, message, tmp_path):
    cfg = TokenConfig()
    policy = kind(cfg, needs_value=True)

    def reload(folder):
        saved = cfg.model_copy(update={"checkpoint": str(folder)})
        return token_policy.load(saved, device="cpu", needs_value=True)

    with pytest.raises(ContractBroken, match=message):
        check_policy(policy, made_up_observation(policy.spec), folder=tmp_path, reload=reload)


def test_a_flow_policy_scored_on_too_few_steps_is_caught(tmp_path):
    class Forgetful(FlowPolicy):
        def evaluate(self, obs, trace, *, temperature):
            fewer = {**trace, "step": trace["step"][:, :1]}
            return super().evaluate(obs, fewer, temperature=temperature)

    policy = Forgetful(FlowConfig())
    with pytest.raises(ContractBroken, match="disagree about the log-prob"):
        check_policy(
            policy, made_up_observation(policy.spec), folder=tmp_path, reload=lambda _: policy
        )


def test_ranks_that_do_not_meet_raise_instead_of_hanging():
    def work(rank, all_sum):
        if rank == 0:
            raise ValueError("rank 0 gave up")
        return all_sum(torch.ones(1))

    with pytest.raises(ValueError, match="rank 0 gave up"):
        on_ranks(2, work)
