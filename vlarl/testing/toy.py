"""What the two toy policies share: config fields, pixel features, a small network, files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vlarl.atomic import new_file
from vlarl.batch import Observation
from vlarl.config.schema import Int, PolicySection
from vlarl.errors import AssetMissing, CorruptFile
from vlarl.specs import ActionSpec, PolicySpec

_POOLED = 8  # pixels per side that the network sees
NUM_FEATURES = 3 * _POOLED * _POOLED
"""Numbers per observation that `features` gives."""


class ToySection(PolicySection):
    """Sizes of a toy policy."""

    checkpoint: str = "random"
    """Folder that `save` wrote, or "random" for fresh weights."""
    seed: Annotated[Int, Field(ge=0)] = 0
    """Of the fresh weights."""
    chunk: Annotated[Int, Field(ge=1)] = 8
    """C, actions per decision."""
    dims: Annotated[Int, Field(ge=1)] = 2
    """A, numbers per action."""
    hidden: Annotated[Int, Field(ge=1)] = 64
    """Width of the hidden layer."""
    value: Literal["chunk", "action"] = "chunk"
    """Value head, where the algorithm needs one: one number per decision, or one per action."""


def toy_spec(cfg: ToySection, needs_value: bool) -> PolicySpec:
    """The spec of a toy policy; its action format is that of `vlarl.testing.reach`."""
    return PolicySpec(
        name=cfg.name,
        action=ActionSpec(dims=cfg.dims, format="delta_xy", gripper="none"),
        chunk=cfg.chunk,
        cameras=1,
        state_dims=0,
        value_width=0 if not needs_value else 1 if cfg.value == "chunk" else cfg.chunk,
        trained_on=("nothing",),
    )


def features(obs: Observation, device: torch.device) -> Tensor:
    """[n, NUM_FEATURES] float32: the first camera, pooled to 8 by 8 pixels, black 0 and white 2."""
    image = next(iter(obs.images.values())).to(device).permute(0, 3, 1, 2).float() / 127.5
    return F.adaptive_avg_pool2d(image, _POOLED).flatten(1)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """One hidden layer; the last layer starts small, so that a fresh policy is nearly uniform."""
    last = nn.Linear(hidden, outputs)
    with torch.no_grad():
        last.weight.mul_(0.1)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), last)


def write(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write FOLDER/model.safetensors atomically."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with new_file(folder / "model.safetensors", overwrite=True) as temporary:
        save_file(tensors, temporary)


def read(module: nn.Module, cfg: ToySection) -> None:
    """Load the weights of cfg.checkpoint, unless it is "random".

    A value head without weights in the file keeps its fresh ones. Raises AssetMissing, CorruptFile.
    """
    if cfg.checkpoint == "random":
        return
    file = Path(cfg.checkpoint) / "model.safetensors"
    if not file.is_file():
        raise AssetMissing(f"policy.checkpoint: no file {file}", fix="policy.checkpoint=random")
    try:
        state = load_file(file)
    except SafetensorError as error:
        raise CorruptFile(f"{file} is truncated or no safetensors file ({error})") from None
    missing, unexpected = module.load_state_dict(state, strict=False)
    critic = [name for name in (*missing, *unexpected) if name.startswith("critic.")]
    assert len(critic) == len(missing) + len(unexpected), (missing, unexpected)
