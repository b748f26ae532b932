"""The reaching env of vlarl.testing with suites, groups and a horizon that can be set."""

from dataclasses import replace
from typing import Literal

from vlarl.testing import reach

TASKS = ("reach-left", "reach-right")


class Config(reach.ReachConfig):
    """With a suite."""

    name: Literal["toy_env"] = "toy_env"
    suite: str = "toy_both"
    tasks: tuple[str, ...] = ()


def suites():
    return ("toy_both", "toy_left")


def task_names(cfg):
    if cfg.tasks:
        return cfg.tasks
    return {"toy_both": TASKS, "toy_left": TASKS[:1]}.get(cfg.suite, (cfg.suite,))


def spec(cfg):
    return replace(reach.spec(cfg), name="toy_env", tasks=task_names(cfg), trials="v1")


def trials(cfg, split):
    every = reach.trials(cfg, split)
    return {task: every[task] for task in task_names(cfg)}


def groups(cfg):
    return {task.removeprefix("reach-"): (task,) for task in task_names(cfg)}


def make(cfg, *, num_slots, final_frames):
    env = reach.make(cfg, num_slots=num_slots, final_frames=final_frames)
    env.spec = spec(cfg)
    return env
