"""The real simulator. One pool of two fast 64 px workers, and one simulator here, serve most."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.envs import libero, libero_sim, libero_tasks
from vlarl.envs.chunked import ChunkRunner, PlayConfig
from vlarl.episode import Episode
from vlarl.errors import RunFailed

pytestmark = pytest.mark.sim

BESIDE = "pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate"
STOVE = "KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it"
SCRIPT = Path(__file__).with_name("libero_package.py")
TINY = {"frame_size": 64, "video_size": 64, "render_quality": "fast", "max_steps": 20}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def episode(trial=0, *, task=BESIDE, record=False):
    return Episode(task=task, trial=trial, index=0, record=record)


@pytest.fixture(scope="module")
def env():
    made = libero.make(libero.Config(suite=BESIDE, **TINY), num_slots=2, final_frames=True)
    yield made
    made.close()


def simulator(**changes):
    return libero_sim.make(
        libero_sim.SimConfig(
            **{
                "layout_seed": 0,
                "settle_steps": 10,
                "reset_gripper_open": True,
                "quality": "fast",
                "max_size": (96, 96),
                "max_models": 1,
            }
            | changes
        )
    )


@pytest.fixture(scope="module")
def sim():
    return simulator()


@pytest.mark.parametrize(
    ("task", "trial"), [(libero_tasks.suite_named("libero_spatial")[4], 3), (STOVE, 7)]
)
def test_it_plays_and_looks_as_the_package_does_bit_for_bit(tmp_path, task, trial):
    for kind in ("package", "ours"):
        run(kind, task, trial, tmp_path / f"{kind}.npz")
    package, ours = (np.load(tmp_path / f"{kind}.npz") for kind in ("package", "ours"))
    for name in ("qpos", "qvel", "state", "success", "agentview", "wrist"):
        assert np.array_equal(package[name], ours[name]), name
    assert package["agentview"].std() > 20


@pytest.mark.slow
def test_states_are_restored_bit_for_bit_in_any_process_and_order():
    tasks = libero_tasks.suite_named("libero_spatial")
    first, second = (json.loads(run("hashes", json.dumps(tasks), "[0, 17, 49]", s)) for s in (1, 2))
    assert len(first) == 30
    assert first == second
    physics = [row[0] for row in first.values()]
    assert len(set(physics)) == 30


@pytest.mark.slow
def test_episodes_are_the_same_on_any_number_of_slots():
    tasks = libero_tasks.suite_named("libero_goal")[:2]
    plan = [episode(trial, task=task) for trial in (0, 1, 2) for task in tasks]
    chunk = torch.rand(1, 8, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seen = {}
    for slots in (1, 3):
        cfg = libero.Config(
            suite="libero_goal", tasks=tasks, cameras=("wrist", "agentview"), **TINY
        )
        made = libero.make(cfg, num_slots=slots, final_frames=True)
        for start in range(0, len(plan), slots):
            wave = range(slots)
            made.reset(wave, plan[start : start + slots])
            before = made.recv(slots)[1].obs
            made.send(wave, chunk.expand(slots, -1, -1))
            after = made.recv(slots)[1].obs
            for k, e in enumerate(plan[start : start + slots]):
                rows = [before.state[k], after.state[k]]
                rows += [obs.images[c][k] for obs in (before, after) for c in cfg.cameras]
                seen.setdefault((e.task, e.trial), []).append(rows)
        made.close()
    assert len(seen) == 6
    for alone, beside in seen.values():
        assert all(map(torch.equal, alone, beside))


def test_the_initial_state_is_set_after_the_reset_and_then_settles():
    still = simulator(settle_steps=0)
    still.reset(episode(5))
    data, given = still._task.data, libero_tasks.init_state(BESIDE, 5)
    assert np.array_equal(np.concatenate([[data.time], data.qpos, data.qvel]), given)
    for _ in range(10):
        still.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
    settled = simulator()
    settled.reset(episode(5))
    assert np.array_equal(settled._task.data.qpos, data.qpos)
    assert np.array_equal(settled.state(), still.state())
    assert settled._task.data.time == pytest.approx(given[0] + 0.5)
    settled._task.view.close()
    still._task.view.close()


def test_state_and_gripper(sim):
    sim.reset(episode(0))
    state = sim.state()
    assert state.shape == (8,)
    assert state.dtype == np.float32
    # The hand is over the table, points down (half a turn about x), and is open: 4 cm a finger.
    assert state[2] > 1.0
    assert state[3] == pytest.approx(np.pi, abs=0.1)
    assert np.abs(state[4:6]).max() < 0.2
    assert state[6:] == pytest.approx([0.04, -0.04], abs=0.003)
    for _ in range(15):
        sim.step(np.array([0, 0, 0, 0, 0, 0, 1], np.float32))
    assert np.abs(sim.state()[6:]).max() < 0.005, "+1 closes"
    for _ in range(15):
        sim.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
    assert sim.state()[6:] == pytest.approx([0.04, -0.04], abs=0.003), "-1 opens"


def test_an_action_moves_the_hand_along_the_worlds_axes(sim):
    for axis in range(3):
        sim.reset(episode(0))
        before = sim.state()
        action = np.zeros(7, np.float32)
        action[axis], action[6] = 0.5, -1
        for _ in range(6):
            sim.step(action)
        moved = (sim.state() - before)[:3]
        assert np.argmax(moved) == axis
        assert moved[axis] > 0.02


def test_the_gripper_stays_where_it_is_unless_it_is_to_open():
    still = simulator(reset_gripper_open=False)
    still.reset(episode(0))
    start = libero_tasks.init_state(BESIDE, 0)
    fingers = still._task.env.robots[0]._ref_gripper_joint_pos_indexes
    assert still.state()[6:] == pytest.approx(start[1:][fingers], abs=0.004)
    assert still.state()[6] < 0.03
    still._task.view.close()


def test_a_marked_corner_is_where_published_checkpoints_expect_it(sim):
    """Upright, and mirrored: robosuite's frames are bottom-up, and turning one by 180 degrees flips
    columns as well. The camera faces the robot from x = 0.6, so low x is far away, up in the frame;
    the robot's left, y > 0, is at the right of the world as seen, hence left in the mirror.
    """
    sim.reset(episode(0))
    task = sim._task
    plate = task.env.sim.model.get_joint_qpos_addr(task.env.get_object("plate_1").joints[0])[0]
    geoms = task.model.geom_bodyid == task.env.obj_body_id["plate_1"]
    looks = task.model.geom_matid[geoms].copy(), task.model.geom_rgba[geoms].copy()
    task.model.geom_matid[geoms], task.model.geom_rgba[geoms] = -1, (1, 0, 0, 1)
    before = sim._seen.qpos
    try:
        centres = []
        for x, y in ((0.15, 0.25), (-0.15, -0.05)):
            sim._seen.qpos = before.copy()
            sim._seen.qpos[plate : plate + 2] = x, y
            frame = sim.render("agentview", (96, 96)).astype(int)
            red = np.argwhere((frame[..., 0] > 60) & (frame[..., 1] < 30) & (frame[..., 2] < 30))
            assert len(red) > 20
            centres.append(red.mean(0))
        (near_row, left_column), (far_row, right_column) = centres
        assert near_row > 70 > 55 > far_row
        assert left_column < 30 < 50 < right_column
    finally:
        sim._seen.qpos = before
        task.model.geom_matid[geoms], task.model.geom_rgba[geoms] = looks


def test_frames_are_contiguous_and_do_not_depend_on_the_size_asked_before(sim):
    sim.reset(episode(1))
    small = sim.render("agentview", (48, 48))
    sim.render("wrist", (96, 96))
    assert small.flags.c_contiguous
    assert np.array_equal(small, sim.render("agentview", (48, 48)))
    assert not np.array_equal(small, sim.render("wrist", (48, 48)))


def runner(sim, *, max_steps):
    play = PlayConfig(
        max_steps=max_steps,
        low=-1,
        high=1,
        cameras=("agentview", "wrist"),
        frame_size=(32, 32),
        final_frames=False,
        video_every=2,
        video_size=(32, 32),
    )
    return ChunkRunner(np.zeros(play.frames_shape, np.uint8), sim, play)


def test_one_frame_of_each_camera_a_chunk_and_none_while_settling(sim, monkeypatch):
    sim.reset(episode(2))
    sim._task.settled.clear()
    drawn = []
    frame = sim._task.view.frame
    monkeypatch.setattr(sim._task.view, "frame", lambda *a: drawn.append(a[1]) or frame(*a))
    played = runner(sim, max_steps=50)
    played.play(episode(2), ())
    assert drawn == ["agentview", "robot0_eye_in_hand"]
    played.play(None, (np.zeros((8, 7), np.float32),))
    assert drawn == ["agentview", "robot0_eye_in_hand"] * 2


@pytest.mark.parametrize(("horizon", "counts"), [(4, True), (3, False)])
def test_success_after_the_horizon_does_not_count(sim, monkeypatch, horizon, counts):
    sim.reset(episode(2))
    met = iter([False, False, False, True, True, True])
    monkeypatch.setattr(sim._task.env, "_check_success", lambda: next(met))
    played = runner(sim, max_steps=horizon)
    played.play(episode(2), ())
    answer = played.play(None, (np.zeros((6, 7), np.float32),))
    assert answer.terminated.any() == counts
    assert answer.truncated.any() != counts
    assert answer.reward.sum() == counts


def test_the_goal_is_success_and_pays_once(sim):
    sim.reset(episode(0))
    assert not sim.step(np.zeros(7, np.float32)).success
    task = sim._task
    address = task.env.sim.model.get_joint_qpos_addr
    bowl = address(task.env.get_object("akita_black_bowl_1").joints[0])[0]
    plate = address(task.env.get_object("plate_1").joints[0])[0]
    task.data.qpos[bowl : bowl + 3] = task.data.qpos[plate : plate + 3]
    task.data.qpos[bowl + 2] += 0.01
    task.data.qvel[:] = 0
    done = [sim.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32)).success for _ in range(10)]
    assert done[-1]


@pytest.mark.parametrize("number", [np.nan, 1e12])
def test_physics_that_blows_up_diverges_and_leaves_no_trace(sim, number):
    sim.reset(episode(3))
    before = sim.state(), sim._task.data.qpos.copy()
    sim._task.data.qvel[:] = number
    success, diverged = sim.step(np.zeros(7, np.float32))
    assert diverged
    assert not success
    sim.reset(episode(3))
    assert np.array_equal(before[0], sim.state())
    assert np.array_equal(before[1], sim._task.data.qpos)
    assert sim.step(np.zeros(7, np.float32)) == (False, False)


@pytest.mark.parametrize("number", [1e9, 1e30])
def test_a_state_that_does_not_survive_settling_is_refused(sim, monkeypatch, number):
    wild = libero_sim.init_state(episode(0).task, 0).copy()
    wild[1:] = number
    monkeypatch.setattr(libero_sim, "init_state", lambda task, trial: wild)
    with pytest.raises(RunFailed, match=r"trial 33, diverges while it settles.*is damaged"):
        sim.reset(episode(33))


def test_states_of_another_version_are_refused(sim, monkeypatch):
    monkeypatch.setattr(libero_sim, "init_state", lambda task, trial: np.zeros(79))
    with pytest.raises(RunFailed, match=r"task 'pick.* have 79 numbers, its model needs 92"):
        sim.reset(episode(31))


def test_a_goal_of_unknown_words_is_one_message(sim, tmp_path):
    task = libero_tasks.task_named(episode(0).task)
    changed = tmp_path / task.bddl.name
    changed.write_text(task.bddl.read_text().replace("(On ", "(Onn ").replace("(In ", "(Inn "))
    with pytest.raises(RunFailed, match=f"cannot build task .* from {changed}"):
        sim._build(replace(task, bddl=changed))


def test_a_worker_killed_in_mid_episode_changes_no_outcome(env):
    generator = torch.Generator().manual_seed(1)
    plan = [torch.rand(1, 3, 7, generator=generator) * 2 - 1 for _ in range(4)]

    def play(slot, kill_at=None):
        env.reset([slot], [episode(4)])
        seen = [env.recv(1)[1].obs]
        for i, chunk in enumerate(plan):
            if i == kill_at:
                os.kill(env.pids()[slot], signal.SIGKILL)
            env.send([slot], chunk)
            seen.append(env.recv(1)[1].obs)
        return seen

    for calm, disturbed in zip(play(0), play(1, kill_at=2), strict=True):
        assert torch.equal(calm.state, disturbed.state)
        assert torch.equal(calm.images["agentview"], disturbed.images["agentview"])


def test_workers_hold_no_torch(env):
    env.reset([0, 1], [episode(0), episode(1)])
    env.recv(2)
    for pid in env.pids():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "mujoco" in maps
        assert "torch" not in maps


def test_nothing_is_written_to_the_home_folder(tmp_path):
    code = (
        "from vlarl.envs import libero_sim as s\n"
        "s.make(s.SimConfig(layout_seed=0, settle_steps=0, reset_gripper_open=True,"
        " quality='fast', max_size=(32, 32), max_models=1))\n"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -c "$0" <&-', code],
        env=os.environ | {"HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert not (tmp_path / ".libero").exists()
