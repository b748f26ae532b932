"""The shipped presets: YAML files of the data package `vlarl_presets`.

A preset that runs stands at the top level; `base/` holds the parts that presets extend. The first
comment line of a file is its description.
"""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from vlarl.atomic import new_file
from vlarl.errors import ConfigError


def folder() -> Path:
    """Where the shipped presets lie. Read-only to everyone."""
    return Path(str(files("vlarl_presets")))


def names() -> list[str]:
    """Presets that can be run, sorted: everything outside `base/`."""
    return [name for name in all_names() if not name.startswith("base/")]


def all_names() -> list[str]:
    """Every shipped file without its suffix, bases included: "base/grpo", "tiny_metaworld_grpo"."""
    root = folder()
    return sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml"))


def read(name: str) -> str:
    """The text of a shipped preset or base. Raises ConfigError with near names."""
    known = all_names()
    if name not in known:
        file = "; a preset's file ends in .yaml" if Path(name).is_file() else ""
        raise ConfigError(f"no preset named '{name}'{file or _hint(name, known)}")
    return (folder() / f"{name}.yaml").read_text(encoding="utf-8")


def description(text: str) -> str:
    """The first comment line of a preset's text, or nothing."""
    first = text.lstrip().partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def copy(name: str, to: Path | None = None) -> Path:
    """Write a shipped preset to a file of one's own (default `./NAME.yaml`) and return its path.

    Raises ConfigError when the file exists: nothing is overwritten.
    """
    text = read(name)
    target = to if to is not None else Path(f"{name.rpartition('/')[2]}.yaml")
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{target}: a preset file must end in .yaml")
    try:
        if not target.parent.is_dir():
            raise ConfigError(f"cannot write {target}: there is no folder {target.parent}")
        if target.exists():
            raise ConfigError(f"{target} exists already; choose another file or remove it")
        with new_file(target) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None
    return target


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return "; did you mean " + " or ".join(f"'{n}'" for n in near) + "?"
    return f"; there are: {', '.join(n for n in known if not n.startswith('base/'))}"
