"""Estimates against sums by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from vlarl.config.compose import build, compose
from vlarl.specs import Footprint
from vlarl.train import memory
from vlarl.train.setup import resolve

GIB = 2**30
NET = Footprint(
    parameters=1000,
    largest=300,
    root=100,
    weights=4000,
    trained=2000,
    kept=10,
    inside=7,
    everything=50,
    stored=6,
    assumes=("a guess",),
)


@pytest.fixture
def parts(toys, tmp_path):
    """parts(*overrides) -> (run, Parts) of a reaching run whose policy says it takes NET."""
    preset = tmp_path / "p.yaml"
    preset.write_text(
        "env: {name: reach, chunk: 4, num_slots: 5}\n"
        "policy: {name: token_toy, checkpoint: random, chunk: 4}\n"
        "algo: {name: grpo, group_size: 4}\n"
        "rollout: {episodes: 16}\n"
        "optim: {micro_batch: 100}\n"
    )

    def make(*overrides):
        run = build(compose(preset, overrides))
        found = resolve(run)
        policy = SimpleNamespace(footprint=lambda cfg, spec, *, compute: NET)
        env = SimpleNamespace(worker_bytes=lambda cfg: 1_000_000)
        return run, replace(found, policy_module=policy, env_module=env)

    return make


def table(found, place):
    rows = [(i.phase, i.what, i.num_bytes) for i in found.items if i.place == place]
    return {(phase, what): number for phase, what, number in rows}


def test_replicas_on_a_gpu(parts):
    run, found = parts("compute.param_dtype=bf16")
    gpu = table(memory.estimate(run, found, ranks=2, on_gpu=True), "gpu")
    assert gpu == {
        ("load", "weights"): 4000,
        ("rollout", "weights"): 4000,
        ("rollout", "Adam moments"): 4000,
        ("rollout", "weights in bf16"): 2000,
        # 3 of 5 slots at once, in two stages.
        ("rollout", "activations"): 3 * 7,
        ("update", "weights"): 4000,
        ("update", "Adam moments"): 4000,
        ("update", "weights in bf16"): 2000,
        ("update", "gradients"): 2000,
        ("update", "activations"): 100 * 50,
        ("save", "weights"): 4000,
        ("save", "Adam moments"): 4000,
    }


def test_shards_with_recomputation(parts):
    run, found = parts(
        "compute.param_dtype=bf16", "compute.shard=fsdp2", "compute.activation_checkpointing=true"
    )
    gpu = table(memory.estimate(run, found, ranks=4, on_gpu=True), "gpu")
    assert gpu["load", "weights"] == 4000
    assert gpu["update", "weights"] == gpu["save", "weights"] == 1000
    assert gpu["update", "Adam moments"] == 1000
    assert gpu["update", "gradients"] == 500
    assert gpu["rollout", "weights in bf16"] == 2000
    # 100 + 2 x 300 weights of 2 bytes, gradients of 100 + 300 in 2 and in 4 bytes.
    assert gpu["update", "gathered units"] == 1400 + 400 * 6
    assert gpu["update", "activations"] == 100 * (10 + 7)


def test_a_large_optimizer_step_outweighs_small_activations(parts):
    run, found = parts("optim.micro_batch=1")
    gpu = table(memory.estimate(run, found, ranks=1, on_gpu=True), "gpu")
    assert gpu["update", "activations"] == 2000
    assert ("rollout", "weights in fp32") not in gpu


def test_what_the_host_holds(parts):
    run, found = parts("compute.shard=fsdp2", "env.max_steps=12")
    estimate = memory.estimate(run, found, ranks=2, on_gpu=True)
    host = table(estimate, "host")
    # 8 episodes of 3 decisions on a rank; 16 px frames without state.
    assert host["update", "decisions"] == 24 * (3 * 16 * 16 + 6)
    collected = 24 * (3 * 16 * 16 + 3 * 6)
    assert host["rollout", "decisions"] == collected
    assert host["rollout", "simulators"] == 5_000_000
    assert host["save", "whole weights, rank 0"] == 4000
    assert estimate.total("rollout", "host") == GIB + collected + 5_000_000
    assert estimate.machine(2) == 2 * (GIB + collected + 5_000_000)
    assert any("24 decisions" in sentence for sentence in estimate.assumes)
    assert "a guess" in estimate.assumes


def test_what_only_rank_0_holds_counts_once(parts, monkeypatch):
    run, found = parts("compute.shard=fsdp2")
    monkeypatch.setattr(found.env_module, "worker_bytes", lambda cfg: 0)
    big = replace(NET, weights=GIB)
    monkeypatch.setattr(found.policy_module, "footprint", lambda *_, **__: big)
    assert memory.estimate(run, found, ranks=2, on_gpu=True).machine(2) == 3 * GIB


def test_without_a_gpu_all_of_it_is_the_hosts(parts):
    run, found = parts()
    estimate = memory.estimate(run, found, ranks=1, on_gpu=False)
    assert table(estimate, "gpu") == {}
    assert estimate.total("load", "host") == GIB + 4000


def test_a_policy_that_cannot_say_its_size(parts):
    run, found = parts()
    assert memory.estimate(run, resolve(run), ranks=1, on_gpu=True) is None
    assert found is not None


def test_the_7b_on_eight_gpus():
    run = build(compose("libero_spatial_grpo_openvlaoft"))
    found = memory.estimate(run, resolve(run, without_files=True), ranks=8, on_gpu=True)
    gpu, host = table(found, "gpu"), table(found, "host")
    built = 7_541_237_184 - 43_080_480 - (32064 - 256) * 4096
    assert gpu["load", "weights"] == 4 * built
    assert gpu["update", "weights"] == gpu["update", "gradients"] == 4 * built // 8
    assert gpu["update", "Adam moments"] == built
    assert gpu["rollout", "weights in bf16"] == 2 * built
    # 128 episodes of 64 decisions: a frame of 256 px, 8 state numbers, 56 ids and log-probs.
    assert host["update", "decisions"] == 128 * 64 * (3 * 256 * 256 + 8 * 4 + 56 * 6)
