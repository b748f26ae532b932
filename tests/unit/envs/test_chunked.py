import importlib.util
from pathlib import Path

import numpy as np
import pytest

from vlarl.envs.chunked import ChunkRunner, PlayConfig
from vlarl.episode import Episode

_SPEC = importlib.util.spec_from_file_location(
    "counting_sim", Path(__file__).parent / "fakes" / "counting_sim.py"
)
counting_sim = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(counting_sim)


def runner(*, max_steps=100, goal=1e9, final_frames=False, fail="", cameras=("front",)):
    config = PlayConfig(
        max_steps=max_steps,
        low=-1.0,
        high=1.0,
        cameras=cameras,
        frame_size=(2, 3),
        final_frames=final_frames,
        video_every=2,
        video_size=(4, 4),
    )
    sim = counting_sim.CountingSim(counting_sim.CountingConfig(goal=goal, fail=fail))
    frames = np.full(config.frames_shape, 99, np.uint8)
    return ChunkRunner(frames, sim, config), sim, frames


def episode(trial=0, *, record=False):
    return Episode(task="line", trial=trial, index=0, record=record)


def ones(length, value=0.5):
    """[C, 2] actions that move x by 2 * value each."""
    return np.full((length, 2), value, np.float32)


def test_reset_answers_with_no_actions_and_one_frame_per_camera():
    run, sim, frames = runner(cameras=("front", "side"))
    played = run.play(episode(7), ())
    assert played.reward.shape == (0,)
    assert played.state.tolist() == [7.0]
    assert (frames == 7).all()
    assert sim.rendered == [("front", (2, 3)), ("side", (2, 3))]


def test_a_chunk_renders_once_after_its_last_action():
    run, sim, frames = runner()
    run.play(episode(), ())
    sim.rendered.clear()
    run.play(None, (ones(8),))
    assert len(sim.rendered) == 1
    assert (frames == 8).all()


def test_success_ends_the_episode_and_parks_the_rest_of_the_chunk():
    run, sim, frames = runner(goal=3.0)
    run.play(episode(), ())
    sim.rendered.clear()
    played = run.play(None, (ones(5),))
    assert played.terminated.tolist() == [False, False, True, False, False]
    assert played.truncated.tolist() == [False] * 5
    assert played.reward.tolist() == [0, 0, 1, 0, 0]
    assert played.state.tolist() == [3.0]  # the two actions after success were not played
    assert sim.rendered == []
    assert (frames == 0).all()


def test_success_at_the_horizon_is_a_termination():
    run, _, _ = runner(goal=3.0, max_steps=3)
    run.play(episode(), ())
    played = run.play(None, (ones(5),))
    assert played.terminated.tolist() == [False, False, True, False, False]
    assert not played.truncated.any()


@pytest.mark.parametrize(("final_frames", "pixel"), [(True, 3), (False, 0)])
def test_the_horizon_cuts_inside_a_chunk(final_frames, pixel):
    run, _, frames = runner(max_steps=3, final_frames=final_frames)
    run.play(episode(), ())
    first = run.play(None, (ones(2),))
    assert not first.truncated.any()
    second = run.play(None, (ones(2),))
    assert second.truncated.tolist() == [True, False]
    assert second.reward.tolist() == [0, 0]
    assert (frames == pixel).all()


def test_only_executed_actions_outside_the_bounds_count_as_clipped():
    run, sim, _ = runner(max_steps=3)
    run.play(episode(), ())
    chunk = np.array([[1, -1], [1.5, 0.5], [0, -9], [7, 7]], np.float32)
    played = run.play(None, (chunk,))
    assert played.num_clipped == 2
    assert sim.x == 0 + 1.5 - 1


def test_a_diverged_simulation_is_truncated_without_reward():
    run, _, frames = runner(fail="diverge", goal=3.0, final_frames=True)
    run.play(episode(), ())
    played = run.play(None, (ones(5),))
    assert played.diverged
    assert played.truncated.tolist() == [False, False, True, False, False]
    assert not played.terminated.any()
    assert played.reward.sum() == 0
    assert (frames == 0).all()


def test_replaying_all_chunks_gives_the_last_answer():
    chunks = [ones(2, 0.25), ones(3), ones(4, -0.1)]
    run, _, frames = runner()
    run.play(episode(5), ())
    for chunk in chunks:
        expected = run.play(None, (chunk,))
    again, _, frames_again = runner()
    played = again.play(episode(5), tuple(chunks))
    assert played.state.tolist() == expected.state.tolist()
    assert played.reward.shape == (4,)
    assert (frames_again == frames).all()


def test_a_recorded_episode_films_the_start_every_second_action_and_the_end():
    run, _, frames = runner(goal=5.0)
    start = run.play(episode(record=True), ())
    assert start.video.shape == (1, 4, 4, 3)
    first = run.play(None, (ones(3),))
    assert [f[0, 0, 0] for f in first.video] == [2]
    assert (frames == 3).all()
    second = run.play(None, (ones(3),))
    assert [f[0, 0, 0] for f in second.video] == [4, 5]


def test_an_episode_that_is_not_recorded_has_no_video():
    run, _, _ = runner()
    assert run.play(episode(), ()).video is None
    assert run.play(None, (ones(3),)).video is None


def test_a_demonstration_is_the_clipped_expert_with_the_frames_before_each_action():
    run, _, _ = runner(goal=5.0)
    demo = run.demonstrate(episode(1), noise_std=0.0, seed=0)
    assert demo.target.tolist() == [[1.0, 0.25]] * 4  # 1 -> 2.25 -> 3.5 -> 4.75 -> 6
    assert demo.action.tolist() == demo.target.tolist()
    assert demo.state[:, 0].tolist() == [1.0, 2.25, 3.5, 4.75]
    assert demo.frames["front"][:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert demo.reward.tolist() == [0, 0, 0, 1]
    assert demo.success


def test_demonstration_noise_is_a_function_of_seed_and_trial():
    run, _, _ = runner(max_steps=20)
    a, b = (run.demonstrate(episode(1), noise_std=0.3, seed=4) for _ in range(2))
    assert (a.action == b.action).all()
    assert (a.target == [1.0, 0.25]).all()
    assert np.abs(a.action).max() <= 1.0
    noise = a.action[:, 1] - a.target[:, 1]
    assert 0.1 < noise.std() < 0.6
    other_seed = run.demonstrate(episode(1), noise_std=0.3, seed=5)
    other_trial = run.demonstrate(episode(2), noise_std=0.3, seed=4)
    assert (a.action != other_seed.action).any()
    assert (a.action != other_trial.action).any()


def test_a_demonstration_stops_at_the_horizon():
    run, _, _ = runner(max_steps=6)
    demo = run.demonstrate(episode(), noise_std=0.0, seed=0)
    assert len(demo.action) == 6
    assert not demo.success
