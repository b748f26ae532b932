from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from vlarl.rollout.plan import eval_plan, train_plan

trial_ids = st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True)
trial_sets = st.dictionaries(st.sampled_from("abcdefg"), trial_ids, min_size=1, max_size=5)
seeds = st.integers(0, 5)
sizes = st.integers(1, 5)


@given(trial_sets, st.integers(1, 9), sizes, seeds, st.integers(0, 30))
def test_groups_are_whole_and_share_a_start(trials, num_groups, size, seed, step):
    plan = train_plan(trials, episodes=num_groups * size, group_size=size, seed=seed, step=step)
    assert [e.index for e in plan] == list(range(num_groups * size))
    if size == 1:
        assert {e.group for e in plan} == {-1}
    else:
        assert [(e.group, e.member) for e in plan] == [
            (g, m) for g in range(num_groups) for m in range(size)
        ]
    for g in range(num_groups):
        assert len({(e.task, e.trial) for e in plan[g * size : (g + 1) * size]}) == 1
    # Noise is keyed by these four: two episodes of a plan must not share them.
    identities = {(e.task, e.trial, e.group, e.member) for e in plan}
    assert len(identities) == len(plan)


@given(trial_sets, st.integers(1, 9), seeds, st.integers(1, 30))
def test_tasks_are_balanced_over_the_run_and_within_an_iteration(trials, num_groups, seed, steps):
    total = Counter(dict.fromkeys(trials, 0))
    for step in range(steps):
        plan = train_plan(trials, episodes=num_groups, group_size=1, seed=seed, step=step)
        mine = Counter(dict.fromkeys(trials, 0))
        mine.update(e.task for e in plan)
        total += mine
        counts = [mine[task] for task in trials]
        # An iteration may begin and end inside a round; whole rounds hold each task once.
        slack = 0 if num_groups % len(trials) == 0 else 2
        assert max(counts) - min(counts) <= slack
        so_far = [total[task] for task in trials]
        assert max(so_far) - min(so_far) <= 1


@given(trial_sets, st.integers(1, 9), seeds, st.integers(1, 20))
def test_trials_are_used_up_before_one_comes_again(trials, num_groups, seed, steps):
    seen = {task: [] for task in trials}
    for step in range(steps):
        for e in train_plan(trials, episodes=num_groups, group_size=1, seed=seed, step=step):
            seen[e.task].append(e.trial)
    for task, order in seen.items():
        n = len(trials[task])
        for start in range(0, len(order), n):
            cycle = order[start : start + n]
            assert len(set(cycle)) == len(cycle)
            assert set(cycle) <= set(trials[task])


@given(trial_sets, seeds, st.integers(0, 9))
def test_the_size_of_an_iteration_only_cuts_one_endless_sequence(trials, seed, steps):
    def sequence(size, steps):
        return [
            (e.task, e.trial)
            for step in range(steps)
            for e in train_plan(trials, episodes=size, group_size=1, seed=seed, step=step)
        ]

    assert sequence(6, steps) == sequence(2, 3 * steps)


@settings(max_examples=60)
@given(trial_sets, sizes, st.integers(0, 40), st.data())
def test_an_evaluation_plays_each_start_as_often_as_asked(trials, repeats, record, data):
    fewest = min(map(len, trials.values()))
    episodes = data.draw(st.none() | st.integers(1, fewest))
    plan = eval_plan(trials, episodes=episodes, repeats=repeats, record=record)
    expected = {(task, t): repeats for task, ids in trials.items() for t in ids[:episodes]}
    assert Counter((e.task, e.trial) for e in plan) == expected
    assert len({(e.task, e.trial, e.member) for e in plan}) == len(plan)
    assert [e.index for e in plan] == list(range(len(plan)))
    chosen = [e.index for e in plan if e.record]
    assert len(chosen) == min(record, len(plan))
    if chosen:
        ends = [0, *chosen, len(plan) - 1]
        widest = max(b - a for a, b in pairwise(ends))
        assert widest <= len(plan) / len(chosen) + 1
