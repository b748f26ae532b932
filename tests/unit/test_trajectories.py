from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vlarl.errors import ConfigError, CorruptFile
from vlarl.trajectories import Trajectory, read_frames, read_trajectory, write_trajectory

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectories"


def make(length=5, *, cameras=("corner4",), size=(6, 7), last=False, seed=0) -> Trajectory:
    rng = np.random.default_rng(seed)

    def picture(*shape):
        return rng.integers(0, 256, (*shape, *size, 3), dtype=np.uint8)

    return Trajectory(
        task="button-press-v3",
        trial=17,
        instruction="Press a button",
        frames={name: picture(length) for name in cameras},
        state=rng.normal(size=(length, 4)).astype(np.float32),
        action=rng.normal(size=(length, 4)).astype(np.float32),
        target=rng.normal(size=(length, 4)).astype(np.float32),
        reward=np.eye(length, dtype=np.float32)[-1],
        success=True,
        last_frames={name: picture() for name in cameras} if last else None,
    )


def same(a: Trajectory, b: Trajectory) -> None:
    assert (a.task, a.trial, a.instruction) == (b.task, b.trial, b.instruction)
    assert a.success is b.success
    for name in ("state", "action", "target", "reward"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype == np.float32
        np.testing.assert_array_equal(left, right)
    pairs = [(a.frames, b.frames)]
    if a.last_frames is not None or b.last_frames is not None:
        pairs.append((a.last_frames, b.last_frames))
    for left, right in pairs:
        assert list(left) == list(right)
        for name in left:
            assert left[name].dtype == right[name].dtype == np.uint8
            np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("cameras", [("corner4",), ("corner4", "gripperPOV")])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, length, last, cameras):
    trajectory = make(length, cameras=cameras, last=last)
    same(read_trajectory(write_trajectory(trajectory, tmp_path / "a.npy")), trajectory)


def test_failure_and_trial_are_kept(tmp_path):
    trajectory = replace(make(), success=False, trial=1003)
    back = read_trajectory(write_trajectory(trajectory, tmp_path / "a.npy"))
    assert (back.success, back.trial) == (False, 1003)


@pytest.mark.parametrize("last", [False, True])
def test_the_reference_finds_its_keys_in_our_files(tmp_path, last):
    trajectory = make(4, last=last)
    path = write_trajectory(trajectory, tmp_path / "a.npy")
    # The reference's loader is a plain np.load; here the file is our own.
    rows = np.load(path, allow_pickle=True)
    assert rows.dtype == object
    assert rows.shape == (4 + last,)
    for t, row in enumerate(rows):
        expected = np.zeros(4) if t == 0 else trajectory.action[t - 1]
        np.testing.assert_array_equal(row["delta_action"], expected)
        assert row["delta_action"].dtype == np.float32
        assert row["instruction"] == "Press a button"
        assert row["image"].dtype == np.uint8
        # Its state would come from one of these; ours must not be taken for them.
        assert not {"init_ee_pose", "abs_action"} & set(row)
    np.testing.assert_array_equal(rows[2]["image"], trajectory.frames["corner4"][2])
    if last:
        np.testing.assert_array_equal(rows[4]["image"], trajectory.last_frames["corner4"])


def test_a_file_of_the_reference_is_read_with_actions_shifted():
    path = GOLDEN / "step_0_seed_0_traj_1_kir.npy"
    theirs = np.load(path, allow_pickle=True)
    ours = read_trajectory(path)
    assert len(ours) == 24
    assert ours.instruction == "slide the red block next to the blue ramp"
    assert (ours.trial, ours.success, ours.state.shape) == (-1, False, (24, 0))
    for t in range(24):
        np.testing.assert_array_equal(ours.frames["image"][t], theirs[t]["image"])
        np.testing.assert_array_equal(ours.action[t], theirs[t + 1]["delta_action"])
    np.testing.assert_array_equal(ours.last_frames["image"], theirs[24]["image"])


def test_a_reference_file_of_one_frame_has_no_action():
    ours = read_trajectory(GOLDEN / "seed_0_traj_0.npy")
    assert len(ours) == 0
    assert ours.action.shape == (0, 7)
    assert ours.frames["image"].shape == (0, 64, 64, 3)
    assert ours.last_frames["image"].shape == (64, 64, 3)


def test_frames_are_read_with_the_action_that_produced_them(tmp_path):
    theirs = np.load(GOLDEN / "step_0_seed_0_traj_1_kir.npy", allow_pickle=True)
    rows = read_frames(GOLDEN / "step_0_seed_0_traj_1_kir.npy")
    assert len(rows) == 25
    np.testing.assert_array_equal(rows[3].delta_action, theirs[3]["delta_action"])
    trajectory = make(3)
    ours = read_frames(write_trajectory(trajectory, tmp_path / "a.npy"))
    np.testing.assert_array_equal(ours[2].delta_action, trajectory.action[1])


def test_what_was_read_from_the_reference_can_be_written_and_read_again(tmp_path):
    first = read_trajectory(GOLDEN / "step_0_seed_0_traj_1_kir.npy")
    same(read_trajectory(write_trajectory(first, tmp_path / "a.npy")), first)


def test_nothing_is_overwritten(tmp_path):
    path = write_trajectory(make(), tmp_path / "a.npy")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"a\.npy exists"):
        write_trajectory(make(seed=1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def rows_of(path: Path) -> list[dict]:
    return list(np.load(path, allow_pickle=True))


def rewrite(path: Path, rows: list) -> Path:
    array = np.empty(len(rows), object)
    array[:] = rows
    np.save(path, array, allow_pickle=True)
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows[1].pop("image"), r"frame 1: 'image' is not"),
        (lambda rows: rows[1].update(image=np.zeros((4, 4, 3))), r"frame 1: 'image' is not"),
        (lambda rows: rows[2].update(delta_action="x"), r"frame 2: 'delta_action' is not"),
        (lambda rows: rows[0].pop("instruction"), r"frame 0: there is no 'instruction'"),
        (lambda rows: rows[1].pop("target"), "not a whole trajectory.*target"),
        (lambda rows: rows[1].update(state=np.zeros(9, np.float32)), "not a whole trajectory"),
        (lambda rows: rows[1].update(image=np.zeros((2, 2, 3), np.uint8)), "not a whole traj"),
        (lambda rows: rows[0]["episode"].update(format=99), "format 99 is not known"),
        (lambda rows: rows[0]["episode"].pop("task"), "not a whole trajectory.*task"),
        (lambda rows: rows.__setitem__(1, "row"), "frame 1: expected a dict, got str"),
        (lambda rows: rows.clear(), "holds no frames"),
    ],
)
def test_a_damaged_file_is_named_with_the_reason(tmp_path, change, reason):
    rows = rows_of(write_trajectory(make(), tmp_path / "a.npy"))
    change(rows)
    with pytest.raises(CorruptFile, match=reason):
        read_trajectory(rewrite(tmp_path / "b.npy", rows))


def test_a_byte_string_instruction_is_text(tmp_path):
    rows = rows_of(GOLDEN / "step_0_seed_0_traj_1_kir.npy")
    rows[0]["instruction"] = b"push it"
    assert read_trajectory(rewrite(tmp_path / "a.npy", rows)).instruction == "push it"


def test_the_task_stands_in_for_a_missing_instruction(tmp_path):
    rows = [
        {k: v for k, v in r.items() if k != "instruction"} | {"task": "lift"}
        for r in rows_of(GOLDEN / "step_0_seed_0_traj_1_kir.npy")
    ]
    back = read_trajectory(rewrite(tmp_path / "a.npy", rows))
    assert (back.instruction, back.task) == ("lift", "lift")
