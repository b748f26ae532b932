import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from vlarl.envs.chunked import PlayConfig
from vlarl.envs.simulator import SimulatorEnv
from vlarl.episode import Episode
from vlarl.errors import DeviceMissing, RunFailed, WorkerDied
from vlarl.specs import ActionSpec, EnvSpec

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture
def make(monkeypatch):
    """Builds envs on the fake simulator and closes them."""
    monkeypatch.syspath_prepend(FAKES)
    config = importlib.import_module("counting_sim").CountingConfig
    made = []

    def build(num_slots=1, *, max_steps=100, timeout_s=60.0, final_frames=False, **options):
        spec = EnvSpec(
            name="line",
            action=ActionSpec(dims=2, format="delta_x", gripper="none"),
            cameras=("front",),
            frame_size=(2, 3),
            state_dims=1,
            state_format="x",
            max_steps=max_steps,
            control_hz=1.0,
            tasks=("line",),
        )
        play = PlayConfig(
            max_steps=max_steps,
            low=-1.0,
            high=1.0,
            cameras=spec.cameras,
            frame_size=spec.frame_size,
            final_frames=final_frames,
            video_every=2,
            video_size=(4, 4),
        )
        env = SimulatorEnv(
            "counting_sim:CountingSim",
            config(**options),
            spec=spec,
            play=play,
            instructions={"line": "count"},
            num_slots=num_slots,
            timeout_s=timeout_s,
        )
        made.append(env)
        return env

    yield build
    for env in made:
        env.close()


def episode(trial, *, record=False):
    return Episode(task="line", trial=trial, index=trial, record=record)


def actions(slots, length=2, value=0.5):
    return torch.full((slots, length, 2), value)


def test_slots_answer_in_slot_order_with_their_own_episode(make):
    env = make(3)
    env.reset([2, 0, 1], [episode(20), episode(5), episode(10)])
    slots, step = env.recv(3)
    assert slots == [0, 1, 2]
    assert step.first.tolist() == [True] * 3
    assert step.obs.state.tolist() == [[5], [10], [20]]
    assert step.obs.images["front"].shape == (3, 2, 3, 3)
    assert step.obs.images["front"].float().mean(dim=(1, 2, 3)).tolist() == [5, 10, 20]
    assert step.obs.instruction == ("count",) * 3
    env.send([1, 2], torch.stack([actions(1)[0], actions(1, value=-0.5)[0]]))
    slots, step = env.recv(2)
    assert slots == [1, 2]
    assert step.obs.state.tolist() == [[12], [18]]
    assert step.reward.shape == step.terminated.shape == step.truncated.shape == (2, 2)
    assert step.first.tolist() == [False, False]


def test_the_renderer_is_asked_of_a_slot_that_does_not_play(make):
    env = make(2)
    assert env.renderer() == "counting"
    env.reset([0], [episode(5)])
    assert env.renderer() is None
    env.recv(1)
    assert env.renderer() == "counting"


def test_observations_belong_to_the_caller(make):
    env = make()
    env.reset([0], [episode(5)])
    _, before = env.recv(1)
    env.send([0], actions(1))
    env.recv(1)
    assert (before.obs.images["front"] == 5).all()


def test_among_leaves_the_other_slots_alone(make):
    env = make(3)
    env.reset([0, 1, 2], [episode(i) for i in range(3)])
    assert env.recv(1, among=[1])[0] == [1]
    assert env.recv(5)[0] == [0, 2]


def test_a_message_may_mix_resets_and_chunks(make):
    env = make(2)
    env.reset([0], [episode(0)])
    env.recv(1)
    env.send([0], actions(1, length=3))
    env.reset([1], [episode(9)])
    slots, step = env.recv(2)
    assert slots == [0, 1]
    assert step.first.tolist() == [False, True]
    assert step.reward.shape == (2, 3)


def test_video_frames_come_for_recorded_episodes_only(make):
    env = make(2)
    env.reset([0, 1], [episode(0, record=True), episode(0)])
    _, step = env.recv(2)
    assert [f.shape for f in step.frames] == [(1, 4, 4, 3), (0, 4, 4, 3)]
    assert (step.obs.images["front"][0] == step.obs.images["front"][1]).all()
    env.reset([0], [episode(0)])
    assert env.recv(1)[1].frames is None


def test_non_finite_actions_are_refused(make):
    env = make()
    env.reset([0], [episode(3)])
    env.recv(1)
    with pytest.raises(RunFailed, match=r"non-finite actions in .*trial=3"):
        env.send([0], actions(1, value=float("nan")))


def test_workers_import_no_torch(make):
    env = make()
    env.reset([0], [episode(0)])
    env.recv(1)
    maps = Path(f"/proc/{env.pids()[0]}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert "torch" not in maps.read_text()


def play_out(env, chunks=6):
    """States after each chunk of one episode in slot 0."""
    env.reset([0], [episode(0)])
    states = [env.recv(1)[1].obs.state.item()]
    for _ in range(chunks):
        env.send([0], actions(1))
        step = env.recv(1)[1]
        states.append(step.obs.state.item())
        assert (step.obs.images["front"] == int(states[-1])).all()
    return states


def test_a_worker_that_dies_is_replaced_and_its_episode_goes_on(make, tmp_path):
    undisturbed = play_out(make())
    assert undisturbed == [0, 2, 4, 6, 8, 10, 12]
    assert play_out(make(fail="die", once=tmp_path / "died")) == undisturbed
    assert (tmp_path / "died").exists()


def test_a_worker_killed_between_messages_is_replaced(make):
    env = make()
    env.reset([0], [episode(0)])
    env.recv(1)
    env.send([0], actions(1))
    env.recv(1)
    os.kill(env.pids()[0], signal.SIGKILL)
    env.send([0], actions(1))
    assert env.recv(1)[1].obs.state.item() == 4


def test_ctrl_c_leaves_the_decision_to_the_parent(make):
    env = make()
    env.reset([0], [episode(0)])
    env.recv(1)
    pids = env.pids()
    os.kill(pids[0], signal.SIGINT)  # a terminal sends it to the whole group
    env.send([0], actions(1))
    assert env.recv(1)[1].obs.state.item() == 2
    assert env.pids() == pids


def test_a_long_demonstration_is_not_taken_for_a_hung_worker(make, caplog):
    env = make(slow_s=0.3, max_steps=16)
    env.reset([0], [episode(0)])
    env.recv(1)
    env._pool._timeout_s = 3.0  # a process that starts may take longer on a busy machine
    start = time.monotonic()
    (played,) = env.demonstrate([episode(0)], noise_std=0.0, seed=0)
    assert time.monotonic() - start > 4.5, "one answer took longer than a worker may be silent"
    assert len(played) == 16
    assert caplog.records == []


def test_a_worker_that_hangs_is_replaced(make, tmp_path):
    start = time.monotonic()
    env = make(fail="hang", once=tmp_path / "hung", timeout_s=4.0)
    assert play_out(env, chunks=3) == [0, 2, 4, 6]
    assert time.monotonic() - start > 4


def test_a_second_death_in_one_episode_ends_the_run_with_the_last_words(make):
    env = make(fail="raise")
    env.reset([0], [episode(0)])
    env.recv(1)
    env.send([0], actions(1, length=5))
    with pytest.raises(WorkerDied, match="the number line is torn"):
        env.recv(1)


def test_each_episode_may_lose_its_worker_once(make):
    env = make()
    for _ in range(2):
        env.reset([0], [episode(0)])
        env.recv(1)
        os.kill(env.pids()[0], signal.SIGKILL)
        env.send([0], actions(1))
        assert env.recv(1)[1].obs.state.item() == 2

    def go_on():
        env.send([0], actions(1))  # notices already, when the process is gone by then
        env.recv(1)

    os.kill(env.pids()[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"slot 0 died .exit status -9., again"):
        go_on()


def test_a_users_error_in_a_worker_keeps_its_class_and_fix(make):
    env = make(fail="build")
    env.reset([0], [episode(0)])
    with pytest.raises(DeviceMissing, match="no driver") as caught:
        env.recv(1)
    assert caught.value.fix == "install one"


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, within_s):
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_close_ends_the_workers_and_may_be_called_twice(make):
    env = make(2)
    pids = env.pids()
    env.close()
    env.close()
    assert gone(pids, 0.0)


PARENT = """
    import signal, time
    from vlarl.envs.subproc import SubprocPool
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    pool = SubprocPool("served:Served", (), num_slots=2, num_bytes=8, timeout_s=60)
    for slot in range(2):
        pool.submit(slot, ("nap", (0.0,)))
    pool.wait(2)
    pool.submit(1, ("nap", (1.0,)))
    print(*pool.pids(), flush=True)
    time.sleep(600)
"""
SERVED = """
    import time
    class Served:
        def __init__(self, memory): self.memory = memory
        def nap(self, seconds): time.sleep(seconds)
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_no_worker_outlives_its_parent(tmp_path, name):
    (tmp_path / "served.py").write_text(textwrap.dedent(SERVED))
    (tmp_path / "parent.py").write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(alive, pids))
    parent.send_signal(getattr(signal, name))
    parent.wait(60)
    parent.stdout.close()
    assert gone(pids, within_s=60)


def test_demonstrations_come_in_order_from_all_slots(make):
    env = make(2, goal=5.0)
    wanted = [episode(trial) for trial in (1, 4, 2, 3, 0)]
    found = list(env.demonstrate(wanted, noise_std=0.0, seed=0))
    assert [t.trial for t in found] == [1, 4, 2, 3, 0]
    assert [len(t) for t in found] == [4, 1, 3, 2, 4]  # 1.25 an action, up to 5
    assert {t.instruction for t in found} == {"count"}
    assert all(t.success for t in found)
