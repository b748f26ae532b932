"""One MetaWorld episode at a time on the package's bare env classes (no gym.make). Torch-free.

Facts of metaworld 3.1.1 this relies on: the initial state is a function of the frozen goal vector;
`reset(seed=)` is ignored; `step` never terminates and refuses step 501; camera corner4 sees the
table upside down.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlarl.envs import gl
from vlarl.envs.chunked import Step
from vlarl.envs.metaworld_tasks import Task, goal_vector, task_named
from vlarl.episode import Episode
from vlarl.errors import RunFailed

if TYPE_CHECKING:
    from vlarl.envs.mujoco_render import ModelView, Quality

STATE_DIMS = 4
"""Hand x, y, z in metres and gripper opening in [0, 1]."""
LIBRARY_MAX_STEPS = 500
"""The package refuses to step further; settling counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """settle_steps: zero actions after a reset. max_size: largest frame, (height, width)."""

    goal_seed: int
    settle_steps: int
    quality: Quality
    max_size: tuple[int, int]
    max_models: int


@dataclass(slots=True)
class _Loaded:
    """One compiled task: the package's env, its expert and its view."""

    env: Any
    expert: Any
    view: ModelView


def make(config: SimConfig) -> MetaWorldSim:
    """The simulator, with the GL driver chosen before anything imports mujoco."""
    gl.choose_backend()
    return MetaWorldSim(config)


class MetaWorldSim:
    """Implements vlarl.envs.chunked.Sim. Keeps the `max_models` tasks played last compiled.

    Success while settling does not count: the first executed action that meets the task's success
    condition ends the episode.
    """

    def __init__(self, config: SimConfig) -> None:
        # Here and not above: whoever only plans or validates a run must not pay for the simulator.
        self._mujoco = gl.import_mujoco()
        self._config = config
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        gl.keep_quiet(self._mujoco)

    def reset(self, episode: Episode) -> None:
        """Bring about (task, trial), then settle with zero actions."""
        self._task = self._load(task_named(episode.task))
        env = self._task.env
        env._last_rand_vec = goal_vector(episode.task, episode.trial, seed=self._config.goal_seed)
        self._obs, _ = env.reset()
        for _ in range(self._config.settle_steps):
            self._obs, *_ = env.step(np.zeros(4, np.float32))

    def step(self, action: np.ndarray) -> Step:
        """Play one action."""
        self._obs, _, _, _, info = self._task.env.step(action)
        diverged = gl.blew_up(self._mujoco, self._task.env.data)
        return Step(bool(info["success"]), diverged or not np.isfinite(self._obs).all())

    def state(self) -> np.ndarray:
        """[4] float32: hand position and gripper opening."""
        return self._obs[:STATE_DIMS].astype(np.float32)

    def render(self, camera: str, size: tuple[int, int]) -> np.ndarray:
        """[H, W, 3] uint8, contiguous, the package's image rotated by 180 degrees."""
        pixels = self._task.view.frame(self._task.env.data, camera, size)
        # OpenGL's bottom-up rows are half of the rotation already.
        return np.ascontiguousarray(pixels[:, ::-1])

    def expert(self) -> np.ndarray:
        """[4] the package's scripted policy at the current observation; unclipped."""
        return np.asarray(self._task.expert.get_action(self._obs))

    def renderer(self) -> str | None:
        """What draws the frames; None before a task is compiled."""
        return next((loaded.view.driver for loaded in self._loaded.values()), None)

    def _load(self, task: Task) -> _Loaded:
        if task.name in self._loaded:
            self._loaded.move_to_end(task.name)
            return self._loaded[task.name]
        if len(self._loaded) == self._config.max_models:
            _, oldest = self._loaded.popitem(last=False)
            oldest.view.close()
        self._loaded[task.name] = self._compile(task)
        return self._loaded[task.name]

    def _compile(self, task: Task) -> _Loaded:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: PLC0415
        from metaworld.policies import ENV_POLICY_MAP  # noqa: PLC0415

        from vlarl.envs.mujoco_render import ModelView  # noqa: PLC0415

        env: Any = ALL_V3_ENVIRONMENTS[task.name]()
        box = env._random_reset_space
        if not (np.array_equal(box.low, task.low) and np.array_equal(box.high, task.high)):
            raise RunFailed(
                f"the installed metaworld draws goals of {task.name} from {box}, this version of "
                f"vlarl expects {task.low} to {task.high}; run: pip install metaworld==3.1.1"
            )
        # What `set_task` does, without a pickle: frozen goal, visible to the scripted expert; the
        # cached bounds were made while it was hidden and would clip it to zero.
        env._set_task_called = True
        env._freeze_rand_vec = True
        env._partially_observable = False
        del env.sawyer_observation_space
        view = ModelView(env.model, quality=self._config.quality, max_size=self._config.max_size)
        return _Loaded(env, ENV_POLICY_MAP[task.name](), view)
