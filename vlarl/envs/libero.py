"""LIBERO: 130 tabletop and kitchen tasks of a Franka Panda arm, and LIBERO-PRO's perturbed ones.

Success ends an episode with reward 1; nothing else is rewarded. Trial k of a task starts from the
k-th of the benchmark's 50 initial states; which of them are for training is data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from vlarl.config.schema import Bool, EnvSection, Float, Int
from vlarl.envs import gl, libero_expert, libero_install, libero_sim
from vlarl.envs.chunked import PlayConfig
from vlarl.envs.libero_tasks import (
    UNION,
    check_files,
    files_hash,
    init_states,
    parse_trials,
    prompt,
    suite_named,
    task_named,
)
from vlarl.envs.libero_tasks import suites as complete_suites
from vlarl.envs.simulator import SimulatorEnv
from vlarl.episode import Episode
from vlarl.errors import ConfigError
from vlarl.specs import ActionSpec, EnvSpec
from vlarl.trajectories import Trajectory

log = logging.getLogger(__name__)

Split = Literal["train", "eval"]
Camera = Literal["agentview", "wrist"]
Pixels = Annotated[Int, Field(ge=16, le=2048)]

_HORIZONS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Longest demonstration of each suite, rounded up: the OpenVLA-OFT evaluation's."""
_SETTLE = {"oft": 10, "rlinf": 15}
_RLINF_HORIZON = 512


class LiberoConfig(EnvSection):
    """LIBERO and LIBERO-PRO on robosuite 1.4 and MuJoCo 3.3.0."""

    name: Literal["libero"] = "libero"
    """Registered name of the env."""
    suite: str = "libero_spatial"
    """libero_spatial, libero_object, libero_goal, libero_10 (or libero_long), libero_90,
    libero_130; a LIBERO-PRO suite, i.e. one of the first four with _lan, _object, _swap or _task
    behind it; or the name of one task."""
    tasks: tuple[str, ...] = ()
    """Task names to play, out of the suite; none means all of it."""
    train_trials: str = "0-39"
    """Initial states to train on, of each task's 50: numbers and ranges such as 0-9,20,30-39."""
    eval_trials: str = "0-49"
    """Initial states to evaluate on. All 50 is the benchmark; 40-49 holds them out of training."""
    share_trials: Bool = False
    """Let a training run's own evaluations start from states it trains on, as published recipes do.
    Every result says how many of its episodes did."""
    protocol: Literal["oft", "rlinf"] = "oft"
    """Whose published evaluation the defaults of the next two fields follow. oft: 10 settling
    steps; horizon 220 spatial, 280 object, 300 goal, 520 long, 400 for libero_90, and the longest
    of its parts for libero_130. rlinf: 15 settling steps, horizon 512."""
    settle_steps: Annotated[Int, Field(ge=0, le=200)] | None = None
    """Actions without motion after each reset, before the first observation; none: the
    protocol's."""
    max_steps: Annotated[Int, Field(ge=1, le=10_000)] | None = None
    """Horizon in actions, settling not counted; an episode without success is cut here. None: the
    protocol's."""
    reset_gripper_open: Bool = True
    """Open the gripper while settling, instead of leaving it where it is."""
    layout_seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Where fixtures such as cabinets and stoves stand, which initial states do not hold. 0 is what
    published evaluations seed with."""
    cameras: tuple[Camera, ...] = ("agentview",)
    """Views the policy reads, in order; wrist is the one in the hand."""
    frame_size: Pixels = 256
    """Height and width of the policy's frames, pixels."""
    render_quality: Literal["full", "fast"] = "full"
    """full: as the package renders, for published checkpoints. fast: no reflections or
    multisampling, textures of at most 512 px; half the time and memory without a GPU."""
    video_size: Pixels = 256
    """Height and width of recorded video frames, pixels."""
    video_every: Annotated[Int, Field(ge=1)] = 2
    """Actions per recorded video frame; 2 of 20 Hz makes 10 frames a second."""
    worker_timeout_s: Annotated[Float, Field(gt=0)] = 300.0
    """Seconds without an answer, start-up included, after which a worker counts as hung."""
    worker_models: Annotated[Int, Field(ge=1)] = 1
    """Compiled tasks each simulator process keeps, at 1 GB each with a software renderer. A reset
    to any other task first compiles it, which takes as long as 30 resets. Slots keep to their tasks
    while they can; more than one pays where there are more tasks than slots."""

    @field_validator("train_trials", "eval_trials", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value  # YAML reads one trial as a number

    @field_validator("train_trials", "eval_trials")
    @classmethod
    def _are_trials(cls, text: str) -> str:
        parse_trials(text)
        return text

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.cameras or len(set(self.cameras)) < len(self.cameras):
            raise ValueError("cameras: name at least one camera, each once")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("tasks: a task is named twice")
        return self


Config = LiberoConfig


def suites() -> tuple[str, ...]:
    """Names of all suites whose files are complete. A task's name is a suite of one task, too."""
    return tuple(complete_suites())


def instruction(task: str) -> str:
    """What the policy is told to do."""
    return prompt(task)


def task_names(cfg: LiberoConfig) -> tuple[str, ...]:
    """The tasks of a config, in the order asked for. ConfigError on names the suite lacks."""
    suite = suite_named(cfg.suite)
    if not cfg.tasks:
        return suite
    others = [name for name in cfg.tasks if task_named(name).name not in suite]
    if others:
        raise ConfigError(
            f"env.tasks: {', '.join(others)} is not in env.suite={cfg.suite}; to play the whole "
            "suite, set env.tasks=[]"
        )
    return cfg.tasks


def trials(cfg: LiberoConfig, split: Split) -> dict[str, tuple[int, ...]]:
    """Task -> trial numbers of a split; looks at the files of these tasks.

    ConfigError when a task has fewer different initial states than are asked for; AssetMissing and
    CorruptFile as `check_files`.
    """
    field = f"{split}_trials"
    numbers = parse_trials(getattr(cfg, field))
    found = {}
    for task in task_names(cfg):
        check_files(task)
        states = init_states(task)
        if numbers[-1] >= len(states):
            raise ConfigError(
                f"env.{field}: {task_named(task).init_states} has {len(states)} initial states of "
                f"task '{task}', and {numbers[-1]} is none of their numbers; set env.{field} to "
                f"0-{len(states) - 1} or fewer"
            )
        different = len(np.unique(states[list(numbers)], axis=0))
        if different < len(numbers):
            raise ConfigError(
                f"env.{field}: {len(numbers)} trials of task '{task}' start from only {different} "
                f"different states; {task_named(task).init_states} repeats itself; set "
                f"env.{field} to trials that differ"
            )
        found[task] = numbers
    return found


def groups(cfg: LiberoConfig) -> dict[str, tuple[str, ...]]:
    """Standard suite -> the config's tasks that belong to it; empty when there is only one."""
    by_suite: dict[str, tuple[str, ...]] = {}
    for task in task_names(cfg):
        suite = task_named(task).suite
        by_suite[suite] = (*by_suite.get(suite, ()), task)
    return by_suite if len(by_suite) > 1 else {}


def overlap(cfg: LiberoConfig) -> int:
    """How many evaluation trials start from the state of a training trial of the same task."""
    train, held_out = trials(cfg, "train"), trials(cfg, "eval")
    count = 0
    for task in held_out:
        states = init_states(task)
        seen = {states[i].tobytes() for i in train[task]}
        count += sum(states[i].tobytes() in seen for i in held_out[task])
    return count


def datasets(cfg: LiberoConfig) -> tuple[str, ...]:
    """Public data sets with demonstrations of all tasks, by the start of their names."""
    suites = {task_named(task).base_suite for task in task_names(cfg)}
    if len(suites) > 1:
        return (UNION,)
    (suite,) = suites
    four = () if suite == "libero_90" else ("libero_4_task_suites",)
    return (suite, UNION, *four)


def settle_steps(cfg: LiberoConfig) -> int:
    """Settling actions: the config's own, or the protocol's."""
    return _SETTLE[cfg.protocol] if cfg.settle_steps is None else cfg.settle_steps


def horizon(cfg: LiberoConfig) -> int:
    """Horizon in actions: the config's own, or the protocol's for the suite."""
    if cfg.max_steps is not None:
        return cfg.max_steps
    if cfg.protocol == "rlinf":
        return _RLINF_HORIZON
    return max(_HORIZONS[task_named(task).base_suite] for task in task_names(cfg))


def spec(cfg: LiberoConfig) -> EnvSpec:
    """What the env offers; starts nothing. ExtraMissing when LIBERO cannot run here."""
    found = libero_install.installed()
    return EnvSpec(
        name="libero",
        action=ActionSpec(dims=7, format="delta_xyz_axisangle", gripper="close_positive"),
        cameras=cfg.cameras,
        frame_size=(cfg.frame_size, cfg.frame_size),
        state_dims=libero_sim.STATE_DIMS,
        state_format="hand_xyz_axisangle_fingers",
        max_steps=horizon(cfg),
        control_hz=libero_sim.CONTROL_HZ,
        tasks=task_names(cfg),
        video_every=cfg.video_every,
        trials=f"layout_seed={cfg.layout_seed} settle_steps={settle_steps(cfg)} "
        f"gripper={'open' if cfg.reset_gripper_open else 'still'}",
        share_trials=cfg.share_trials,
        facts={"settle_steps": settle_steps(cfg), **found.facts()},
        datasets=datasets(cfg),
    )


def worker_bytes(cfg: LiberoConfig) -> int:
    """Memory of one simulator process, as measured with a software renderer."""
    first = 1_800_000_000 if cfg.render_quality == "full" else 1_400_000_000
    return first + 1_100_000_000 * (cfg.worker_models - 1)


def require_device(_: LiberoConfig) -> None:
    """Raise DeviceMissing when there is nothing to render with."""
    gl.choose_backend()


def make(cfg: LiberoConfig, *, num_slots: int, final_frames: bool) -> SimulatorEnv:
    """Start num_slots simulator processes.

    final_frames: render the last observation of episodes cut by the horizon (value bootstrap).
    """
    require_device(cfg)  # here, so that a missing driver is one error, and results can name it
    offered = spec(cfg)
    # Only here: `spec` is asked of every suite, and has to stay cheap.
    files = {"task_files_sha256": files_hash(offered.tasks)}
    offered = replace(offered, facts={**offered.facts, **files})
    for warning in libero_install.installed().warnings():
        log.warning("%s", warning)
    larger = max(cfg.frame_size, cfg.video_size)
    return SimulatorEnv(
        "vlarl.envs.libero_sim:make",
        libero_sim.SimConfig(
            layout_seed=cfg.layout_seed,
            settle_steps=settle_steps(cfg),
            reset_gripper_open=cfg.reset_gripper_open,
            quality=cfg.render_quality,
            max_size=(larger, larger),
            max_models=cfg.worker_models,
        ),
        spec=offered,
        play=PlayConfig.of(offered, final_frames=final_frames, video_size=cfg.video_size),
        instructions={task: prompt(task) for task in offered.tasks},
        num_slots=num_slots,
        timeout_s=cfg.worker_timeout_s,
    )


def check_expert(cfg: LiberoConfig) -> None:
    """Raise ConfigError for tasks of suites that the scripted expert was not made for."""
    others = [t for t in task_names(cfg) if task_named(t).suite not in libero_expert.SUITES]
    if others:
        raise ConfigError(
            f"the scripted expert plays {' and '.join(libero_expert.SUITES)}, not "
            f"{others[0]}" + (f" and {len(others) - 1} more" if len(others) > 1 else "")
        )


def demonstrate(
    cfg: LiberoConfig, episodes: Sequence[Episode], *, noise_std: float, seed: int
) -> Iterator[Trajectory]:
    """Whole episodes of the scripted expert, in the order given, played in parallel.

    noise_std: standard deviation of Gaussian action noise, in action units; drawn from (seed, task,
    trial, step). `action` is what was executed, `target` what the expert wanted.

    Raises ConfigError as `check_expert`.
    """
    check_expert(cfg)
    env = make(cfg, num_slots=min(cfg.num_slots, max(1, len(episodes))), final_frames=False)
    try:
        yield from env.demonstrate(episodes, noise_std=noise_std, seed=seed)
    finally:
        env.close()
