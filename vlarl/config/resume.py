"""What may change when a run is continued: how long and how often, never what it learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlarl.config.compose import CLI, Composed, parse_overrides
from vlarl.config.resolved import flatten
from vlarl.config.sources import values_of
from vlarl.errors import ConfigError

MAY_CHANGE = ("max_steps", "patience", "run_dir", "eval", "save", "log", "compute")
"""Keys and sections that `--resume` accepts."""


def continued(stored: Composed, overrides: Sequence[str]) -> Composed:
    """A run's own configuration with overrides laid on it.

    Raises:
        ConfigError: an override would make the rest of the run another experiment.
    """
    given = dict(flatten(values_of(parse_overrides(overrides))))
    own = dict(flatten(stored.values))
    fixed = [
        key
        for key, value in given.items()
        if key.split(".")[0] not in MAY_CHANGE and own.get(key) != value
    ]
    if fixed:
        raise ConfigError(
            f"--resume cannot change {', '.join(fixed)}; it may change {', '.join(MAY_CHANGE)}. "
            "Start another run for that, from this run's checkpoint: "
            "policy.checkpoint=RUN_DIR/ckpt/step_N/policy"
        )
    values = stored.values
    for key, value in given.items():
        values = _set(values, key.split("."), value)
    return replace(stored, values=values, sources={**stored.sources, **dict.fromkeys(given, CLI)})


def _set(values: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A copy of nested values with one leaf replaced."""
    head, *rest = path
    if not rest:
        return {**values, head: value}
    below = values.get(head)
    return {**values, head: _set(below if isinstance(below, Mapping) else {}, rest, value)}
