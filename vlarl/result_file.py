"""Reading a result file: what follows from its episodes has to be what it says. Torch-free."""

from __future__ import annotations

import json
import math
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from vlarl.config.explain import explain
from vlarl.errors import ConfigError, CorruptFile, RunFailed
from vlarl.results import FORMAT, VERSION, EpisodeKey, EpisodeResult, EvalResult, groups_json


class _Document(BaseModel):
    """The file as it must be; validated in strict mode."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    format: Literal["vlarl-eval"]
    version: Literal[1]
    summary: dict[str, Any]
    protocol: dict[str, Any]
    groups: dict[str, tuple[str, ...]]
    plan_hash: str
    plan: tuple[EpisodeKey, ...]
    episodes: tuple[EpisodeResult, ...]


def load(path: Path) -> EvalResult:
    """Read and verify a result file: what follows from its episodes must be what it says.

    Raises:
        ConfigError: there is no such file, or it is of another version.
        CorruptFile: it is no result file, or its parts contradict each other.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no result file {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; expected an evaluation's .json file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFile(f"cannot read {path}: {error}") from None
    values = _json_of(path, text)
    try:
        document = _Document.model_validate_json(text, strict=True)
        result = EvalResult(
            plan=document.plan,
            episodes=document.episodes,
            protocol=document.protocol,
            groups=document.groups,
        )
    except ValidationError as error:
        raise CorruptFile(f"{path}: {explain(error, _Document, values, {})[0]}") from None
    except RunFailed as error:
        raise CorruptFile(f"{path}: {error}") from None
    found, summary = result.plan_hash, result.summary()
    # Early files state the averages of a single group too, and no count of diverged episodes.
    if len(result.by_group) == 1 and "groups" in document.summary:
        summary |= groups_json(result.by_group)
    for where, stated, derived in (
        ("plan_hash", document.plan_hash, found),
        ("protocol.plan_hash", result.protocol.get("plan_hash", found), found),
        ("summary", {"diverged": result.num_diverged} | document.summary, summary),
    ):
        difference = _first_difference(stated, derived, where)
        if difference is not None:
            raise CorruptFile(f"{path} was changed or damaged: {difference}")
    return result


def _json_of(path: Path, text: str) -> dict[str, Any]:
    """The document, of a version that this module reads."""
    try:
        values = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise CorruptFile(f"{path} is not JSON, was it cut short? ({error})") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise CorruptFile(f"{path} is not a result of `vlarl eval`")
    version = values.get("version")
    if not isinstance(version, int) or version is True:
        raise CorruptFile(
            f"{path}: version is {json.dumps(version)}, expected the number {VERSION}"
        )
    if version != VERSION:
        raise ConfigError(f"{path} has format version {version}; this vlarl reads {VERSION}")
    return values


def _first_difference(stated: Any, derived: Any, where: str) -> str | None:
    """`key: the file says A, its plan and episodes give B`; None when equal up to the last bits."""
    if isinstance(stated, dict) and isinstance(derived, dict):
        keys = dict.fromkeys([*derived, *stated])
        pairs = [(f"{where}.{key}", stated.get(key), derived.get(key)) for key in keys]
    elif isinstance(stated, list) and isinstance(derived, list) and len(stated) == len(derived):
        pairs = [
            (f"{where}.{i}", a, b) for i, (a, b) in enumerate(zip(stated, derived, strict=True))
        ]
    else:
        is_number = type(stated) in (int, float) and type(derived) is float
        # Another version of Python or a compiler may round the last bits of an interval otherwise.
        if is_number and math.isclose(stated, derived, abs_tol=1e-9):
            return None
        if type(stated) is type(derived) and stated == derived:
            return None
        said, given = (shorten(json.dumps(x), 80, placeholder=" ...") for x in (stated, derived))
        return f"{where}: the file says {said}, its plan and episodes give {given}"
    found = (_first_difference(a, b, key) for key, a, b in pairs)
    return next((text for text in found if text is not None), None)
