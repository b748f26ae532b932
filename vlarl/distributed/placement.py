"""Which episodes of a plan a rank plays. Collocated: every rank plays, decides and learns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from vlarl.distributed.world import World
from vlarl.episode import Episode


def owned(plan: Sequence[Episode], world: World) -> list[Episode]:
    """This rank's share of a plan, in plan order.

    Every episode belongs to exactly one rank. A group (neighbours with the same `group` >= 0) never
    crosses ranks, so that group statistics need no communication; ungrouped episodes are dealt one
    by one. Dealing goes round robin: shares differ by at most one group, and every rank gets a bit
    of each task, since plans list tasks in order and tasks differ in length.
    """
    blocks = [list(block) for _, block in groupby(plan, key=_block)]
    return [episode for block in blocks[world.rank :: world.size] for episode in block]


def _block(episode: Episode) -> tuple[int, int]:
    return (episode.group, -1) if episode.group >= 0 else (-1, episode.index)
