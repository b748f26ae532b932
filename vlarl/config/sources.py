"""YAML text as a tree of leaves that remember the file and line they came from.

The dialect is YAML 1.2's core schema without anchors: `1e-5` is a number, `on`, `yes` and
2024-01-01 are strings, and a key written twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from vlarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is not a section. source: "base/grpo.yaml:4", "cli", ..."""

    value: Any
    source: str


_TOO_DEEP = "brackets are nested too deeply"

Tree = dict[str, "Tree | Leaf"]
"""Sections by name, leaves at the ends."""


def tree_of(values: Mapping[str, Any], source: str) -> Tree:
    """Nested values as a tree whose leaves all come from `source`."""
    return {
        str(key): tree_of(value, source) if isinstance(value, Mapping) else Leaf(value, source)
        for key, value in values.items()
    }


def values_of(tree: Tree) -> dict[str, Any]:
    """The nested plain values of a tree."""
    return {k: v.value if isinstance(v, Leaf) else values_of(v) for k, v in tree.items()}


def sources_of(tree: Tree, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, source) of every leaf, in order."""
    for key, value in tree.items():
        if isinstance(value, Leaf):
            yield prefix + key, value.source
        else:
            yield from sources_of(value, f"{prefix}{key}.")


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2 scalars, unique keys and no aliases."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's own spelling

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not supported; use 'extends'",
                problem_mark=self.peek_event().start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        _check_unique_keys(node)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))


def read_tree(text: str, label: str) -> Tree:
    """The mapping written in a YAML document; empty for an empty document.

    label: the file's name in messages and sources. Raises ConfigError, with the line, on a syntax
    error, a duplicate key or anything but a mapping with word keys.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise yaml.MarkedYAMLError(
                problem="expected a mapping of keys to values", problem_mark=node.start_mark
            )
        return _convert(loader, node, label)
    except yaml.YAMLError as error:
        raise ConfigError(_describe(error, label)) from None
    except ValueError as error:  # a number with a tag it does not fit, or with too many digits
        raise ConfigError(f"{label}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{label}: {_TOO_DEEP}") from None


def read_value(text: str) -> Any:
    """One YAML value, as on the command line: `1e-5`, `[a, b]`, `{name: ppo}`, `word`.

    Raises ValueError with the reason.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or "not valid YAML") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _convert(loader: _Loader, node: yaml.MappingNode, label: str) -> Tree:
    _check_unique_keys(node)
    tree: Tree = {}
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode):
            tree[key.value] = _convert(loader, value, label)
        else:
            source = f"{label}:{value.start_mark.line + 1}"
            tree[key.value] = Leaf(loader.construct_object(value, deep=True), source)
    return tree


def _check_unique_keys(node: yaml.MappingNode) -> None:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or not key.value:
            raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
        line = key.start_mark.line + 1
        if key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key '{key.value}' is already set on line {seen[key.value]}",
                problem_mark=key.start_mark,
            )
        seen[key.value] = line


def _describe(error: yaml.YAMLError, label: str) -> str:
    """`file:line:column: problem` from whatever PyYAML raised."""
    mark = getattr(error, "problem_mark", None)
    where = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark else label
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    return f"{where}: {problem}" + (f" ({context})" if context else "")
