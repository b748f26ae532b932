"""The numbers that un-normalise a checkpoint's actions and normalise its state.

Layout: moojink/openvla-oft@213c5ff, `dataset_statistics.json`. As there, a missing mask means that
every number is normalised. Equal quantiles are as valid: data in which a number never changes have
them, and it is decoded to that number.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vlarl.errors import ConfigError, CorruptFile
from vlarl.models.openvla_oft.config import Normalisation, read_json

FILE = "dataset_statistics.json"


class Bounds(NamedTuple):
    """What becomes -1 and 1, and which numbers are normalised at all; all of one length."""

    low: list[float]
    high: list[float]
    mask: list[bool]


def bounds(entry: Mapping[str, Any], normalisation: Normalisation, what: str) -> Bounds:
    """Of the actions or the state of a data set. what: "action" or "proprio", for messages.

    Raises:
        ConfigError: numbers are missing, not finite, exchanged or of different lengths.
        CorruptFile: something else stands in their place.
    """
    low_name, high_name = ("q01", "q99") if normalisation == "q99" else ("min", "max")
    for name in (low_name, high_name):
        if name not in entry:
            raise ConfigError(
                f"{FILE}: no '{name}' among the {what} numbers, which policy.normalisation="
                f"{normalisation} needs"
            )
        if not (isinstance(entry[name], list) and all(map(_is_number, entry[name]))):
            raise CorruptFile(f"{FILE}: {what}.{name} is {entry[name]!r}, expected numbers")
    low, high = entry[low_name], entry[high_name]
    mask = entry.get("mask")
    if mask is None:
        mask = [True] * len(low)
    if not isinstance(mask, list) or any(type(value) is not bool for value in mask):
        raise CorruptFile(
            f"{FILE}: {what}.mask is {mask!r}, expected true or false for each number"
        )
    if not 0 < len(low) == len(high) == len(mask):
        raise ConfigError(
            f"{FILE}: {low_name}, {high_name} and mask of {what} have {len(low)}, {len(high)} and "
            f"{len(mask)} numbers, expected the same"
        )
    if not all(map(math.isfinite, [*low, *high])):
        raise ConfigError(f"{FILE}: {low_name} or {high_name} of {what} is not finite")
    used = [(a, b) for a, b, normalised in zip(low, high, mask, strict=True) if normalised]
    crossed = [f"{a} > {b}" for a, b in used if a > b]
    if crossed:
        raise ConfigError(
            f"{FILE}: {low_name} of {what} is greater than {high_name}: {', '.join(crossed)}; "
            "they are exchanged or damaged, download the file again"
        )
    if used and all(a == b for a, b in used):
        raise ConfigError(
            f"{FILE}: {low_name} and {high_name} of {what} are all equal, so that it could never "
            "change; download the file again"
        )
    return Bounds([float(x) for x in low], [float(x) for x in high], mask)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def laid_out(path: Path) -> Generator[None]:
    """Inside, values of a JSON file of the wrong kind end in CorruptFile."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptFile(
            f"{path} is not as an OpenVLA-OFT checkpoint has it ({type(error).__name__}: {error}); "
            "download it again"
        ) from error


def read_statistics(folder: Path) -> dict[str, dict[str, Any]]:
    """Data set -> {"action": {q01, q99, min, max, mask, ...}, "proprio": {...}}.

    `norm_stats` of config.json, updated with dataset_statistics.json when there is one.
    """
    statistics = dict(read_json(folder / "config.json").get("norm_stats") or {})
    path = folder / FILE
    if path.exists():
        statistics.update(read_json(path))
    if not statistics:
        raise ConfigError(f"{folder}: no action statistics in config.json or {path.name}")
    return statistics


def resolve_key(statistics: Mapping[str, Any], key: str | None) -> str:
    """The data set to use: `key`, else `key`_no_noops; without a key the only one there is.

    Raises ConfigError listing what is there.
    """
    there = ", ".join(sorted(statistics))
    if key is None:
        if len(statistics) == 1:
            return next(iter(statistics))
        raise ConfigError(
            "policy.unnorm_key: the checkpoint has statistics of several data sets; "
            f"choose one of: {there}"
        )
    for name in (key, f"{key}_no_noops"):
        if name in statistics:
            return name
    raise ConfigError(
        f"policy.unnorm_key: the checkpoint has no statistics of '{key}'; there are: {there}"
    )
