from hypothesis import given, settings
from hypothesis import strategies as st

from vlarl.comparison import compare, merge
from vlarl.evaluate import evaluate
from vlarl.proportions import Paired, Rate
from vlarl.result_file import load
from vlarl.results import EpisodeKey, EpisodeResult, EvalResult
from vlarl.rollout.plan import eval_plan
from vlarl.testing import reach, token_policy

keys = st.builds(
    EpisodeKey, st.sampled_from(["a", "b", "c d"]), st.integers(0, 5), st.integers(0, 2)
)
plans = st.lists(keys, min_size=1, max_size=20, unique=True)
counts = st.integers(0, 30)


def play(key, flips):
    success = hash_free(key) in flips
    return EpisodeResult(
        task=key.task,
        trial=key.trial,
        repeat=key.repeat,
        success=success,
        num_steps=1 + key.trial,
        total_reward=float(success),
        num_clipped=0,
        diverged=False,
    )


def hash_free(key):
    return (ord(key.task[0]) + key.trial + key.repeat) % 4


flips = st.sets(st.integers(0, 3))


@given(plans, flips, st.data())
def test_any_cover_by_overlapping_shards_merges_to_the_whole(plan, wins, data):
    whole = EvalResult(plan=tuple(plan), episodes=tuple(play(k, wins) for k in plan))
    shard_count = data.draw(st.integers(1, 4))
    parts = [
        data.draw(st.lists(st.sampled_from(plan), unique=True, max_size=len(plan)))
        for _ in range(shard_count)
    ]
    shards = [EvalResult(plan=tuple(plan), episodes=tuple(play(k, wins) for k in p)) for p in parts]
    merged = merge(shards)
    covered = set().union(*map(set, parts))
    assert {e.key for e in merged.episodes} == covered
    assert set(merged.missing) == set(plan) - covered
    if covered == set(plan):
        assert merged.episodes == whole.episodes


@given(plans, flips)
def test_the_file_gives_back_what_was_saved(tmp_path_factory, plan, wins):
    result = EvalResult(plan=tuple(plan), episodes=tuple(play(k, wins) for k in plan))
    path = tmp_path_factory.mktemp("r") / "x.json"
    result.save(path)
    assert load(path) == result


@given(plans, flips, flips)
def test_swapping_the_two_sides_flips_the_difference(plan, wins_a, wins_b):
    a, b = (
        EvalResult(plan=tuple(plan), episodes=tuple(play(k, wins) for k in plan))
        for wins in (wins_a, wins_b)
    )
    forth, back = compare(a, b).total, compare(b, a).total
    assert forth.difference == -back.difference
    assert abs(forth.interval[0] + back.interval[1]) < 1e-12
    assert forth.p_value == back.p_value


@given(counts, counts, counts, counts)
def test_paired_interval_holds_its_difference_and_stays_in_range(both, only_a, only_b, neither):
    if both + only_a + only_b + neither == 0:
        return
    paired = Paired(both=both, only_a=only_a, only_b=only_b, neither=neither)
    low, high = paired.interval
    assert -1 - 1e-9 <= low <= paired.difference <= high <= 1 + 1e-9
    assert 0 < paired.p_value <= 1


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_interval_holds_its_rate(k, n):
    rate = Rate(min(k, n), n)
    low, high = rate.interval
    assert 0 <= low <= rate.value <= high <= 1


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8))
def test_every_planned_episode_is_played_exactly_once(slots, stages, repeats, episodes):
    cfg = reach.Config()
    plan = eval_plan(reach.trials(cfg, "eval"), episodes=episodes, repeats=repeats)
    result = evaluate(
        reach.make(cfg, num_slots=slots),
        token_policy.load(token_policy.Config(), device="cpu", needs_value=False),
        plan,
        temperature=1.0,
        seed=0,
        stages=stages,
    )
    assert [e.key for e in result.episodes] == [EpisodeKey.of(e) for e in plan]
