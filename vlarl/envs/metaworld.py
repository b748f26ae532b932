"""MetaWorld: 50 tabletop tasks of a Sawyer arm, as an env plug-in.

Success ends an episode with reward 1; nothing else is rewarded. Which trials are for training and
which are held out is decided by their numbers, and a trial's goal is a function of its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from vlarl.config.schema import EnvSection, Float, Int
from vlarl.envs import gl, metaworld_sim
from vlarl.envs.chunked import PlayConfig
from vlarl.envs.metaworld_tasks import SUITES, TASKS, goal_vector, suite_named, task_named
from vlarl.envs.simulator import SimulatorEnv
from vlarl.episode import Episode
from vlarl.errors import ConfigError
from vlarl.specs import ActionSpec, EnvSpec
from vlarl.trajectories import Trajectory

Split = Literal["train", "eval"]
Trials = Annotated[Int, Field(ge=1, le=10_000)]
Camera = Literal[
    "corner4", "corner", "corner2", "corner3", "topview", "behindGripper", "gripperPOV"
]
Pixels = Annotated[Int, Field(ge=16, le=2048)]

CONTROL_HZ = 80.0


class MetaWorldConfig(EnvSection):
    """MetaWorld 3.1.1 on MuJoCo 3.3.0."""

    name: Literal["metaworld"] = "metaworld"
    """Registered name of the env."""
    suite: str = "mt10"
    """mt10, mt50, ml45_train, ml45_test, mt50_easy, mt50_medium, mt50_hard, mt50_very_hard, or the
    name of one task."""
    tasks: tuple[str, ...] = ()
    """Task names to play instead of a suite. With a suite other than mt10, only some of it."""
    train_trials: Trials = 50
    """Trials per task to train on: numbers 0 to train_trials - 1."""
    eval_trials: Trials = 50
    """Held-out trials per task: numbers eval_start to eval_start + eval_trials - 1."""
    eval_start: Annotated[Int, Field(ge=1)] = 1000
    """First held-out trial; fixed, so that results stay comparable when train_trials changes."""
    goal_seed: Annotated[Int, Field(ge=0)] = 0
    """Seed of the goals of all trials. Another seed is another benchmark."""
    settle_steps: Annotated[Int, Field(ge=0)] = 15
    """Zero actions after each reset, before the first observation."""
    max_steps: Annotated[Int, Field(ge=1)] = 160
    """Horizon in actions; an episode without success is cut here."""
    cameras: tuple[Camera, ...] = ("corner4",)
    """Views the policy reads, in order. corner4 is the camera of the published checkpoints."""
    frame_size: Pixels = 480
    """Height and width of the policy's frames, pixels."""
    render_quality: Literal["full", "fast"] = "full"
    """full: as the package renders, for published checkpoints. fast: no shadows, reflections or
    multisampling; about ten times cheaper without a GPU."""
    video_size: Pixels = 256
    """Height and width of recorded video frames, pixels."""
    video_every: Annotated[Int, Field(ge=1)] = 4
    """Actions per recorded video frame; 4 of 80 Hz makes 20 frames a second."""
    worker_timeout_s: Annotated[Float, Field(gt=0)] = 300.0
    """Seconds without an answer, start-up included, after which a worker counts as hung."""
    worker_models: Annotated[Int, Field(ge=1)] = 4
    """Compiled tasks each simulator process keeps, at 65 MB (fast) to 145 MB (full) each. A reset
    to any other task first compiles it, which costs about as much as 20 resets."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        budget = metaworld_sim.LIBRARY_MAX_STEPS - self.settle_steps
        if self.max_steps >= budget:
            raise ValueError(
                f"max_steps: {self.max_steps} does not fit: the simulator ends an episode at "
                f"{metaworld_sim.LIBRARY_MAX_STEPS} steps, {self.settle_steps} of them are "
                f"settle_steps; at most {budget - 1}"
            )
        if self.train_trials > self.eval_start:
            raise ValueError(
                f"train_trials: {self.train_trials} training trials overlap the held-out ones, "
                f"which start at {self.eval_start}; raise eval_start or lower train_trials"
            )
        if not self.cameras or len(set(self.cameras)) < len(self.cameras):
            raise ValueError("cameras: name at least one camera, each once")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("tasks: a task is named twice")
        return self


Config = MetaWorldConfig


def suites() -> tuple[str, ...]:
    """Names of all suites. A task's name is a suite of one task, too."""
    return tuple(SUITES)


def instruction(task: str) -> str:
    """What the policy is told to do."""
    return task_named(task).prompt


def task_names(cfg: MetaWorldConfig) -> tuple[str, ...]:
    """The tasks of a config, in suite order. ConfigError on unknown names."""
    suite = suite_named(cfg.suite)
    if not cfg.tasks:
        return suite
    tasks = tuple(task_named(name).name for name in cfg.tasks)
    others = [name for name in tasks if name not in suite]
    if others and cfg.suite != MetaWorldConfig.model_fields["suite"].default:
        raise ConfigError(
            f"env.tasks: {', '.join(others)} is not in env.suite={cfg.suite}; "
            "to play the whole suite, set env.tasks=[]"
        )
    return tasks


def trials(cfg: MetaWorldConfig, split: Split) -> dict[str, tuple[int, ...]]:
    """Task -> trial numbers of a split."""
    start, count = (0, cfg.train_trials) if split == "train" else (cfg.eval_start, cfg.eval_trials)
    return dict.fromkeys(task_names(cfg), tuple(range(start, start + count)))


def groups(cfg: MetaWorldConfig) -> dict[str, tuple[str, ...]]:
    """Difficulty -> the config's tasks of that difficulty; what published tables average over."""
    tasks = task_names(cfg)
    by_level: dict[str, tuple[str, ...]] = {}
    for task in tasks:
        level = task_named(task).difficulty
        by_level[level] = (*by_level.get(level, ()), task)
    return by_level


def overlap(cfg: MetaWorldConfig) -> int:
    """How many held-out trials have the goal vector of a training trial of the same task."""
    count = 0
    train, held_out = trials(cfg, "train"), trials(cfg, "eval")
    for task in train:
        seen = {goal_vector(task, i, seed=cfg.goal_seed).tobytes() for i in train[task]}
        goals = (goal_vector(task, i, seed=cfg.goal_seed).tobytes() for i in held_out[task])
        count += sum(goal in seen for goal in goals)
    return count


def spec(cfg: MetaWorldConfig) -> EnvSpec:
    """What the env offers; starts nothing."""
    return EnvSpec(
        name="metaworld",
        action=ActionSpec(dims=4, format="delta_xyz", gripper="effort_close_positive"),
        cameras=cfg.cameras,
        frame_size=(cfg.frame_size, cfg.frame_size),
        state_dims=metaworld_sim.STATE_DIMS,
        state_format="hand_xyz_gripper_opening",
        max_steps=cfg.max_steps,
        control_hz=CONTROL_HZ,
        tasks=task_names(cfg),
        video_every=cfg.video_every,
        trials=f"goal_seed={cfg.goal_seed}",
    )


def worker_bytes(cfg: MetaWorldConfig) -> int:
    """Memory of one simulator process, as measured with a software renderer."""
    first, model = (230, 150) if cfg.render_quality == "full" else (210, 75)
    return 1_000_000 * (first + model * cfg.worker_models)


def require_device(_: MetaWorldConfig) -> None:
    """Raise DeviceMissing when there is nothing to render with."""
    gl.choose_backend()


def make(cfg: MetaWorldConfig, *, num_slots: int, final_frames: bool) -> SimulatorEnv:
    """Start num_slots simulator processes.

    final_frames: render the last observation of episodes cut by the horizon (value bootstrap).
    """
    require_device(cfg)  # here, so that a missing driver is one error, and results can name it
    offered = spec(cfg)
    larger = max(cfg.frame_size, cfg.video_size)
    return SimulatorEnv(
        "vlarl.envs.metaworld_sim:make",
        metaworld_sim.SimConfig(
            goal_seed=cfg.goal_seed,
            settle_steps=cfg.settle_steps,
            quality=cfg.render_quality,
            max_size=(larger, larger),
            max_models=cfg.worker_models,
        ),
        spec=offered,
        play=PlayConfig.of(offered, final_frames=final_frames, video_size=cfg.video_size),
        instructions={name: task.prompt for name, task in TASKS.items()},
        num_slots=num_slots,
        timeout_s=cfg.worker_timeout_s,
    )


def demonstrate(
    cfg: MetaWorldConfig, episodes: Sequence[Episode], *, noise_std: float, seed: int
) -> Iterator[Trajectory]:
    """Whole episodes of the package's scripted experts, in the order given, played in parallel.

    noise_std: standard deviation of Gaussian action noise, in action units; drawn from (seed, task,
    trial, step). `action` is what was executed, `target` what the expert wanted.
    """
    env = make(cfg, num_slots=min(cfg.num_slots, max(1, len(episodes))), final_frames=False)
    try:
        yield from env.demonstrate(episodes, noise_std=noise_std, seed=seed)
    finally:
        env.close()
