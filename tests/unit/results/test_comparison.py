from dataclasses import replace

import pytest

from vlarl.comparison import compare, merge, unlike
from vlarl.errors import ConfigError
from vlarl.proportions import Rate
from vlarl.results import EpisodeKey, EpisodeResult, EvalResult, plan_hash


def outcome(task, trial, success, repeat=0):
    return EpisodeResult(
        task=task,
        trial=trial,
        repeat=repeat,
        success=success,
        num_steps=5,
        total_reward=float(success),
        num_clipped=0,
        diverged=False,
    )


def result(rows, plan=(), **protocol):
    episodes = tuple(outcome(*row) for row in rows)
    keys = tuple(plan) or tuple(e.key for e in episodes)
    return EvalResult(plan=keys, episodes=episodes, protocol=protocol)


def weights(path, sha256=None):
    return {"path": path, "sha256": sha256, "step": None}


def test_pairs_are_matched_by_identity_not_by_position():
    a = result([("x", 0, True), ("x", 1, False), ("y", 0, False)])
    b = result([("y", 0, True), ("x", 1, True), ("x", 0, True)])
    found = compare(a, b)
    total = found.total
    assert (total.both, total.only_a, total.only_b, total.neither) == (1, 0, 2, 0)
    assert found.by_task["y"].difference == 1.0
    assert list(found.by_task) == ["x", "y"]
    assert found.warnings() == []


def test_difference_is_on_shared_episodes_and_the_others_are_named():
    a = result([("x", 0, True), ("x", 1, True), ("x", 2, False)])
    b = result([("x", 1, True), ("x", 2, True), ("x", 3, False)])
    found = compare(a, b)
    assert found.total.n == 2
    assert found.total.difference == 0.5
    assert found.only_a == (EpisodeKey("x", 0, 0),)
    assert found.only_b == (EpisodeKey("x", 3, 0),)
    assert "1 episode only in A is left out: x trial 0 repeat 0" in found.warnings()


def test_plans_without_overlap_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"no episode in common.*A has 1 episode of x.*B has 1"):
        compare(result([("x", 0, True)]), result([("x", 1, True)]))


def test_trial_numbers_of_different_meaning_are_refused():
    a = result([("x", 0, True)], trials={"env": "metaworld", "seed": 0})
    b = result([("x", 0, True)], trials={"env": "metaworld", "seed": 1})
    with pytest.raises(ConfigError, match=r"different start states.*seed: 0 \| 1"):
        compare(a, b)


def test_protocol_differences_are_warned_of_but_not_the_weights():
    env = {"name": "toy", "horizon": 100}
    a = result([("x", 0, True)], env=env, checkpoint=weights("a"), date="1")
    b = result([("x", 0, True)], env=env | {"horizon": 90, "q": 1}, checkpoint=weights("b"))
    found = compare(a, b)
    assert found.differences == ("env.horizon: 100 | 90", "env.q: (absent) | 1")
    (warning,) = found.warnings()
    assert "env.horizon: 100 | 90" in warning


def test_results_of_other_episodes_or_settings_are_unlike_the_first():
    a = result([("x", 0, True)], sampling={"temperature": 0.0, "seed": 0})
    b = result([("x", 1, True)], sampling={"temperature": 1.6, "seed": 0})
    assert unlike({"a": a, "c": replace(a, episodes=())}) == []
    (sentence,) = unlike({"a": a, "b": b})
    assert sentence.startswith("a and b were not measured alike")
    assert sentence.endswith(": sampling.temperature: 0.0 | 1.6; planned episodes: 1 | 1 others")


def test_repeats_are_pointed_out():
    rows = [("x", 0, True, 0), ("x", 0, True, 1), ("x", 1, True, 0)]
    found = compare(result(rows), result(rows))
    assert found.repeats == 2
    assert "2 repeats" in found.warnings()[0]


def test_document_has_the_numbers():
    a = result([("x", i, i < 2) for i in range(4)])
    b = result([("x", i, True) for i in range(4)])
    document = compare(a, b).document()
    assert (document["pairs"], document["difference"], document["p_value"]) == (4, 0.5, 0.5)
    assert document["a"]["k"] == 2
    assert document["tasks"]["x"]["only_b"] == 2


def test_merged_shards_are_the_whole():
    plan = [EpisodeKey("x", i, 0) for i in range(4)]
    one = result([("x", 0, True), ("x", 1, False)], plan, date="1")
    two = result([("x", 1, False), ("x", 3, True)], plan, date="2")
    whole = merge([one, two])
    assert [e.trial for e in whole.episodes] == [0, 1, 3]
    assert whole.missing == (EpisodeKey("x", 2, 0),)
    assert whole.total == Rate(2, 3)
    assert whole.plan_hash == plan_hash(plan)


def test_parts_of_different_plans_are_refused():
    one = result([("x", 0, True)])
    with pytest.raises(
        ConfigError, match=r"part 1 and part 2 .* planned 1 episode and 1, not the same"
    ):
        merge([one, result([("y", 0, False)])])
    with pytest.raises(ConfigError, match="they planned 1 episode and 2"):
        merge([one, result([("x", 0, True), ("x", 1, True)])])


def test_shards_that_disagree_are_refused_by_name():
    one = result([("x", 0, True)])
    with pytest.raises(ConfigError, match=r"^b and c disagree about x trial 0 repeat 0"):
        merge([replace(one, episodes=()), one, result([("x", 0, False)])], "abc")


def test_the_same_weights_may_lie_elsewhere():
    plan = [("x", 0, True), ("x", 1, False)]
    whole = result(plan)
    parts = [
        replace(
            whole,
            episodes=whole.episodes[i : i + 1],
            protocol={"checkpoint": weights(f"/host{i}/weights", sha)},
        )
        for i, sha in enumerate(("ab", "ab"))
    ]
    assert merge(parts).is_complete
    other = replace(parts[1], protocol={"checkpoint": weights("/host0/weights", "cd")})
    with pytest.raises(ConfigError, match="sha256"):
        merge([parts[0], other])


def test_shards_of_different_protocols_are_refused():
    one = result([("x", 0, True)], sampling={"temperature": 0.0, "seed": 0})
    two = result([("x", 1, True)], sampling={"temperature": 1.6, "seed": 0})
    with pytest.raises(ConfigError, match=r"sampling.temperature: 0.0 \| 1.6"):
        merge([one, two])
