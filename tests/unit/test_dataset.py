import json
from dataclasses import replace

import numpy as np
import pytest

from vlarl import dataset
from vlarl.dataset import EntryKey, Origin, file_name
from vlarl.errors import AssetMissing, ConfigError, CorruptFile, SpecMismatch
from vlarl.specs import ActionSpec, EnvSpec
from vlarl.trajectories import Trajectory

SPEC = EnvSpec(
    name="dots",
    action=ActionSpec(dims=2, format="delta_xy", gripper="none"),
    cameras=("top",),
    frame_size=(4, 4),
    state_dims=1,
    state_format="time",
    max_steps=9,
    control_hz=10.0,
    tasks=("left", "right"),
)
ORIGIN = Origin(
    env={"name": "dots", "num_slots": 2, "tasks": ("left",), "size": (4, 4)},
    spec=SPEC,
    teacher="expert",
    noise=0.1,
    temperature=0.0,
    seed=0,
    split="train",
    keep_failures=False,
    versions={"vlarl": "0"},
)


def episode(task="left", trial=0, *, length=3, success=True):
    ramp = np.arange(length, dtype=np.float32)
    return Trajectory(
        task=task,
        trial=trial,
        instruction=f"go {task}",
        frames={"top": np.full((length, 4, 4, 3), trial, np.uint8)},
        state=ramp[:, None],
        action=np.stack([ramp, -ramp], axis=1),
        target=np.stack([ramp, -ramp], axis=1),
        reward=ramp,
        success=success,
    )


def test_a_data_set_is_read_back_as_it_was_written(tmp_path):
    data = dataset.create(tmp_path / "d", ORIGIN)
    data.add(episode(trial=3))
    data.add(episode("right", 1, length=5))
    data.flush()
    again = dataset.open_(tmp_path / "d")
    assert again.origin.spec == SPEC
    assert again.origin.differences(ORIGIN) == []
    assert again.entries == data.entries
    read = list(again.read())
    assert [(t.task, t.trial, len(t)) for t in read] == [("left", 3, 3), ("right", 1, 5)]
    document = json.loads((tmp_path / "d" / "dataset.json").read_text())
    assert document["counts"] == {"episodes": 2, "successes": 2, "steps": 8}


def test_failed_episodes_are_noted_and_written_only_when_asked(tmp_path):
    for keep, files in ((False, []), (True, ["left_trial_0000.npy"])):
        data = dataset.create(tmp_path / str(keep), replace(ORIGIN, keep_failures=keep))
        data.add(episode(success=False))
        data.flush()
        assert sorted(p.name for p in data.folder.glob("*.npy")) == files
        assert [e.success for e in dataset.open_(data.folder).entries] == [False]
        assert EntryKey("left", 0, 0) in dataset.open_(data.folder)


def test_an_episode_the_index_missed_is_taken_in(tmp_path):
    data = dataset.create(tmp_path / "d", ORIGIN)
    data.flush()
    data.add(episode(trial=3), repeat=2)  # killed before the index was written
    assert dataset.open_(tmp_path / "d").entries == []
    again = dataset.create(tmp_path / "d", ORIGIN)
    assert [e.key for e in again.entries] == [EntryKey("left", 3, 2)]
    assert dataset.open_(tmp_path / "d").entries == again.entries


def test_more_tasks_and_slots_continue_a_data_set_but_nothing_else_does(tmp_path):
    dataset.create(tmp_path / "d", ORIGIN)
    wider = replace(ORIGIN, env=dict(ORIGIN.env, num_slots=7, tasks=("left", "right")))
    dataset.create(tmp_path / "d", wider)
    other = replace(ORIGIN, noise=0.2, env=dict(ORIGIN.env, size=(8, 8)))
    with pytest.raises(ConfigError) as caught:
        dataset.create(tmp_path / "d", other)
    assert "env.size: [4, 4] here, [8, 8] asked for" in str(caught.value)
    assert "noise: 0.1 here, 0.2 asked for" in str(caught.value)
    assert "num_slots" not in str(caught.value)


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"is in use and has no dataset\.json"):
        dataset.create(tmp_path, ORIGIN)
    dataset.create(tmp_path / "d", ORIGIN)
    (tmp_path / "d" / "stray.npy").write_bytes((tmp_path / "mine.txt").read_bytes())
    with pytest.raises(CorruptFile, match=r"stray\.npy"):
        dataset.create(tmp_path / "d", ORIGIN)


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make .*file/data: Not a directory"):
        dataset.create(tmp_path / "file" / "data", ORIGIN)


def test_a_missing_or_damaged_index_is_named(tmp_path):
    with pytest.raises(AssetMissing, match="no data set in") as caught:
        dataset.open_(tmp_path)
    assert "vlarl collect" in caught.value.fix
    index = tmp_path / "dataset.json"
    for text, reason in (
        ("{", "Invalid JSON"),
        ('{"format": "other"}', "format"),
        ('{"format": "vlarl-trajectories", "version": 9}', "version"),
    ):
        index.write_text(text)
        with pytest.raises(CorruptFile, match=reason):
            dataset.open_(tmp_path)


def test_a_file_that_is_another_episode_is_noticed(tmp_path):
    data = dataset.create(tmp_path / "d", ORIGIN)
    data.add(episode(trial=0, length=3))
    data.add(episode(trial=1, length=4))
    data.flush()
    (data.folder / file_name(EntryKey("left", 1, 0))).replace(
        data.folder / file_name(EntryKey("left", 0, 0))
    )
    with pytest.raises(CorruptFile, match=r"left_trial_0000\.npy is another episode"):
        list(data.read())


def test_the_env_of_a_data_set_is_compared(tmp_path):
    data = dataset.create(tmp_path / "d", ORIGIN)
    data.check_matches(replace(SPEC, tasks=(), frame_size=(9, 9)))
    wider = replace(SPEC, action=replace(SPEC.action, dims=7), name="libero")
    with pytest.raises(SpecMismatch, match=r"env is 'dots', but 'libero' is needed"):
        data.check_matches(wider)


def test_file_names_are_safe_and_distinct():
    assert file_name(EntryKey("push-v3", 17, 0)) == "push-v3_trial_0017.npy"
    assert file_name(EntryKey("push-v3", 17, 2)) == "push-v3_trial_0017_repeat_2.npy"
    assert "/" not in file_name(EntryKey("../a b", 0, 0))
