"""Demonstrations as training samples: whole data sets in memory, batches without per-sample work.

A sample is (frames at step t, state at t, instruction) -> the teacher's next C actions. Past the
end of its episode the last action is repeated and does not count (mask False).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vlarl.batch import Observation
from vlarl.dataset import DataSet, EntryKey
from vlarl.errors import ConfigError, SpecMismatch
from vlarl.noise import stream, uniform
from vlarl.trajectories import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """N steps of E episodes, episode by episode.

    images: camera -> [N, H, W, 3] uint8. state: [N, S] float32. target: [N, A] float32, canonical.
    end: [N] int64, row of the last step of the same episode. text: [N] int64, row in
    `instructions`. episode: [N] int64. keys: the E episodes.
    """

    images: dict[str, Tensor]
    state: Tensor
    target: Tensor
    end: Tensor
    text: Tensor
    instructions: tuple[str, ...]
    episode: Tensor
    keys: tuple[EntryKey, ...]

    def __len__(self) -> int:
        return len(self.target)

    def observation(self, rows: Tensor) -> Observation:
        """What was seen at these steps."""
        texts = self.instructions
        return Observation(
            images={name: frames[rows] for name, frames in self.images.items()},
            state=self.state[rows],
            instruction=tuple(texts[i] for i in self.text[rows].tolist()),
        )

    def chunks(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The next `length` actions from each step on: [n, C, A] float32, and mask [n, C] bool."""
        ahead = rows[:, None] + torch.arange(length)
        end = self.end[rows][:, None]
        return self.target[torch.minimum(ahead, end)], ahead <= end


def load(data_sets: Sequence[DataSet], num_cameras: int) -> Samples:
    """All kept episodes of all data sets; the first `num_cameras` cameras.

    Raises:
        ConfigError: no episodes, too few cameras, or frames of different sizes.
        SpecMismatch: the data sets are of different envs, or an episode is of other widths.
        AssetMissing, CorruptFile: as `read_trajectory`.
    """
    total = sum(entry.num_steps for data in data_sets for entry in data.kept)
    if total == 0:
        named = ", ".join(str(data.folder) for data in data_sets)
        raise ConfigError(f"there are no episodes in {named}; collect some with `vlarl collect`")
    for data in data_sets[1:]:
        data.check_matches(data_sets[0].origin.spec)
    cameras = data_sets[0].origin.spec.cameras[:num_cameras]
    if len(cameras) < num_cameras:
        raise ConfigError(
            f"the policy reads {num_cameras} cameras but {data_sets[0].folder} has {len(cameras)}: "
            f"{', '.join(cameras)}"
        )
    images: dict[str, np.ndarray] = {}
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    lengths, texts, keys = [], [], []
    row = 0
    for data in data_sets:
        for entry, trajectory in zip(data.kept, data.read(), strict=True):
            _check_widths(trajectory, data.folder / str(entry.file), data_sets[0])
            for name in cameras:
                frames = trajectory.frames[name]
                if name not in images:
                    images[name] = np.empty((total, *frames.shape[1:]), np.uint8)
                if frames.shape[1:] != images[name].shape[1:]:
                    raise ConfigError(
                        f"{data.folder / str(entry.file)} has frames of {frames.shape[1:3]}, the "
                        f"others of {images[name].shape[1:3]} pixels; collect all at one size"
                    )
                images[name][row : row + len(frames)] = frames
            parts.append((trajectory.state, trajectory.target))
            lengths.append(len(trajectory))
            texts.append(trajectory.instruction)
            keys.append(entry.key)
            row += len(trajectory)
    instructions = tuple(dict.fromkeys(texts))
    count = torch.tensor(lengths)
    text = torch.tensor([instructions.index(t) for t in texts])
    return Samples(
        images={name: torch.from_numpy(frames) for name, frames in images.items()},
        state=torch.from_numpy(np.concatenate([state for state, _ in parts])),
        target=torch.from_numpy(np.concatenate([target for _, target in parts])),
        end=torch.repeat_interleave(count.cumsum(0) - 1, count),
        text=torch.repeat_interleave(text, count),
        instructions=instructions,
        episode=torch.repeat_interleave(torch.arange(len(count)), count),
        keys=tuple(keys),
    )


def _check_widths(trajectory: Trajectory, file: Path, first: DataSet) -> None:
    """What an episode holds against what the first data set says of its own."""
    spec = first.origin.spec
    for what, numbers, width in (
        ("actions", trajectory.target, spec.action.dims),
        ("states", trajectory.state, spec.state_dims),
    ):
        if numbers.shape[1] != width:
            raise SpecMismatch(
                f"{file} holds {what} of {numbers.shape[1]} numbers, but those of {first.folder} "
                f"have {width}; train on data sets of one env, or collect this one again"
            )


def split(samples: Samples, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to validate on: whole episodes, chosen by a keyed hash.

    Of each task round(fraction * episodes) are held out. An episode's side does not depend on the
    order of the files.

    Raises:
        ConfigError: when a fraction above 0 holds out nothing, or everything.
    """
    by_task: dict[str, list[int]] = {}
    for i, key in enumerate(samples.keys):
        by_task.setdefault(key.task, []).append(i)
    held: list[int] = []
    for episodes in by_task.values():
        ranked = sorted(episodes, key=lambda i: stream(seed, "sft-split", *samples.keys[i]))
        held += ranked[: round(fraction * len(ranked))]
    if (fraction > 0 and not held) or len(held) == len(samples.keys):
        raise ConfigError(
            f"validation: {fraction} of {len(samples.keys)} episodes holds out {len(held)}; "
            f"choose 0 or a fraction that leaves some on both sides"
        )
    is_held = torch.zeros(len(samples.keys), dtype=torch.bool)
    is_held[held] = True
    rows = torch.arange(len(samples))
    mask = is_held[samples.episode]
    return rows[~mask], rows[mask]


class Batches:
    """Endless shuffled passes over the rows; batch k is a function of (seed, k) alone."""

    def __init__(self, rows: Tensor, size: int, seed: int) -> None:
        self._rows = rows
        self._size = size
        self._seed = seed
        self._orders: dict[int, Tensor] = {}

    def __getitem__(self, k: int) -> Tensor:
        """[size] rows. A batch may go from the end of one pass into the next."""
        n = len(self._rows)
        position = torch.arange(k * self._size, (k + 1) * self._size)
        passes, place = position // n, position % n
        out = torch.empty_like(position)
        for number in passes.unique().tolist():
            here = passes == number
            out[here] = self._order(number)[place[here]]
        return self._rows[out]

    def _order(self, number: int) -> Tensor:
        if number not in self._orders:
            generator = torch.Generator().manual_seed(stream(self._seed, "sft-pass", number))
            kept = {p: o for p, o in self._orders.items() if p >= number - 1}
            self._orders = kept | {number: torch.randperm(len(self._rows), generator=generator)}
        return self._orders[number]


def augment(
    frames: Tensor, *, shift: float, brightness: float, contrast: float, key: int
) -> Tensor:
    """Randomly moved and lit frames: [n, H, W, 3] uint8 -> the same shape and type.

    shift: moves by up to this fraction of the side along both axes, edges repeated; with a centre
    crop in the policy it acts as the random crop of the published recipe. brightness, contrast:
    factors from [1 - x, 1 + x], contrast about the frame's mean. 0 leaves a thing as it is. Each
    sample draws its own; the draw is a function of key and the position in the batch alone.
    """
    n, height, width = frames.shape[:3]
    keys = torch.tensor([stream(key, i) for i in range(n)], device=frames.device)
    draw = 2 * uniform(keys, (4,)) - 1
    if shift > 0:
        dy = (draw[:, 0] * shift * height).round().long()
        dx = (draw[:, 1] * shift * width).round().long()
        down = torch.arange(height, device=frames.device) + dy[:, None]
        right = torch.arange(width, device=frames.device) + dx[:, None]
        each = torch.arange(n, device=frames.device)[:, None, None]
        frames = frames[
            each, down.clamp(0, height - 1)[:, :, None], right.clamp(0, width - 1)[:, None, :]
        ]
    if brightness > 0 or contrast > 0:
        x = frames.float()
        mean = x.mean(dim=(1, 2, 3), keepdim=True)
        x = (x - mean) * (1 + contrast * draw[:, 2])[:, None, None, None] + mean
        x = x * (1 + brightness * draw[:, 3])[:, None, None, None]
        frames = x.round().clamp(0, 255).to(torch.uint8)
    return frames


def statistics(action: Tensor, state: Tensor) -> dict[str, dict[str, list[float] | list[bool]]]:
    """The entry of `dataset_statistics.json` that belongs to these actions and states.

    action: [N, A], as the data set stores it. state: [N, S]; without state there is no "proprio".
    Quantiles are numpy's linear ones, std is the biased one, as in RLDS statistics.
    """
    found = {"action": _moments(action)}
    found["action"]["mask"] = [True] * action.shape[1]
    if state.shape[1]:
        found["proprio"] = _moments(state)
    return found


def _moments(x: Tensor) -> dict[str, list[float] | list[bool]]:
    x = x.double()
    quantile = np.quantile(x.numpy(), [0.01, 0.99], axis=0)
    return {
        "mean": x.mean(0).tolist(),
        "std": x.std(0, unbiased=False).tolist(),
        "min": x.amin(0).tolist(),
        "max": x.amax(0).tolist(),
        "q01": quantile[0].tolist(),
        "q99": quantile[1].tolist(),
    }
