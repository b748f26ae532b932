"""Run by test_libero.py in processes of their own: episodes of the package itself, and ours.

python libero_package.py package TASK TRIAL OUT.npz    as published evaluations drive LIBERO
python libero_package.py ours TASK TRIAL OUT.npz       ours, after other episodes were played
python libero_package.py hashes TASKS TRIALS SEED      one line per restored state, as JSON
"""

import hashlib
import json
import os
import random
import sys

import numpy as np

from vlarl.envs import gl, libero_sim, libero_tasks
from vlarl.episode import Episode

SIZE = 128
SHOWN = (0, 7, 24)
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (25, 7)).astype(np.float32)
ACTIONS[:, 6] = np.where(np.arange(25) % 10 < 5, 1, -1)


def simulator(**changes):
    return libero_sim.make(
        libero_sim.SimConfig(
            **{
                "layout_seed": 0,
                "settle_steps": 10,
                "reset_gripper_open": True,
                "quality": "full",
                "max_size": (SIZE, SIZE),
                "max_models": 2,
            }
            | changes
        )
    )


def package(task: str, trial: int) -> dict[str, list]:
    """Construct, seed, reset, set the initial state, ten actions with an open gripper, ours."""
    import robosuite.utils.transform_utils as transforms
    from libero.libero.envs import OffScreenRenderEnv

    env = OffScreenRenderEnv(
        bddl_file_name=str(libero_tasks.task_named(task).bddl),
        camera_heights=SIZE,
        camera_widths=SIZE,
    )
    env.seed(0)
    env.reset()
    env.set_init_state(libero_tasks.init_states(task)[trial])
    for _ in range(10):
        obs, *_ = env.step([0, 0, 0, 0, 0, 0, -1])
    found = {name: [] for name in ("qpos", "qvel", "state", "success", "agentview", "wrist")}
    for i, action in enumerate(ACTIONS):
        obs, _, done, _ = env.step(action.astype(np.float64))
        turn = transforms.quat2axisangle(obs["robot0_eef_quat"])
        state = [obs["robot0_eef_pos"], turn, obs["robot0_gripper_qpos"]]
        found["state"].append(np.concatenate(state).astype(np.float32))
        found["qpos"].append(env.sim.data.qpos.copy())
        found["qvel"].append(env.sim.data.qvel.copy())
        found["success"].append(bool(done))
        if i in SHOWN:
            found["agentview"].append(obs["agentview_image"][::-1, ::-1])
            found["wrist"].append(obs["robot0_eye_in_hand_image"][::-1, ::-1])
    return found


def ours(task: str, trial: int) -> dict[str, list]:
    sim = simulator()
    for before in (trial + 1, trial):
        sim.reset(Episode(task=task, trial=before, index=0))
        for action in ACTIONS[::-3]:
            sim.step(action)
    sim.reset(Episode(task=task, trial=trial, index=0))
    found = {name: [] for name in ("qpos", "qvel", "state", "success", "agentview", "wrist")}
    for i, action in enumerate(ACTIONS):
        success, diverged = sim.step(action)
        assert not diverged
        found["state"].append(sim.state())
        found["qpos"].append(sim._task.data.qpos.copy())
        found["qvel"].append(sim._task.data.qvel.copy())
        found["success"].append(success)
        if i in SHOWN:
            for camera in ("agentview", "wrist"):
                found[camera].append(sim.render(camera, (SIZE, SIZE)))
    return found


def everything(sim) -> list:
    """All numbers that the rest of an episode depends on, hashed one by one."""
    moment = sim._capture(sim._task)
    arrays = [moment.physics, moment.gripper, *moment.controller.values()]
    model = sim._task.model
    arrays += [model.body_pos, model.body_quat, model.site_rgba, sim.state()]
    hashed = [hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16] for x in arrays]
    return [*hashed, moment.will_look]


def hashes(tasks: list[str], trials: list[int], seed: int) -> dict[str, list]:
    """What is restored for every (task, trial), in an order of its own, with play in between."""
    sim = simulator(quality="fast", max_models=1 + seed % 2)
    order = [(task, trial) for task in tasks for trial in trials]
    shuffle = random.Random(seed)
    shuffle.shuffle(tasks)
    found = {}
    for task in tasks:
        numbers = [trial for name, trial in order if name == task]
        shuffle.shuffle(numbers)
        for trial in numbers:
            sim.reset(Episode(task=task, trial=trial, index=0))
            found[f"{task} {trial}"] = everything(sim)
            for action in ACTIONS[: shuffle.randrange(4)]:
                sim.step(action)
            sim.reset(Episode(task=task, trial=trial, index=0))
            assert everything(sim) == found[f"{task} {trial}"]
            sim.step(ACTIONS[0])
            found[f"{task} {trial}"] += everything(sim)
    return found


def main() -> None:
    gl.choose_backend()
    kind, *rest = sys.argv[1:]
    if kind == "hashes":
        tasks, trials, seed = map(json.loads, rest)
        sys.stdout.write(json.dumps(hashes(tasks, trials, seed), sort_keys=True))
    else:
        task, trial, out = rest
        np.savez(out, **{"package": package, "ours": ours}[kind](task, int(trial)))
    sys.stdout.flush()
    os._exit(0)  # the package's renderer cannot be taken down in order


if __name__ == "__main__":
    main()
