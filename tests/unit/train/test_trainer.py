"""Whole runs of the toys: what is written, that it repeats, and that stopping loses nothing."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from vlarl import comparison, metrics, result_file, run_dir, worker
from vlarl.algos import grpo
from vlarl.config import resolved
from vlarl.config.compose import build
from vlarl.config.resume import continued
from vlarl.distributed.world import World
from vlarl.errors import ConfigError, NonFiniteLoss, NothingToLearn, RunFailed
from vlarl.testing import reach
from vlarl.train import trainer
from vlarl.train.setup import resolve
from vlarl.train.state import TrainState
from vlarl.train.trainer import Clock, Stopped, Trainer


@pytest.fixture
def train(world):
    """train(folder, stop_at=7) -> how often it asked whether to stop; raises Stopped at the 7th."""

    def run(folder, *, stop_at=None, stop_when=lambda: False):
        asked = 0

        def should_stop():
            nonlocal asked
            asked += 1
            return asked == stop_at or stop_when()

        worker.run(folder, build(resolved.load(folder.config)), world, should_stop)
        return asked

    return run


@pytest.fixture
def extend():
    """extend(folder, "max_steps=9"): what `vlarl train --resume` does to config.json."""

    def rewrite(folder, *overrides):
        composed = continued(resolved.load(folder.config), overrides)
        folder.config.write_text(resolved.dump(build(composed), composed.sources))

    return rewrite


def lines(folder):
    """The record of a run without what depends on the machine's speed, as text."""
    return [json.dumps(metrics.strip_timing(line)) for line in metrics.read(folder.metrics)]


def weights(folder):
    return load_file(run_dir.latest_checkpoint(folder) / "policy" / "model.safetensors")


def outcomes(folder):
    return {path.name: result_file.load(path).episodes for path in folder.eval.glob("*.json")}


def assert_same_run(one, two):
    assert lines(one) == lines(two)
    assert outcomes(one) == outcomes(two)
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# --- a whole run ---------------------------------------------------------------------------------


def test_two_runs_of_one_seed_are_the_same_and_another_seed_is_not(train, toy_run):
    one, two, other = toy_run("seed=1"), toy_run("seed=1"), toy_run("seed=2")
    for folder in (one, two, other):
        train(folder)
    assert_same_run(one, two)
    assert all(a != b for a, b in zip(lines(one), lines(other), strict=True))
    assert not torch.equal(weights(one)["actor.0.weight"], weights(other)["actor.0.weight"])


def test_a_line_per_iteration_with_the_evaluations_that_belong_to_it(train, toy_run):
    folder = toy_run()
    train(folder)
    found = metrics.read(folder.metrics)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4]
    evaluated = [line["step"] for line in found if "eval/success_once" in line]
    assert evaluated == [0, 2, 4]
    assert [line["step"] for line in found if "train/loss" in line] == [1, 2, 3, 4]
    last = found[-1]
    assert last["env/num_trajectories"] == 16
    assert last["train/optimizer_steps"] == 2
    assert last["time/step"] == pytest.approx(
        last["time/generate_rollouts"] + last["time/cal_adv_and_returns"]
        + last["time/actor_training"]
    )  # fmt: skip
    assert last["time/env_steps_per_s"] == pytest.approx(
        16 * last["env/episode_len"] / last["time/generate_rollouts"]
    )
    assert run_dir.read_status(folder).phase == "done"


def test_every_metric_is_documented(train, toy_run, request):
    text = (request.config.rootpath / "docs" / "metrics.md").read_text()
    for algo in ("algo={name: grpo, group_size: 4}", "algo={name: ppo}"):
        folder = toy_run(algo, "max_steps=2")
        train(folder)
        names = {name for line in metrics.read(folder.metrics) for name in line} - {"step"}
        per_task = {n for n in names if n.endswith(("/reach-left", "/reach-right"))}
        assert len(per_task) == 4
        assert [n for n in sorted(names - per_task) if f"`{n}`" not in text] == []


def test_an_evaluation_covers_each_held_out_trial_once(train, toy_run):
    folder = toy_run("eval.temperature=0.5")
    train(folder)
    assert sorted(outcomes(folder)) == [f"step_{n:06d}.json" for n in (0, 2, 4)]
    for path in folder.eval.glob("*.json"):
        result = result_file.load(path)
        keys = [(e.task, e.trial) for e in result.episodes]
        assert keys == [(task, t) for task in ("reach-left", "reach-right") for t in (1, 3, 5)]
        assert result.is_complete
        assert result.protocol["sampling"] == {"temperature": 0.5, "seed": 0}
        assert result.protocol["plan"] == {"split": "eval", "start_from_training_trial": 0}
        assert f"step_{result.protocol['checkpoint']['step']:06d}.json" == path.name


def test_an_evaluation_samples_like_the_rollout_unless_told(train, toy_run):
    folder = toy_run("max_steps=0", "rollout.temperature=1.7")
    train(folder)
    (path,) = folder.eval.glob("*.json")
    assert result_file.load(path).protocol["sampling"]["temperature"] == 1.7
    assert [json.loads(line)["step"] for line in lines(folder)] == [0]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["eval.every=0"], [0, 4]),
        (["eval.every=3"], [0, 3, 4]),
        (["eval.every=3", "eval.ends=false"], [3]),
        (["eval.every=0", "eval.ends=false"], []),
    ],
)
def test_when_it_is_evaluated(train, toy_run, overrides, steps):
    folder = toy_run(*overrides)
    train(folder)
    assert sorted(outcomes(folder)) == [f"step_{n:06d}.json" for n in steps]


@pytest.mark.parametrize(
    ("every", "keep", "steps"), [(1, 2, [3, 4]), (1, 9, [1, 2, 3, 4]), (3, 2, [3, 4]), (9, 1, [4])]
)
def test_which_checkpoints_stay(train, toy_run, every, keep, steps):
    folder = toy_run(f"save.every={every}", f"save.keep={keep}")
    train(folder)
    assert sorted(p.name for p in folder.ckpt.iterdir()) == [f"step_{n:06d}" for n in steps]


def test_a_checkpoint_can_be_the_start_of_another_run(train, toy_run):
    first = toy_run("eval.every=0")
    train(first)
    policy = run_dir.latest_checkpoint(first) / "policy"
    second = toy_run(f"policy.checkpoint={policy}", "max_steps=0")
    train(second)
    (before,) = outcomes(second).values()
    assert before == outcomes(first)["step_000004.json"]


def test_it_learns_and_the_comparison_says_so(train, toy_run):
    """The whole chain, from the sign of the advantage to before and after."""
    folder = toy_run(
        "max_steps=16", "rollout.episodes=48", "algo.group_size=8", "env.num_slots=48",
        "eval.every=0", "eval.episodes=null", "save.every=16", "optim.minibatches=2",
        "optim.epochs=2", "optim.micro_batch=1000",
    )  # fmt: skip
    train(folder)
    before, after = (result_file.load(folder.eval / f"step_{n:06d}.json") for n in (0, 16))
    total = comparison.compare(before, after).total
    assert total.n == 16
    assert total.difference > 0.4
    assert total.interval[0] > 0


def test_the_last_evaluation_is_filmed_and_a_failing_encoder_costs_only_the_video(
    train, toy_run, monkeypatch, caplog
):
    folder = toy_run("max_steps=1", "eval.every=1", "eval.video=2")
    train(folder)
    assert [p.name for p in folder.video.iterdir()] == ["step_000001.mp4"]

    def fail(clips, *args, **kwargs):
        assert len(clips) == 2
        raise RunFailed("the encoder is on strike")

    monkeypatch.setattr(trainer, "write_grid", fail)
    other = toy_run("max_steps=1", "eval.every=1", "eval.video=2")
    train(other)
    assert "no video: the encoder is on strike" in caplog.text
    assert_same_run(folder, other)


def test_every_iteration_has_noise_of_its_own(train, toy_run, monkeypatch):
    paths = []

    def collect(*args, noise, **given):
        paths.append(noise)
        return trainer_collect(*args, noise=noise, **given)

    trainer_collect = trainer.collect
    monkeypatch.setattr(trainer, "collect", collect)
    for seed in (0, 1):
        train(toy_run(f"seed={seed}", "max_steps=3", "eval.ends=false"))
    assert len(set(paths)) == 6


# --- stopping and continuing ---------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["algo={name: grpo, group_size: 4}", "algo={name: ppo}"])
def test_a_run_that_was_stopped_and_continued_is_an_unbroken_one(train, toy_run, algo):
    whole = toy_run(algo)
    total = train(whole)
    assert total > 60
    for stop_at in range(2, total, total // 3):
        folder = toy_run(algo)
        with pytest.raises(Stopped):
            train(folder, stop_at=stop_at)
        train(folder)
        assert_same_run(whole, folder)


def test_stopping_again_and_again_gets_there_as_long_as_an_iteration_ends(train, toy_run):
    whole, folder, stops = toy_run("save.every=3"), toy_run("save.every=3"), 0
    longest = train(whole) // 3
    while True:
        try:
            train(folder, stop_at=longest)
            break
        except Stopped:
            stops += 1
            assert stops < 20
    assert stops >= 3
    assert_same_run(whole, folder)


def phase_log(monkeypatch):
    """Every phase that is published, with its step."""
    seen = []
    write = run_dir.write_status

    def note(folder, status):
        seen.append((status.phase, status.step))
        write(folder, status)

    monkeypatch.setattr(run_dir, "write_status", note)
    return seen


def stop_in(train, folder, phase, step):
    """Stop the run as soon as an episode of that phase has ended, after `step` iterations."""

    def there():
        status = run_dir.read_status(folder)
        return status is not None and (status.phase, status.step) == (phase, step)

    with pytest.raises(Stopped):
        train(folder, stop_when=there)


@pytest.mark.parametrize("save_every", [1, 10])
def test_a_stop_in_an_evaluation_does_not_repeat_the_iteration(
    train, toy_run, monkeypatch, save_every
):
    overrides = ("max_steps=3", f"save.every={save_every}", "eval.every=2", "eval.episodes=8")
    whole, folder = toy_run(*overrides), toy_run(*overrides)
    train(whole)
    stop_in(train, folder, "evaluate", 2)
    latest = run_dir.latest_checkpoint(folder)
    assert latest.name == "step_000002"
    kept = json.loads((latest / "state.json").read_text())["trainer"]
    assert (kept["step"], kept["num_updates"]) == (2, 4)
    assert kept["pending"]["env/num_trajectories"] == 16
    assert [line["step"] for line in metrics.read(folder.metrics)] == [0, 1]
    seen = phase_log(monkeypatch)
    train(folder)
    assert ("rollout", 1) not in seen, "the second iteration was over"
    assert_same_run(whole, folder)


def test_a_second_stop_right_after_such_a_resume_writes_no_line_twice(train, toy_run):
    overrides = ("max_steps=3", "save.every=10", "eval.every=2", "eval.episodes=8")
    whole, folder = toy_run(*overrides), toy_run(*overrides)
    train(whole)
    stop_in(train, folder, "evaluate", 2)
    stop_in(train, folder, "rollout", 2)
    train(folder)
    assert_same_run(whole, folder)


def test_a_longer_run_goes_on_from_a_finished_one(train, toy_run, extend):
    whole, folder = toy_run("eval.every=1"), toy_run("eval.every=1", "max_steps=2")
    train(whole)
    train(folder)
    assert lines(folder) == lines(whole)[:3]
    train(folder)
    assert lines(folder) == lines(whole)[:3], "a finished run has nothing to do"
    extend(folder, "max_steps=4")
    train(folder)
    assert_same_run(whole, folder)


def test_a_stop_before_anything_is_finished_saves_nothing(train, toy_run):
    folder = toy_run()
    with pytest.raises(Stopped):
        train(folder, stop_at=1)
    assert run_dir.latest_checkpoint(folder) is None
    assert lines(folder) == []


def test_a_loss_that_is_not_finite_ends_the_run_at_its_last_checkpoint(train, toy_run, monkeypatch):
    whole, folder = toy_run(), toy_run()
    train(whole)

    def poisoned(rollout, cfg, all_sum):
        credit = grpo.credit(rollout, cfg, all_sum)
        return replace(credit, advantage=credit.advantage * float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "ALGORITHM", replace(grpo.ALGORITHM, credit=poisoned))
        with pytest.raises(NonFiniteLoss, match="in iteration 0, optimizer step 0"):
            train(folder)
    assert run_dir.latest_checkpoint(folder) is None
    train(folder)
    assert_same_run(whole, folder)


# --- nothing to learn ----------------------------------------------------------------------------

FAIL = ("env.max_steps=1", "eval.ends=false", "eval.every=0", "patience=3", "max_steps=9")


def test_it_gives_up_when_every_episode_fails(train, toy_run):
    folder = toy_run(*FAIL)
    with pytest.raises(
        NothingToLearn, match=r"^3 iterations .* every episode failed \(0/16 successes\)\. Choose"
    ):
        train(folder)
    assert [line["step"] for line in metrics.read(folder.metrics)] == [1, 2]


def test_a_value_head_makes_no_signal_out_of_nothing(train, toy_run):
    with pytest.raises(NothingToLearn, match=r"every episode failed \(0/16 successes\)"):
        train(toy_run(*FAIL, "algo={name: ppo}"))


def test_it_gives_up_when_every_episode_succeeds(train, toy_run, monkeypatch):
    monkeypatch.setattr(reach, "_RADIUS", 2.0)
    with pytest.raises(NothingToLearn, match=r"every episode succeeded \(16/16 successes\)"):
        train(toy_run("patience=1"))


def test_it_gives_up_when_every_group_is_filtered(train, toy_run):
    folder = toy_run("algo.filter_low=0.9", "algo.filter_high=0.95", "patience=2", "max_steps=9")
    with pytest.raises(NothingToLearn, match=r"within each group all episodes ended alike, or"):
        train(folder)


def test_patience_goes_on_counting_after_a_resume(train, toy_run, extend):
    folder = toy_run(*FAIL[:-1], "max_steps=2")
    train(folder)
    extend(folder, "max_steps=9")
    with pytest.raises(NothingToLearn, match=r"^3 iterations in a row"):
        train(folder)
    assert [line["step"] for line in metrics.read(folder.metrics)] == [1, 2]


def test_one_good_iteration_renews_patience(judged, toy_run, world):
    it = judged()
    nothing = replace(it.credit, weight=torch.zeros_like(it.credit.weight))
    run = build(resolved.load(toy_run("patience=2").config))
    loop = Trainer(
        run=run, parts=None, env=None, policy=None, optimizer=None, state=TrainState(),
        world=world, sink=None, folder=None,
    )  # fmt: skip
    for credit, barren in ((nothing, 1), (it.credit, 0), (nothing, 1)):
        loop.watch(it.rollout, credit)
        assert loop.state.barren == barren
    with pytest.raises(NothingToLearn):
        loop.watch(it.rollout, nothing)


# --- small parts ---------------------------------------------------------------------------------


def test_more_ranks_than_groups_is_an_error(toy_run):
    run = build(resolved.load(toy_run().config))
    fifth = World(rank=4, local_rank=4, size=5, device=torch.device("cpu"))
    loop = Trainer(
        run=run, parts=resolve(run), env=None, policy=None, optimizer=None, state=TrainState(),
        world=fifth, sink=None, folder=None,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="4 groups cannot be shared by 5 ranks"):
        loop.play(0)


def test_the_state_survives_json():
    state = TrainState(step=3, num_updates=7, barren=1, pending={"env/return": 0.5})
    assert TrainState(**json.loads(json.dumps(state.as_dict()))) == state
    assert TrainState(**TrainState().as_dict()) == TrainState()


def test_a_clock_adds_up_what_is_spent_in_a_phase_even_when_it_fails():
    clock = Clock()
    with clock("act"):
        pass
    first = clock.seconds["time/act"]
    with pytest.raises(RunFailed), clock("act"):
        raise RunFailed("x")
    assert clock.seconds["time/act"] > first > 0
    assert list(clock.seconds) == ["time/act"]


def test_barren_iterations_are_told(train, toy_run, caplog):
    caplog.set_level(logging.WARNING)
    with pytest.raises(NothingToLearn):
        train(toy_run(*FAIL))
    told = [r.message for r in caplog.records if "teaches nothing" in r.message]
    assert told == [f"iteration {n} teaches nothing: every episode failed" for n in range(3)]
