"""Against numbers of the reference implementation where it is right (tests/golden/algorithms)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.algos import functional as fn
from vlarl.algos import grpo, ppo
from vlarl.algos.surrogate import episode_weight, policy_loss
from vlarl.batch import LossBatch, Observation, PolicyEval, PolicyStep, Rollout
from vlarl.episode import Episode
from vlarl.rollout.collect import assemble
from vlarl.rollout.play import Decisions, Outcome
from vlarl.testing import TokenConfig, TokenPolicy, alone

GOLDEN = np.load(
    Path(__file__).parents[2] / "golden" / "algorithms" / "golden.npz", allow_pickle=False
)
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SINGLE = {"rtol": 1e-5, "atol": 1e-6}  # the reference computes these in float32


def case(group):
    """Arrays of one case by name."""
    prefix = f"{group}."
    return {
        key.removeprefix(prefix): torch.from_numpy(GOLDEN[key])
        for key in GOLDEN.files
        if key.startswith(prefix)
    }


def close(got, expected, **tolerance):
    torch.testing.assert_close(got, expected, check_dtype=False, **tolerance)


@pytest.mark.parametrize("n", range(5))
def test_gae(n):
    g = case(f"gae.{n}")
    done = g["dones"][1:]
    following = torch.where(done, 0, g["values"][1:])
    args = {"gamma": g["gamma"].item(), "gae_lambda": g["gae_lambda"].item()}
    advantage = fn.gae(g["rewards"], g["values"][:-1], following, done, **args)
    close(advantage, g["advantages"], **EXACT)
    close(advantage + g["values"][:-1], g["returns"], **EXACT)
    zero = torch.zeros_like(g["rewards"])
    to_go = fn.gae(g["rewards"], zero, zero, done, gamma=1.0, gae_lambda=1.0)
    close(to_go, g["returns_to_go_without_values"], **EXACT)


@pytest.mark.parametrize("n", range(1, 5))
def test_normalised_advantages(n):
    g = case(f"gae.{n}")
    everywhere = torch.ones_like(g["mask"])
    close(fn.standardize(g["advantages"], everywhere, alone), g["advantages_normalized"], **EXACT)
    got = fn.standardize(g["advantages"], g["mask"], alone)
    close(got[g["mask"]], g["advantages_normalized_masked"][g["mask"]], **EXACT)


@pytest.mark.parametrize("n", range(2))
def test_gae_bootstraps_where_the_horizon_cut_and_not_where_it_terminated(n):
    g = case(f"timelimit.{n}")
    following = torch.where(g["truncations"], g["final_values"], g["values"][1:])
    following = torch.where(g["terminations"], 0, following)
    advantage = fn.gae(
        g["rewards"],
        g["values"][:-1],
        following,
        g["terminations"] | g["truncations"],
        gamma=g["gamma"].item(),
        gae_lambda=g["gae_lambda"].item(),
    )
    close(advantage, g["advantages"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", range(3))
def test_valid_ends_with_the_step_of_the_first_done(n):
    g = case(f"mask.{n}")
    done = g["dones"][1:]
    num_t, num_b, chunk = done.shape
    policy = TokenPolicy(TokenConfig(chunk=chunk))
    store, outcomes = Decisions(), []
    for b in range(num_b):
        ended = done[:, b].any(dim=1).nonzero()[:, 0]
        length = int(ended[0]) + 1 if len(ended) else num_t
        rows = store.add(
            Observation(images={}, state=torch.zeros(length, 0), instruction=("x",) * length),
            PolicyStep(
                action=torch.zeros(length, chunk, 2),
                logprob=torch.zeros(length, chunk, 2),
                value=None,
                trace={},
            ),
        )
        flags = done[:length, b]
        outcomes.append(
            Outcome(
                episode=Episode(task="t", trial=b, index=b),
                reward=torch.zeros(length, chunk),
                terminated=flags,
                truncated=torch.zeros_like(flags),
                rows=tuple(rows),
                last_value=None,
                num_clipped=0,
                diverged=False,
                frames=None,
            )
        )
    rollout = assemble(outcomes, store, policy, 1.0)
    padded = torch.zeros(num_t, num_b, chunk, dtype=torch.bool)
    padded[: len(rollout.valid)] = rollout.valid
    assert torch.equal(padded, g["loss_mask"])
    assert torch.equal(rollout.episode_len, g["loss_mask_sum"][0, :, 0])


@pytest.mark.parametrize("n", range(5))
def test_group_zscore(n):
    g = case(f"grpo.{n}")
    got = fn.group_zscore(g["scores"], g["group_size"].item())
    close(g["mask"] * got, g["advantages"], **EXACT)
    assert not got[: g["group_size"]].any()


def chunked_rollout(g, value):
    """The golden chunks as a Rollout: a done terminates, what is left over is cut at the end."""
    done = g["dones"][1:]
    num_t, num_b, chunk = done.shape
    flat = done.transpose(1, 2).reshape(-1, num_b)
    valid = (flat.cumsum(dim=0) - flat.long()) == 0
    terminated = flat & valid
    truncated = torch.zeros_like(terminated)
    truncated[-1] = ~terminated.any(dim=0)
    size = g["group_size"].item()
    valid, terminated, truncated = (
        x.view(num_t, chunk, num_b).transpose(1, 2) for x in (valid, terminated, truncated)
    )
    t, b = valid.any(dim=2).nonzero().unbind(dim=1)
    return Rollout(
        obs=Observation(images={}, state=torch.zeros(len(t), 0), instruction=("x",) * len(t)),
        trace={},
        logprob=torch.zeros(len(t), chunk, 1),
        t=t,
        b=b,
        reward=g["rewards"],
        valid=valid,
        terminated=terminated,
        truncated=truncated,
        value=value,
        group=torch.arange(num_b) // size,
        episodes=tuple(
            Episode(task="t", trial=i // size, index=i, group=i // size) for i in range(num_b)
        ),
        num_clipped=torch.zeros(num_b, dtype=torch.int64),
        diverged=torch.zeros(num_b, dtype=torch.bool),
        temperature=1.0,
    )


@pytest.mark.parametrize("n", range(2))
def test_grpo_credit_of_chunks(n):
    g = case(f"chunked.{n}")
    rollout = chunked_rollout(g, None)
    got = grpo.credit(rollout, grpo.GrpoConfig(group_size=g["group_size"].item()), alone)
    assert torch.equal(rollout.valid, g["loss_mask"])
    # credit is float32 by contract
    close(got.advantage * rollout.valid, g["grpo_action_level"], rtol=1e-6, atol=1e-7)
    close(got.advantage, g["grpo_chunk_level"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["action", "chunk"])
@pytest.mark.parametrize("n", range(2))
def test_ppo_credit_of_chunks(n, level):
    g = case(f"chunked.{n}")
    value = g["values"] if level == "action" else g["values"][:, :, :1]
    cfg = ppo.PpoConfig(
        reward_level=level,
        gamma=g["gamma"].item(),
        gae_lambda=g["gae_lambda"].item(),
        normalize_advantage=False,
    )
    got = ppo.credit(chunked_rollout(g, value), cfg, alone)
    valid = g["loss_mask"] if level == "action" else g["loss_mask"].any(dim=2, keepdim=True)
    close(got.advantage[valid], g[f"gae_{level}_level_advantages"][valid], **EXACT)
    assert got.returns is not None
    close(got.returns[valid], g[f"gae_{level}_level_returns"][valid], **EXACT)
    assert not got.advantage[~valid].any()


def test_success_rate_filter():
    # The reference's bounds are in units of return and a success earns 5.
    g = case("filter.0")
    rollout = chunked_rollout(g, None)
    earned = (g["rewards"] * rollout.valid).sum(dim=(0, 2))
    assert set(earned.tolist()) == {0.0, 5.0}
    failed = rollout.terminated & (earned == 0)[None, :, None]
    rollout = Rollout(
        **{name: getattr(rollout, name) for name in Rollout.__dataclass_fields__}
        | {
            "terminated": rollout.terminated & ~failed,
            "truncated": rollout.truncated | failed,
        }
    )
    cfg = grpo.GrpoConfig(
        group_size=g["group_size"].item(),
        filter_low=g["lower"].item() / 5,
        filter_high=g["upper"].item() / 5,
        denominator="all",
    )
    credit = grpo.credit(rollout, cfg, alone)
    assert torch.equal(credit.weight > 0, g["loss_mask"])
    share = credit.kept.float().mean() / g["loss_mask_sum"] / credit.kept.sum()
    close(credit.weight, share * g["loss_mask"], rtol=1e-6, atol=0)


def run_loss(evaluation, batch, cfg):
    """(loss, gradient by log-prob, metric values)."""
    out = policy_loss(evaluation, batch, cfg)
    (grad,) = torch.autograd.grad(out.loss, evaluation.logprob)
    numbers = {name: float(num / den) for name, (num, den) in out.metrics.items()}
    return out.loss.detach(), grad, numbers


@pytest.mark.parametrize("n", range(5))
def test_actor_loss(n):
    g = case(f"actor.{n}")
    shape = g["logprobs"].shape
    mask = g.get("mask", torch.ones(shape, dtype=torch.bool)).reshape(-1, 1)
    logprob = g["logprobs"].reshape(-1, 1, 1).requires_grad_()
    dual = g["clip_c"].item()
    cfg = grpo.GrpoConfig(
        clip_low=g["clip_low"].item(),
        clip_high=g["clip_high"].item(),
        dual_clip=None if np.isnan(dual) else dual,
    )
    batch = LossBatch(
        logprob=g["old_logprobs"].reshape(-1, 1, 1),
        advantage=g["advantages"].reshape(-1, 1),
        weight=mask / mask.sum(),
        value=None,
        returns=None,
    )
    evaluation = PolicyEval(logprob=logprob, entropy=torch.zeros_like(logprob), value=None)
    loss, grad, numbers = run_loss(evaluation, batch, cfg)
    close(loss, g["loss"], **SINGLE)
    close(grad.view(shape), g["grad_logprobs"], **SINGLE)
    assert numbers["train/actor/ratio"] == pytest.approx(g["ratio_mean"].item(), rel=1e-5)
    assert numbers["train/actor/clip_fraction"] == pytest.approx(g["clip_fraction"].item(), 1e-5)
    # The reference's is k1; ours is k3 = k1 + ratio - 1, never negative.
    k1 = numbers["train/actor/approx_kl"] - numbers["train/actor/ratio"] + 1
    assert k1 == pytest.approx(g["approx_kl"].item(), rel=1e-5, abs=1e-6)
    # Counted in the golden file: ratio > 3 with a negative advantage, under the mask.
    expected_dual = {2: 9, 3: 5}.get(n, 0) / int(mask.sum())
    assert numbers["train/actor/dual_clip_fraction"] == pytest.approx(expected_dual, rel=1e-5)


LEVELS = [(r, p) for r in ("action", "chunk") for p in ("token", "action", "chunk")]


@pytest.mark.parametrize(("reward", "level"), [x for x in LEVELS if x != ("action", "chunk")])
def test_ratio_levels(reward, level):
    g = case("level")
    dims = g["action_dim"].item()
    num, tokens = g["logprobs"].shape
    chunk = tokens // dims
    logprob = g["logprobs"].view(num, chunk, dims).clone().requires_grad_()
    batch = LossBatch(
        logprob=g["old_logprobs"].view(num, chunk, dims),
        advantage=g[f"advantages_{reward}"],
        weight=torch.full((num, chunk), 1 / (num * chunk)),
        value=None,
        returns=None,
    )
    cfg = grpo.GrpoConfig(
        logprob_level=level, clip_low=g["clip_low"].item(), clip_high=g["clip_high"].item()
    )
    evaluation = PolicyEval(logprob=logprob, entropy=torch.zeros_like(logprob), value=None)
    loss, grad, numbers = run_loss(evaluation, batch, cfg)
    name = f"reward_{reward}_logprob_{level}"
    close(loss, g[f"loss_{name}"], **SINGLE)
    close(grad.reshape(num, tokens), g[f"grad_{name}"], **SINGLE)
    clip_fraction = g[f"clip_fraction_{name}"].item()
    assert numbers["train/actor/clip_fraction"] == pytest.approx(clip_fraction, rel=1e-5)
    k1 = numbers["train/actor/approx_kl"] - numbers["train/actor/ratio"] + 1
    assert k1 == pytest.approx(g[f"approx_kl_{name}"].item(), rel=1e-5, abs=1e-6)


def trajectory_weight(g, chunk):
    """[N, C] by episode_weight, rows ordered time first."""
    shape = (g["n_time"].item(), g["n_traj"].item(), chunk)
    assert g["max_episode_steps"].item() == shape[0] * chunk
    kept = torch.ones(shape[1], dtype=torch.bool)
    weight = episode_weight(g["mask"].view(shape), kept, alone, keep_filtered=False)
    return weight.view(-1, chunk)


@pytest.mark.parametrize("level", ["token", "action"])
def test_trajectory_weights_give_the_loss_of_the_reference(level):
    g = case("traj")
    dims = g["action_dim"].item()
    num, tokens = g["logprobs"].shape
    chunk = tokens // dims
    logprob = g["logprobs"].view(num, chunk, dims).clone().requires_grad_()
    batch = LossBatch(
        logprob=g["old_logprobs"].view(num, chunk, dims),
        advantage=g["advantages"],
        weight=trajectory_weight(g, chunk),
        value=None,
        returns=None,
    )
    cfg = grpo.GrpoConfig(
        logprob_level=level, clip_low=g["clip_low"].item(), clip_high=g["clip_high"].item()
    )
    evaluation = PolicyEval(logprob=logprob, entropy=torch.zeros_like(logprob), value=None)
    loss, grad, _ = run_loss(evaluation, batch, cfg)
    close(loss, g[f"loss_{level}_level"], **SINGLE)
    close(grad.reshape(num, tokens), g[f"grad_{level}_level"], **SINGLE)


def test_trajectory_weights_give_the_value_loss_of_the_reference():
    g = case("traj")
    value = g["values"].clone().requires_grad_()
    weight = trajectory_weight(g, value.shape[1])
    zeros = torch.zeros(*value.shape, 1)
    cfg = ppo.PpoConfig(
        reward_level="action",
        value_clip=g["value_clip"].item(),
        huber_delta=g["huber_delta"].item(),
    )
    out = ppo.loss(
        PolicyEval(logprob=zeros, entropy=zeros, value=value),
        LossBatch(
            logprob=zeros,
            advantage=torch.zeros_like(weight),
            weight=weight,
            value=g["prev_values"],
            returns=g["returns"],
        ),
        cfg,
    )
    (grad,) = torch.autograd.grad(out.loss, value)
    # our weights are float32
    close(out.loss.detach(), g["critic_loss"], rtol=1e-6, atol=1e-7)
    close(grad, g["critic_grad_values"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", range(5))
def test_value_loss(n):
    g = case(f"critic.{n}")
    value = g["values"].clone().requires_grad_()
    mask = g.get("mask", torch.ones(value.shape, dtype=torch.bool))
    entries, _ = fn.clipped_value_loss(
        value,
        g["prev_values"],
        g["returns"],
        clip=g["value_clip"].item(),
        huber_delta=g["huber_delta"].item(),
    )
    loss = (entries * mask).sum() / mask.sum()
    (grad,) = torch.autograd.grad(loss, value)
    tolerance = EXACT if value.dtype == torch.float64 else SINGLE
    close(loss.detach(), g["loss"], **tolerance)
    close(grad, g["grad_values"], **tolerance)


def test_entropy_levels():
    g = case("entropy")
    dims = g["action_dim"].item()
    entropy = g["entropy"].view(4, -1, dims)
    everywhere = torch.ones(entropy.shape[:2], dtype=torch.bool)
    close(fn.reduce_actions(entropy, everywhere, "action"), g["action_level"], **EXACT)
    close(fn.reduce_actions(entropy, everywhere, "chunk"), g["chunk_level"], **EXACT)


@pytest.mark.parametrize("n", range(3))
def test_explained_variance(n):
    g = case(f"ev.{n}")
    for mask, name in (
        (torch.ones_like(g["mask"]), "explained_variance"),
        (g["mask"], "explained_variance_masked"),
    ):
        num, den = fn.explained_variance(fn.variance_sums(g["returns"], g["values"], mask))
        close(num / den, g[name], **SINGLE)


def test_explained_variance_adds_up_over_shards():
    g = case("ev.1")
    ones = torch.ones_like(g["mask"])
    sums = [
        fn.variance_sums(g["returns"][rows], g["values"][rows], ones[rows])
        for rows in (slice(0, 7), slice(7, None))
    ]
    num, den = fn.explained_variance(sums[0] + sums[1])
    close(num / den, g["two_shards_summed"], **SINGLE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(estimator):
    g = case("kl")
    got = fn.kl(g["logprobs"], g["ref_logprobs"], estimator)
    # The reference also caps k3 itself at 10.
    expected = g[estimator]
    below = expected < 10
    close(got[below], expected[below], **EXACT)
