import json
from dataclasses import replace

import pytest

from vlarl.atomic import check_writable
from vlarl.episode import Episode
from vlarl.errors import ConfigError, CorruptFile, RunFailed
from vlarl.proportions import Rate
from vlarl.result_file import load
from vlarl.results import EpisodeKey, EpisodeResult, EvalResult, name_some, plan_hash

PROTOCOL = {
    "plan": {"split": "eval", "start_from_training_trial": 0},
    "versions": {"vlarl": "0.1.0"},
    "env": {"name": "toy", "horizon": 10, "facts": {}},
    "policy": {"name": "toy"},
    "sampling": {"temperature": 0.0, "seed": 0},
    "checkpoint": {"path": "p", "sha256": "a" * 64, "step": None},
}


def episode(task="reach-v3", trial=0, repeat=0, success=True, **other):
    fields = {"num_steps": 10, "total_reward": 1.0, "num_clipped": 0, "diverged": False} | other
    return EpisodeResult(task=task, trial=trial, repeat=repeat, success=success, **fields)


def result(episodes, plan=None, **other):
    keys = tuple(e.key for e in episodes) if plan is None else tuple(plan)
    return EvalResult(plan=keys, episodes=tuple(episodes), **other)


def three_tasks():
    """a: 1/2, b: 2/2, c: 0/4; group easy = a and b (3/4), group hard = c (0/4)."""
    outcomes = {"a": [True, False], "b": [True, True], "c": [False] * 4}
    return result(
        [
            episode(task=task, trial=i, success=success)
            for task, successes in outcomes.items()
            for i, success in enumerate(successes)
        ],
        groups={"easy": ("a", "b"), "hard": ("c",)},
        protocol=PROTOCOL,
    )


def test_rates_are_counts():
    found = three_tasks()
    assert found.total == Rate(3, 8)
    assert found.by_task == {"a": Rate(1, 2), "b": Rate(2, 2), "c": Rate(0, 4)}
    assert found.by_group == {"easy": Rate(3, 4), "hard": Rate(0, 4)}


def test_mean_of_groups_differs_from_the_total_when_groups_differ_in_size():
    episodes = [episode(task="a"), *(episode(task="b", trial=i, success=False) for i in range(3))]
    found = result(episodes, groups={"g1": ("a",), "g2": ("b",)})
    assert found.total.value == 0.25
    assert found.mean_of_groups[0] == 0.5
    assert result(episodes).mean_of_groups is None


def test_metrics_by_hand():
    found = result(
        [
            episode(task="a", success=True, num_steps=4, total_reward=2.0),
            episode(task="b", success=False, num_steps=10, total_reward=0.0),
        ]
    )
    assert found.metrics() == {
        "eval/success_once": 0.5,
        "eval/return": 1.0,
        "eval/reward": 0.25,  # (2 / 4 + 0 / 10) / 2
        "eval/episode_len": 7.0,
        "eval/num_trajectories": 2.0,
        "eval/success_once/a": 1.0,
        "eval/success_once/b": 0.0,
    }


def test_episodes_come_in_plan_order():
    plan = [EpisodeKey("a", i, 0) for i in range(3)]
    found = result([episode("a", 2), episode("a", 0), episode("a", 1)], plan)
    assert [e.trial for e in found.episodes] == [0, 1, 2]


def test_a_duplicate_is_refused_by_name():
    with pytest.raises(RunFailed, match="a trial 1 repeat 0 was played 2 times"):
        result([episode("a", 1), episode("a", 1, success=False)], [EpisodeKey("a", 1, 0)])


def test_an_episode_outside_the_plan_is_refused_by_name():
    with pytest.raises(RunFailed, match="a trial 7 repeat 0 was played but not planned"):
        result([episode("a", 7)], [EpisodeKey("a", 1, 0)])


def test_missing_episodes_are_named():
    plan = [EpisodeKey("a", 0, 0), EpisodeKey("a", 0, 1), EpisodeKey("b", 0, 0)]
    found = result([episode("a", 0, 1)], plan)
    assert found.missing == (plan[0], plan[2])
    assert not found.is_complete
    assert name_some(found.missing, limit=1) == "a trial 0 repeat 0 and 1 more"
    assert found.total == Rate(1, 1)
    assert found.summary()["complete"] is False


def test_no_episode_means_no_percentage():
    with pytest.raises(RunFailed, match="no success rate"):
        _ = result([], [EpisodeKey("a", 0, 0)]).total


def test_repeat_of_an_eval_plan_is_the_member():
    assert EpisodeKey.of(Episode(task="a", trial=3, index=9, member=2)) == ("a", 3, 2)


def test_plan_hash_is_of_the_set():
    a, b = EpisodeKey("a", 1, 0), EpisodeKey("b", 1, 0)
    assert plan_hash([a, b]) == plan_hash([b, a])
    assert plan_hash([a]) != plan_hash([a, b])
    assert plan_hash([EpisodeKey("a", 1, 2)]) != plan_hash([EpisodeKey("a", 12, 0)])


def test_file_round_trip(tmp_path):
    found = three_tasks()
    found.save(tmp_path / "new" / "x.json")
    again = load(tmp_path / "new" / "x.json")
    assert again == replace(found, groups={"easy": ("a", "b"), "hard": ("c",)})
    assert again.summary() == found.summary()


def test_file_of_an_interrupted_evaluation_says_so(tmp_path):
    result([], [EpisodeKey("a", 0, 0)]).save(tmp_path / "x.json")
    again = load(tmp_path / "x.json")
    assert again.missing == (("a", 0, 0),)
    assert json.loads((tmp_path / "x.json").read_text())["summary"]["success"] is None


def test_an_existing_file_is_kept_unless_asked(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not overwritten"):
        three_tasks().save(path)
    assert path.read_text() == "mine"
    three_tasks().save(path, overwrite=True)
    assert load(path).total == Rate(3, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "x.json"
    with pytest.raises(RunFailed, match="cannot write"):
        three_tasks().save(target)
    with pytest.raises(ConfigError, match="is a file"):
        check_writable(target, overwrite=False)


def test_check_writable_makes_nothing(tmp_path):
    check_writable(tmp_path / "a" / "b" / "x.json", overwrite=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.json").write_text("")
    with pytest.raises(ConfigError, match="not overwritten"):
        check_writable(tmp_path / "x.json", overwrite=False)
    check_writable(tmp_path / "x.json", overwrite=True)
    with pytest.raises(ConfigError, match="is a folder"):
        check_writable(tmp_path, overwrite=True)


def test_a_folder_without_write_permission_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="no permission to write"):
        check_writable(tmp_path / "x.json", overwrite=False)


def damaged(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["episodes"][0].update(success=False), r"summary\.success\.k: .* 3, .* give 2"),
        (lambda d: d["summary"]["success"].update(k=0), r"summary\.success\.k: the file says 0"),
        (lambda d: d["summary"]["success"].update(k=True), r"success\.k: the file says true"),
        (lambda d: d["summary"]["success"].update(rate=0.9), r"summary\.success\.rate"),
        (lambda d: d["summary"]["success"].update(interval_95=[0, 1]), r"success\.interval_95\.0"),
        (lambda d: d["summary"]["success"].update(interval_95=[]), r"success\.interval_95: "),
        (lambda d: d["summary"].update(success=None), r"summary\.success: the file says null"),
        (
            lambda d: d["summary"]["tasks"]["b"].update(k=1),
            r"summary\.tasks\.b\.k: .* 1, .* give 2",
        ),
        (lambda d: d["summary"]["tasks"].pop("b"), r"summary\.tasks\.b: the file says null"),
        (lambda d: d["summary"]["groups"]["easy"].update(k=4), r"summary\.groups\.easy\.k"),
        (
            lambda d: d["summary"]["mean_of_groups"].update(rate=1.0),
            r"summary\.mean_of_groups\.rate",
        ),
        (lambda d: d["summary"].update(complete=False), r"summary\.complete: the file says false"),
        (lambda d: d["summary"].update(planned=9), r"summary\.planned: the file says 9"),
        (lambda d: d["summary"].update(diverged=1), r"summary\.diverged"),
        (lambda d: d["summary"].update(extra=1), r"summary\.extra"),
        (
            lambda d: d["protocol"].update(plan_hash="x"),
            r"protocol\.plan_hash: the file says \"x\"",
        ),
        (lambda d: d["protocol"].update(sampling=None), r"protocol\.sampling: should be"),
        (lambda d: d["protocol"].update(env=3), r"protocol\.env: should be"),
        (lambda d: d["protocol"].update(checkpoint=[]), r"protocol\.checkpoint: should be"),
        (lambda d: d["protocol"].update(versions=None), r"protocol\.versions: should be"),
        (lambda d: d["protocol"]["sampling"].pop("seed"), r"protocol\.sampling\.seed: missing"),
        (lambda d: d["protocol"]["env"].update(facts=None), r"protocol\.env\.facts: should be"),
        (lambda d: d["groups"].update(easy=["nope"]), "group 'easy' has 'nope'"),
        (lambda d: d["episodes"][0].update(num_steps=0), "a trial 0 repeat 0 has num_steps 0"),
        (lambda d: d["episodes"][0].update(num_steps=11), "num_steps 11, not 1 to 10"),
        (lambda d: d["episodes"][0].update(num_clipped=-1), "num_clipped -1"),
        (lambda d: d["episodes"][0].update(diverged=True), "although the simulator diverged"),
        (lambda d: d["episodes"][0].update(total_reward=float("nan")), "is not JSON"),
        (lambda d: d.update(version="1"), 'version is "1", expected the number 1'),
        (
            lambda d: d["episodes"][0].update(trial="0"),
            r"episodes\[0\]\.trial: should be a valid integer; got '0'",
        ),
        (lambda d: d["episodes"][0].update(extra=1), r"episodes\[0\]\.extra: Unexpected"),
        (lambda d: d["episodes"][0].pop("num_steps"), r"episodes\[0\]\.num_steps: missing"),
        (lambda d: d["episodes"].append(dict(d["episodes"][0])), "a trial 0 repeat 0 was played 2"),
        (lambda d: d["plan"].append(["z", 0, 0]), "plan_hash"),
        (lambda d: d["plan"].append(d["plan"][0]), "planned 2 times"),
        (lambda d: d.pop("protocol"), "protocol"),
        (lambda d: d.update(format="other"), "not a result"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, change, words):
    path = tmp_path / "x.json"
    three_tasks().save(path)
    damaged(path, change)
    with pytest.raises(CorruptFile, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_the_last_bits_of_another_version_are_no_damage(tmp_path):
    path = tmp_path / "x.json"
    three_tasks().save(path)
    document = json.loads(path.read_text())
    low, high = document["summary"]["success"]["interval_95"]
    document["summary"]["success"]["interval_95"] = [low + 1e-16, high - 1e-16]
    path.write_text(json.dumps(document))
    assert load(path) == three_tasks()


def test_a_cut_file_is_named(tmp_path):
    path = tmp_path / "x.json"
    three_tasks().save(path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CorruptFile, match="cut short"):
        load(path)


def test_thousands_of_brackets_are_one_message(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(CorruptFile, match=r"x\.json is not JSON.*recursion limit"):
        load(tmp_path / "x.json")


def test_early_files_read(tmp_path):
    path = tmp_path / "x.json"
    found = result([episode("a"), episode("a", 1, success=False)], groups={"g": ("a",)})
    found.save(path)
    damaged(path, lambda d: d["summary"].pop("diverged"))
    assert load(path) == found
    half = json.loads(path.read_text())["summary"]["success"]
    mean = {key: half[key] for key in ("rate", "interval_95")}
    averages = {"groups": {"g": half}, "mean_of_groups": mean}
    damaged(path, lambda d: d["summary"].update(averages))
    assert load(path) == found
    damaged(path, lambda d: d["summary"]["groups"]["g"].update(k=2))
    with pytest.raises(CorruptFile, match=r"summary\.groups\.g\.k"):
        load(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_not_written(tmp_path, number):
    with pytest.raises(RunFailed, match="a trial 0 repeat 0 has total_reward"):
        result([episode("a", total_reward=number)])
    with pytest.raises(RunFailed, match="cannot write"):
        result([episode("a")], protocol={"other": number}).save(tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("played", "shard", "words"),
    [
        ((0, 2, 4), (1, 2), "incomplete, 3 of 5 planned episodes (shard 1/2)"),
        ((1, 4), (2, 3), "incomplete, 2 of 5 planned episodes (shard 2/3)"),
        ((0, 1), None, "incomplete, 2 of 5 planned episodes"),
        ((1,), None, "incomplete, 1 of 5 planned episodes"),
        ((0, 1, 2, 3, 4), None, "all 5 planned episodes"),
        ((), None, "incomplete, 0 of 5 planned episodes"),
    ],
)
def test_a_shard_is_known_by_what_was_played(played, shard, words):
    found = result([episode("a", i) for i in played], [EpisodeKey("a", i, 0) for i in range(5)])
    assert found.shard == shard
    assert found.coverage == words


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "x.json"
    three_tasks().save(path)
    damaged(path, lambda d: d.update(version=2))
    with pytest.raises(ConfigError, match="format version 2; this vlarl reads 1"):
        load(path)


def test_no_file_and_folders_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match="there is no result file"):
        load(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)


def test_diverged_episodes_are_counted():
    fine, lost = episode(), episode(trial=1, success=False, diverged=True)
    assert result([fine]).summary()["diverged"] == 0
    assert result([fine, lost]).summary()["diverged"] == 1
