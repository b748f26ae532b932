"""The 50 MetaWorld tasks as data: prompts, difficulty, suites, goals. Torch-free.

Order, prompts and difficulty are those of the `lerobot/metaworld_mt50` data set and of SmolVLA
(arXiv:2506.01844); boxes and clearances are metaworld 3.1.1's, and the simulator refuses to run
when the installed package disagrees with the boxes. push-v3 and push-back-v3 share one prompt:
language alone cannot tell them apart.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np

from vlarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    clearance: least horizontal distance between object and goal, metres; closer goal vectors are
    redrawn. low, high: box of the goal vector (object position, then goal position where the task
    has one), metres.
    """

    name: str
    prompt: str
    difficulty: str
    clearance: float
    low: tuple[float, ...]
    high: tuple[float, ...]


# fmt: off
_ROWS = (
    Task("assembly-v3", "Pick up a nut and place it onto a peg", "hard", 0.1,
         (0.0, 0.6, 0.02, -0.1, 0.75, 0.1), (0.0, 0.6, 0.02, 0.1, 0.85, 0.1)),
    Task("basketball-v3", "Dunk the basketball into the basket", "medium", 0.15,
         (-0.1, 0.6, 0.0299, -0.1, 0.85, 0.0), (0.1, 0.7, 0.0301, 0.1, 0.9000001, 0.0)),
    Task("bin-picking-v3", "Grasp the puck from one bin and place it into another bin",
         "medium", 0.0,
         (-0.21, 0.65, 0.02, 0.1199, 0.699, -0.001), (-0.03, 0.75, 0.02, 0.1201, 0.701, 0.001)),
    Task("box-close-v3", "Grasp the cover and close the box with it", "medium", 0.25,
         (-0.05, 0.5, 0.02, -0.1, 0.7, 0.133), (0.05, 0.55, 0.02, 0.1, 0.8, 0.133)),
    Task("button-press-topdown-v3", "Press a button from the top", "easy", 0.0,
         (-0.1, 0.8, 0.115), (0.1, 0.9, 0.115)),
    Task("button-press-topdown-wall-v3", "Bypass a wall and press a button from the top",
         "easy", 0.0,
         (-0.1, 0.8, 0.115), (0.1, 0.9, 0.115)),
    Task("button-press-v3", "Press a button", "easy", 0.0,
         (-0.1, 0.85, 0.115), (0.1, 0.9, 0.115)),
    Task("button-press-wall-v3", "Bypass a wall and press a button", "easy", 0.0,
         (-0.05, 0.85, 0.1149), (0.05, 0.9, 0.1151)),
    Task("coffee-button-v3", "Push a button on the coffee machine", "easy", 0.0,
         (-0.1, 0.8, -0.001), (0.1, 0.9, 0.001)),
    Task("coffee-pull-v3", "Pull a mug from a coffee machine", "medium", 0.15,
         (-0.05, 0.7, -0.001, -0.1, 0.55, -0.001), (0.05, 0.75, 0.001, 0.1, 0.65, 0.001)),
    Task("coffee-push-v3", "Push a mug under a coffee machine", "medium", 0.15,
         (-0.1, 0.55, -0.001, -0.05, 0.7, -0.001), (0.1, 0.65, 0.001, 0.05, 0.75, 0.001)),
    Task("dial-turn-v3", "Rotate a dial 180 degrees", "easy", 0.0,
         (-0.1, 0.7, 0.0), (0.1, 0.8, 0.0)),
    Task("disassemble-v3", "Pick a nut out of a peg", "very_hard", 0.1,
         (0.0, 0.6, 0.025, -0.1, 0.6, 0.1699), (0.1, 0.75, 0.02501, 0.1, 0.75, 0.1701)),
    Task("door-close-v3", "Close a door with a revolving joint", "easy", 0.0,
         (0.0, 0.85, 0.15), (0.1, 0.95, 0.15)),
    Task("door-lock-v3", "Lock the door by rotating the lock clockwise", "easy", 0.0,
         (-0.1, 0.8, 0.15), (0.1, 0.85, 0.15)),
    Task("door-open-v3", "Open a door with a revolving joint", "easy", 0.0,
         (0.0, 0.85, 0.15), (0.1, 0.95, 0.15)),
    Task("door-unlock-v3", "Unlock the door by rotating the lock counter-clockwise", "easy", 0.0,
         (-0.1, 0.8, 0.15), (0.1, 0.85, 0.15)),
    Task("hand-insert-v3", "Insert the gripper into a hole", "hard", 0.15,
         (-0.1, 0.6, 0.05, -0.04, 0.8, -0.0201), (0.1, 0.7, 0.05, 0.04, 0.88, -0.0199)),
    Task("drawer-close-v3", "Push and close a drawer", "easy", 0.0,
         (-0.1, 0.9, 0.0), (0.1, 0.9, 0.0)),
    Task("drawer-open-v3", "Open a drawer", "easy", 0.0,
         (-0.1, 0.9, 0.0), (0.1, 0.9, 0.0)),
    Task("faucet-open-v3", "Rotate the faucet counter-clockwise", "easy", 0.0,
         (-0.05, 0.8, 0.0), (0.05, 0.85, 0.0)),
    Task("faucet-close-v3", "Rotate the faucet clockwise", "easy", 0.0,
         (-0.1, 0.8, 0.0), (0.1, 0.85, 0.0)),
    Task("hammer-v3", "Hammer a screw on the wall", "medium", 0.0,
         (-0.1, 0.4, 0.0), (0.1, 0.5, 0.0)),
    Task("handle-press-side-v3", "Press a handle down sideways", "easy", 0.0,
         (-0.35, 0.65, -0.001), (-0.25, 0.75, 0.001)),
    Task("handle-press-v3", "Press a handle down", "easy", 0.0,
         (-0.1, 0.8, -0.001), (0.1, 0.9, 0.001)),
    Task("handle-pull-side-v3", "Pull a handle up sideways", "easy", 0.0,
         (-0.35, 0.65, 0.0), (-0.25, 0.75, 0.0)),
    Task("handle-pull-v3", "Pull a handle up", "easy", 0.0,
         (-0.1, 0.8, -0.001), (0.1, 0.9, 0.001)),
    Task("lever-pull-v3", "Pull a lever down 90 degrees", "easy", 0.0,
         (-0.1, 0.7, 0.0), (0.1, 0.8, 0.0)),
    Task("peg-insert-side-v3", "Insert a peg sideways", "medium", 0.1,
         (0.0, 0.5, 0.02, -0.35, 0.4, -0.001), (0.2, 0.7, 0.02, -0.25, 0.7, 0.001)),
    Task("pick-place-wall-v3", "Pick a puck, bypass a wall and place the puck", "very_hard", 0.15,
         (-0.05, 0.6, 0.015, -0.05, 0.85, 0.05), (0.05, 0.65, 0.015, 0.05, 0.9, 0.3)),
    Task("pick-out-of-hole-v3", "Pick up a puck from a hole", "hard", 0.15,
         (0.0, 0.75, 0.02, -0.1, 0.5, 0.15), (0.0, 0.75, 0.02, 0.1, 0.6, 0.3)),
    Task("reach-v3", "Reach a goal position", "easy", 0.15,
         (-0.1, 0.6, 0.02, -0.1, 0.8, 0.05), (0.1, 0.7, 0.02, 0.1, 0.9, 0.3)),
    Task("push-back-v3", "Push the puck to a goal", "hard", 0.15,
         (-0.1, 0.8, 0.02, -0.1, 0.6, 0.0199), (0.1, 0.85, 0.02, 0.1, 0.7, 0.0201)),
    Task("push-v3", "Push the puck to a goal", "hard", 0.15,
         (-0.1, 0.6, 0.02, -0.1, 0.8, 0.01), (0.1, 0.7, 0.02, 0.1, 0.9, 0.02)),
    Task("pick-place-v3", "Pick and place a puck to a goal", "hard", 0.15,
         (-0.1, 0.6, 0.02, -0.1, 0.8, 0.05), (0.1, 0.7, 0.02, 0.1, 0.9, 0.3)),
    Task("plate-slide-v3", "Slide a plate into a cabinet", "easy", 0.0,
         (0.0, 0.6, 0.0, -0.1, 0.85, 0.0), (0.0, 0.6, 0.0, 0.1, 0.9, 0.0)),
    Task("plate-slide-side-v3", "Slide a plate into a cabinet sideways", "easy", 0.0,
         (0.0, 0.6, 0.0, -0.3, 0.54, 0.0), (0.0, 0.6, 0.0, -0.25, 0.66, 0.0)),
    Task("plate-slide-back-v3", "Get a plate from the cabinet", "easy", 0.0,
         (0.0, 0.85, 0.0, -0.1, 0.6, 0.015), (0.0, 0.85, 0.0, 0.1, 0.6, 0.015)),
    Task("plate-slide-back-side-v3", "Get a plate from the cabinet sideways", "easy", 0.0,
         (-0.25, 0.6, 0.0, -0.05, 0.6, 0.015), (-0.25, 0.6, 0.0, 0.15, 0.6, 0.015)),
    Task("peg-unplug-side-v3", "Unplug a peg sideways", "easy", 0.0,
         (-0.25, 0.6, -0.001), (-0.15, 0.8, 0.001)),
    Task("soccer-v3", "Kick a soccer into the goal", "medium", 0.15,
         (-0.1, 0.6, 0.03, -0.1, 0.8, 0.0), (0.1, 0.7, 0.03, 0.1, 0.9, 0.0)),
    Task("stick-push-v3", "Grasp a stick and push a box using the stick", "very_hard", 0.1,
         (-0.08, 0.58, 0.0, 0.399, 0.55, 0.1319), (-0.03, 0.62, 0.001, 0.401, 0.6, 0.1321)),
    Task("stick-pull-v3", "Grasp a stick and pull a box with the stick", "very_hard", 0.1,
         (-0.1, 0.55, 0.0, 0.35, 0.45, 0.0199), (0.0, 0.65, 0.001, 0.45, 0.55, 0.0201)),
    Task("push-wall-v3", "Bypass a wall and push a puck to a goal", "medium", 0.15,
         (-0.05, 0.6, 0.015, -0.05, 0.85, 0.01), (0.05, 0.65, 0.015, 0.05, 0.9, 0.02)),
    Task("reach-wall-v3", "Bypass a wall and reach a goal", "easy", 0.15,
         (-0.05, 0.6, 0.015, -0.05, 0.85, 0.05), (0.05, 0.65, 0.015, 0.05, 0.9, 0.3)),
    Task("shelf-place-v3", "Pick and place a puck onto a shelf", "very_hard", 0.1,
         (-0.1, 0.5, 0.019, -0.1, 0.8, 0.299), (0.1, 0.6, 0.021, 0.1, 0.9, 0.301)),
    Task("sweep-into-v3", "Sweep a puck into a hole", "medium", 0.15,
         (-0.1, 0.6, 0.02, -0.001, 0.8399, 0.0199), (0.1, 0.7, 0.02, 0.001, 0.8401, 0.0201)),
    Task("sweep-v3", "Sweep a puck off the table", "medium", 0.0,
         (-0.1, 0.6, 0.02), (0.1, 0.7, 0.02)),
    Task("window-open-v3", "Push and open a window", "easy", 0.0,
         (-0.1, 0.7, 0.16), (0.1, 0.9, 0.16)),
    Task("window-close-v3", "Push and close a window", "easy", 0.0,
         (0.0, 0.75, 0.2), (0.0, 0.9, 0.2)),
)
# fmt: on

TASKS: dict[str, Task] = {task.name: task for task in _ROWS}

_MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
_ML45_TEST = ("bin-picking-v3", "box-close-v3", "door-lock-v3", "door-unlock-v3", "hand-insert-v3")

SUITES: dict[str, tuple[str, ...]] = {
    "mt10": _MT10,
    "mt50": tuple(TASKS),
    "ml45_train": tuple(name for name in TASKS if name not in _ML45_TEST),
    "ml45_test": _ML45_TEST,
} | {
    f"mt50_{level}": tuple(task.name for task in _ROWS if task.difficulty == level)
    for level in ("easy", "medium", "hard", "very_hard")
}


def task_named(name: str) -> Task:
    """The task of that name; ConfigError with a near name when there is none."""
    if name not in TASKS:
        raise ConfigError(f"no MetaWorld task named '{name}'{_hint(name, list(TASKS))}")
    return TASKS[name]


def suite_named(name: str) -> tuple[str, ...]:
    """Task names of a suite, in order; a task's name is a suite of one."""
    if name in TASKS:
        return (name,)
    if name not in SUITES:
        raise ConfigError(
            f"no MetaWorld suite or task named '{name}'{_hint(name, [*SUITES, *TASKS])} "
            f"(suites: {', '.join(SUITES)})"
        )
    return SUITES[name]


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def goal_vector(name: str, trial: int, *, seed: int) -> np.ndarray:
    """The goal vector of one trial: float64 [3] or [6], a function of (seed, task, trial) alone.

    Uniform in the task's box, redrawn while object and goal are nearer than its clearance, as the
    package's own reset does. Raw PCG64 words are turned into doubles here because NumPy promises
    the words, not `Generator.uniform`, to stay the same over its versions.
    """
    task = task_named(name)
    low, high = np.array(task.low), np.array(task.high)
    bits = np.random.PCG64(np.random.SeedSequence([seed, trial, *name.encode()]))
    while True:
        unit = (bits.random_raw(len(low)) >> np.uint64(11)) * 2.0**-53
        vector = low + (high - low) * unit
        if not task.clearance or np.linalg.norm(vector[:2] - vector[-3:-1]) >= task.clearance:
            return vector
