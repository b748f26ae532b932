"""Validation whose errors a person can act on.

For example: `optim.lrr: unknown key; did you mean 'optim.lr'? (cli)`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from vlarl.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)

_LONGEST_VALUE = 60


def validate(
    model: type[ModelT],
    values: Mapping[str, Any],
    sources: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
) -> ModelT:
    """The model made of these values.

    sources: dotted key -> where it was set, quoted in messages. problems: what the caller found
    wrong already. Raises ConfigError with all problems, one a line.
    """
    found = list(problems)
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        found += explain(error, model, values, sources or {})
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))
    return config


def explain(
    error: ValidationError,
    model: type[BaseModel],
    values: Mapping[str, Any],
    sources: Mapping[str, str],
) -> list[str]:
    """One sentence for every wrong key; the members of a union share one."""
    reasons: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        path = _path(detail["loc"], values, is_missing=detail["type"] == "missing")
        reason = _reason(path, detail, model)
        # A check of a whole section may begin with the key that it is about.
        key, colon, rest = reason.partition(": ")
        if path and colon and key in _fields_at(path, model):
            path, reason = f"{path}.{key}", rest
        reasons.setdefault(path, []).append(reason)
    return [
        (f"{path}: " if path else "") + "; or ".join(texts) + where(path, sources)
        for path, texts in reasons.items()
    ]


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with a file, as `where.it.is: what`."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted keys of all leaves of a config class, in order."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name
        else:
            yield from keys(section, f"{prefix}{name}.")


def where(path: str, sources: Mapping[str, str]) -> str:
    """` (base/grpo.yaml:4)`; nothing when the key was not set by anyone."""
    key = path.partition("[")[0]
    exact = {sources[key]} if key in sources else set()
    if not exact and key:
        exact = {source for k, source in sources.items() if k.startswith(f"{key}.")}
    return f" ({exact.pop()})" if len(exact) == 1 else ""


def _reason(path: str, detail: Any, model: type[BaseModel]) -> str:
    kind, message = detail["type"], detail["msg"]
    if kind == "extra_forbidden":
        return "unknown key" + _suggest(path, model)
    if kind == "missing":
        return "missing, and it has no default"
    if kind in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    if kind in ("model_type", "model_attributes_type"):
        message = "should be a section of keys and values"
    message = message.replace("Input should be", "should be").replace("valid dictionary", "mapping")
    message = message.replace("valid tuple", "list, such as [a, b]")
    got = repr(detail["input"])
    if len(got) > _LONGEST_VALUE:
        got = got[: _LONGEST_VALUE - 3] + "..."
    return f"{message}; got {got}"


def _path(loc: Sequence[int | str], values: Any, *, is_missing: bool) -> str:
    """Dotted path of a pydantic location, without its names for union members."""
    path, here = "", values
    for i, part in enumerate(loc):
        if isinstance(here, Mapping) and part in here:
            path, here = f"{path}.{part}" if path else str(part), here[part]
        elif isinstance(here, (list, tuple)) and isinstance(part, int) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
        elif is_missing and i == len(loc) - 1:
            path = f"{path}.{part}" if path else str(part)
    return path


def _suggest(path: str, model: type[BaseModel]) -> str:
    """The likeliest key: a near one of the same section, or the same word in another section."""
    parent, _, key = path.rpartition(".")
    siblings = _fields_at(parent, model)
    prefix = f"{parent}." if parent else ""
    near = [prefix + name for name in difflib.get_close_matches(key, siblings, n=1)]
    near += [k for k in keys(model) if k.rpartition(".")[2] == key]
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; there are: {', '.join(siblings)}" if siblings else ""


def _fields_at(path: str, model: type[BaseModel]) -> list[str]:
    """Keys of the section at a dotted path; none where there is no section."""
    section: type[BaseModel] | None = model
    for part in path.split(".") if path else []:
        field = section.model_fields.get(part) if section else None
        section = section_of(field.annotation) if field else None
    return list(section.model_fields) if section else []


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The config class in an annotation such as `Section | None`; None for other types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [section_of(a) for a in get_args(annotation)]
    return next((s for s in found if s is not None), None)
