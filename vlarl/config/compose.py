"""From a preset and overrides to a validated run, with the origin of every value.

`compose` is torch-free: it merges files and overrides into a plain tree. `build` imports the three
named plug-ins (hence torch) and validates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError

from vlarl import registry
from vlarl.config import presets
from vlarl.config.explain import validate, where
from vlarl.config.schema import AlgoSection, RolloutSection, RunConfig, Section, disagreements
from vlarl.config.sources import Leaf, Tree, read_tree, read_value, sources_of, tree_of, values_of
from vlarl.errors import ConfigError

CLI = "cli"
"""Source of a value given as KEY=VALUE or by a named option."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A merged configuration, not validated yet.

    name: stem of the preset or file. values: nested plain values. sources: dotted key of every
    leaf -> where it was set.
    """

    name: str
    values: dict[str, Any]
    sources: dict[str, str]


def compose(preset: str | Path, overrides: Sequence[str] = ()) -> Composed:
    """Merge what the preset extends (left to right), the preset itself, then KEY=VALUE overrides.

    preset: a shipped name, or a path that ends in .yaml or .yml. Lists replace lists; a section
    whose `name` changes is replaced as a whole. Raises ConfigError: unknown preset, missing file,
    YAML error with its line, cycle of `extends`, malformed overrides (all of them at once).
    """
    given = parse_overrides(overrides)
    preset = str(preset)
    tree = merge(_load(preset, within=None, chain=()), given)
    file = preset if _is_file(preset) else f"{preset}.yaml"
    name = Path(file).stem
    tree.setdefault("name", Leaf(name, file))
    return Composed(name, values_of(tree), dict(sources_of(tree)))


def command_of(composed: Composed) -> Literal["train", "sft"]:
    """The command a preset is for: one that names trajectories under `data` is for `vlarl sft`."""
    return "sft" if "data" in composed.values else "train"


def require_command(composed: Composed, command: Literal["train", "sft"]) -> None:
    """Raise ConfigError for what is clearly a preset of the other command."""
    own, name = command_of(composed), composed.name
    is_clear = ("data" in composed.values) != ("algo" in composed.values)
    if own != command and is_clear:
        raise ConfigError(f"{name} is a preset of `vlarl {own}`; run: vlarl {own} --preset {name}")


def parse_overrides(overrides: Iterable[str]) -> Tree:
    """`optim.lr=1e-5` and so on as a tree; values are YAML.

    Raises ConfigError listing every malformed one and every key given twice.
    """
    tree: Tree = {}
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            problems.append(f"'{text}': expected KEY=VALUE, for example optim.lr=1e-5")
            continue
        try:
            one = _nest(path, read_value(value))
        except ValueError as error:
            problems.append(f"'{text}': {error}; quote the value as YAML text if it is a word")
            continue
        old = [k for k, _ in sources_of(tree)]
        for new, _ in sources_of(one):
            if any(f"{k}.".startswith(f"{new}.") or f"{new}.".startswith(f"{k}.") for k in old):
                problems.append(f"'{text}': {new} is given twice")
        tree = merge(tree, one)
    if problems:
        raise ConfigError("\n".join(problems))
    return tree


def merge(under: Tree, over: Tree, *, nested: bool = False) -> Tree:
    """`over` laid on `under`; neither is changed.

    In a nested section a new `name` drops everything below it: the keys belong to another plug-in.
    """
    if nested and _renames(under, over):
        return dict(over)
    merged = dict(under)
    for key, value in over.items():
        below = under.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = merge(below, value, nested=True)
        else:
            merged[key] = value
    return merged


def build(composed: Composed) -> RunConfig:
    """The validated run: RunConfig[Env, Policy, Algo] of the plug-ins it names.

    Raises ConfigError with every problem, one a line.
    """
    require_command(composed, "train")
    problems: list[str] = []
    env, policy, algo = (_section_class(k, composed, problems) for k in registry.KINDS)
    model = cast("type[RunConfig]", RunConfig.__class_getitem__((env, policy, algo)))
    problems += _cross_check(algo, composed.values)
    return validate(model, composed.values, composed.sources, problems)


def _is_file(preset: str) -> bool:
    return preset.endswith((".yaml", ".yml"))


def _load(preset: str, within: Path | None, chain: tuple[str, ...]) -> Tree:
    """One preset with everything it extends. within: folder that file names are relative to."""
    if _is_file(preset):
        path = Path(preset) if within is None else within / preset
        identity, label, folder = str(path.resolve()), str(path), path.parent
    else:
        identity, label, folder = preset, f"{preset}.yaml", None
    if identity in chain:
        raise ConfigError(f"'extends' goes round in a circle: {' -> '.join([*chain, identity])}")
    text = _read_file(path) if _is_file(preset) else presets.read(preset)
    own = read_tree(text, label)
    tree: Tree = {}
    for parent in _parents(own.pop("extends", None), label):
        tree = merge(tree, _load(parent, folder, (*chain, identity)))
    return merge(tree, own)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _parents(extends: Tree | Leaf | None, label: str) -> list[str]:
    if extends is None:
        return []
    value = extends.value if isinstance(extends, Leaf) else None
    parents = [value] if isinstance(value, str) else value
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        where = extends.source if isinstance(extends, Leaf) else label
        raise ConfigError(f"{where}: extends: expected a preset name or a list of them")
    return parents


def _nest(path: list[str], value: Any) -> Tree:
    """{"optim": {"lr": Leaf}} from ["optim", "lr"]."""
    for key in reversed(path):
        value = {key: value}
    return tree_of(value, CLI)


def _renames(under: Tree, over: Tree) -> bool:
    old, new = under.get("name"), over.get("name")
    return isinstance(old, Leaf) and isinstance(new, Leaf) and old.value != new.value


class _Unknown(Section, extra="allow"):
    """Stands in for a plug-in that does not exist, so that the other sections are still checked."""

    name: str


def _section_class(kind: registry.Kind, composed: Composed, problems: list[str]) -> type[Section]:
    """The Config class of the plug-in that a section names; an unknown name goes to problems."""
    section = composed.values.get(kind)
    name = section.get("name") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        return _Unknown  # validation says what is missing
    try:
        return registry.module(kind, name).Config
    except ConfigError as error:
        problems.append(f"{error}{where(f'{kind}.name', composed.sources)}")
        return _Unknown


def _cross_check(algo: type[Section], values: Mapping[str, Any]) -> list[str]:
    """What RunConfig checks between sections, also when an unrelated section has errors."""
    if not issubclass(algo, AlgoSection):
        return []
    try:
        rollout_section = RolloutSection.model_validate(values.get("rollout", {}))
        algo_section = algo.model_validate(values.get("algo"))
    except ValidationError:
        return []
    return disagreements(rollout_section, algo_section)
