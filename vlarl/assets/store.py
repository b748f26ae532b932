"""Checkpoints by name: shipped tiny ones, and those in the cache folder. Torch-free.

A shipped asset is a folder `vlarl/assets/tiny/NAME`; a cached one is `$VLARL_HOME/NAME`.
"""

from __future__ import annotations

import difflib
import os
from importlib.resources import files
from pathlib import Path

from vlarl.errors import AssetMissing


def home() -> Path:
    """The cache folder: $VLARL_HOME, by default ~/.cache/vlarl. It need not exist."""
    return Path(os.environ.get("VLARL_HOME") or "~/.cache/vlarl").expanduser()


def names() -> list[str]:
    """Every asset on this machine, shipped ones first."""
    shipped = _folders(_shipped())
    return shipped + [name for name in _folders(home()) if name not in shipped]


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a checkpoint.

    A bare word is the name of a shipped or cached asset before it is a folder here, so that a
    shipped name always means the shipped asset; anything with a separator is a path (`./word`).
    Raises AssetMissing with near names.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    candidates = [path]
    if _is_word(text):
        candidates = [_shipped() / text, home() / text, path]
    for folder in candidates:
        if text and folder.is_dir():
            return folder
    raise _missing(text, path)


def _missing(text: str, path: Path) -> AssetMissing:
    if text and path.exists():
        reason = f"'{text}' is a file; expected the folder of a checkpoint"
    elif _is_word(text):
        reason = f"no asset or folder named '{text}'"
    else:
        reason = f"there is no folder '{text}'"
    known = names()
    near = difflib.get_close_matches(path.name, known, n=3)
    if near:
        reason += "; did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    else:
        reason += f"; on this machine: {', '.join(known) or 'none'}"
    is_repo = text.count("/") == 1 and text[0] not in "./~"
    repo = text if is_repo else f"OWNER/{path.name}"
    return AssetMissing(reason, fix=f"hf download {repo} --local-dir {home() / path.name}")


def _shipped() -> Path:
    return Path(str(files("vlarl.assets"))) / "tiny"


def _folders(parent: Path) -> list[str]:
    if not parent.is_dir():
        return []
    return sorted(p.name for p in parent.iterdir() if p.is_dir() and p.name[0] not in "._")


def _is_word(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and os.sep not in text and text[0] != "~"
