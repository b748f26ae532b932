import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from vlarl import registry
from vlarl.envs import metaworld
from vlarl.envs.metaworld_tasks import TASKS, goal_vector
from vlarl.errors import ConfigError


def test_suite_sizes():
    sizes = {
        name: len(metaworld.task_names(metaworld.Config(suite=name))) for name in metaworld.suites()
    }
    assert sizes == {
        "mt10": 10,
        "mt50": 50,
        "ml45_train": 45,
        "ml45_test": 5,
        "mt50_easy": 28,
        "mt50_medium": 11,
        "mt50_hard": 6,
        "mt50_very_hard": 5,
    }


def test_ml45_splits_the_fifty_tasks():
    train = metaworld.task_names(metaworld.Config(suite="ml45_train"))
    test = metaworld.task_names(metaworld.Config(suite="ml45_test"))
    assert set(train) | set(test) == set(TASKS)
    assert not set(train) & set(test)


def test_a_task_is_a_suite_and_a_list_of_tasks_replaces_the_suite():
    assert metaworld.task_names(metaworld.Config(suite="reach-v3")) == ("reach-v3",)
    listed = metaworld.Config(suite="mt50", tasks=("push-v3", "reach-v3"))
    assert metaworld.task_names(listed) == ("push-v3", "reach-v3")
    assert metaworld.spec(listed).tasks == ("push-v3", "reach-v3")


def test_instructions():
    assert metaworld.instruction("door-lock-v3") == "Lock the door by rotating the lock clockwise"
    assert metaworld.instruction("push-v3") == metaworld.instruction("push-back-v3")


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ({"suite": "mt51"}, "mt50"),
        ({"suite": "reach"}, "reach-v3"),
        ({"suite": "mt51", "tasks": ("reach-v3",)}, "mt50"),
        ({"tasks": ("drawer-opne-v3",)}, "drawer-open-v3"),
    ],
)
def test_unknown_names_are_answered_with_a_near_one(wrong, suggestion):
    with pytest.raises(ConfigError, match=f"did you mean '{suggestion}'"):
        metaworld.trials(metaworld.Config(**wrong), "train")


def test_a_suite_is_not_silently_ignored_because_of_tasks():
    asked = metaworld.Config(suite="ml45_test", tasks=("reach-v3", "door-lock-v3"))
    with pytest.raises(
        ConfigError, match=r"reach-v3 is not in env.suite=ml45_test.*env.tasks=\[\]"
    ):
        metaworld.spec(asked)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_steps": 485}, "at most 484"),
        ({"max_steps": 400, "settle_steps": 100}, "at most 399"),
        ({"train_trials": 1001}, "overlap the held-out ones, which start at 1000"),
        ({"train_trials": 10_001, "eval_start": 20_000}, "10000"),
        ({"eval_trials": 1_000_000_000}, "10000"),
        ({"train_trials": 30, "eval_start": 29}, "overlap"),
        ({"cameras": ()}, "at least one camera"),
        ({"cameras": ("corner4", "corner4")}, "each once"),
        ({"tasks": ("reach-v3", "reach-v3")}, "named twice"),
    ],
)
def test_bad_values_are_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        metaworld.Config(**wrong)


def test_the_largest_horizon_that_fits_is_accepted():
    assert metaworld.spec(metaworld.Config(max_steps=484)).max_steps == 484


def test_trials_of_the_splits():
    cfg = metaworld.Config(suite="reach-v3", train_trials=3, eval_trials=2)
    assert metaworld.trials(cfg, "train") == {"reach-v3": (0, 1, 2)}
    assert metaworld.trials(cfg, "eval") == {"reach-v3": (1000, 1001)}


def test_no_held_out_goal_is_a_training_goal():
    cfg = metaworld.Config(suite="mt50", train_trials=1000, eval_trials=200)
    assert metaworld.overlap(cfg) == 0


def test_overlap_counts_equal_goals(monkeypatch):
    monkeypatch.setattr(
        metaworld, "goal_vector", lambda name, trial, *, seed: np.array([float(trial % 1000 // 2)])
    )
    cfg = metaworld.Config(suite="reach-v3", train_trials=4, eval_trials=6)
    assert metaworld.overlap(cfg) == 4  # 0 0 1 1 of 0 0 1 1 2 2


def test_goals_lie_in_the_tasks_box_and_keep_their_distance():
    for name, task in TASKS.items():
        goals = np.array([goal_vector(name, trial, seed=0) for trial in range(200)])
        assert (goals >= task.low).all(), name
        assert (goals <= task.high).all(), name
        assert len(np.unique(goals, axis=0)) == 200, name
        if task.clearance:
            apart = np.linalg.norm(goals[:, :2] - goals[:, 3:5], axis=1)
            assert apart.min() >= task.clearance, name


def test_goals_fill_their_box():
    goals = np.array([goal_vector("hammer-v3", trial, seed=0) for trial in range(400)])
    low, high = np.array(TASKS["hammer-v3"].low[:2]), np.array(TASKS["hammer-v3"].high[:2])
    unit = (goals[:, :2] - low) / (high - low)
    # The mean of 400 uniform numbers has a standard deviation of 0.0144.
    assert np.abs(unit.mean(axis=0) - 0.5).max() < 0.06
    assert unit.min() < 0.02
    assert unit.max() > 0.98


def test_goals_never_change():
    np.testing.assert_array_equal(
        goal_vector("reach-v3", 1000, seed=0),
        np.array(
            [
                0.09174607333736479,
                0.6009651825828208,
                0.02,
                -0.0578913910430722,
                0.8602466473461321,
                0.11900144535248243,
            ]
        ),
    )


def test_goals_depend_on_seed_task_and_trial():
    goal = goal_vector("reach-v3", 3, seed=0)
    for other in (("reach-v3", 4, 0), ("reach-v3", 3, 1), ("push-v3", 3, 0)):
        assert not np.array_equal(goal[:2], goal_vector(*other[:2], seed=other[2])[:2])


def test_the_registry_knows_metaworld():
    plugin = registry.module("env", "metaworld")
    assert plugin is metaworld
    assert plugin.Config().name == "metaworld"


def test_spec_is_honest_about_config():
    spec = metaworld.spec(metaworld.Config(frame_size=64, cameras=("corner4", "gripperPOV")))
    assert spec.frame_size == (64, 64)
    assert spec.cameras == ("corner4", "gripperPOV")
    assert (spec.action.dims, spec.action.format, spec.action.gripper) == (
        4,
        "delta_xyz",
        "effort_close_positive",
    )
    assert spec.state_dims == 4


def test_the_simulator_side_imports_no_torch():
    code = (
        "import sys, vlarl.envs.sim_worker, vlarl.envs.subproc, vlarl.envs.chunked, vlarl.envs.gl, "
        "vlarl.envs.metaworld_sim; "
        "assert not {'torch', 'mujoco', 'metaworld', 'pydantic'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
