import numpy as np
import pytest
import torch

from vlarl import sft_data
from vlarl.dataset import EntryKey
from vlarl.errors import ConfigError
from vlarl.sft_data import Batches, Samples


def samples(lengths=(3, 5), tasks=None) -> Samples:
    count = torch.tensor(lengths)
    n = int(count.sum())
    keys = tuple(EntryKey(t, i, 0) for i, t in enumerate(tasks or ["a"] * len(lengths)))
    return Samples(
        images={"top": torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 2, 2, 3)},
        state=torch.arange(n)[:, None].float(),
        target=torch.stack([torch.arange(n), -torch.arange(n)], dim=1).float(),
        end=torch.repeat_interleave(count.cumsum(0) - 1, count),
        text=torch.repeat_interleave(torch.arange(len(lengths)), count),
        instructions=tuple(f"do {i}" for i in range(len(lengths))),
        episode=torch.repeat_interleave(torch.arange(len(lengths)), count),
        keys=keys,
    )


def test_a_chunk_ends_with_its_episode_and_repeats_the_last_action_unmasked():
    target, mask = samples().chunks(torch.tensor([0, 1, 2, 3, 7]), 4)
    assert target[:, :, 0].tolist() == [
        [0, 1, 2, 2],
        [1, 2, 2, 2],
        [2, 2, 2, 2],
        [3, 4, 5, 6],
        [7, 7, 7, 7],
    ]
    assert mask.int().tolist() == [
        [1, 1, 1, 0],
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
    ]


def test_an_observation_belongs_to_its_row():
    obs = samples().observation(torch.tensor([4, 2]))
    assert obs.instruction == ("do 1", "do 0")
    assert obs.state[:, 0].tolist() == [4, 2]
    assert obs.images["top"][:, 0, 0, 0].tolist() == [4, 2]


def test_batches_pass_over_every_row_once_before_any_comes_again():
    rows = torch.arange(10, 17)
    batches = Batches(rows, 3, seed=5)
    seen = torch.cat([batches[k] for k in range(7)])  # 21 = three passes
    for i in range(3):
        assert sorted(seen[7 * i : 7 * i + 7].tolist()) == rows.tolist()
    assert seen[:7].tolist() != seen[7:14].tolist()


def test_a_batch_depends_on_seed_and_number_alone():
    rows = torch.arange(20)
    forward = [Batches(rows, 8, seed=1)[k].tolist() for k in range(6)]
    one = Batches(rows, 8, seed=1)
    assert [one[k].tolist() for k in reversed(range(6))] == forward[::-1]
    assert Batches(rows, 8, seed=2)[0].tolist() != forward[0]


def test_a_batch_may_be_larger_than_the_data():
    assert sorted(Batches(torch.arange(3), 6, seed=0)[0].tolist()) == [0, 0, 1, 1, 2, 2]


def test_the_split_holds_out_whole_episodes_of_every_task():
    data = samples([2, 3, 4, 5, 2, 3, 4, 5], ["a"] * 4 + ["b"] * 4)
    train, held = sft_data.split(data, 0.25, seed=0)
    assert sorted(torch.cat([train, held]).tolist()) == list(range(28))
    held_episodes = set(data.episode[held].tolist())
    assert not held_episodes & set(data.episode[train].tolist())
    assert sorted(data.keys[e].task for e in held_episodes) == ["a", "b"]


def test_the_split_does_not_depend_on_the_order_of_the_files():
    lengths, tasks = [2] * 6, ["a"] * 6
    data = samples(lengths, tasks)
    held = {data.keys[e] for e in data.episode[sft_data.split(data, 0.5, 3)[1]].tolist()}
    back = samples(lengths, tasks)
    object.__setattr__(back, "keys", data.keys[::-1])
    again = {back.keys[e] for e in back.episode[sft_data.split(back, 0.5, 3)[1]].tolist()}
    assert held == again
    assert len(held) == 3


def test_fraction_zero_holds_out_nothing_and_too_little_data_is_an_error():
    train, held = sft_data.split(samples(), 0.0, seed=0)
    assert (len(train), len(held)) == (8, 0)
    with pytest.raises(ConfigError, match=r"0\.1 of 2 episodes holds out 0"):
        sft_data.split(samples(), 0.1, seed=0)
    with pytest.raises(ConfigError, match="holds out 2"):
        sft_data.split(samples(), 0.9, seed=0)


def test_augmentation_off_changes_nothing():
    frames = torch.randint(0, 256, (3, 8, 8, 3), dtype=torch.uint8)
    same = sft_data.augment(frames, shift=0.0, brightness=0.0, contrast=0.0, key=1)
    assert torch.equal(same, frames)


def test_a_shift_moves_each_picture_by_a_few_pixels_and_repeats_the_edge():
    n, size = 200, 20
    ramp = torch.arange(size, dtype=torch.uint8) * 10
    frames = torch.stack([ramp[None, :].expand(size, size), ramp[:, None].expand(size, size)], -1)
    frames = torch.cat([frames, torch.zeros(size, size, 1, dtype=torch.uint8)], -1)
    moved = sft_data.augment(
        frames.expand(n, size, size, 3), shift=0.1, brightness=0.0, contrast=0.0, key=1
    )
    dx = moved[:, 10, 10, 0].int() // 10 - 10
    dy = moved[:, 10, 10, 1].int() // 10 - 10
    assert set(dx.tolist()) == set(dy.tolist()) == {-2, -1, 0, 1, 2}
    assert not torch.equal(dx, dy)
    expected = (torch.arange(size)[None] + dx[:, None]).clamp(0, size - 1) * 10
    assert torch.equal(moved[:, 0, :, 0].int(), expected.int())


def test_brightness_scales_and_contrast_keeps_the_mean():
    frames = torch.full((300, 4, 4, 3), 100, dtype=torch.uint8)
    bright = sft_data.augment(frames, shift=0.0, brightness=0.2, contrast=0.0, key=1)
    levels = bright[:, 0, 0, 0].float()
    assert (levels.min() >= 80, levels.max() <= 120) == (True, True)
    assert levels.std() == pytest.approx(40 / 12**0.5, rel=0.1)
    frames[:, :2] = 200
    stretched = sft_data.augment(frames, shift=0.0, brightness=0.0, contrast=0.3, key=1)
    means = stretched.float().mean(dim=(1, 2, 3))
    assert (means - 150).abs().max() <= 0.5
    assert stretched[:, 0, 0, 0].float().std() > 5


def test_augmentation_is_a_function_of_its_key():
    frames = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)

    def run(key):
        return sft_data.augment(frames, shift=0.3, brightness=0.3, contrast=0.3, key=key)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_statistics_are_those_of_numpy():
    action = torch.linspace(-1, 1, 101)[:, None] * torch.tensor([1.0, 0.5])
    found = sft_data.statistics(action, torch.ones(101, 3))
    assert found["action"]["q01"] == pytest.approx([-0.98, -0.49])
    assert found["action"]["q99"] == pytest.approx([0.98, 0.49])
    assert found["action"]["min"] == [-1.0, -0.5]
    assert found["action"]["max"] == [1.0, 0.5]
    assert found["action"]["std"] == pytest.approx(action.numpy().std(0).tolist(), abs=1e-6)
    assert found["action"]["mask"] == [True, True]
    assert found["proprio"]["mean"] == [1.0, 1.0, 1.0]
    assert "proprio" not in sft_data.statistics(action, torch.zeros(101, 0))
    assert np.isfinite(found["proprio"]["std"]).all()
