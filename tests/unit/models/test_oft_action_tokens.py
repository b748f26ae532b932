"""The action codec, against the reference's numbers and by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.errors import ConfigError, CorruptFile
from vlarl.models.openvla_oft.action_tokens import (
    ActionCodec,
    StateCodec,
    bin_centres,
    choose_format,
    digitise,
)
from vlarl.models.openvla_oft.statistics import resolve_key

GOLDEN = Path(__file__).parents[2] / "golden" / "oft"
FIRST = 31744


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "golden.npz"))


@pytest.fixture(scope="module")
def statistics():
    return json.loads((GOLDEN / "dataset_statistics.json").read_text())


def codec_of(entry, normalisation="q99", action_format=None) -> ActionCodec:
    return ActionCodec(entry, normalisation=normalisation, action_format=action_format)


UNIT = {"q01": [-1.0] * 4, "q99": [1.0] * 4}


def test_centres(golden):
    np.testing.assert_allclose(bin_centres().numpy(), golden["detok_centres"], atol=1e-15)


def test_ids_zero_and_one_mean_the_same_and_the_middle_is_zero():
    centres = bin_centres()
    assert centres[0] == centres[1] == pytest.approx(1 - 1 / 255)
    assert centres[255] == pytest.approx(-1 + 1 / 255)
    assert centres[128] == pytest.approx(0, abs=1e-15)


def test_encoding_continuous_values(golden):
    got = digitise(torch.from_numpy(golden["encode_values"])) + FIRST
    assert np.array_equal(got.numpy(), golden["encode_ids"])


def test_every_bin_survives_decode_and_encode():
    token = torch.arange(1, 256)  # 0 decodes to the centre of 1
    assert torch.equal(digitise(bin_centres()[token]), token)


@pytest.mark.parametrize("name", ["libero_spatial", "libero_object"])
def test_unnormalised_actions(golden, statistics, name):
    codec = codec_of(statistics[resolve_key(statistics, name)]["action"])
    local = torch.from_numpy(golden["tokens"] - FIRST)
    normalised = bin_centres()[local]
    np.testing.assert_allclose(normalised, golden["tokens_normalized_actions"], atol=1e-15)
    want = golden[f"tokens_actions_{name}"]
    np.testing.assert_allclose(codec.unnormalise(normalised).numpy(), want, atol=1e-15)
    decoded = codec.decode(local)
    assert decoded.dtype == torch.float32
    np.testing.assert_allclose(decoded[..., :6], want[..., :6], atol=1e-7)


def test_libero_gripper_becomes_minus_one_open_plus_one_closed(statistics):
    codec = codec_of(statistics["libero_spatial_no_noops"]["action"])
    # Normalised 0.996 (id 0): wide open. -0.996 (id 255): closed.
    token = torch.tensor([[128] * 6 + [0], [128] * 6 + [255]])
    assert codec.decode(token)[:, 6].tolist() == [-1.0, 1.0]


def test_libero_actions_survive_encode_and_decode(statistics):
    codec = codec_of(statistics["libero_spatial_no_noops"]["action"])
    action = torch.tensor([[0.05, 0.1, -0.2, 0.01, 0.02, 0.03, 1.0], [0.0] * 6 + [-1.0]])
    back = codec.decode(codec.encode(action))
    width = torch.tensor([1.5, 1.3, 1.1, 0.25, 0.45, 0.65]) / 255
    assert ((back - action)[:, :6].abs() <= width / 2 + 1e-6).all()
    assert torch.equal(back[:, 6], action[:, 6])


def test_metaworld_actions_are_scaled_by_their_statistics():
    codec = codec_of({"q01": [-0.5] * 4, "q99": [0.5] * 4, "mask": [True] * 3 + [False]})
    got = codec.decode(torch.tensor([1, 128, 255, 255]))
    assert got.tolist() == pytest.approx([0.49804, 0.0, -0.49804, -0.99608], abs=1e-5)


def test_actions_outside_the_statistics_are_clipped():
    codec = codec_of({"q01": [-0.5] * 4, "q99": [0.5] * 4})
    tokens = codec.encode(torch.tensor([9.0, -9.0, 0.5, -0.5]))
    # The reference's 1e-8 keeps the upper end just below the last edge: id 1, which means the same.
    assert tokens.tolist() == [0, 255, 1, 255]


def test_metaworld_7d_keeps_numbers_0_1_2_6_without_rescaling():
    codec = codec_of({"q01": [-1.0] * 7, "q99": [1.0] * 7}, action_format="metaworld_7d")
    assert (codec.width, codec.spec.dims) == (7, 4)
    token = torch.tensor([10, 20, 30, 40, 50, 60, 70])
    assert torch.allclose(codec.decode(token), bin_centres()[[10, 20, 30, 70]].float())
    action = torch.tensor([0.1, -0.2, 0.3, -0.4])
    tokens = codec.encode(action)
    assert tokens[3:6].tolist() == [128, 128, 128]  # unused rotations are zero
    assert torch.allclose(codec.decode(tokens), action, atol=1 / 255)


def test_bounds_use_minimum_and_maximum():
    codec = codec_of({"min": [-2.0] * 4, "max": [2.0] * 4}, normalisation="bounds")
    assert codec.decode(torch.tensor([1, 1, 1, 1])).tolist() == pytest.approx([2 - 2 / 255] * 4)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"q01": [0.0] * 4}, "no 'q99'"),
        ({"q01": [0.0] * 4, "q99": [1.0] * 3}, "4, 3 and 4"),
        ({"q01": [0.0] * 5, "q99": [1.0] * 5}, "actions of 5 numbers"),
        ({"q01": [], "q99": []}, "0, 0 and 0"),
        ({"q01": [0.0] * 4, "q99": [1.0] * 4, "mask": []}, "4, 4 and 0"),
        ({"q01": [0.0, 2.0, 0.0, 0.0], "q99": [1.0] * 4}, r"greater than q99: 2\.0 > 1\.0"),
        ({"q01": [1.0] * 4, "q99": [1.0] * 4}, "could never change"),
        ({"q01": [0.0] * 4, "q99": [1.0, 1.0, 1.0, float("inf")]}, "not finite"),
    ],
)
def test_bad_statistics(entry, words):
    with pytest.raises(ConfigError, match=words):
        codec_of(entry)


def test_exchanged_numbers_that_are_stored_as_they_are_and_ones_that_never_change_are_fine():
    codec = codec_of(
        {"q01": [0.0, 0.5, 0.0, 9.0], "q99": [1.0, 0.5, 1.0, 1.0], "mask": [True] * 3 + [False]}
    )
    low, high = codec.decode(torch.tensor([[255] * 4, [0] * 4]))
    assert low[1].item() == high[1].item() == 0.5
    assert (low[3].item(), high[3].item()) == pytest.approx((-254 / 255, 254 / 255))


@pytest.mark.parametrize("entry", [{"q01": "0", "q99": [1.0]}, {"q01": [True], "q99": [1.0]}])
def test_a_state_of_no_numbers_is_corrupt(entry):
    with pytest.raises(CorruptFile, match=r"proprio\.q01"):
        StateCodec(entry, normalisation="q99")


def test_a_format_of_another_width_is_refused():
    with pytest.raises(ConfigError, match="'metaworld_7d' needs 7 numbers per action"):
        choose_format(4, "metaworld_7d")


def test_statistics_key():
    there = {"libero_goal_no_noops": 1, "bridge": 2}
    assert resolve_key(there, "bridge") == "bridge"
    assert resolve_key(there, "libero_goal") == "libero_goal_no_noops"
    assert resolve_key({"bridge": 2}, None) == "bridge"
    with pytest.raises(
        ConfigError, match="no statistics of 'goal'; there are: bridge, libero_goal"
    ):
        resolve_key(there, "goal")
    with pytest.raises(ConfigError, match="choose one of: bridge, libero_goal"):
        resolve_key(there, None)


def test_state_is_normalised_and_clipped():
    codec = StateCodec({"q01": [0.0, -2.0], "q99": [1.0, 2.0]}, normalisation="q99")
    got = codec(torch.tensor([[0.25, 9.0]]))
    assert got.tolist()[0] == pytest.approx([-0.5, 1.0])
