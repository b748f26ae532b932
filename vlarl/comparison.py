"""Evaluations together: the paired difference of two, and shards made whole. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlarl.errors import ConfigError
from vlarl.proportions import Paired
from vlarl.protocol import leaves
from vlarl.results import (
    EpisodeKey,
    EpisodeResult,
    EvalResult,
    counted,
    name_some,
    rate_json,
)

VOLATILE = ("date", "plan_hash", "compute")
"""Parts of the protocol that say nothing about what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """B against A on the episodes that both played.

    total: all pairs. by_task: the pairs of each task, in A's order. only_a, only_b: episodes that
    just one of them played; they count for nothing. differences: protocol fields that differ, each
    "key: A's value | B's value". repeats: most repeats of one (task, trial) among the pairs; with
    more than one, intervals and p-value hold for these start states, not for new ones.
    """

    total: Paired
    by_task: Mapping[str, Paired]
    only_a: tuple[EpisodeKey, ...]
    only_b: tuple[EpisodeKey, ...]
    differences: tuple[str, ...]
    repeats: int

    def warnings(self) -> list[str]:
        """Everything a reader must know before quoting the difference, as sentences."""
        found = []
        for name, keys in (("A", self.only_a), ("B", self.only_b)):
            if keys:
                verb = "is" if len(keys) == 1 else "are"
                found.append(
                    f"{counted(len(keys), 'episode')} only in {name} {verb} left out: "
                    + name_some(keys)
                )
        if self.differences:
            found.append(
                "not only the weights may differ; the protocols differ in "
                + "; ".join(self.differences)
            )
        if self.repeats > 1:
            found.append(
                f"up to {self.repeats} repeats of one start state are treated as independent; "
                "the interval holds for these start states"
            )
        return found

    def document(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            **paired_json(self.total),
            "tasks": {task: paired_json(paired) for task, paired in self.by_task.items()},
            "warnings": self.warnings(),
        }


def paired_json(paired: Paired) -> dict[str, Any]:
    """Counts, rates, difference with 95 % interval and p-value as JSON values."""
    return {
        "pairs": paired.n,
        "both": paired.both,
        "only_a": paired.only_a,
        "only_b": paired.only_b,
        "neither": paired.neither,
        "a": rate_json(paired.a),
        "b": rate_json(paired.b),
        "difference": paired.difference,
        "interval_95": list(paired.interval),
        "p_value": paired.p_value,
    }


def compare(a: EvalResult, b: EvalResult) -> Comparison:
    """B against A on identical (task, trial, repeat).

    Raises:
        ConfigError: when nothing can be paired: the two share no episode, or their envs give
        different start states to the same (task, trial).
    """
    _check_same_trials(a, b)
    outcomes_b = {e.key: e for e in b.episodes}
    pairs = [(e, outcomes_b[e.key]) for e in a.episodes if e.key in outcomes_b]
    if not pairs:
        raise ConfigError(
            "the two evaluations have no episode in common, so there is nothing to pair: "
            f"A has {_described(a)}; B has {_described(b)}"
        )
    shared = {e.key for e, _ in pairs}
    by_task: dict[str, list[tuple[EpisodeResult, EpisodeResult]]] = {}
    for pair in pairs:
        by_task.setdefault(pair[0].task, []).append(pair)
    return Comparison(
        total=_paired(pairs),
        by_task={task: _paired(own) for task, own in by_task.items()},
        only_a=tuple(e.key for e in a.episodes if e.key not in shared),
        only_b=tuple(e.key for e in b.episodes if e.key not in shared),
        differences=tuple(other_than_weights(a, b)),
        repeats=max(len({k.repeat for k in own}) for own in _by_start(shared)),
    )


def _check_same_trials(a: EvalResult, b: EvalResult) -> None:
    """`protocol.trials` names what a (task, trial) means; it must agree."""
    same = protocol_differences(a.protocol.get("trials", {}), b.protocol.get("trials", {}))
    if same:
        raise ConfigError(
            "the same trial numbers mean different start states in the two evaluations, so they "
            "cannot be paired: " + "; ".join(same)
        )


def _described(result: EvalResult) -> str:
    tasks = list(result.by_task) if result.episodes else []
    shown = ", ".join(tasks[:3]) + (
        f" and {counted(len(tasks) - 3, 'more task')}" if len(tasks) > 3 else ""
    )
    first = f", the first is {result.episodes[0].key}" if result.episodes else ""
    return f"{counted(len(result.episodes), 'episode')} of {shown or 'nothing'}{first}"


def _paired(pairs: Sequence[tuple[EpisodeResult, EpisodeResult]]) -> Paired:
    outcomes = [(a.success, b.success) for a, b in pairs]
    return Paired(
        both=outcomes.count((True, True)),
        only_a=outcomes.count((True, False)),
        only_b=outcomes.count((False, True)),
        neither=outcomes.count((False, False)),
    )


def _by_start(keys: set[EpisodeKey]) -> list[list[EpisodeKey]]:
    starts: dict[tuple[str, int], list[EpisodeKey]] = {}
    for key in keys:
        starts.setdefault((key.task, key.trial), []).append(key)
    return list(starts.values())


def merge(shards: Sequence[EvalResult], names: Sequence[str] = ()) -> EvalResult:
    """Shards of one evaluation as one result.

    An episode that several shards played the same way counts once. What no shard played is in
    `missing` of the result. names: what messages call the shards, by default "part 1" and so on.

    Raises:
        ConfigError: two shards were not played under one protocol (differences are listed), have
        other plans, or an episode came out differently in them; the message names both.
    """
    names = names or [f"part {number}" for number in range(1, len(shards) + 1)]
    start, first = names[0], shards[0]
    episodes: dict[EpisodeKey, EpisodeResult] = {}
    origin: dict[EpisodeKey, str] = {}
    for name, shard in zip(names, shards, strict=True):
        different = differences(first, shard)
        if different:
            raise ConfigError(
                f"{start} and {name} are not shards of one evaluation, their protocols differ: "
                + "; ".join(different)
            )
        if shard.plan_hash != first.plan_hash:
            counts = f"{counted(len(first.plan), 'episode')} and {len(shard.plan)}"
            raise ConfigError(
                f"{start} and {name} are not shards of one evaluation: they planned "
                f"{counts}, not the same ones"
            )
        clashes = [e.key for e in shard.episodes if episodes.get(e.key, e) != e]
        if clashes:
            raise ConfigError(
                f"{origin[clashes[0]]} and {name} disagree about {name_some(clashes)}; merge only "
                "files of one evaluation"
            )
        episodes.update({e.key: e for e in shard.episodes})
        origin.update({e.key: name for e in shard.episodes})
    return replace(first, episodes=tuple(episodes.values()))


def differences(a: EvalResult, b: EvalResult) -> list[str]:
    """`key: value in a | value in b` for all of the protocol that shards have to share."""
    return protocol_differences(
        _without_place(a.protocol), _without_place(b.protocol), ignore=VOLATILE
    )


def _without_place(protocol: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the folder of a checkpoint whose hash is known: machines keep it elsewhere."""
    checkpoint = protocol.get("checkpoint")
    if not (isinstance(checkpoint, dict) and checkpoint.get("sha256")):
        return protocol
    return {**protocol, "checkpoint": {k: v for k, v in checkpoint.items() if k != "path"}}


def other_than_weights(a: EvalResult, b: EvalResult) -> list[str]:
    """`key: value in a | value in b` for all of the protocol that can change a result, but the
    checkpoint.
    """
    return protocol_differences(a.protocol, b.protocol, ignore=(*VOLATILE, "checkpoint"))


def unlike(results: Mapping[str, EvalResult]) -> list[str]:
    """In what, other than the weights, results differ from the first, as sentences."""
    (start, first), *others = results.items()
    found = []
    for name, result in others:
        different = other_than_weights(first, result)
        if result.plan_hash != first.plan_hash:
            different.append(f"planned episodes: {len(first.plan)} | {len(result.plan)} others")
        if different:
            found.append(
                f"{start} and {name} were not measured alike, so their numbers may differ for "
                "more than the weights: " + "; ".join(different)
            )
    return found


def protocol_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], *, ignore: Sequence[str] = ()
) -> list[str]:
    """`dotted.key: value in a | value in b` for every leaf that differs.

    ignore: top-level parts that may differ.
    """
    flat_a, flat_b = dict(leaves(a)), dict(leaves(b))
    return [
        f"{key}: {_shown(flat_a, key)} | {_shown(flat_b, key)}"
        for key in dict.fromkeys([*flat_a, *flat_b])
        if key.split(".")[0] not in ignore and flat_a.get(key) != flat_b.get(key)
    ]


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else "(absent)"
