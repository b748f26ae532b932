"""Checkpoints by name: shipped tiny ones, and those in the cache folder. Torch-free.

A shipped asset is a folder `vlarl/assets/tiny/NAME`; a cached one is `$VLARL_HOME/NAME`, put there
by `vlarl download NAME` or by hand.
"""

from __future__ import annotations

import difflib
import os
import re
from importlib.resources import files
from pathlib import Path

from vlarl.assets import manifest, record
from vlarl.errors import AssetMissing

_NO_FOLDERS = (".json", ".yaml", ".yml", ".safetensors", ".mp4")


def home() -> Path:
    """The cache folder: $VLARL_HOME, by default ~/.cache/vlarl. It need not exist."""
    return Path(os.environ.get("VLARL_HOME") or "~/.cache/vlarl").expanduser()


def names() -> list[str]:
    """Every asset on this machine, shipped ones first."""
    ours = shipped()
    return ours + [name for name in _folders(home()) if name not in ours]


def shipped() -> list[str]:
    """The assets that come with the package."""
    return _folders(_shipped())


def draft_of(folder: Path) -> Path:
    """Where the files of an asset are collected until all are there."""
    return folder.with_name(f".{folder.name}.partial")


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a checkpoint.

    A bare word is the name of a shipped or cached asset before it is a folder here, so that a
    shipped name always means the shipped asset; anything with a separator is a path (`./word`).

    Raises:
        AssetMissing: there is none, with near names; or a cached one lacks files.
        CorruptFile: the note that `vlarl download` left in it is damaged.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    candidates = [path]
    if _is_word(text):
        candidates = [_shipped() / text, home() / text, path]
    for folder in candidates:
        if text and folder.is_dir():
            if folder == home() / text:
                _check_complete(text, folder)
            return folder
    raise _missing(text, path)


def lacking(name: str, folder: Path) -> list[str]:
    """Files that a folder should have and has not, or not in their size. Reads no contents.

    By the note of `vlarl download`, else by the manifest; a name of neither lacks nothing.
    """
    note = record.read(folder)
    if note is not None:
        return note.lacking(folder)
    if name not in manifest.names():
        return []
    return manifest.get(name).lacking(record.sizes_in(folder))


def _check_complete(name: str, folder: Path) -> None:
    absent = lacking(name, folder)
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise AssetMissing(
            f"{folder} is not complete: no {', no '.join(absent[:5])}{more}",
            fix=f"vlarl download {name}",
        )


def settled(name_or_path: str) -> str:
    """The same checkpoint in a word that means it from any folder.

    A path becomes absolute. The name of an asset stays, and so does what is no folder at all.
    """
    path = Path(name_or_path).expanduser()
    is_asset = _is_word(name_or_path) and name_or_path in names()
    return name_or_path if is_asset or not path.is_dir() else str(path.absolute())


def _missing(text: str, path: Path) -> AssetMissing:
    if text and path.exists():
        reason = f"'{text}' is a file; expected the folder of a checkpoint"
    elif _is_word(text):
        reason = f"no asset or folder named '{text}'"
    else:
        reason = f"there is no folder '{text}'"
    here = names()
    near = difflib.get_close_matches(path.name, [*here, *manifest.names()], n=3)
    if text in manifest.names():
        reason = f"asset '{text}' is not in {home()}"
    elif near:
        reason += "; did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    else:
        reason += f"; on this machine: {', '.join(here) or 'none'}"
    return AssetMissing(reason, fix=_fix(text, path, near))


def _fix(text: str, path: Path, near: list[str]) -> str:
    """The command that gets what was probably meant."""
    for name in (text, manifest.named_by(text), *near[:1]):
        if name in manifest.names() and name not in names():
            return f"vlarl download {name}"
    if (
        "/" in text and path.parent.is_dir() and not path.exists()
    ):  # a path, and not OWNER/NAME on a hub
        return f"ls {path.parent}"
    if path.parts[:1] == ("runs",):
        return f"vlarl train --preset NAME --run-dir {path}"
    if near or not re.fullmatch(r"\w[\w.-]*", path.name) or path.suffix in _NO_FOLDERS:
        return "vlarl download --list"
    is_repo = text.count("/") == 1 and text[0] not in "./~"
    repo = text if is_repo else f"OWNER/{path.name}"
    return f"hf download {repo} --local-dir {home() / path.name}"


def _shipped() -> Path:
    return Path(str(files("vlarl.assets"))) / "tiny"


def _folders(parent: Path) -> list[str]:
    if not parent.is_dir():
        return []
    return sorted(p.name for p in parent.iterdir() if p.is_dir() and p.name[0] not in "._")


def _is_word(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and os.sep not in text and text[0] != "~"
