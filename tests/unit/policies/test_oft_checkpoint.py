"""The checkpoint layout: what is written reloads to the same policy; what is broken is named."""

import json
import os
import shutil
from fractions import Fraction
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlarl.errors import AssetMissing, ConfigError, CorruptFile, RunFailed
from vlarl.models.openvla_oft import checkpoint
from vlarl.models.openvla_oft.config import read_net_config
from vlarl.models.openvla_oft.layout import LM_HEAD, dead_tensors, l1_tensors, proprio_tensors
from vlarl.models.openvla_oft.net import L1Head, ProprioProjector
from vlarl.models.value_head import ValueHead
from vlarl.policies.openvla_oft import LoraSection, OftConfig, check, load, spec

CPU = torch.device("cpu")


def fresh(folder, *, needs_value=False, train=True, **fields):
    cfg = OftConfig(checkpoint=str(folder), **fields)
    return load(cfg, device=CPU, needs_value=needs_value, train=train)


def scores(policy, obs):
    chunk, width = policy.spec.chunk, policy.codec.width
    token = torch.arange(len(obs) * chunk * width).view(len(obs), chunk, width) % 256
    with torch.no_grad():
        return policy.evaluate(obs, {"token": token.to(torch.int16)}, temperature=1.0)


def tensors_of(folder):
    files = sorted(set(checkpoint.weight_map(folder).values()))
    return {n: t for f in files for n, t in load_file(folder / f).items()}


def shake(policy):
    """Other weights than those on disk."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.module.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.02)
    return policy


@pytest.fixture
def copy(tiny_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_folder, folder)
    return folder


def rewrite(folder, name, change):
    """Pass the tensors of the shard that holds `name` through `change`."""
    path = folder / checkpoint.weight_map(folder)[name]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# ------------------------------------------------------------------ saving


def test_a_saved_policy_reloads_bit_for_bit(tiny_folder, tmp_path, make_obs):
    one = shake(fresh(tiny_folder, needs_value=True, value="action"))
    one.save(tmp_path / "a")
    two = fresh(tmp_path / "a", needs_value=True, value="action")
    obs = make_obs(3)
    a, b = scores(one, obs), scores(two, obs)
    assert torch.equal(a.logprob, b.logprob)
    assert torch.equal(a.value, b.value)
    two.save(tmp_path / "b")
    first, second = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_same_shards_names_and_files_as_the_source(tiny_folder, tmp_path):
    shake(fresh(tiny_folder)).save(tmp_path / "a")
    assert checkpoint.weight_map(tmp_path / "a") == checkpoint.weight_map(tiny_folder)
    assert len(set(checkpoint.weight_map(tiny_folder).values())) > 1
    assert {p.name for p in tmp_path.joinpath("a").iterdir()} == {
        p.name for p in tiny_folder.iterdir()
    }
    index = json.loads((tmp_path / "a" / checkpoint.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in tensors_of(tmp_path / "a").values()
    )


def test_what_is_saved_may_be_read_by_those_whom_the_umask_lets(tiny_folder, tmp_path):
    before = os.umask(0o022)
    try:
        fresh(tiny_folder).save(tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert any(name.endswith(".safetensors") for name in modes)
    assert set(modes.values()) == {0o644}


def test_dead_tensors_and_other_head_rows_pass_through(tiny_folder, tmp_path):
    one = shake(fresh(tiny_folder))
    one.save(tmp_path / "a")
    before, after = tensors_of(tiny_folder), tensors_of(tmp_path / "a")
    config = read_net_config(tiny_folder)
    dead = dead_tensors(config)
    assert len(dead) == 43
    for name, tensor in before.items():
        if name == LM_HEAD:
            first = config.first_action_id
            rows = torch.zeros(len(tensor), dtype=torch.bool)
            rows[first : first + 256] = True
            assert torch.equal(after[name][~rows], tensor[~rows])
            assert torch.equal(after[name][rows], one.module.language_model.action_rows.weight)
        else:
            assert torch.equal(after[name], tensor) == (name in dead), name


def test_settings_travel_with_the_checkpoint(tiny_folder, tmp_path):
    one = fresh(tiny_folder, compat="rlinf", chunk=5, num_images=2, use_proprio=True)
    one.save(tmp_path / "a")
    two = fresh(tmp_path / "a")
    assert two.settings == one.settings
    assert two.spec == one.spec


def test_evaluation_refuses_to_act_on_a_fresh_state_projector(tiny_folder):
    cfg = OftConfig(checkpoint=str(tiny_folder), use_proprio=True)
    for attempt in (check, partial(load, device=CPU)):
        attempt(cfg, needs_value=False, train=True)
        with pytest.raises(AssetMissing, match="no proprio_projector"):
            attempt(cfg, needs_value=False, train=False)


def test_the_state_projector_is_saved(tiny_folder, tmp_path, make_obs):
    one = shake(fresh(tiny_folder, use_proprio=True))
    one.save(tmp_path / "a")
    assert (tmp_path / "a" / "proprio_projector--0_checkpoint.pt").exists()
    assert torch.equal(
        scores(one, make_obs(2)).logprob, scores(fresh(tmp_path / "a"), make_obs(2)).logprob
    )


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("qkv", "fc2", "action_rows")])
def test_adapters_are_merged(tiny_folder, tmp_path, make_obs, targets):
    one = shake(fresh(tiny_folder, lora=LoraSection(rank=4, alpha=6.0, targets=targets)))
    one.save(tmp_path / "a")
    plain = fresh(tmp_path / "a")
    assert not any("lora" in n for n, _ in plain.module.named_parameters())
    obs = make_obs(2)
    a, b, base = (scores(p, obs).logprob for p in (one, plain, fresh(tiny_folder)))
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    assert (a - base).abs().max() > 1e-2


def test_a_given_state_dict_is_written_instead_of_the_weights(tiny_folder, tmp_path, make_obs):
    """Under sharding the module itself holds only a part."""
    one = fresh(tiny_folder, needs_value=True)
    other = shake(fresh(tiny_folder, needs_value=True))
    one.save(tmp_path / "a", state=other.module.state_dict())
    got = scores(fresh(tmp_path / "a", needs_value=True), make_obs(2))
    want = scores(other, make_obs(2))
    assert torch.equal(got.logprob, want.logprob)
    assert torch.equal(got.value, want.value)


def test_bfloat16_is_saved_as_bfloat16(tiny_folder, tmp_path):
    one = fresh(tiny_folder, dtype="bf16", needs_value=True)
    assert one.module.value_head.mlp[0].weight.dtype == torch.float32
    one.save(tmp_path / "a")
    assert tensors_of(tmp_path / "a")["projector.fc1.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_nothing_is_overwritten(tiny_folder, tmp_path):
    one = fresh(tiny_folder)
    one.save(tmp_path / "a")
    with pytest.raises(ConfigError, match="exists"):
        one.save(tmp_path / "a")


def test_a_full_disk_leaves_nothing_behind(tiny_folder, tmp_path, monkeypatch):
    one = fresh(tiny_folder)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunFailed, match="No space left"):
        one.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_single_file_is_read_and_written(tiny_folder, tmp_path, make_obs):
    folder = tmp_path / "single"
    folder.mkdir()
    for path in tiny_folder.glob("*.json"):
        if path.name != checkpoint.INDEX:
            shutil.copy(path, folder)
    save_file(tensors_of(tiny_folder), folder / checkpoint.SINGLE)
    one = fresh(folder)
    assert torch.equal(
        scores(one, make_obs(2)).logprob, scores(fresh(tiny_folder), make_obs(2)).logprob
    )
    one.save(tmp_path / "again")
    assert not (tmp_path / "again" / checkpoint.INDEX).exists()
    assert tensors_of(tmp_path / "again").keys() == tensors_of(folder).keys()


def test_the_released_layout_survives(golden_folder, tmp_path, make_obs):
    one = shake(fresh(golden_folder, unnorm_key="libero_spatial", jpeg="off"))
    one.save(tmp_path / "a")
    two = fresh(tmp_path / "a")
    assert two.settings.unnorm_key == "libero_spatial_no_noops"
    assert torch.equal(scores(one, make_obs(2)).logprob, scores(two, make_obs(2)).logprob)


# ------------------------------------------------------------------ value head


def test_a_fresh_value_head_is_the_same_on_every_rank(tiny_folder, make_obs):
    a, b = (scores(fresh(tiny_folder, needs_value=True), make_obs(2)).value for _ in "ab")
    assert torch.equal(a, b)


def test_a_stored_value_head_is_used(tiny_folder, tmp_path, make_obs):
    one = shake(fresh(tiny_folder, needs_value=True))
    one.save(tmp_path / "a")
    got = scores(fresh(tmp_path / "a", needs_value=True), make_obs(2)).value
    assert torch.equal(got, scores(one, make_obs(2)).value)


def test_a_value_head_of_another_width_is_refused(tiny_folder, tmp_path):
    fresh(tiny_folder, needs_value=True).save(tmp_path / "a")
    with pytest.raises(
        CorruptFile, match=r"value_head\.safetensors .* \(1, 128\), expected \(8, 128\)"
    ):
        fresh(tmp_path / "a", needs_value=True, value="action")


# ------------------------------------------------------------------ broken checkpoints


@pytest.fixture(params=["check", "load"])
def judge(request):
    """judge(folder): by headers alone, or by loading; both have to refuse alike."""

    def by_headers(folder, *, needs_value=False, train=True):
        check(OftConfig(checkpoint=str(folder)), needs_value=needs_value, train=train)

    return by_headers if request.param == "check" else fresh


def test_a_whole_checkpoint_passes(tiny_folder, judge):
    judge(tiny_folder)
    judge(tiny_folder, needs_value=True)


def test_a_value_head_of_another_width_is_named(copy, judge):
    head = ValueHead(read_net_config(copy).hidden_size, 3)
    state = {f"value_head.{name}": t for name, t in head.state_dict().items()}
    save_file(state, copy / checkpoint.VALUE_HEAD)
    judge(copy)
    with pytest.raises(CorruptFile, match=r"value_head\.safetensors does not fit .*mlp\.4\.weight"):
        judge(copy, needs_value=True)


def test_a_missing_tensor_is_named(copy, judge):
    name = "projector.fc1.bias"
    index = json.loads((copy / checkpoint.INDEX).read_text())
    del index["weight_map"][name]
    (copy / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match=r"1 missing: projector\.fc1\.bias"):
        judge(copy)


def test_a_missing_dead_tensor_is_named(copy, judge):
    name = "vision_backbone.featurizer.norm.weight"
    index = json.loads((copy / checkpoint.INDEX).read_text())
    del index["weight_map"][name]
    (copy / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match=name):
        judge(copy)


def test_an_extra_tensor_is_named(copy, judge):
    index = json.loads((copy / checkpoint.INDEX).read_text())
    index["weight_map"]["who.knows"] = next(iter(index["weight_map"].values()))
    (copy / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match=r"1 unknown: who\.knows"):
        judge(copy)


def test_an_index_that_lies_is_found(copy, judge):
    name = "projector.fc1.bias"
    rewrite(copy, name, lambda tensors: tensors.pop(name))
    with pytest.raises(CorruptFile, match=r"no tensor 'projector\.fc1\.bias'"):
        judge(copy)


@pytest.mark.parametrize("name", ["projector.fc1.bias", LM_HEAD])
def test_a_wrong_shape_is_named(copy, name, judge):
    rewrite(copy, name, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(CorruptFile, match=rf"wrong shapes .*{name} \[3\], expected"):
        judge(copy)


@pytest.mark.parametrize("name", ["projector.fc1.bias", LM_HEAD])
def test_weights_that_are_no_floats_are_named(copy, name, judge):
    rewrite(copy, name, lambda tensors: tensors.update({name: tensors[name].int()}))
    with pytest.raises(CorruptFile, match=rf"{name} holds I32 numbers, expected one of F16"):
        judge(copy)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["projector.fc1.bias", LM_HEAD, "vision_backbone.featurizer.patch_embed.proj.weight"]
)
def test_weights_that_are_not_finite_are_named(copy, name, bad):
    def spoil(tensors):
        # In the head, only rows of action tokens are read.
        tensors[name].view(-1)[-1] = bad
        if name == LM_HEAD:
            tensors[name][:] = bad

    rewrite(copy, name, spoil)
    with pytest.raises(CorruptFile, match=rf"model-.*: {name} holds NaN or infinite numbers"):
        fresh(copy)


def test_a_truncated_shard_is_named(copy, judge):
    path = sorted(copy.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptFile, match=rf"{path.name} \(\d+ bytes\) is truncated"):
        judge(copy)


def test_a_missing_shard_is_named(copy, judge):
    path = sorted(copy.glob("model-*.safetensors"))[1]
    path.unlink()
    with pytest.raises(AssetMissing, match=path.name) as caught:
        judge(copy)
    assert caught.value.fix == f"hf download OWNER/copy --local-dir {copy}"


@pytest.mark.parametrize("name", [5, None, "../copy/model-00001-of-00003.safetensors"])
def test_an_index_names_files_of_its_folder(copy, judge, name):
    index = json.loads((copy / checkpoint.INDEX).read_text())
    index["weight_map"][LM_HEAD] = name
    (copy / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match="no weight_map of file names"):
        judge(copy)


def test_no_weights_at_all(copy, judge):
    for path in copy.glob("model*"):
        path.unlink()
    with pytest.raises(AssetMissing, match="no model") as caught:
        judge(copy)
    assert caught.value.fix == f"hf download OWNER/copy --local-dir {copy}"


@pytest.mark.parametrize(
    ("file", "keys", "value", "error"),
    [
        ("config.json", ("text_config",), 3, CorruptFile),
        ("config.json", ("image_sizes",), 3, CorruptFile),
        ("config.json", ("vlarl",), [1], CorruptFile),
        ("config.json", ("vlarl", "settings"), 7, CorruptFile),
        ("config.json", ("vlarl", "settings", "chunk"), "8", CorruptFile),
        ("config.json", ("text_config", "hidden_size"), None, CorruptFile),
        ("config.json", ("text_config", "hidden_size"), 33, CorruptFile),
        ("config.json", ("text_config", "hidden_size"), 10**12, CorruptFile),
        ("config.json", ("text_config", "num_hidden_layers"), 1.5, CorruptFile),
        ("config.json", ("text_config", "num_attention_heads"), 0, CorruptFile),
        ("config.json", ("text_config", "num_key_value_heads"), 3, CorruptFile),
        ("config.json", ("text_config", "rms_norm_eps"), float("nan"), CorruptFile),
        ("config.json", ("text_config", "vocab_size"), 256, CorruptFile),
        ("config.json", ("pad_token_id",), 10**6, CorruptFile),
        ("config.json", ("vlarl", "towers", "vlarl_tiny_dinov2", "depth"), True, CorruptFile),
        ("config.json", ("vlarl", "towers", "vlarl_tiny_dinov2", "dim"), 17, CorruptFile),
        ("config.json", ("vlarl", "towers", "vlarl_tiny_dinov2", "width"), 16, CorruptFile),
        ("dataset_statistics.json", ("*", "action", "mask"), [1, 1, 1, 0], CorruptFile),
        ("dataset_statistics.json", ("*", "action", "q01"), [0.95, 0, 0, 0], ConfigError),
        ("dataset_statistics.json", ("*",), 3, ConfigError),
        ("dataset_statistics.json", ("*", "action", "q01"), ["a"] * 4, CorruptFile),
        (
            "dataset_statistics.json",
            ("*", "action", "q99"),
            [1, 1, 1, float("nan")],
            ConfigError,
        ),
    ],
)
def test_values_of_the_wrong_kind_name_the_file(copy, file, keys, value, error):
    """Found from the small files alone, before weights load. `*` is the one data set."""
    whole = json.loads((copy / file).read_text())
    *path, last = (next(iter(whole)) if key == "*" else key for key in keys)
    below = whole
    for key in path:
        below = below[key]
    below[last] = value
    (copy / file).write_text(json.dumps(whole))
    with pytest.raises(error, match=file) as caught:
        spec(OftConfig(checkpoint=str(copy)))
    # What is wrong between two keys is said of one of them.
    assert keys[-1] in ("*", "hidden_size") or keys[-1] in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[" * 10**5, "[1]"])
def test_a_file_that_is_no_json_object_is_named(copy, content):
    path = copy / "dataset_statistics.json"
    path.unlink()
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(CorruptFile, match=str(path)):
        spec(OftConfig(checkpoint=str(copy)))


# ------------------------------------------------------------------ other heads


@pytest.fixture
def l1_folder(copy):
    head = L1Head(read_net_config(copy).hidden_size, 4)
    g = torch.Generator().manual_seed(0)
    state = {
        f"module.{n}": torch.randn(t.shape, generator=g) * 0.1 for n, t in head.state_dict().items()
    }
    torch.save(state, copy / "action_head--150000_checkpoint.pt")
    return copy


def test_training_refuses_an_l1_head_and_says_why(l1_folder):
    with pytest.raises(ConfigError, match=r"L1 regression head .*never learned"):
        fresh(l1_folder)


def test_evaluation_uses_an_l1_head(l1_folder, make_obs):
    one = fresh(l1_folder, train=False)
    assert one.is_l1
    obs = make_obs(2)
    step = one.act(obs, temperature=0)
    assert step.trace == {}
    # The regression by hand: chunk rows of A hidden states each.
    hidden = one.module.read_hidden(
        one.images([obs.images["front"]]), *one.prompts.batch(obs.instruction, CPU), None
    ).detach()
    w = torch.load(l1_folder / "action_head--150000_checkpoint.pt", weights_only=True)
    w = {n.removeprefix("module.model."): t for n, t in w.items()}
    x = hidden.reshape(2, 8, -1)

    def norm(x, name):
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"]
        )

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = torch.relu(linear(norm(x, "layer_norm1"), "fc1"))
    for i in range(2):
        block = f"mlp_resnet_blocks.{i}.ffn"
        x = x + torch.relu(linear(norm(x, f"{block}.0"), f"{block}.1"))
    x = linear(norm(x, "layer_norm2"), "fc2")
    torch.testing.assert_close(step.action, one.codec.decode_normalised(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [("noisy_action_projector", "diffusion head"), ("vision_backbone", "FiLM")],
)
def test_other_kinds_are_refused(copy, name, words):
    torch.save({}, copy / f"{name}--1_checkpoint.pt")
    with pytest.raises(ConfigError, match=words):
        fresh(copy, train=False)


def test_two_components_of_a_kind_are_refused(l1_folder):
    shutil.copy(
        l1_folder / "action_head--150000_checkpoint.pt", l1_folder / "action_head--5_checkpoint.pt"
    )
    with pytest.raises(ConfigError, match="several action_head files"):
        fresh(l1_folder, train=False)


@pytest.mark.parametrize("content", [b"", b"not a torch file", b"PK\x03\x04 cut"])
def test_a_broken_component_is_named(copy, content, judge):
    (copy / "action_head--1_checkpoint.pt").write_bytes(content)
    with pytest.raises(CorruptFile, match="action_head--1_checkpoint") as caught:
        judge(copy, train=False)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("saved", [5, {"a": 5}, {3: torch.zeros(1)}, Fraction(1, 2)])
def test_a_component_of_something_else_is_named(copy, saved, judge):
    torch.save(saved, copy / "action_head--1_checkpoint.pt")
    with pytest.raises(CorruptFile, match="something else than tensors") as caught:
        judge(copy, train=False)
    assert "weights_only" not in str(caught.value)


def test_a_component_of_another_size_is_named(copy, judge):
    torch.save(ValueHead(8, 1).state_dict(), copy / "action_head--1_checkpoint.pt")
    with pytest.raises(CorruptFile, match="does not fit"):
        judge(copy, train=False)


def test_heads_have_the_shapes_that_their_files_are_judged_by():
    for module, shapes in (
        (L1Head(16, 7), l1_tensors(7, 16)),
        (ProprioProjector(8, 16), proprio_tensors(8, 16)),
    ):
        assert checkpoint.shapes_of(module.state_dict()) == shapes


@pytest.mark.parametrize("dims", [4, 5])
def test_a_state_projector_is_judged_by_its_header(copy, dims):
    hidden = read_net_config(copy).hidden_size
    torch.save(ProprioProjector(dims, hidden).state_dict(), copy / "proprio_projector--1_x.pt")
    cfg = OftConfig(checkpoint=str(copy), use_proprio=True)
    if dims == 4:
        check(cfg, needs_value=False, train=False)
        return
    with pytest.raises(CorruptFile, match=r"proprio_projector--1_x\.pt does not fit"):
        check(cfg, needs_value=False, train=False)


def test_an_l1_head_is_evaluated_after_its_check(l1_folder):
    check(OftConfig(checkpoint=str(l1_folder)), needs_value=False, train=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, ["has a state projector"]),
        ({"use_proprio": False, "chunk": 8}, ["has a state projector"]),
        ({"use_proprio": True, "chunk": 5}, ["policy.chunk is 5, but"]),
        ({"use_proprio": True}, []),
    ],
)
def test_what_it_was_not_trained_for_is_said(copy, caplog, settings, says):
    hidden = read_net_config(copy).hidden_size
    torch.save(ProprioProjector(4, hidden).state_dict(), copy / "proprio_projector--1_x.pt")
    check(OftConfig(checkpoint=str(copy), **settings), needs_value=False, train=False)
    assert len(caplog.messages) == len(says)
    assert all(word in text for word, text in zip(says, caplog.messages, strict=True))


def test_a_published_data_set_is_told_from_one_that_somebody_named(golden_folder, tiny_folder):
    key = next(iter(json.loads((golden_folder / "dataset_statistics.json").read_text())))
    released = spec(OftConfig(checkpoint=str(golden_folder), unnorm_key=key))
    assert (released.dataset, released.dataset_is_known) == ("", True)
    own = spec(OftConfig(checkpoint=str(tiny_folder)))
    assert (own.dataset, own.dataset_is_known) == ("metaworld", False)
