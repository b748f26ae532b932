import pytest

from vlarl.errors import ConfigError
from vlarl.rollout.plan import eval_plan, train_plan

TRIALS = {"push": (3, 5), "pull": (0, 1, 2), "turn": (9,)}


def starts(plan):
    return [(e.task, e.trial) for e in plan]


def test_a_group_is_contiguous_and_shares_its_start():
    plan = train_plan(TRIALS, episodes=12, group_size=4, seed=0, step=0)
    assert [e.index for e in plan] == list(range(12))
    assert [e.group for e in plan] == [0] * 4 + [1] * 4 + [2] * 4
    assert [e.member for e in plan] == [0, 1, 2, 3] * 3
    for g in range(3):
        assert len(set(starts(plan)[4 * g : 4 * g + 4])) == 1
    assert sorted({e.task for e in plan}) == ["pull", "push", "turn"]


def test_without_groups_repeats_of_a_start_are_told_apart():
    plan = train_plan({"turn": (9,)}, episodes=3, group_size=1, seed=0, step=7)
    assert [(e.task, e.trial, e.group, e.member) for e in plan] == [
        ("turn", 9, -1, 0),
        ("turn", 9, -1, 1),
        ("turn", 9, -1, 2),
    ]


def test_another_seed_and_another_step_give_another_order():
    def order(seed, step):
        many = {f"task-{i}": range(50) for i in range(8)}
        return starts(train_plan(many, episodes=8, group_size=1, seed=seed, step=step))

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)


@pytest.mark.parametrize(("episodes", "nearest"), [(13, 16), (3, 8), (20, 16), (21, 24)])
def test_a_group_size_that_does_not_divide_is_refused(episodes, nearest):
    with pytest.raises(ConfigError, match=rf"\({episodes}\).*group size \(8\).*is {nearest}$"):
        train_plan(TRIALS, episodes=episodes, group_size=8, seed=0, step=0)


@pytest.mark.parametrize("trials", [{}, {"push": (1,), "pull": ()}])
def test_no_trials_is_an_error_of_the_env_section(trials):
    with pytest.raises(ConfigError, match=r"no training trials; check env\.tasks"):
        train_plan(trials, episodes=8, group_size=8, seed=0, step=0)


def test_an_evaluation_goes_task_by_task():
    plan = eval_plan(TRIALS, episodes=1, repeats=2)
    assert [(e.task, e.trial, e.member) for e in plan] == [
        ("push", 3, 0),
        ("push", 3, 1),
        ("pull", 0, 0),
        ("pull", 0, 1),
        ("turn", 9, 0),
        ("turn", 9, 1),
    ]
    assert [e.index for e in plan] == list(range(6))
    assert {e.group for e in plan} == {-1}


def test_more_evaluation_trials_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="task 'turn' has 1 trials but 2 were asked"):
        eval_plan(TRIALS, episodes=2)


@pytest.mark.parametrize(
    ("record", "chosen"),
    [(0, []), (1, [5]), (2, [2, 7]), (3, [1, 5, 8]), (10, list(range(10))), (99, list(range(10)))],
)
def test_recorded_episodes_are_spread_over_the_plan(record, chosen):
    plan = eval_plan({"push": range(5), "pull": range(5)}, record=record)
    assert [e.index for e in plan if e.record] == chosen
