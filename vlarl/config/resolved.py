"""A validated config written out in full: config.json of a run, YAML, differences. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import vlarl
from vlarl.config.compose import Composed
from vlarl.config.sources import read_value
from vlarl.errors import ConfigError

DEFAULT = "default"
"""Source of a value that nobody set."""


def resolved(config: BaseModel, sources: Mapping[str, str]) -> Composed:
    """All values of a config as JSON types, defaults included, with a source for each leaf."""
    values = config.model_dump(mode="json")
    origin = {key: _source_of(key, sources) for key, _ in flatten(values)}
    return Composed(str(values.get("name", "")), values, origin)


def dump(config: BaseModel, sources: Mapping[str, str]) -> str:
    """The text of a run's config.json: every value, and where each came from."""
    full = resolved(config, sources)
    document = {"vlarl": vlarl.__version__, "config": full.values, "sources": full.sources}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def load(path: Path) -> Composed:
    """What `dump` wrote; `build` turns it into the same config again.

    Raises ConfigError when the file is missing or something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        values, sources = document["config"], document["sources"]
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is {path.parent} a run directory?") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is not the config.json of a run") from None
    if not isinstance(values, dict) or not isinstance(sources, dict):
        raise ConfigError(f"{path} is not the config.json of a run")
    return Composed(str(values.get("name", path.parent.name)), values, sources)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf, in order; lists are leaves."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) wherever two trees differ; None where one has no key."""
    left, right = dict(flatten(a)), dict(flatten(b))
    every = [*left, *(key for key in right if key not in left)]
    return [(k, left.get(k), right.get(k)) for k in every if left.get(k) != right.get(k)]


def to_yaml(composed: Composed, *, with_sources: bool = False) -> str:
    """The values as YAML that `compose` reads back; sources become comments at the line ends."""
    return "\n".join(_lines(composed.values, composed.sources if with_sources else None, (), 0))


def _lines(
    values: Mapping[str, Any], sources: Mapping[str, str] | None, path: tuple[str, ...], indent: int
) -> Iterator[str]:
    for key, value in values.items():
        here = (*path, key)
        head = "  " * indent + key + ":"
        if isinstance(value, Mapping) and value:
            yield head
            yield from _lines(value, sources, here, indent + 1)
        else:
            line = f"{head} {_scalar(value)}"
            yield f"{line}  # {_source_of('.'.join(here), sources)}" if sources else line


def _scalar(value: Any) -> str:
    """A value in YAML's flow style; words stay bare when they read back as themselves."""
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, str) and value and not set(value) & set("\n,[]{}#:'\"\\"):
        try:
            if read_value(value) == value and read_value(f"[{value}]") == [value]:
                return value
        except ValueError:
            pass  # a word that YAML cannot read bare is quoted below
    return json.dumps(value, ensure_ascii=False)


def _source_of(key: str, sources: Mapping[str, str]) -> str:
    """Source of a leaf, or of the value it is part of."""
    while key not in sources and "." in key:
        key = key.rpartition(".")[0]
    return sources.get(key, DEFAULT)
