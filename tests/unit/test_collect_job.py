import sys
import types
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch

from vlarl import dataset, registry
from vlarl.collect_job import build_job, collect, prepare, record, remaining
from vlarl.config.schema import EnvSection
from vlarl.dataset import EntryKey
from vlarl.distributed.world import World
from vlarl.episode import Episode
from vlarl.errors import ConfigError
from vlarl.rollout.plan import eval_plan
from vlarl.rollout.play import play
from vlarl.specs import ActionSpec, EnvSpec
from vlarl.testing import reach
from vlarl.testing.token_policy import TokenConfig, TokenPolicy
from vlarl.trajectories import Trajectory

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


class DotsConfig(EnvSection):
    name: Literal["dots"] = "dots"
    tasks: tuple[str, ...] = ("left", "right")
    size: int = 4


def demonstrate(cfg, episodes, *, noise_std, seed) -> Iterator[Trajectory]:
    """An expert that fails on odd trials of "right"."""
    for e in episodes:
        PLAYED.append((e.task, e.trial))
        rng = np.random.default_rng([seed, e.trial])
        target = np.full((3, 2), 0.5, np.float32)
        yield Trajectory(
            task=e.task,
            trial=e.trial,
            instruction=f"go {e.task}",
            frames={"top": np.zeros((3, cfg.size, cfg.size, 3), np.uint8)},
            state=np.zeros((3, 0), np.float32),
            action=target + noise_std * rng.normal(size=(3, 2)).astype(np.float32),
            target=target,
            reward=np.zeros(3, np.float32),
            success=e.task == "left" or e.trial % 2 == 0,
        )


PLAYED: list[tuple[str, int]] = []


@pytest.fixture
def dots(monkeypatch):
    """The env above, registered."""
    module = types.ModuleType("dots_plugin")
    module.Config = DotsConfig
    module.demonstrate = demonstrate
    module.trials = lambda cfg, split: dict.fromkeys(
        cfg.tasks, tuple(range(5)) if split == "train" else (100,)
    )
    module.spec = lambda cfg: EnvSpec(
        name="dots",
        action=ActionSpec(dims=2, format="delta_xy", gripper="none"),
        cameras=("top",),
        frame_size=(cfg.size, cfg.size),
        state_dims=0,
        state_format="none",
        max_steps=3,
        control_hz=10.0,
        tasks=cfg.tasks,
    )
    monkeypatch.setitem(sys.modules, "dots_plugin", module)
    monkeypatch.setitem(registry._BUILT_IN["env"], "dots", "dots_plugin")
    PLAYED.clear()
    return module


def job(to, **changes):
    env = {"name": "dots", **changes.pop("env", {})}
    return build_job({"env": env, "to": str(to), "episodes": 4, **changes})


def run(to, **changes):
    stop = changes.pop("stop", None)
    return collect(prepare(job(to, **changes)), WORLD, should_stop=stop)


def test_every_planned_trial_is_played_once_and_successes_are_kept(dots, tmp_path):
    data = run(tmp_path / "d")
    assert [(task, trial) for task in ("left", "right") for trial in range(4)] == PLAYED
    assert len(data.entries) == 8
    assert {e.key for e in data.entries if e.file is None} == {
        EntryKey("right", 1, 0),
        EntryKey("right", 3, 0),
    }
    assert len(list(data.read())) == 6


def test_failures_are_kept_when_asked_and_noise_reaches_the_teacher(dots, tmp_path):
    data = run(tmp_path / "d", keep_failures=True, noise=0.1)
    assert len(data.kept) == 8
    first = next(iter(data.read()))
    assert np.abs(first.action - first.target).max() > 0
    assert data.origin.noise == 0.1


def test_an_interrupted_collection_goes_on_where_it_stopped(dots, tmp_path):
    count = iter(range(100))
    run(tmp_path / "d", stop=lambda: next(count) == 2)
    assert len(PLAYED) == 3
    prepared = prepare(job(tmp_path / "d"))
    assert len(remaining(prepared)) == 5
    PLAYED.clear()
    data = run(tmp_path / "d")
    assert len(PLAYED) == 5
    assert len(data.entries) == 8
    PLAYED.clear()
    run(tmp_path / "d")
    assert PLAYED == []


def test_a_failing_simulator_loses_nothing(dots, tmp_path):
    def broken(cfg, episodes, *, noise_std, seed):
        for i, trajectory in enumerate(demonstrate(cfg, episodes, noise_std=noise_std, seed=seed)):
            if i == 2:
                raise RuntimeError("the simulator died")
            yield trajectory

    dots.demonstrate = broken
    with pytest.raises(RuntimeError, match="died"):
        run(tmp_path / "d")
    assert len(dataset.open_(tmp_path / "d").entries) == 2


def test_more_episodes_extend_a_data_set(dots, tmp_path):
    run(tmp_path / "d", episodes=2)
    PLAYED.clear()
    assert len(run(tmp_path / "d", episodes=3).entries) == 6
    assert PLAYED == [("left", 2), ("right", 2)]


def test_bad_requests_are_refused_before_anything_is_written(dots, tmp_path):
    to = tmp_path / "d"
    with pytest.raises(ConfigError, match=r"task 'left' has 5 trials in split 'train' but 6"):
        prepare(job(to, episodes=6))
    del dots.demonstrate
    with pytest.raises(ConfigError, match="has no scripted expert; name a --policy"):
        prepare(job(to))
    with pytest.raises(ConfigError, match="unknown key; did you mean 'noise'"):
        job(to, nois=1)
    assert not to.exists()


def test_another_noise_or_size_does_not_mix_into_a_data_set(dots, tmp_path):
    run(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"noise: 0.0 here, 0.3 asked for"):
        prepare(job(tmp_path / "d", noise=0.3))
    with pytest.raises(ConfigError, match=r"env.size: 4 here, 8 asked for"):
        prepare(job(tmp_path / "d", env={"size": 8}))


# --- a policy as teacher -------------------------------------------------------------------------


def toy_policy(chunk=4, seed=3):
    return TokenPolicy(TokenConfig(chunk=chunk, seed=seed))


def single_steps(slots):
    return reach.make(reach.ReachConfig(chunk=1), num_slots=slots)


PLAN = eval_plan(reach.trials(reach.ReachConfig(), "eval"))


def recorded(slots, **options):
    settings = {"temperature": 0.0, "seed": 0, **options}
    found = record(single_steps(slots), toy_policy(), PLAN, **settings)
    return {(e.task, e.trial): t for e, t in found}


def test_single_steps_lead_where_whole_chunks_lead():
    chunks = reach.make(reach.ReachConfig(chunk=4), num_slots=3)
    outcomes = {
        (o.episode.task, o.episode.trial): o
        for o in play(chunks, toy_policy(), PLAN, temperature=0.0)
    }
    trajectories = recorded(5)
    assert trajectories.keys() == outcomes.keys()
    assert {t.success for t in trajectories.values()} == {True, False}
    for key, trajectory in trajectories.items():
        assert trajectory.success == outcomes[key].success
        assert len(trajectory) == outcomes[key].num_steps
        assert trajectory.reward.sum() == outcomes[key].total_reward


def test_each_frame_is_what_was_seen_before_its_action():
    trajectory = recorded(2)["reach-left", 1]
    env = single_steps(1)
    env.reset([0], [Episode(task="reach-left", trial=1, index=0)])
    for t in range(len(trajectory)):
        _, step = env.recv(1)
        np.testing.assert_array_equal(step.obs.images["top"][0], trajectory.frames["top"][t])
        env.send([0], torch.from_numpy(trajectory.action[t])[None, None])
    _, step = env.recv(1)
    assert bool(step.done[0])


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"noise": 0.3}])
def test_slots_do_not_change_what_is_recorded(options):
    one, many = recorded(1, **options), recorded(7, **options)
    for key, trajectory in one.items():
        np.testing.assert_array_equal(trajectory.action, many[key].action)
        np.testing.assert_array_equal(trajectory.frames["top"], many[key].frames["top"])


def test_noise_changes_the_action_and_keeps_the_target_inside_the_bounds():
    for trajectory in recorded(4, noise=0.5).values():
        assert np.abs(trajectory.action).max() <= 1
        assert np.abs(trajectory.action - trajectory.target).max() > 0
        assert set(np.unique(trajectory.target)) <= {-1.0, 0.0, 1.0}
    for trajectory in recorded(4).values():
        np.testing.assert_array_equal(trajectory.action, trajectory.target)


def test_the_last_frame_is_kept_when_the_horizon_cut_the_episode():
    for trajectory in recorded(4).values():
        assert (trajectory.last_frames is None) == trajectory.success


def test_a_policy_in_an_env_of_whole_chunks_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._BUILT_IN["env"], "reach", "vlarl.testing.reach")
    monkeypatch.setitem(registry._BUILT_IN["policy"], "token_toy", "vlarl.testing.token_policy")
    values = {"env": {"name": "reach"}, "policy": {"name": "token_toy"}, "to": str(tmp_path / "d")}
    with pytest.raises(ConfigError, match="plays whole chunks only"):
        prepare(build_job(values))
