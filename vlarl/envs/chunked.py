"""Whole chunks of actions on a single-step simulator: the one place that steps episodes.

Torch-free; runs inside a simulator process. First-done parking, the horizon, clipping, divergence,
and which frames are rendered at all are decided here, the same for every simulator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from vlarl.episode import Episode
from vlarl.specs import EnvSpec


class Step(NamedTuple):
    """What one action led to. `diverged`: the simulator holds non-finite or reset numbers."""

    success: bool
    diverged: bool


class Sim(Protocol):
    """One simulator in one process, one episode at a time. This is what a new env backend writes.

    The state after `reset` is a function of (episode.task, episode.trial) alone, bit for bit,
    whatever was played before and in whichever process.
    """

    def reset(self, episode: Episode) -> None:
        """Bring the episode's initial state about, settling included. Renders nothing."""
        ...

    def step(self, action: np.ndarray) -> Step:
        """Play one action: [A] float32, finite, inside the bounds."""
        ...

    def state(self) -> np.ndarray:
        """[S] float32 proprioception."""
        ...

    def render(self, camera: str, size: tuple[int, int]) -> np.ndarray:
        """[H, W, 3] uint8 upright frame; does not disturb the simulation."""
        ...

    def expert(self) -> np.ndarray:
        """[A] what the simulator's scripted expert would do now, before clipping."""
        ...

    def renderer(self) -> str | None:
        """What draws the frames, as the driver calls itself; None before the first frame."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayConfig:
    """How episodes are played, independent of the simulator.

    max_steps: horizon in actions. low, high: action bounds. cameras: rendered for the policy, in
    order, at frame_size (height, width). final_frames: render the last observation of episodes cut
    by the horizon. video_every, video_size: one recorded frame in so many actions, from the first
    camera.
    """

    max_steps: int
    low: float
    high: float
    cameras: tuple[str, ...]
    frame_size: tuple[int, int]
    final_frames: bool
    video_every: int
    video_size: tuple[int, int]

    @classmethod
    def of(cls, spec: EnvSpec, *, final_frames: bool, video_size: int) -> PlayConfig:
        """What an env offers, played; video_size: height and width, pixels."""
        return cls(
            max_steps=spec.max_steps,
            low=spec.action.low,
            high=spec.action.high,
            cameras=spec.cameras,
            frame_size=spec.frame_size,
            final_frames=final_frames,
            video_every=spec.video_every,
            video_size=(video_size, video_size),
        )

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """Shape of one observation's frames: [cameras, H, W, 3] uint8."""
        return (len(self.cameras), *self.frame_size, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The answer to one chunk; C = 0 for a reset. Frames for the policy are in shared memory.

    reward [C] float32, terminated, truncated [C] bool, state [S] float32, video [F, h, w, 3] uint8
    or None when the episode is not recorded.
    """

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    num_clipped: int
    diverged: bool
    state: np.ndarray
    video: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A whole episode of the scripted expert; fields as in vlarl.trajectories.Trajectory."""

    frames: dict[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    target: np.ndarray
    reward: np.ndarray
    success: bool


class ChunkRunner:
    """Plays episodes on one simulator. `frames` is where observations are written."""

    def __init__(self, frames: np.ndarray, sim: Sim, config: PlayConfig) -> None:
        assert frames.shape == config.frames_shape, (frames.shape, config.frames_shape)
        self._frames = frames
        self._sim = sim
        self._config = config
        self._episode: Episode | None = None
        self._steps = 0
        self._done = True
        self.alive: Callable[[], None] = lambda: None
        """Called while one answer takes long; a worker tells its parent so."""

    def play(self, episode: Episode | None, chunks: Sequence[np.ndarray]) -> Played:
        """Reset to `episode` (None: go on), play every chunk ([C, A] float32), answer to the last.

        Several chunks after a reset bring a lost episode back to where it was.
        """
        if episode is not None:
            self._start(episode)
        assert self._episode is not None, "play needs an episode first"
        for chunk in chunks[:-1]:
            self._chunk(chunk, record=False)
        chunk = chunks[-1] if chunks else np.zeros((0, 0), np.float32)
        played = self._chunk(chunk, record=self._episode.record, first=not chunks)
        self._observe(cut=bool(played.truncated.any()) and not played.diverged)
        return played

    def demonstrate(self, episode: Episode, noise_std: float, seed: int) -> Demonstration:
        """Play a whole episode with the expert plus Gaussian action noise.

        The noise is a function of (seed, task, trial, step).
        """
        self._start(episode)
        config, sim = self._config, self._sim
        frames, states, actions, targets, rewards = [], [], [], [], []
        success = diverged = False
        while not (success or diverged) and len(actions) < config.max_steps:
            self.alive()
            frames.append([sim.render(name, config.frame_size) for name in config.cameras])
            states.append(sim.state())
            target = np.clip(sim.expert(), config.low, config.high).astype(np.float32)
            key = [seed, episode.trial, len(actions), *episode.task.encode()]
            noise = noise_std * np.random.default_rng(key).standard_normal(target.shape)
            action = np.clip(target + noise, config.low, config.high).astype(np.float32)
            success, diverged = sim.step(action)
            success = success and not diverged
            actions.append(action)
            targets.append(target)
            rewards.append(float(success))
        self._done = True
        by_camera = np.swapaxes(np.array(frames), 0, 1)
        return Demonstration(
            frames=dict(zip(config.cameras, by_camera, strict=True)),
            state=np.array(states),
            action=np.array(actions),
            target=np.array(targets),
            reward=np.array(rewards, np.float32),
            success=success,
        )

    def renderer(self) -> str | None:
        """As `Sim.renderer`."""
        return self._sim.renderer()

    def _start(self, episode: Episode) -> None:
        self._sim.reset(episode)
        self._episode = episode
        self._steps = 0
        self._done = False

    def _chunk(self, chunk: np.ndarray, *, record: bool, first: bool = False) -> Played:
        length = len(chunk)
        reward = np.zeros(length, np.float32)
        terminated = np.zeros(length, bool)
        truncated = np.zeros(length, bool)
        inside = np.clip(chunk, self._config.low, self._config.high)
        outside = (inside != chunk).any(axis=1)
        diverged = False
        num_clipped = 0
        video = [self._film()] if record and first else []
        for c in range(length):
            if self._done:
                break
            success, diverged = self._sim.step(inside[c])
            self._steps += 1
            num_clipped += int(outside[c])
            terminated[c] = success and not diverged
            truncated[c] = diverged or (not success and self._steps >= self._config.max_steps)
            reward[c] = float(terminated[c])
            self._done = bool(terminated[c] or truncated[c])
            if record and (self._done or self._steps % self._config.video_every == 0):
                video.append(self._film())
        empty = np.zeros((0, *self._config.video_size, 3), np.uint8)
        return Played(
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            num_clipped=num_clipped,
            diverged=diverged,
            state=self._sim.state(),
            video=(np.stack(video) if video else empty) if record else None,
        )

    def _film(self) -> np.ndarray:
        return self._sim.render(self._config.cameras[0], self._config.video_size)

    def _observe(self, *, cut: bool) -> None:
        """Write the frames the policy will read; black when nothing will read them."""
        if self._done and not (cut and self._config.final_frames):
            self._frames[:] = 0
            return
        for i, camera in enumerate(self._config.cameras):
            self._frames[i] = self._sim.render(camera, self._config.frame_size)


def serve(memory: memoryview, sim: str, sim_config: object, play: PlayConfig) -> ChunkRunner:
    """What a worker process runs: `sim` is "module:callable", called with sim_config."""
    module, _, name = sim.partition(":")
    frames = np.frombuffer(memory, np.uint8).reshape(play.frames_shape)
    return ChunkRunner(frames, getattr(importlib.import_module(module), name)(sim_config), play)
