"""Played episodes as data: one type in memory, one file format on disk. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode of L actions.

    frames: camera -> [L, H, W, 3] uint8; frame t is what was seen before action t.
    state: [L, S] float32, before action t. action: [L, A] float32, what was executed, canonical units of the env.
    target: [L, A] float32, what the teacher wanted at that state (differs from action under action noise).
    reward: [L] float32. success: the episode ended in success.
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

    def __len__(self) -> int:
        return len(self.action)
