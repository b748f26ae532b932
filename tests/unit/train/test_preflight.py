"""How an iteration is divided, and what is said about what divides badly."""

import pytest

from vlarl.config import resolved
from vlarl.config.compose import build
from vlarl.errors import ConfigError
from vlarl.train.preflight import divide
from vlarl.train.setup import resolve


@pytest.fixture
def division(toy_run):
    """division(ranks, *overrides) of the toy run: 16 episodes in groups of 4, 12 steps, chunk 2."""

    def make(ranks, *overrides, slots=2):
        run = build(resolved.load(toy_run(f"env.num_slots={slots}", *overrides).config))
        return divide(run, resolve(run), ranks=ranks)

    return make


def test_the_numbers_of_an_iteration(division):
    found = division(2, "optim.epochs=3")
    assert (found.episodes, found.rank_episodes) == (16, 8)
    # 6 decisions an episode; 2 minibatches in each of 3 passes; 24 of 48 decisions of a rank.
    assert (found.decisions, found.steps, found.step_decisions) == (96, 6, 48)
    assert found.micro_batches == 3
    # 3 held-out trials of 2 tasks.
    assert found.eval_episodes == 6
    assert found.notes == ()


def test_groups_that_do_not_divide_name_the_nearest_that_do(division):
    found = division(3)
    (note,) = found.notes
    assert found.rank_episodes == 8
    assert "4 groups of 4 do not divide evenly among 3 ranks" in note
    assert note.endswith("12 or 24")


def test_more_ranks_than_groups_are_refused(division):
    with pytest.raises(ConfigError, match=r"4 groups .* 5 ranks; .*the nearest is 20"):
        division(5)


def test_slots_that_stay_idle(division):
    (note,) = division(4, slots=6).notes
    assert note == "2 of 6 slots stay idle; env.num_slots=4 is enough"


def test_slots_that_do_not_divide_into_stages(division):
    (note,) = division(1, slots=5).notes
    assert note.endswith("env.num_slots that do: 4 or 6")
