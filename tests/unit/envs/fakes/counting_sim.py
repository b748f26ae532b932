"""A simulator on a number line for worker processes: no torch, no GL, failures on demand."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlarl.envs.chunked import Step
from vlarl.errors import DeviceMissing


@dataclass(frozen=True, kw_only=True)
class CountingConfig:
    """fail: what goes wrong at x >= 3. once: a file that exists once it has gone wrong. slow_s:
    what each action takes.
    """

    goal: float = 1e9
    fail: str = ""
    slow_s: float = 0.0
    once: Path | None = None


class CountingSim:
    """x starts at the trial number, an action adds its sum; x >= goal is success; frames show x."""

    def __init__(self, config: CountingConfig) -> None:
        self.config = config
        self.rendered: list[tuple[str, tuple[int, int]]] = []
        if config.fail == "build":
            raise DeviceMissing("no driver", fix="install one")

    def reset(self, episode):
        self.x = float(episode.trial)

    def step(self, action):
        time.sleep(self.config.slow_s)
        self.x += float(action.sum())
        if self.config.fail and self.x >= 3:
            self._fail()
        return Step(self.x >= self.config.goal, self.config.fail == "diverge" and self.x >= 3)

    def state(self):
        return np.array([self.x], np.float32)

    def render(self, camera, size):
        self.rendered.append((camera, size))
        return np.full((*size, 3), int(self.x) % 256, np.uint8)

    def renderer(self):
        return "counting"

    def expert(self):
        return np.array([2.0, 0.25])

    def _fail(self):
        once = self.config.once
        if once is not None and once.exists():
            return
        if once is not None:
            once.touch()
        if self.config.fail == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.config.fail == "hang":
            time.sleep(3600)
        if self.config.fail == "raise":
            raise ValueError("the number line is torn")
