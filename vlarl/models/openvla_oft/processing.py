"""From raw frames and instructions to what the network reads. Everything in batches, on the device
of its input.

Source: moojink/openvla-oft@213c5ff experiments/robot/openvla_utils.py (resize, crop) and
RLinf@a3816b5 (bicubic). Differences: TensorFlow's Lanczos resize and `crop_and_resize` are written
as two matrices each (at most 1 level off on 0.2 % of values); the optional JPEG round trip uses
Pillow, whose decoder differs from TensorFlow's by 1-2 levels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from vlarl.config.explain import first_problem
from vlarl.errors import AssetMissing, ConfigError, CorruptFile
from vlarl.models.openvla_oft.config import Jpeg, Positive, Resize, download, read_json

_Three = tuple[float, float, float]
_ThreePositive = tuple[Positive, Positive, Positive]

CROP_AREA = 0.9
JPEG_QUALITY = 95
TEMPLATE = "In: What action should the robot take to {}?\nOut:"
BOS, EOS, SPACE = "<s>", "</s>", "▁"


def lanczos_matrix(size_in: int, size_out: int) -> Tensor:
    """[size_out, size_in] float32: Lanczos3 resampling with antialias and half-pixel centres along
    one axis.
    """
    scale = max(size_in / size_out, 1.0)
    centre = (torch.arange(size_out, dtype=torch.float64) + 0.5) * size_in / size_out
    x = (torch.arange(size_in, dtype=torch.float64)[None] + 0.5 - centre[:, None]) / scale
    weight = torch.sinc(x) * torch.sinc(x / 3) * (x.abs() < 3)
    return (weight / weight.sum(1, keepdim=True)).float()


def crop_matrix(size: int, area: float = CROP_AREA) -> Tensor:
    """[size, size] float32: central crop of `area` of a square image, resized back bilinearly,
    along one axis.

    Output k samples position (size - 1) (1 - r) / 2 + k r with r = sqrt(area), as TensorFlow's
    crop_and_resize.
    """
    side = math.sqrt(area)
    k = torch.arange(size, dtype=torch.float64)
    position = (size - 1) * (1 - side) / 2 + k * side
    below = position.floor().long().clamp(max=size - 2)
    fraction = position - below
    rows = torch.zeros(size, size, dtype=torch.float64)
    rows[torch.arange(size), below] = 1 - fraction
    rows[torch.arange(size), below + 1] = fraction
    return rows.float()


def jpeg_round_trip(frames: Tensor) -> Tensor:
    """[n, H, W, 3] uint8 through JPEG (quality 95, 4:2:0) and back, on the CPU, one frame after
    another.
    """
    decoded = []
    for frame in frames.cpu().numpy():
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
        decoded.append(np.asarray(Image.open(buffer)))
    return torch.from_numpy(np.stack(decoded)).to(frames.device)


class ImageFrontEnd:
    """Frames -> pixels of both towers.

    image_size: s. mean, std: 6 numbers, first tower first. A frame that already has the model's
    size is neither sent through JPEG nor resized, as in the reference.
    """

    def __init__(
        self,
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        resize: Resize,
        centre_crop: bool,
        jpeg: Jpeg,
    ) -> None:
        self.image_size = image_size
        self.resize = resize
        self.centre_crop = centre_crop
        self.jpeg = jpeg
        self.mean = torch.tensor(mean, dtype=torch.float32).view(1, 2, 3, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(1, 2, 3, 1, 1)
        self._cache: dict[tuple[str, int, torch.device], Tensor] = {}

    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """From k views of [n, H, W, 3] uint8 to [n, 6k, s, s] float32."""
        return torch.cat([self.normalise(self.to_model_size(view)) for view in images], dim=1)

    def to_model_size(self, frames: Tensor) -> Tensor:
        """[n, H, W, 3] uint8 -> [n, 3, s, s] float32 with whole numbers 0..255."""
        assert frames.dtype == torch.uint8, frames.dtype
        assert frames.ndim == 4, frames.shape
        size = self.image_size
        if frames.shape[1:3] != (size, size):
            if self.jpeg == "pil":
                frames = jpeg_round_trip(frames)
            x = frames.permute(0, 3, 1, 2).float()
            if self.resize == "lanczos":
                rows = self._matrix("lanczos", frames.shape[1], frames.device)
                columns = self._matrix("lanczos", frames.shape[2], frames.device)
                x = rows @ x @ columns.T
            else:
                x = F.interpolate(x, (size, size), mode="bicubic", antialias=True)
            x = x.round().clamp(0, 255)
        else:
            x = frames.permute(0, 3, 1, 2).float()
        if self.centre_crop:
            crop = self._matrix("crop", size, frames.device)
            x = (crop @ (x / 255) @ crop.T).clamp(0, 1)
            x = (x * 255.5).floor()
        return x

    def normalise(self, x: Tensor) -> Tensor:
        """[n, 3, s, s] levels -> [n, 6, s, s]: normalised for the first tower, then for the
        second.
        """
        mean, std = self.mean.to(x.device), self.std.to(x.device)
        return ((x[:, None] / 255 - mean) / std).flatten(1, 2)

    def _matrix(self, kind: str, size_in: int, device: torch.device) -> Tensor:
        key = (kind, size_in, device)
        if key not in self._cache:
            make = (
                crop_matrix(size_in) if kind == "crop" else lanczos_matrix(size_in, self.image_size)
            )
            self._cache[key] = make.to(device)
        return self._cache[key]


class _Normalisation(BaseModel):
    """One tower's entry in `tvf_normalize_params`."""

    mean: _Three
    std: _ThreePositive


class _Preprocessor(BaseModel):
    """What is read of `preprocessor_config.json`."""

    model_config = ConfigDict(allow_inf_nan=False)

    input_sizes: list[tuple[int, int, int]] = Field(default_factory=list)
    tvf_normalize_params: list[_Normalisation] = Field(default_factory=list)
    means: list[_Three] = Field(default_factory=list)
    stds: list[_ThreePositive] = Field(default_factory=list)


def read_normalisation(folder: Path, image_size: int) -> tuple[list[float], list[float]]:
    """Mean and std, 6 numbers each, from `preprocessor_config.json`.

    `tvf_normalize_params` wins over `means` and `stds`, as it does in the reference: it holds the
    bfloat16-rounded numbers that the released checkpoints were trained with.

    Raises:
        CorruptFile: the file does not hold such numbers. ConfigError: they are not of two towers,
            or its sizes disagree with the network.
    """
    path = folder / "preprocessor_config.json"
    try:
        found = _Preprocessor.model_validate(read_json(path))
    except ValidationError as error:
        raise CorruptFile(f"{path}: {first_problem(error)}; run: {download(folder)}") from None
    if any(size[1:] != (image_size, image_size) for size in found.input_sizes):
        raise ConfigError(
            f"{path}: input_sizes is {found.input_sizes} but config.json says image_sizes "
            f"{image_size}"
        )
    towers = found.tvf_normalize_params
    means = [tower.mean for tower in towers] or found.means
    stds = [tower.std for tower in towers] or found.stds
    if len(means) != 2 or len(stds) != 2:
        raise ConfigError(f"{path}: expected means and stds of two towers, 3 numbers each")
    return [x for mean in means for x in mean], [x for std in stds for x in std]


class Prompts:
    """Instructions -> token ids; each distinct instruction is tokenised once.

    Template of the reference, lower-cased, BOS in front; the last token is always the lone space
    mark, where the prediction of the first action token is read.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        bos, stop, space = (tokenizer.token_to_id(token) for token in (BOS, EOS, SPACE))
        if bos is None or stop is None or space is None:
            raise ConfigError(
                f"tokenizer.json: needs the tokens {BOS}, {EOS} and {SPACE}; "
                "not a Llama-style tokenizer"
            )
        self.bos, self.stop, self.space = bos, stop, space
        self._row: dict[str, int] = {}
        self._ids: list[list[int]] = []
        self._table: Tensor | None = None
        self._length: Tensor | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Prompts:
        """From `tokenizer.json`."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise AssetMissing(f"no 'tokenizer.json' in {folder}", fix=download(folder))
        try:
            tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except ValueError as err:
            raise CorruptFile(f"{path} is not a tokenizer ({err}); download it again") from None
        return cls(tokenizer)

    def encode(self, instruction: str) -> list[int]:
        """Ids of one prompt, BOS to space mark."""
        text = TEMPLATE.format(instruction.lower())
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos, *ids] + ([] if ids[-1] == self.space else [self.space])

    def batch(
        self, instructions: Sequence[str], device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [n, L], BOS first and the rest flush right, and which to keep.

        The second is [n, L] bool, False on padding, or None when there is no padding.
        """
        rows = [self._row.get(text, -1) for text in instructions]
        if -1 in rows or self._table is None or self._table.device != device:
            self._grow(instructions, device)
            rows = [self._row[text] for text in instructions]
        table, lengths = self._table, self._length
        assert table is not None
        assert lengths is not None
        real = [len(self._ids[row]) for row in set(rows)]
        longest = max(real)
        index = torch.tensor(rows, device=device)
        # Column 0 of the table is BOS, columns from the right end hold the rest.
        ids = torch.cat([table[index, :1], table[index][:, table.shape[1] - longest + 1 :]], dim=1)
        if min(real) == longest:
            return ids, None
        column = torch.arange(longest, device=device)[None]
        keep = column >= longest - lengths[index][:, None] + 1
        keep[:, 0] = True
        return ids, keep

    def _grow(self, instructions: Sequence[str], device: torch.device) -> None:
        for text in instructions:
            if text not in self._row:
                self._row[text] = len(self._ids)
                self._ids.append(self.encode(text))
        longest = max(map(len, self._ids))
        # Which id stands on a masked place changes nothing.
        padded = [[ids[0]] + [self.bos] * (longest - len(ids)) + ids[1:] for ids in self._ids]
        self._table = torch.tensor(padded, device=device)
        self._length = torch.tensor([len(ids) for ids in self._ids], device=device)
