"""Frames to pixels: TensorFlow's and RLinf's results on recorded frames."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.errors import ConfigError, CorruptFile
from vlarl.models.openvla_oft.processing import (
    ImageFrontEnd,
    crop_matrix,
    jpeg_round_trip,
    lanczos_matrix,
    read_normalisation,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "oft"
GRID = slice(8, None, 16)


@pytest.fixture(scope="module")
def images():
    return dict(np.load(GOLDEN / "images.npz"))


@pytest.fixture(scope="module")
def constants():
    return read_normalisation(GOLDEN, 56)


def front_end(constants, *, size=224, resize="lanczos", crop=True, jpeg="off") -> ImageFrontEnd:
    mean, std = constants
    return ImageFrontEnd(
        image_size=size, mean=mean, std=std, resize=resize, centre_crop=crop, jpeg=jpeg
    )


def levels(end: ImageFrontEnd, frame: np.ndarray) -> np.ndarray:
    """[s, s, 3] levels of one frame."""
    return end.to_model_size(torch.from_numpy(frame)[None])[0].permute(1, 2, 0).numpy()


def nearly_equal(got, want):
    """At most one level off, on at most 0.3 % of the values."""
    diff = np.abs(got - want.astype(np.float32))
    assert diff.max() <= 1
    assert (diff > 0).mean() <= 0.003


@pytest.mark.parametrize("size", [256, 480])
def test_lanczos(images, constants, size):
    got = levels(front_end(constants, crop=False), images[f"frame_{size}"])
    nearly_equal(got, images[f"lanczos_{size}"])


@pytest.mark.parametrize("size", [256, 480])
def test_lanczos_and_centre_crop(images, constants, size):
    got = levels(front_end(constants), images[f"frame_{size}"])
    nearly_equal(got, images[f"lanczos_crop_{size}"])


def test_centre_crop_alone(images, constants):
    got = levels(front_end(constants), images["lanczos_256"])  # has the model's size: not resized
    nearly_equal(got, images["lanczos_crop_256"])


def test_from_the_reference_jpeg(images, constants):
    got = levels(front_end(constants), images["jpeg_decoded_256"])
    nearly_equal(got, images["jpeg_lanczos_crop_256"])


def test_jpeg_round_trip_is_close_to_the_reference_one(images, constants):
    got = levels(front_end(constants, jpeg="pil"), images["frame_256"])
    want = images["jpeg_lanczos_crop_256"].astype(np.float32)
    assert 0 < np.abs(got - want).mean() < 2.5
    without = levels(front_end(constants), images["frame_256"])
    assert np.abs(without - want).mean() > np.abs(got - want).mean()


def test_jpeg_pixels(images):
    got = jpeg_round_trip(torch.from_numpy(images["frame_256"])[None])[0].numpy()
    diff = np.abs(got.astype(int) - images["jpeg_decoded_256"].astype(int))
    assert diff.max() <= 11
    assert diff.mean() < 2


@pytest.mark.parametrize("size", [256, 480])
def test_bicubic_is_exact(images, constants, size):
    end = front_end(constants, resize="bicubic", crop=False)
    assert np.array_equal(levels(end, images[f"frame_{size}"]), images[f"bicubic_{size}"])
    pixels = end([torch.from_numpy(images[f"frame_{size}"])[None]])[0, :, GRID, GRID]
    np.testing.assert_allclose(
        pixels, images[f"normalized_bicubic_{size}_stride16"], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("size", [256, 480])
def test_normalisation_of_both_towers(images, constants, size):
    frame = torch.from_numpy(images[f"lanczos_crop_{size}"])[None]
    pixels = front_end(constants, crop=False)([frame])[0, :, GRID, GRID]
    want = images[f"normalized_lanczos_crop_{size}_stride16"]
    np.testing.assert_allclose(pixels, want, atol=1e-6, rtol=0)


def test_a_frame_of_the_models_size_is_untouched(constants):
    frame = torch.randint(0, 256, (2, 56, 56, 3)).to(torch.uint8)
    got = front_end(constants, size=56, crop=False, jpeg="pil").to_model_size(frame)
    assert torch.equal(got.to(torch.uint8), frame.permute(0, 3, 1, 2))


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 80), (31, 57)])
def test_constant_frames_stay_constant_at_any_size(constants, height, width):
    frame = torch.full((1, height, width, 3), 77, dtype=torch.uint8)
    for resize in ("lanczos", "bicubic"):
        got = front_end(constants, size=70, resize=resize).to_model_size(frame)
        assert got.shape == (1, 3, 70, 70)
        assert (got == 77).all()


def test_rows_of_a_batch_are_independent(images, constants):
    end = front_end(constants, size=56)
    frames = torch.randint(0, 256, (5, 64, 64, 3), generator=torch.Generator().manual_seed(0))
    frames = frames.to(torch.uint8)
    assert torch.equal(end([frames])[3:4], end([frames[3:4]]))


def test_views_follow_each_other_on_the_channel_axis(constants):
    a, b = (torch.full((1, 56, 56, 3), v, dtype=torch.uint8) for v in (0, 255))
    pixels = front_end(constants, size=56)([a, b])
    assert pixels.shape == (1, 12, 56, 56)
    assert (pixels[:, 3:6] == -1).all()  # second tower: (0 - 0.5) / 0.5
    assert (pixels[:, 9:12] == 1).all()


def test_resampling_rows_sum_to_one():
    for matrix in (lanczos_matrix(480, 224), lanczos_matrix(48, 56), crop_matrix(56)):
        assert torch.allclose(matrix.sum(1), torch.ones(len(matrix)), atol=1e-6)


def test_crop_shows_the_central_nine_tenths():
    ramp = crop_matrix(224) @ torch.arange(224.0)
    margin = 223 * (1 - 0.9**0.5) / 2
    assert ramp[0].item() == pytest.approx(margin, abs=1e-3)
    assert ramp[-1].item() == pytest.approx(223 - margin, abs=1e-3)


def test_rounded_constants_win_over_means_and_stds(constants):
    mean, std = constants
    assert mean == [0.484375, 0.455078125, 0.40625, 0.5, 0.5, 0.5]
    assert std == [0.228515625, 0.2236328125, 0.224609375, 0.5, 0.5, 0.5]


def test_means_and_stds_are_the_fallback(tmp_path):
    raw = json.loads((GOLDEN / "preprocessor_config.json").read_text())
    del raw["tvf_normalize_params"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    assert read_normalisation(tmp_path, 56)[0][:3] == [0.485, 0.456, 0.406]


def test_another_image_size_is_refused():
    with pytest.raises(ConfigError, match="image_sizes 224"):
        read_normalisation(GOLDEN, 224)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_sizes", None),
        ("input_sizes", -1),
        ("tvf_normalize_params", "x"),
        ("tvf_normalize_params", [[0.5]]),
        ("tvf_normalize_params", [{"mean": [0.5, 0.5, 0.5]}]),
        ("tvf_normalize_params", [{"mean": [0.5] * 3, "std": [0.5, 0, 0.5]}] * 2),
        ("means", {}),
    ],
)
def test_values_of_a_wrong_kind_are_named(tmp_path, key, value):
    raw = json.loads((GOLDEN / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**raw, key: value}))
    with pytest.raises(CorruptFile, match=rf"preprocessor_config\.json: {key}"):
        read_normalisation(tmp_path, 56)


def test_one_tower_is_not_two(tmp_path):
    raw = json.loads((GOLDEN / "preprocessor_config.json").read_text())
    raw["tvf_normalize_params"].pop()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="of two towers"):
        read_normalisation(tmp_path, 56)
