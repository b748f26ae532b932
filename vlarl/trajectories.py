"""Played episodes as data: one type in memory, one file format on disk. Torch-free.

A file is a `.npy` object array with one dict per frame, as the public Wan world-model data sets use
it and as RLinf's loader reads it (RLinf@a3816b5: rlinf/data/datasets/world_model.py). Keys:

  image          [H, W, 3] uint8, the first camera
  delta_action   [A] float32, the action that *produced* this frame; zeros in the first row
  instruction    str
of ours, ignored by that loader:
  action, target [A] float32, executed and wanted *at* this frame; absent in a last frame
  reward         float32, of `action`; absent in a last frame
  state          [S] float32
  images         camera -> [H, W, 3] uint8, the cameras after the first, when there are any
  episode        first row only: {format, task, trial, success, camera}

Note the shift: `delta_action` of row t is `action` of row t - 1. A file without our keys is read
with that rule, and its last frame has no action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlarl.atomic import new_file
from vlarl.errors import CorruptFile
from vlarl.safe_pickle import load_object_array

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode of L actions.

    frames: camera -> [L, H, W, 3] uint8; frame t is what was seen before action t.
    state: [L, S] float32, before action t.
    action: [L, A] float32, what was executed, canonical units of the env.
    target: [L, A] float32, what the teacher wanted at that state (differs from action under action
    noise). reward: [L] float32. success: the episode ended in success.
    last_frames: camera -> [H, W, 3] uint8, what was seen after the last action, when it was
    rendered. Files of others have trial -1, no state, no reward and success False.
    """

    task: str
    trial: int
    instruction: str
    frames: Mapping[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    target: np.ndarray
    reward: np.ndarray
    success: bool
    last_frames: Mapping[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One frame of a file, without our extra keys: what a world model starts from.

    image: [H, W, 3] uint8. delta_action: [A] float32, the action that produced the frame (of the
    first row: of no meaning).
    """

    image: np.ndarray
    delta_action: np.ndarray
    instruction: str


def write_trajectory(trajectory: Trajectory, path: Path) -> Path:
    """Write one file, whole or not at all.

    Raises:
        ConfigError: when the file exists.
    """
    rows = _rows(trajectory)
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    with new_file(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array(file, array, allow_pickle=True)
    return path


def read_trajectory(path: Path) -> Trajectory:
    """Read a file of ours or of the reference.

    Raises:
        AssetMissing: when there is no such file.
        CorruptFile: truncated, not a trajectory, or unsafe; see `load_object_array`.
    """
    rows = load_object_array(path)
    frames = [_frame_row(row, f"{path}, frame {t}") for t, row in enumerate(rows)]
    if not frames:
        raise CorruptFile(f"{path} holds no frames")
    if "episode" not in rows[0]:
        return _from_reference(frames, rows[0])
    try:
        return _from_rows(frames, rows)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is not a whole trajectory: {error!r}") from None


def read_frames(path: Path) -> list[FrameRow]:
    """The frames of a file with the actions that produced them.

    Raises:
        AssetMissing, CorruptFile: as `read_trajectory`.
    """
    rows = load_object_array(path)
    return [_frame_row(row, f"{path}, frame {t}") for t, row in enumerate(rows)]


def _rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    t = trajectory
    first, *others = t.frames
    lengths = {len(x) for x in (*t.frames.values(), t.state, t.action, t.target, t.reward)}
    assert len(t) > 0
    assert lengths == {len(t)}, lengths
    produced_by = np.concatenate([np.zeros_like(t.action[:1]), t.action])
    rows = []
    for i in range(len(t)):
        row: dict[str, Any] = {
            "image": t.frames[first][i],
            "delta_action": produced_by[i],
            "instruction": t.instruction,
            "action": t.action[i],
            "target": t.target[i],
            "reward": np.float32(t.reward[i]),
            "state": t.state[i],
        }
        if others:
            row["images"] = {name: t.frames[name][i] for name in others}
        rows.append(row)
    if t.last_frames is not None:
        row = {"image": t.last_frames[first], "delta_action": produced_by[-1]}
        row["instruction"] = t.instruction
        if others:
            row["images"] = {name: t.last_frames[name] for name in others}
        rows.append(row)
    rows[0]["episode"] = {
        "format": _FORMAT,
        "task": t.task,
        "trial": t.trial,
        "success": t.success,
        "camera": first,
    }
    return rows


def _frame_row(row: object, where: str) -> FrameRow:
    """The three keys every file has, checked."""
    if not isinstance(row, dict):
        raise CorruptFile(f"{where}: expected a dict, got {type(row).__name__}")
    image, action = row.get("image"), row.get("delta_action")
    text = row.get("instruction", row.get("task"))
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise CorruptFile(f"{where}: 'image' is not a uint8 picture [H, W, 3]")
    if not isinstance(action, np.ndarray) or action.ndim != 1 or action.dtype.kind != "f":
        raise CorruptFile(f"{where}: 'delta_action' is not a list of numbers")
    if not isinstance(text, str):
        raise CorruptFile(f"{where}: there is no 'instruction'")
    return FrameRow(image, action.astype(np.float32), str(text))


def _from_rows(frames: list[FrameRow], rows: list[dict[str, Any]]) -> Trajectory:
    episode = rows[0]["episode"]
    if episode["format"] != _FORMAT:
        raise ValueError(f"format {episode['format']} is not known; update vlarl")
    has_last = "action" not in rows[-1]
    acted = rows[:-1] if has_last else rows
    pictures = [{episode["camera"]: row["image"], **row.get("images", {})} for row in rows]
    cameras = tuple(pictures[0])
    return Trajectory(
        task=episode["task"],
        trial=int(episode["trial"]),
        instruction=frames[0].instruction,
        frames={name: np.stack([p[name] for p in pictures[: len(acted)]]) for name in cameras},
        state=np.stack([row["state"] for row in acted]),
        action=np.stack([row["action"] for row in acted]),
        target=np.stack([row["target"] for row in acted]),
        reward=np.array([row["reward"] for row in acted], dtype=np.float32),
        success=bool(episode["success"]),
        last_frames=pictures[-1] if has_last else None,
    )


def _from_reference(frames: list[FrameRow], first: dict[str, Any]) -> Trajectory:
    """A file of others: the action at frame t is the one that produced frame t + 1."""
    action = np.array([row.delta_action for row in frames[1:]], dtype=np.float32)
    action = action.reshape(len(frames) - 1, len(frames[0].delta_action))
    images = np.stack([row.image for row in frames])
    length = len(action)
    return Trajectory(
        task=str(first.get("task", frames[0].instruction)),
        trial=-1,
        instruction=frames[0].instruction,
        frames={"image": images[:-1]},
        state=np.zeros((length, 0), np.float32),
        action=action,
        target=action,
        reward=np.zeros(length, np.float32),
        success=False,
        last_frames={"image": images[-1]},
    )
