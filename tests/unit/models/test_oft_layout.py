"""Names and shapes of the released layout, on meta tensors."""

import json
from pathlib import Path

import pytest
import torch

from vlarl.errors import ConfigError, CorruptFile
from vlarl.models.openvla_oft.checkpoint import check_names
from vlarl.models.openvla_oft.config import KNOWN_TOWERS, read_net_config
from vlarl.models.openvla_oft.layout import ACTION_ROWS, LM_HEAD, dead_tensors, stored_tensors
from vlarl.models.openvla_oft.net import OftNet

GOLDEN = Path(__file__).parents[2] / "golden" / "oft"

RELEASED = {
    "model_type": "openvla",
    "use_fused_vision_backbone": True,
    "image_sizes": [224, 224],
    "timm_model_ids": list(KNOWN_TOWERS),
    "n_action_bins": 256,
    "pad_token_id": 32000,
    "pad_to_multiple_of": 64,
    "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
}


@pytest.fixture(scope="module")
def keys():
    return json.loads((GOLDEN / "keys7b.json").read_text())


@pytest.fixture
def write(tmp_path):
    def make(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**RELEASED, **changes}))
        return tmp_path

    return make


@pytest.fixture(scope="module")
def net7b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    (folder / "config.json").write_text(json.dumps(RELEASED))
    with torch.device("meta"):
        return OftNet(read_net_config(folder), num_slots=56, stop_id=2)


def test_the_released_names_and_shapes_follow_from_the_config(net7b, keys):
    released = {name: tuple(shape) for name, shape in keys["shapes"].items()}
    assert stored_tensors(net7b.config) == released


def test_the_network_is_built_of_the_stored_tensors_that_are_not_dead(net7b):
    built = {name: tuple(p.shape) for name, p in net7b.named_parameters()}
    del built[ACTION_ROWS]
    stored = stored_tensors(net7b.config)
    del stored[LM_HEAD]
    assert built == {n: s for n, s in stored.items() if n not in dead_tensors(net7b.config)}


def test_dead_tensors_are_exactly_the_recorded_ones(net7b, keys):
    assert set(dead_tensors(net7b.config)) == set(keys["dead"])


def test_dead_tensors_are_not_built(net7b, keys):
    built = dict(net7b.named_parameters())
    assert not set(built) & set(keys["dead"])
    # 982 stored, 43 dead, and the head is there as its 256 action rows.
    assert len(built) == 982 - 43
    assert sum(p.numel() for p in built.values()) == 7_498_156_704 - (32064 - 256) * 4096


def test_fallbacks_of_a_released_config(write):
    config = read_net_config(write())
    assert (config.hidden_size, config.num_layers, config.rms_norm_eps) == (4096, 32, 1e-6)
    assert (config.first_action_id, config.num_patches) == (31744, 256)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llava"}, "model_type is 'llava'"),
        ({"use_fused_vision_backbone": False}, "two fused vision towers"),
        ({"image_sizes": [224, 256]}, "multiples of 14"),
        ({"image_sizes": [225, 225]}, "multiples of 14"),
        ({"timm_model_ids": ["vit_huge", "x"]}, "vit_huge"),
        ({"n_action_bins": 128}, "n_action_bins is 128"),
        ({"text_config": {"vocab_size": 32064, "rope_scaling": {"factor": 2}}}, "rope_scaling"),
    ],
)
def test_other_architectures_are_refused(write, changes, words):
    with pytest.raises(ConfigError, match=words):
        read_net_config(write(**changes))


def test_broken_json_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CorruptFile, match=r"config\.json is not valid JSON"):
        read_net_config(tmp_path)


def test_missing_and_unknown_tensors_are_listed(tmp_path):
    with pytest.raises(CorruptFile, match=r"1 missing: b; 2 unknown: c, d"):
        check_names({"a": 0, "b": 0}, {"a": 0, "c": 0, "d": 0}, tmp_path)
    check_names({"a": 0}, {"a": 0, "model.layers.0.self_attn.rotary_emb.inv_freq": 0}, tmp_path)


def test_long_lists_are_cut(tmp_path):
    with pytest.raises(CorruptFile, match=r"30 missing: .* and 18 more"):
        check_names({f"t{i}": 0 for i in range(30)}, {}, tmp_path)
