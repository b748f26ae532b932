"""The scripted expert in the real simulator: every kind of grasp, noise, a drop, and refusals."""

import numpy as np
import pytest

from vlarl.envs import libero, libero_sim, libero_tasks
from vlarl.episode import Episode
from vlarl.errors import ConfigError, RunFailed

pytestmark = pytest.mark.sim

STOVE = "pick_up_the_black_bowl_on_the_stove_and_place_it_on_the_plate"
DRAWER = "pick_up_the_black_bowl_in_the_top_drawer_of_the_wooden_cabinet_and_place_it_on_the_plate"
CHEESE = "pick_up_the_cream_cheese_and_place_it_in_the_basket"
MILK = "pick_up_the_milk_and_place_it_in_the_basket"
TINY = {"frame_size": 16, "video_size": 16, "render_quality": "fast"}


def episode(task, trial=0):
    return Episode(task=task, trial=trial, index=0)


@pytest.fixture
def sim():
    return libero_sim.make(
        libero_sim.SimConfig(
            layout_seed=0,
            settle_steps=10,
            reset_gripper_open=True,
            quality="fast",
            max_size=(16, 16),
            max_models=1,
        )
    )


def play(sim, *, horizon, gripper=lambda step, wanted: wanted):
    """Number of actions up to success, or None."""
    for step in range(horizon):
        action = np.clip(sim.expert(), -1, 1)
        action[6] = gripper(step, action[6])
        if sim.step(action.astype(np.float32)).success:
            return step + 1
    return None


@pytest.mark.slow
@pytest.mark.parametrize("task", [STOVE, DRAWER, CHEESE, MILK])
def test_every_kind_of_grasp_succeeds_within_the_horizon(sim, task):
    sim.reset(episode(task, 3))
    taken = play(sim, horizon=220)
    assert taken is not None
    assert taken > 60, "faster than the arm can get there and back"


@pytest.mark.slow
def test_what_is_dropped_is_picked_up_again(sim):
    sim.reset(episode(STOVE))
    opened = range(60, 70)
    heights = []

    def let_go(step, wanted):
        heights.append(sim._expert._thing_pos[2])
        return -1.0 if step in opened else wanted

    assert play(sim, horizon=280, gripper=let_go) is not None
    assert heights[59] > heights[0] + 0.02, "it was not in the air when it was let go"
    assert min(heights[70:100]) < heights[59] - 0.02, "it did not fall"


@pytest.mark.slow
def test_demonstrations_keep_what_was_wanted_beside_what_was_executed():
    cfg = libero.Config(suite=STOVE, **TINY)
    plan = [episode(STOVE, trial) for trial in (0, 1)]
    found = list(libero.demonstrate(cfg, plan, noise_std=0.1, seed=0))
    assert [t.trial for t in found] == [0, 1]
    for t in found:
        assert t.success
        assert t.reward.tolist() == [0.0] * (len(t) - 1) + [1.0]
        assert t.frames["agentview"].shape == (len(t), 16, 16, 3)
        assert t.action.shape == t.target.shape == (len(t), 7)
        assert t.state.shape == (len(t), 8)
        assert abs(t.target).max() <= 1
        assert 0.02 < np.std(t.action[:, :3] - t.target[:, :3]) < 0.11


def test_other_suites_are_refused_before_anything_starts():
    tasks = libero_tasks.suites()["libero_goal"]
    cfg = libero.Config(suite="libero_goal", tasks=tasks[:2], **TINY)
    plan = [episode(task) for task in cfg.tasks]
    with pytest.raises(ConfigError, match=r"libero_spatial and libero_object, not .* and 1 more"):
        next(libero.demonstrate(cfg, plan, noise_std=0.0, seed=0))


def test_a_goal_that_is_not_to_put_one_thing_somewhere_is_refused(sim):
    sim.reset(episode("open_the_middle_drawer_of_the_cabinet"))
    with pytest.raises(RunFailed, match="puts one object on or in another; this task wants"):
        sim.expert()
