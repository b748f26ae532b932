"""The real simulator. One pool of two fast 64 px workers serves most tests."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.envs import gl, metaworld, metaworld_sim
from vlarl.envs.metaworld_tasks import TASKS, goal_vector
from vlarl.episode import Episode
from vlarl.errors import DeviceMissing

pytestmark = pytest.mark.sim

TINY = {"suite": "mt50", "frame_size": 64, "video_size": 96, "render_quality": "fast"}


@pytest.fixture(scope="module")
def env():
    made = metaworld.make(metaworld.Config(**TINY, max_steps=40), num_slots=2, final_frames=True)
    yield made
    made.close()


def episode(task, trial=0, *, record=False):
    return Episode(task=task, trial=trial, index=0, record=record)


def chunks(seed, count, length=8):
    """[count] of [1, length, 4], a fixed random walk."""
    generator = torch.Generator().manual_seed(seed)
    walk = torch.rand(count, 1, length, 4, generator=generator) * 2 - 1
    return list(walk)


def roll(env, slot, start, plan):
    """Everything seen of one episode: states, frames, rewards."""
    env.reset([slot], [start])
    steps = [env.recv(1)[1]]
    for chunk in plan:
        if steps[-1].done.item():
            break
        env.send([slot], chunk)
        steps.append(env.recv(1)[1])
    return {
        "state": torch.cat([s.obs.state for s in steps]),
        "frame": torch.cat([s.obs.images["corner4"] for s in steps]),
        "reward": torch.cat([s.reward for s in steps[1:]]),
        "truncated": torch.cat([s.truncated for s in steps[1:]]),
        "terminated": torch.cat([s.terminated for s in steps[1:]]),
    }


def assert_same(a, b):
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("task", ["reach-v3", "door-open-v3", "dial-turn-v3", "window-close-v3"])
def test_an_episode_depends_on_task_and_trial_alone(env, task):
    fresh = roll(env, 0, episode(task, 3), chunks(1, 4))
    other = roll(env, 1, episode(task, 1004), chunks(2, 5))
    assert not torch.equal(fresh["frame"][0], other["frame"][0])
    roll(env, 1, episode("reach-v3", 8), chunks(3, 2))
    assert_same(fresh, roll(env, 1, episode(task, 3), chunks(1, 4)))


def test_recording_changes_nothing_but_the_video(env):
    plan = chunks(5, 3)
    plain = roll(env, 0, episode("push-v3", 2), plan)
    assert_same(plain, roll(env, 1, episode("push-v3", 2, record=True), plan))
    env.reset([0], [episode("push-v3", 2, record=True)])
    videos = [env.recv(1)[1].frames[0]]
    env.send([0], plan[0])
    videos.append(env.recv(1)[1].frames[0])
    assert [tuple(v.shape) for v in videos] == [(1, 96, 96, 3), (2, 96, 96, 3)]
    # The same view at two sizes: block means agree up to edges.
    small = plain["frame"][0].float().unfold(0, 2, 2).unfold(1, 2, 2).mean(dim=(3, 4))
    large = videos[0][0].float().unfold(0, 3, 3).unfold(1, 3, 3).mean(dim=(3, 4))
    assert (small - large).abs().mean() < 6


def test_the_horizon_cuts_inside_a_chunk_and_shows_the_last_frame(env):
    seen = roll(env, 0, episode("assembly-v3", 0), [torch.zeros(1, 7, 4)] * 9)
    assert seen["truncated"].nonzero().tolist() == [[5, 4]]  # step 40 of chunks of 7
    assert not seen["terminated"].any()
    assert seen["frame"][-1].float().std() > 10


def test_actions_beyond_the_bounds_are_clipped_and_counted(env):
    inside, beyond = torch.zeros(1, 8, 4), torch.zeros(1, 8, 4)
    inside[:, 2:5, 0], beyond[:, 2:5, 0] = 1.0, 7.0
    env.reset([0, 1], [episode("reach-v3")] * 2)
    env.recv(2)
    env.send([0, 1], torch.cat([inside, beyond]))
    _, step = env.recv(2)
    assert step.num_clipped.tolist() == [0, 3]
    assert torch.equal(step.obs.state[0], step.obs.state[1])


def test_a_worker_killed_in_mid_episode_changes_no_outcome(env):
    plan = chunks(7, 5)
    undisturbed = roll(env, 0, episode("drawer-open-v3", 5), plan)
    env.reset([1], [episode("drawer-open-v3", 5)])
    env.recv(1)
    for i, chunk in enumerate(plan):
        if i == 3:
            os.kill(env.pids()[1], signal.SIGKILL)
        env.send([1], chunk)
        _, step = env.recv(1)
        assert torch.equal(step.obs.state[0], undisturbed["state"][i + 1])
        assert torch.equal(step.obs.images["corner4"][0], undisturbed["frame"][i + 1])


def test_workers_hold_no_torch(env):
    for pid in env.pids():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "mujoco" in maps
        assert "torch" not in maps


def test_experts_succeed_and_success_pays_once(tmp_path):
    tasks = ("reach-v3", "button-press-topdown-v3", "drawer-open-v3", "handle-press-v3", "push-v3")
    cfg = metaworld.Config(**TINY, num_slots=2)
    plan = [episode(task, trial) for task in tasks for trial in (0, 1000)]
    found = list(metaworld.demonstrate(cfg, plan, noise_std=0.0, seed=0))
    assert [(t.task, t.trial) for t in found] == [(e.task, e.trial) for e in plan]
    for t in found:
        assert t.success, t.task
        assert t.reward.tolist() == [0.0] * (len(t) - 1) + [1.0]
        assert t.instruction == metaworld.instruction(t.task)
        assert t.frames["corner4"].shape == (len(t), 64, 64, 3)
        assert t.state.shape == t.action.shape == t.target.shape == (len(t), 4)
        assert np.abs(t.action).max() <= 1


def test_physics_that_blows_up_diverges_instead_of_succeeding():
    sim = metaworld_sim.make(
        metaworld_sim.SimConfig(
            goal_seed=0, settle_steps=2, quality="fast", max_size=(64, 64), max_models=1
        )
    )
    sim.reset(episode("reach-v3"))
    assert sim.step(np.zeros(4, np.float32)) == (False, False)
    sim._task.env.data.qvel[:] = 1e12
    assert sim.step(np.zeros(4, np.float32)).diverged
    sim.reset(episode("reach-v3"))
    assert not sim.step(np.zeros(4, np.float32)).diverged


PACKAGE = """
    import os, sys
    os.environ["MUJOCO_GL"] = {backend!r}
    import numpy as np
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.types import Task
    import pickle
    cls = ALL_V3_ENVIRONMENTS[{task!r}]
    env = cls(render_mode="rgb_array", camera_name="corner4", width=480, height=480)
    goal = np.array({goal})
    data = dict(env_cls=cls, rand_vec=goal, partially_observable=False)
    env.set_task(Task(env_name={task!r}, data=pickle.dumps(data)))
    env.reset()
    for _ in range(15):
        obs, *_ = env.step(np.zeros(4))
    frames = [env.render()]
    for _ in range(6):
        obs, *_ = env.step(np.array([0.5, -0.3, 0.2, 1.0]))
    frames.append(env.render())
    np.savez(sys.argv[1], frames=np.stack(frames), obs=obs)
"""


def test_full_frames_are_the_packages_own_turned_by_half_a_turn(tmp_path):
    task, trial = "hammer-v3", 11
    goal = goal_vector(task, trial, seed=0).tolist()
    script = textwrap.dedent(PACKAGE).format(backend=gl.choose_backend()[0], task=task, goal=goal)
    path = tmp_path / "package.npz"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(path)], check=True)
    package = np.load(path)
    env = metaworld.make(metaworld.Config(suite=task), num_slots=1, final_frames=False)
    try:
        seen = roll(env, 0, episode(task, trial), [torch.tensor([[[0.5, -0.3, 0.2, 1.0]] * 6])])
    finally:
        env.close()
    np.testing.assert_array_equal(seen["frame"].numpy(), package["frames"][:, ::-1, ::-1])
    np.testing.assert_array_equal(seen["state"][-1].numpy(), package["obs"][:4].astype(np.float32))


def projected(point, size):
    """Column and row where an upright, unmirrored picture from camera corner4 shows a point.

    A pinhole at the camera's place, looking along its axis, with the picture's up direction close
    to the world's (the camera is rolled by 4 degrees) and right = forward x up.
    """
    centre = np.array([0.75, 0.075, 0.7])
    forward = np.array([-0.7457, 0.4582, -0.4837])
    up = np.array([-0.3762, 0.3095, 0.8733])
    right = np.cross(forward, up)
    offset = np.asarray(point) - centre
    focal = size / 2 / np.tan(np.radians(60) / 2)
    column = size / 2 + focal * (offset @ right) / (offset @ forward)
    row = size / 2 - focal * (offset @ up) / (offset @ forward)
    return column, row


def test_frames_are_upright_and_not_mirrored():
    # The goal of reach-v3 is a red ball; nothing else that is red is elsewhere in every trial.
    size, trials = 128, range(6)
    cfg = metaworld.Config(suite="reach-v3", frame_size=size, render_quality="fast")
    env = metaworld.make(cfg, num_slots=2, final_frames=False)
    frames = []
    try:
        for trial in trials:
            env.reset([trial % 2], [episode("reach-v3", trial)])
            frames.append(env.recv(1)[1].obs.images["corner4"][0].numpy().astype(int))
    finally:
        env.close()
    moved = np.abs(frames - np.median(frames, axis=0)).max(axis=-1) > 60
    for trial, frame in zip(trials, frames, strict=True):
        ball = moved[trial] & (frame[..., 0] > 200) & (frame[..., 1:].max(axis=-1) < 80)
        rows, columns = np.nonzero(ball)
        assert len(rows) > 3, trial
        column, row = projected(goal_vector("reach-v3", trial, seed=0)[3:], size)
        assert abs(columns.mean() + 0.5 - column) < 1, trial
        assert abs(rows.mean() + 0.5 - row) < 1, trial


def test_the_selftest_renders():
    test = gl.selftest()
    assert test.backend in ("egl", "osmesa")
    assert test.driver


def test_a_machine_without_a_driver_says_what_to_install(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent")
    if gl.ctypes.util.find_library("OSMesa"):
        pytest.skip("OSMesa is installed and takes over")
    with pytest.raises(DeviceMissing, match="no OpenGL driver") as caught:
        metaworld.make(metaworld.Config(**TINY), num_slots=1, final_frames=False)
    assert "libegl-mesa0" in caught.value.fix


@pytest.mark.slow
def test_all_fifty_tasks_restore_bit_exactly_in_another_process_with_another_history():
    cfg = metaworld.Config(**TINY, worker_models=2)
    first = metaworld.make(cfg, num_slots=1, final_frames=False)
    second = metaworld.make(cfg, num_slots=1, final_frames=False)
    plan = chunks(9, 3)
    try:
        for task in TASKS:
            seen = roll(first, 0, episode(task, 3), plan)
            assert not seen["terminated"].any(), "succeeds before it acts"
            roll(second, 0, episode(task, 1003), plan)
            assert_same(seen, roll(second, 0, episode(task, 3), plan))
    finally:
        first.close()
        second.close()
