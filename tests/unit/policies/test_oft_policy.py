"""The policy on tiny checkpoints: sampling, scoring, settings, adapters."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from vlarl import noise
from vlarl.errors import ConfigError, RunFailed
from vlarl.models.openvla_oft import net as net_module
from vlarl.models.openvla_oft.tiny import TinySizes, init_tiny
from vlarl.policies.openvla_oft import LoraSection, OftConfig, load, recognises, spec
from vlarl.testing.check_policy import check_policy, made_up_observation

CPU = torch.device("cpu")


def keys_of(n: int, start: int = 0) -> torch.Tensor:
    return torch.tensor([noise.stream("test", start + i) for i in range(n)])


@pytest.fixture(scope="module")
def policy(tiny_folder):
    return load(OftConfig(checkpoint=str(tiny_folder)), device=CPU, needs_value=True)


def fresh(folder, **fields):
    needs_value = fields.pop("needs_value", False)
    return load(OftConfig(checkpoint=str(folder), **fields), device=CPU, needs_value=needs_value)


# ------------------------------------------------------------------ contract


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"value": "action", "needs_value": True},
        {"num_images": 2, "use_proprio": True, "needs_value": True},
        {"compat": "rlinf", "freeze_vision": True},
        {"lora": LoraSection(rank=4), "needs_value": True},
    ],
    ids=["plain", "action values", "two views and state", "rlinf", "lora"],
)
def test_contract(tiny_folder, tmp_path, fields):
    one = fresh(tiny_folder, **fields)
    if one.lora_scale is not None:
        # B = 0 hides the adapters and cuts the gradient to A.
        for name, param in one.module.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(param, std=0.05)
    folder = tmp_path / "saved"
    check_policy(
        one,
        made_up_observation(one.spec),
        folder=folder,
        reload=lambda path: fresh(path, **fields),
    )


# ------------------------------------------------------------------ act and evaluate


def test_shapes_and_types(policy, make_obs):
    step = policy.act(make_obs(3), temperature=1.0, keys=keys_of(3))
    assert step.action.shape == step.logprob.shape == (3, 8, 4)
    assert step.value.shape == (3, 1)
    assert step.trace["token"].dtype == torch.int16
    assert {step.action.dtype, step.logprob.dtype, step.value.dtype} == {torch.float32}
    assert not step.logprob.requires_grad


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
def test_evaluate_gives_the_logprob_of_act(policy, make_obs, temperature):
    obs = make_obs(5)
    step = policy.act(obs, temperature=temperature, keys=keys_of(5))
    out = policy.evaluate(obs, step.trace, temperature=temperature)
    assert torch.equal(out.logprob, step.logprob)
    assert torch.equal(out.value, step.value)
    assert torch.equal(policy.value(obs), step.value)


def test_rows_do_not_depend_on_the_batch(policy, make_obs):
    obs = make_obs(6)
    step = policy.act(obs, temperature=1.6, keys=keys_of(6))
    rows = [4, 1]
    part = policy.act(obs.select(rows), temperature=1.6, keys=keys_of(6)[rows])
    assert torch.equal(part.trace["token"], step.trace["token"][rows])
    torch.testing.assert_close(part.logprob, step.logprob[rows], atol=2e-5, rtol=0)
    torch.testing.assert_close(part.value, step.value[rows], atol=2e-5, rtol=0)


def test_samples_are_distributed_as_evaluate_says(policy, make_obs):
    """Frequency of each token over many keys against the probability; 5 standard errors."""
    n = 3000
    obs = make_obs(1)
    logits = policy.module(
        policy.images([obs.images["front"]]), *policy.prompts.batch(obs.instruction, CPU), None
    ).logits.detach()
    p = torch.softmax(logits[0, 0] / 1.6, dim=-1)
    g = noise.gumbel(keys_of(n), (256,))  # the draws of the first token come first
    direct = (logits[0, 0] / 1.6 + g).argmax(-1)
    counts = torch.bincount(direct, minlength=256) / n
    assert ((counts - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()
    for i in range(3):
        step = policy.act(obs, temperature=1.6, keys=keys_of(n)[i : i + 1])
        assert step.trace["token"][0, 0, 0] == direct[i]


def test_greedy_takes_the_likeliest_token_and_has_logprob_zero(policy, make_obs):
    obs = make_obs(2)
    step = policy.act(obs, temperature=0)
    assert (step.logprob == 0).all()
    best = policy.evaluate(obs, step.trace, temperature=1.0).logprob
    for shift in (1, 100):
        other = {"token": (step.trace["token"] + shift) % 256}
        assert (policy.evaluate(obs, other, temperature=1.0).logprob <= best).all()


def test_logprobs_are_normalised_and_entropy_is_theirs(policy, make_obs):
    obs = make_obs(1).select([0] * 256)
    token = torch.arange(256).view(256, 1, 1).expand(256, 8, 4).to(torch.int16)
    out = policy.evaluate(obs, {"token": token}, temperature=1.6)
    logp = out.logprob.detach()
    torch.testing.assert_close(logp.exp().sum(0), torch.ones(8, 4), atol=1e-5, rtol=0)
    entropy = -(logp.exp() * logp).sum(0)
    torch.testing.assert_close(entropy, out.entropy[0].detach(), atol=1e-4, rtol=0)


def test_actions_are_what_the_tokens_mean(policy, make_obs):
    step = policy.act(make_obs(3), temperature=1.0, keys=keys_of(3))
    assert torch.equal(policy.codec.decode(step.trace["token"]), step.action)
    again = policy.codec.decode(policy.encode(step.action))
    torch.testing.assert_close(again, step.action)


def test_each_view_prompt_and_pixel_counts(tiny_folder, make_obs):
    two = fresh(tiny_folder, num_images=2)
    obs = make_obs(2)
    base = (
        two.act(obs, temperature=0).logprob,
        two.evaluate(obs, two.act(obs, temperature=0).trace, temperature=1.0).logprob,
    )
    trace = two.act(obs, temperature=0).trace
    for name in obs.images:
        changed = replace(obs, images={**obs.images, name: 255 - obs.images[name]})
        assert not torch.equal(two.evaluate(changed, trace, temperature=1.0).logprob, base[1])
    other = replace(obs, instruction=obs.instruction[::-1])
    assert not torch.equal(two.evaluate(other, trace, temperature=1.0).logprob, base[1])


# ------------------------------------------------------------------ attention


def test_every_slot_sees_the_stop_token_and_every_other_slot(policy, make_obs, monkeypatch):
    obs = make_obs(1)
    trace = policy.act(obs, temperature=0).trace
    base = policy.evaluate(obs, trace, temperature=1.0).logprob
    monkeypatch.setattr(policy.module, "stop_id", policy.prompts.space)
    moved = policy.evaluate(obs, trace, temperature=1.0).logprob
    assert (moved != base).all()  # the last token reaches even the first action token


def test_causal_attention_is_found_at_load(tiny_folder, monkeypatch):
    build = net_module.build_llama

    def causal(config, *, rope_bf16):
        llama = build(config, rope_bf16=rope_bf16)
        llama.config.is_causal = True
        for layer in llama.layers:
            layer.self_attn.is_causal = True
        return llama

    monkeypatch.setattr(net_module, "build_llama", causal)
    with pytest.raises(RunFailed, match="is causal"):
        fresh(tiny_folder)


def test_attention_to_padding_is_found_at_load(tiny_folder, monkeypatch):
    build = net_module.build_llama

    def blind(config, *, rope_bf16):
        llama = build(config, rope_bf16=rope_bf16)
        forward = llama.forward
        llama.forward = lambda attention_mask=None, **kwargs: forward(**kwargs)
        return llama

    monkeypatch.setattr(net_module, "build_llama", blind)
    with pytest.raises(RunFailed, match="attends to padding"):
        fresh(tiny_folder)


# ------------------------------------------------------------------ settings


def test_spec_reads_small_files_only(tiny_folder, tmp_path):
    folder = tmp_path / "json_only"
    folder.mkdir()
    for path in tiny_folder.glob("*.json"):
        shutil.copy(path, folder)
    got = spec(OftConfig(checkpoint=str(folder), value="action"), needs_value=True)
    assert (got.action.dims, got.chunk, got.value_width) == (4, 8, 8)
    assert (got.action.format, got.action.gripper) == ("delta_xyz", "effort_close_positive")
    assert got.trained_on == ("metaworld",)
    assert (got.cameras, got.state_dims) == (1, 0)
    assert spec(OftConfig(checkpoint=str(folder))).value_width == 0


def test_spec_is_that_of_the_loaded_policy(policy, tiny_folder):
    assert spec(OftConfig(checkpoint=str(tiny_folder)), needs_value=True) == policy.spec


def test_a_field_wins_over_compat_over_the_checkpoint(tiny_folder):
    own = fresh(tiny_folder).settings
    assert (own.resize, own.centre_crop, own.jpeg, own.stop_token) == (
        "lanczos",
        False,
        "off",
        True,
    )
    rlinf = fresh(tiny_folder, compat="rlinf").settings
    assert (rlinf.resize, rlinf.centre_crop, rlinf.stop_token) == ("bicubic", False, False)
    oft = fresh(tiny_folder, compat="oft", jpeg="off").settings
    assert (oft.resize, oft.centre_crop, oft.jpeg, oft.stop_token) == ("lanczos", True, "off", True)


def test_a_released_checkpoint_runs_as_it_was_trained(golden_folder):
    settings = fresh(golden_folder, unnorm_key="libero_object").settings
    assert (settings.resize, settings.centre_crop, settings.jpeg) == ("lanczos", True, "pil")
    assert (settings.stop_token, settings.chunk, settings.unnorm_key) == (
        True,
        8,
        "libero_object_no_noops",
    )


@pytest.mark.parametrize(
    "field",
    [
        {"resize": "bicubic"},
        {"centre_crop": True},
        {"jpeg": "pil"},
        {"stop_token": False},
        {"rope_bf16": True},
        {"num_images": 2},
        {"use_proprio": True},
        {"chunk": 5},
        {"dtype": "bf16"},
    ],
    ids=lambda f: next(iter(f)),
)
def test_every_field_changes_the_distribution(tiny_folder, policy, make_obs, field):
    obs = make_obs(2)
    other = fresh(tiny_folder, **field)
    token = torch.full((2, other.spec.chunk, 4), 100, dtype=torch.int16)
    got = other.evaluate(obs, {"token": token}, temperature=1.0).logprob[:, :5]
    base = policy.evaluate(obs, {"token": token.new_full((2, 8, 4), 100)}, temperature=1.0)
    assert got.dtype == torch.float32
    assert not torch.equal(got, base.logprob[:, :5])


@pytest.mark.parametrize("field", [{"normalisation": "bounds"}, {"unnorm_key": "other"}])
def test_statistics_fields_change_the_actions(tiny_folder, tmp_path, make_obs, field):
    folder = tmp_path / "two"
    shutil.copytree(tiny_folder, folder)
    path = folder / "dataset_statistics.json"
    stats = json.loads(path.read_text())
    other = json.loads(json.dumps(stats["metaworld"]))
    other["action"]["q99"] = [0.1] * 4
    path.write_text(json.dumps({**stats, "other": other}))
    obs = make_obs(2)
    base, got = (fresh(folder, **f).act(obs, temperature=0) for f in ({}, field))
    assert torch.equal(base.trace["token"], got.trace["token"])
    assert not torch.equal(base.action, got.action)


def test_a_missing_statistics_key_lists_what_is_there(tiny_folder):
    with pytest.raises(ConfigError, match="no statistics of 'libero'; there are: metaworld"):
        spec(OftConfig(checkpoint=str(tiny_folder), unnorm_key="libero"))


def test_state_without_statistics_is_refused(tiny_folder, tmp_path):
    folder = tmp_path / "no_state"
    shutil.copytree(tiny_folder, folder)
    for name in ("dataset_statistics.json", "config.json"):
        raw = json.loads((folder / name).read_text())
        del raw.get("norm_stats", raw)["metaworld"]["proprio"]
        (folder / name).write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="no proprio entry"):
        spec(OftConfig(checkpoint=str(folder), use_proprio=True))


def test_state_reaches_the_decision(tiny_folder, make_obs):
    one = fresh(tiny_folder, use_proprio=True)
    assert one.spec.state_dims == 4
    obs = make_obs(2)
    trace = one.act(obs, temperature=0).trace
    moved = replace(obs, state=obs.state + 0.2)
    a, b = (one.evaluate(o, trace, temperature=1.0).logprob for o in (obs, moved))
    assert not torch.equal(a, b)


def test_seven_numbers_for_metaworld(tmp_path, make_obs):
    stats = {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}
    folder = tmp_path / "seven"
    init_tiny(
        folder,
        prompts=["open the drawer"],
        statistics=stats,
        key="meta_world_strict",
        action_dims=7,
        chunk=2,
        image_size=70,
        sizes=TinySizes(hidden=32, mlp=32, layers=2, heads=2, vision_dim=16, vision_depth=1),
    )
    assert fresh(folder).spec.action.format == "delta_xyz_axisangle"
    one = fresh(folder, action_format="metaworld_7d")
    step = one.act(make_obs(2), temperature=1.0, keys=keys_of(2))
    assert one.spec.action.dims == 4
    assert step.action.shape == (2, 2, 4)
    assert step.trace["token"].shape == step.logprob.shape == (2, 2, 7)


def test_unknown_keys_are_refused(tiny_folder):
    with pytest.raises(ValidationError):
        OftConfig(checkpoint=str(tiny_folder), stop_tokn=True)


def test_recognises(tiny_folder, tmp_path):
    assert recognises(tiny_folder)
    assert not recognises(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "pi0"}')
    assert not recognises(tmp_path)


# ------------------------------------------------------------------ what is trained


def test_parameter_groups(tiny_folder):
    groups = fresh(tiny_folder, needs_value=True).param_groups()
    assert set(groups) == {"actor", "critic"}
    assert len(groups["critic"]) == 5
    assert set(fresh(tiny_folder).param_groups()) == {"actor"}


def test_frozen_vision(tiny_folder):
    one = fresh(tiny_folder, freeze_vision=True)
    frozen = {n for n, p in one.module.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(n.startswith("vision_backbone.") for n in frozen)


@pytest.mark.parametrize("detach", [False, True])
def test_value_gradient_reaches_the_backbone_unless_detached(tiny_folder, make_obs, detach):
    one = fresh(tiny_folder, needs_value=True, value_detach=detach)
    obs = make_obs(2)
    out = one.evaluate(obs, one.act(obs, temperature=0).trace, temperature=1.0)
    out.value.sum().backward()
    grad = one.module.projector.fc1.weight.grad
    assert (grad is None) == detach
    assert one.module.value_head.mlp[0].weight.grad is not None


def test_adapters_start_as_the_identity_and_are_all_that_trains(tiny_folder, policy, make_obs):
    one = fresh(tiny_folder, lora=LoraSection(rank=4), needs_value=True)
    obs = make_obs(2)
    trace = one.act(obs, temperature=0).trace
    a, b = (p.evaluate(obs, trace, temperature=1.0).logprob for p in (one, policy))
    assert torch.equal(a, b)
    trained = {n for n, p in one.module.named_parameters() if p.requires_grad}
    assert all(".lora_" in n or n.startswith("value_head.") for n in trained)
    # 7 kinds of layers in 2 decoder layers, two matrices each
    assert sum(".lora_" in n for n in trained) == 28


def test_adapters_are_the_same_on_every_rank(tiny_folder):
    a, b = (
        dict(fresh(tiny_folder, lora=LoraSection(rank=4)).module.named_parameters()) for _ in "ab"
    )
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_adapters_on_vision_projector_and_head(tiny_folder, make_obs):
    targets = ("qkv", "proj", "fc1", "fc3", "action_rows")
    one = fresh(tiny_folder, lora=LoraSection(rank=2, targets=targets))
    adapted = {n.split(".lora_A")[0] for n, _ in one.module.named_parameters() if ".lora_A" in n}
    assert "language_model.action_rows" in adapted
    assert "projector.fc3" in adapted
    assert "vision_backbone.featurizer.blocks.0.attn.qkv" in adapted
    assert not any("patch_embed" in n for n in adapted)
    obs = make_obs(2)
    one.evaluate(obs, one.act(obs, temperature=0).trace, temperature=1.0).logprob.sum().backward()
    rows = one.module.language_model.action_rows
    assert rows.lora_B["default"].weight.grad.abs().sum() > 0


def test_unknown_adapter_targets_are_listed(tiny_folder):
    with pytest.raises(ConfigError, match=r"is called q_prj; there are: .*q_proj"):
        fresh(tiny_folder, lora=LoraSection(targets=("q_prj", "k_proj")))


# ------------------------------------------------------------------ supervised


def test_supervised_loss_is_the_mean_negative_logprob(policy, make_obs):
    obs = make_obs(3)
    action = torch.rand(3, 8, 4) * 1.2 - 0.6
    trace = {"token": policy.encode(action)}
    logp = policy.evaluate(obs, trace, temperature=1.0).logprob
    torch.testing.assert_close(policy.sft_loss(obs, action), -logp.mean())
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[0, :5] = mask[2, 0] = True
    want = -torch.cat([logp[0, :5], logp[2, :1]]).mean()
    torch.testing.assert_close(policy.sft_loss(obs, action, mask), want)
    assert policy.sft_loss(obs, action, torch.zeros_like(mask)) == 0


def test_a_few_steps_teach_one_sample(tiny_folder, make_obs):
    one = fresh(tiny_folder)
    obs = make_obs(2)
    action = torch.tensor([0.5, -0.3, 0.2, 1.0]).expand(2, 8, 4)
    optimizer = torch.optim.AdamW(one.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = one.sft_loss(obs, action)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # log 256 = 5.5 is ignorance; log 4 = 1.39 is knowing the four numbers but not their places.
    assert losses[0] > 5
    assert losses[-1] < 1.45


def test_dropout_is_for_supervision_only(tiny_folder, make_obs):
    one = fresh(tiny_folder, lora=LoraSection(rank=4, dropout=0.5))
    for name, param in one.module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(param, std=0.5)
    obs = make_obs(2)
    action = torch.zeros(2, 8, 4)
    assert one.sft_loss(obs, action) != one.sft_loss(obs, action)
    trace = one.act(obs, temperature=0).trace
    a, b = (one.evaluate(obs, trace, temperature=1.0).logprob for _ in "ab")
    assert torch.equal(a, b)
