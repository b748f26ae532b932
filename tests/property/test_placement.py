import torch
from hypothesis import given
from hypothesis import strategies as st

from vlarl.distributed.placement import owned
from vlarl.distributed.world import World
from vlarl.episode import Episode


def plan(num_groups, group_size):
    """Groups of group_size episodes, or ungrouped ones for group_size 0."""
    size = group_size or 1
    return [
        Episode(
            task="reach", trial=i // size, index=i, member=i % size,
            group=i // size if group_size else -1,
        )
        for i in range(num_groups * size)
    ]  # fmt: skip


def shares(episodes, size):
    cpu = torch.device("cpu")
    return [
        owned(episodes, World(rank=r, local_rank=r, size=size, device=cpu)) for r in range(size)
    ]


@given(st.integers(0, 40), st.integers(0, 9), st.integers(1, 12))
def test_every_episode_exactly_once_and_groups_stay_whole(num_groups, group_size, size):
    episodes = plan(num_groups, group_size)
    parts = shares(episodes, size)
    assert sorted(e.index for part in parts for e in part) == [e.index for e in episodes]
    for part in parts:
        assert [e.index for e in part] == sorted(e.index for e in part)
    homes = {}
    if group_size:
        for rank, part in enumerate(parts):
            for e in part:
                homes.setdefault(e.group, set()).add(rank)
        assert all(len(ranks) == 1 for ranks in homes.values())
    counts = [len(part) // (group_size or 1) for part in parts]
    assert max(counts) - min(counts) <= 1


def test_shares_are_dealt_round_robin():
    parts = shares(plan(3, 2), 2)
    assert [[e.index for e in part] for part in parts] == [[0, 1, 4, 5], [2, 3]]
