"""The protocol of a result: the shape every reader may count on, and its words. Torch-free.

Sections may be absent, and may hold more than is named here; what is there has this shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vlarl.config.explain import explain

_ABSENT: Any = None
"""Default of a section: absent is fine, null is not."""

_INNER = ("facts.", "resolved.")
"""Parts of sections whose keys read well without their name."""

_ASIDE = re.compile(r"plan_hash|compute\.num_|env\.(worker|video)_")
"""Keys that say nothing about what was measured."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Plan(_Section):
    split: str
    start_from_training_trial: Annotated[int, Field(ge=0)]


class _Env(_Section):
    name: str
    horizon: Annotated[int, Field(ge=1)]
    facts: dict[str, Any] = _ABSENT


class _Policy(_Section):
    name: str


class _Sampling(_Section):
    temperature: Annotated[float, Field(ge=0)]
    seed: Annotated[int, Field(ge=0)]


class _Checkpoint(_Section):
    path: str | None
    sha256: str | None
    step: int | None


class _Protocol(_Section):
    date: str = _ABSENT
    plan_hash: str = _ABSENT
    plan: _Plan = _ABSENT
    versions: dict[str, str] = _ABSENT
    trials: dict[str, Any] = _ABSENT
    env: _Env = _ABSENT
    policy: _Policy = _ABSENT
    sampling: _Sampling = _ABSENT
    checkpoint: _Checkpoint = _ABSENT
    compute: dict[str, Any] = _ABSENT
    precision: dict[str, str] = _ABSENT


def shape_problems(protocol: Mapping[str, Any]) -> list[str]:
    """What readers could stumble over, one sentence a key; empty when the shape is right."""
    try:
        _Protocol.model_validate(dict(protocol))
    except ValidationError as error:
        return [f"protocol.{text}" for text in explain(error, _Protocol, protocol, {})]
    return []


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value that is no section, in order; tuples become lists."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value


def caveats(protocol: Mapping[str, Any]) -> str:
    """What the env warned of when it was played; empty for nothing."""
    return str(protocol.get("env", {}).get("facts", {}).get("caveats") or "")


def in_words(protocol: Mapping[str, Any]) -> list[str]:
    """All that was set, one line a section: `sampling: temperature 1.6; seed 0`.

    Hashes are cut to 12 digits and long lists to their length.
    """
    lines: dict[str, dict[str, str]] = {}
    for key, value in leaves(protocol):
        if _ASIDE.match(key) or value in (None, "", []):
            continue
        section, _, name = key.partition(".")
        for inner in _INNER:
            name = name.removeprefix(inner)
        lines.setdefault(section, {})[name] = _word(value)
    return [
        f"{section}: " + "; ".join(f"{name.replace('_', ' ')} {word}".strip() for name, word in own)
        for section, own in ((section, own.items()) for section, own in lines.items())
    ]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) if len(value) <= 3 else f"{len(value)} of them"
    words = " ".join(str(value).split())
    text = "".join(c if c.isprintable() else "?" for c in words)  # no escape codes of strangers
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text
