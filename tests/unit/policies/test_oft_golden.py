"""Parity with the reference implementations on weights rebuilt from seeds; see
tests/golden/oft/README.md."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlarl.models.openvla_oft.checkpoint import load_weights, weight_map
from vlarl.models.openvla_oft.config import read_net_config
from vlarl.models.openvla_oft.net import OftNet
from vlarl.models.value_head import ValueHead
from vlarl.policies.openvla_oft import OftConfig, load

ATOL = 2e-5
FIRST = 31744
CPU = torch.device("cpu")


def close(got, want, atol=ATOL):
    np.testing.assert_allclose(got.detach().numpy(), want, atol=atol, rtol=0)


def pixels(images: int) -> torch.Tensor:
    g = np.random.Generator(np.random.PCG64(77000 + images))
    return torch.from_numpy(g.standard_normal((3, 6 * images, 56, 56), dtype=np.float32))


def net_of(folder, *, stop, slots=56, rope_bf16=False, dtype=torch.float32) -> OftNet:
    with torch.device("meta"):
        net = OftNet(
            read_net_config(folder),
            num_slots=slots,
            stop_id=2 if stop else None,
            rope_bf16=rope_bf16,
        )
    load_weights(net, folder, device=CPU, dtype=dtype)
    return net.eval()


@pytest.fixture(scope="module")
def stop_net(golden_folder):
    return net_of(golden_folder, stop=True)


@pytest.fixture(scope="module")
def nostop_net(golden_folder):
    return net_of(golden_folder, stop=False)


@pytest.fixture(scope="module")
def midpad(golden):
    """Prompts in our layout (and RLinf's), which ours shortens to the longest of the batch."""
    return torch.from_numpy(golden["midpad_ids"]), torch.from_numpy(golden["midpad_mask"])


def unpadded_rows(net, golden, pix):
    """One sample at a time, without padding: how the `_stop` arrays were computed."""
    rows = []
    for i, length in enumerate(golden["prompt_lengths"]):
        ids = torch.from_numpy(golden["prompt_ids"][i : i + 1, :length])
        rows.append(net(pix[i : i + 1], ids, None, None).logits)
    return torch.cat(rows)


def test_rebuilt_weights_are_the_recorded_ones(golden_folder, golden_names, golden):
    stored = {}
    for name in sorted(set(weight_map(golden_folder).values())):
        stored |= load_file(golden_folder / name)
    for entry in golden_names:
        w, i = stored[entry["name"]].numpy(), entry["index"]
        assert w.flat[0] == golden["weight_first"][i]
        assert w.flat[-1] == golden["weight_last"][i]
        assert w.sum(dtype=np.float64) == pytest.approx(
            golden["weight_sum"][i], rel=1e-12, abs=1e-9
        )


def test_pixels_are_the_recorded_ones(golden):
    got = [
        x
        for k in (1, 2)
        for p in [pixels(k)]
        for x in (p.flatten()[0], p.flatten()[-1], p.double().sum())
    ]
    np.testing.assert_allclose(np.array(got), golden["pixel_check"], rtol=1e-12, atol=1e-9)


@torch.no_grad()
def test_tower_features_and_patches(stop_net, golden):
    vision = stop_net.vision_backbone
    x = pixels(1)
    close(vision.featurizer(x[:, :3])[:, 5:], golden["features_dino"])
    close(vision.fused_featurizer(x[:, 3:]), golden["features_siglip"])
    close(stop_net.projector(vision(x)), golden["patches"])
    close(stop_net.projector(vision(pixels(2))), golden["patches_2img"])


@torch.no_grad()
def test_logits_with_stop_token(stop_net, golden):
    close(unpadded_rows(stop_net, golden, pixels(1)), golden["logits_stop"])
    close(unpadded_rows(stop_net, golden, pixels(2)), golden["logits_stop_2img"])


@torch.no_grad()
def test_logits_without_stop_token_as_one_padded_batch(nostop_net, golden, midpad):
    close(nostop_net(pixels(1), *midpad, None).logits, golden["logits_nostop"])
    close(nostop_net(pixels(2), *midpad, None).logits, golden["logits_nostop_2img"])


@torch.no_grad()
def test_padding_changes_nothing(stop_net, golden, midpad):
    close(stop_net(pixels(1), *midpad, None).logits, golden["logits_stop"])


@torch.no_grad()
def test_what_stands_on_padding_changes_nothing(nostop_net, midpad):
    ids, keep = midpad
    other = torch.where(keep, ids, 17)
    a, b = (nostop_net(pixels(1), x, keep, None).logits for x in (ids, other))
    assert torch.equal(a, b)


@torch.no_grad()
def test_hidden_states(stop_net, nostop_net, golden, midpad):
    close(nostop_net.read_hidden(pixels(1), *midpad, None), golden["hidden_nostop"])
    close(stop_net.read_hidden(pixels(1), *midpad, None), golden["hidden_stop"])


@torch.no_grad()
def test_logits_of_a_chunk_of_one(golden_folder, golden, midpad):
    net = net_of(golden_folder, stop=False, slots=7)
    close(net(pixels(1), *midpad, None).logits, golden["logits_nostop_chunk1"])


@torch.no_grad()
def test_greedy_over_the_action_ids(nostop_net, golden, midpad):
    ids = nostop_net(pixels(1), *midpad, None).logits.argmax(-1) + FIRST
    assert np.array_equal(ids.view(3, 8, 7), golden["greedy_ids_nostop"])


@torch.no_grad()
def test_rope_frequencies_rounded_to_bfloat16(golden_folder, golden, midpad):
    for stop in (True, False):
        net = net_of(golden_folder, stop=stop, rope_bf16=True)
        close(net.language_model.model.rotary_emb.inv_freq, golden["inv_freq_bf16"], atol=0)
        want = golden[f"logits_{'stop' if stop else 'nostop'}_rope_bf16"]
        close(net(pixels(1), *midpad, None).logits, want)


def test_rope_frequencies_survive_a_cast(golden_folder, golden):
    net = net_of(golden_folder, stop=True).to(torch.bfloat16)
    assert net.projector.fc1.weight.dtype == torch.bfloat16
    close(net.language_model.model.rotary_emb.inv_freq, golden["inv_freq"], atol=0)


@torch.no_grad()
def test_bfloat16_stays_within_its_noise(golden_folder, golden):
    net = net_of(golden_folder, stop=True, dtype=torch.bfloat16)
    logits = unpadded_rows(net, golden, pixels(1))
    assert logits.dtype == torch.float32
    diff = (logits - torch.from_numpy(golden["bf16_logits_stop"])).abs()
    assert diff.max() < 0.3
    assert diff.mean() < 0.06


@pytest.fixture(scope="module")
def policy(golden_folder):
    """RLinf's way to run it: action-level value head, no stop token, one data set's statistics."""
    cfg = OftConfig(
        checkpoint=str(golden_folder), compat="rlinf", unnorm_key="libero_spatial", value="action"
    )
    return load(cfg, device=CPU, needs_value=True)


@pytest.fixture
def golden_inputs(policy, golden, midpad, monkeypatch):
    """The policy's inputs replaced by the recorded pixels and prompt ids; everything behind is the
    real thing."""
    monkeypatch.setattr(policy, "images", lambda views: pixels(1))
    monkeypatch.setattr(policy.prompts, "batch", lambda text, device: midpad)
    return policy


def tokens_of(ids) -> dict[str, torch.Tensor]:
    return {"token": torch.from_numpy(ids - FIRST).to(torch.int16)}


@pytest.mark.parametrize("temperature", [1.6, 1.0])
def test_logprob_entropy_and_value_without_stop(golden_inputs, golden, make_obs, temperature):
    out = golden_inputs.evaluate(make_obs(3), tokens_of(golden["tokens"]), temperature=temperature)
    close(out.logprob.flatten(1), golden[f"logprobs_T{temperature}_nostop"])
    close(out.entropy.flatten(1), golden[f"entropy_T{temperature}_nostop"])
    close(out.value, golden["values_action_level_nostop"])


@pytest.mark.parametrize("temperature", [1.6, 1.0])
def test_logprob_entropy_and_value_with_stop(
    golden_inputs, golden, make_obs, temperature, monkeypatch
):
    monkeypatch.setattr(golden_inputs.module, "stop_id", 2)
    out = golden_inputs.evaluate(make_obs(3), tokens_of(golden["tokens"]), temperature=temperature)
    close(out.logprob.flatten(1), golden[f"logprobs_T{temperature}_stop"])
    close(out.entropy.flatten(1), golden[f"entropy_T{temperature}_stop"])
    close(out.value, golden["values_action_level_stop"])


@torch.no_grad()
@pytest.mark.parametrize("variant", ["stop", "nostop"])
def test_chunk_level_value(golden, golden_value_head, variant):
    head = ValueHead(64, 1)
    state = golden_value_head("chunk")
    head.load_state_dict({n.removeprefix("value_head."): t for n, t in state.items()})
    close(
        head(torch.from_numpy(golden[f"hidden_{variant}"][:, 0])),
        golden[f"values_chunk_level_{variant}"],
    )


def test_greedy_decisions(golden_inputs, golden, make_obs):
    step = golden_inputs.act(make_obs(3), temperature=0)
    assert np.array_equal(step.trace["token"] + FIRST, golden["greedy_ids_nostop"])
    want = golden["greedy_actions_nostop"].copy()
    want[..., 6] = -np.sign(2 * want[..., 6] - 1)  # the data set's gripper to the canonical one
    close(step.action, want, atol=1e-6)
    out = golden_inputs.evaluate(make_obs(3), step.trace, temperature=1.6)
    close(out.logprob.flatten(1), golden["logprobs_T1.6_nostop_greedy"])


def norms(policy, golden_names):
    params = dict(policy.module.named_parameters())
    for entry in golden_names:
        name = entry["name"].replace("lm_head", "action_rows")
        grad = None if entry["dead"] else params[name].grad
        yield entry["index"], 0.0 if grad is None else grad.double().norm().item()


def test_gradient_of_logprobs(golden_inputs, golden, golden_names, make_obs):
    policy = golden_inputs
    policy.module.zero_grad()
    policy.evaluate(
        make_obs(3), tokens_of(golden["tokens"]), temperature=1.6
    ).logprob.sum().backward()
    for i, norm in norms(policy, golden_names):
        assert norm == pytest.approx(golden["grad_l2_logprob"][i], rel=1e-4), golden_names[i][
            "name"
        ]
    close(
        policy.module.language_model.action_rows.weight.grad,
        golden["grad_lm_head_action_rows_logprob"],
        atol=1e-4 * np.abs(golden["grad_lm_head_action_rows_logprob"]).max(),
    )


def test_gradient_of_values(golden_inputs, golden, golden_names, make_obs):
    policy = golden_inputs
    policy.module.zero_grad()
    policy.evaluate(
        make_obs(3), tokens_of(golden["tokens"]), temperature=1.6
    ).value.sum().backward()
    for i, norm in norms(policy, golden_names):
        assert norm == pytest.approx(golden["grad_l2_value"][i], rel=1e-4), golden_names[i]["name"]
    head = sorted(policy.module.value_head.named_parameters())
    got = [p.grad.double().norm().item() for _, p in head]
    np.testing.assert_allclose(got, golden["grad_l2_value_value_head"], rtol=1e-4)
