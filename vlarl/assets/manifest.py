"""What can be downloaded: `manifest.yaml`, read and checked. Torch-free."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from pydantic import model_validator

from vlarl.config import presets
from vlarl.config.compose import compose
from vlarl.config.schema import Section
from vlarl.config.sources import read_tree, values_of
from vlarl.errors import ConfigError

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A full commit hash."""


class Expected(Section):
    """Files without which an asset is of no use."""

    pattern: str
    """Glob over paths in the repository; `*` matches slashes, too."""
    what: str
    """What they hold."""
    count: int | None = None
    """How many files match. Not known: at least one."""
    bytes: int | None = None
    """Their size together, where known."""
    sha256: str | None = None
    """Of the one file that matches, where known."""

    @property
    def label(self) -> str:
        """The pattern and how many files match it: `dataset/*.npy (692 files)`."""
        return self.pattern if self.count in (1, None) else f"{self.pattern} ({self.count} files)"

    def lacking(self, sizes: Mapping[str, int]) -> str | None:
        """The pattern, with what is wrong, when a folder lacks such files. As `Asset.lacking`."""
        matching = [size for path, size in sizes.items() if fnmatchcase(path, self.pattern)]
        wanted = self.count or 1
        if not matching:
            return self.label
        if len(matching) < wanted:
            return f"{self.pattern} ({len(matching)} of {wanted})"
        if self.bytes is not None and len(matching) == wanted and sum(matching) != self.bytes:
            return f"{self.pattern} ({sum(matching)} of {self.bytes} bytes)"
        return None


class Asset(Section):
    """One entry of the manifest."""

    name: str
    """As on the command line and in presets."""
    about: str
    """What it is for, in a line."""
    repo: str
    """OWNER/NAME on the hub."""
    revision: str = "main"
    """A commit where one is known, else a branch."""
    licence: str | None = None
    """As its model card says; None where that is not known."""
    note: str = ""
    """What else to know, e.g. about its size."""
    files: tuple[Expected, ...]
    """What has to be there."""
    skip: tuple[str, ...] = ()
    """Globs of files that are left out."""

    @model_validator(mode="after")
    def _hashes_are_of_single_files(self) -> Asset:
        for file in self.files:
            if file.sha256 is not None and file.count != 1:
                raise ValueError(f"{file.pattern}: sha256 goes with count: 1")
        return self

    @property
    def num_bytes(self) -> int | None:
        """Size of all that has to be there; None when a part is not known."""
        return total(file.bytes for file in self.files)

    def wants(self, path: str) -> bool:
        """Whether a file of the repository is downloaded."""
        return path != ".gitattributes" and not any(fnmatchcase(path, p) for p in self.skip)

    def lacking(self, sizes: Mapping[str, int]) -> list[str]:
        """What is missing of a folder, as patterns with the reason; empty when nothing is.

        sizes: bytes of its files, by path with forward slashes.
        """
        return [why for file in self.files if (why := file.lacking(sizes)) is not None]


def total(sizes: Iterable[int | None]) -> int | None:
    """The sum; None when a part is not known."""
    found = list(sizes)
    return None if None in found else sum(size for size in found if size is not None)


def names() -> list[str]:
    """Every asset of the manifest, in its order."""
    return list(_read())


def get(name: str) -> Asset:
    """An asset by name. Raises ConfigError with near names."""
    if name not in _read():
        near = difflib.get_close_matches(name, names(), n=3)
        hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        hint = hint or f"there are: {', '.join(names())}"
        raise ConfigError(f"no asset named '{name}' to download; {hint}")
    return _read()[name]


def named_by(repo: str) -> str | None:
    """The asset that comes from a repository, if there is one."""
    return next((name for name, asset in _read().items() if asset.repo == repo), None)


def used_by(name: str) -> list[str]:
    """Shipped presets that name an asset in one of their settings."""
    return [p for p in presets.names() if name in set(_words(compose(p).values))]


def _words(value: Any) -> Iterator[str]:
    """Every string in nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _words(inner)


@functools.cache
def _read() -> dict[str, Asset]:
    text = (files("vlarl.assets") / "manifest.yaml").read_text(encoding="utf-8")
    raw = values_of(read_tree(text, "manifest.yaml"))
    layouts, assets = raw["layouts"], raw["assets"]
    found = {}
    for name, entry in assets.items():
        fields = dict(entry)
        if "layout" in fields:
            fields["files"] = layouts[fields.pop("layout")]
        found[name] = Asset(name=name, **fields)
    return found
