"""The note that `vlarl download` leaves in a folder it has completed. Torch-free.

`.vlarl_download` holds the repository, the commit, and size and hash of every file, so that a
folder can be checked without the hub. It has no `.json` suffix: policies copy their `*.json` when
they are saved, and what is saved is no download any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from vlarl.atomic import write_atomic
from vlarl.config.schema import Section
from vlarl.errors import CorruptFile

FILE = ".vlarl_download"

_BLOCK = 1 << 20


class HubFile(Section):
    """Size and hash of one file: the sha256 of an LFS file, or git's hash of a small one."""

    size: int
    """Bytes."""
    sha256: str | None = None
    """Of the content."""
    git_sha1: str | None = None
    """Of git's blob: a header with the size, then the content."""

    def matches(self, path: Path) -> bool:
        """Whether a file has this size and hash. Reads it, when the size is right."""
        return path.is_file() and path.stat().st_size == self.size and self._hash_matches(path)

    def _hash_matches(self, path: Path) -> bool:
        if self.sha256 is not None:
            return _digest(path, hashlib.sha256()) == self.sha256
        header = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        return _digest(path, header) == self.git_sha1


class Record(Section):
    """Where a folder comes from and what it holds."""

    repo: str
    """OWNER/NAME on the hub."""
    commit: str
    """The revision, as a full hash."""
    files: Mapping[str, HubFile]
    """By path in the folder, with forward slashes."""

    def lacking(self, folder: Path) -> list[str]:
        """Files that are absent or of another size. Reads none of them."""
        return [path for path, file in self.files.items() if size_of(folder / path) != file.size]

    def damaged(self, folder: Path) -> list[str]:
        """Files that are absent or differ in size or content. Reads all of them."""
        return [path for path, file in self.files.items() if not file.matches(folder / path)]


def size_of(path: Path) -> int | None:
    """Bytes of a file; None when there is none."""
    return path.stat().st_size if path.is_file() else None


def sizes_in(folder: Path) -> dict[str, int]:
    """Bytes of every file of a folder, by path with forward slashes; empty when there is none."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def read(folder: Path) -> Record | None:
    """The note in a folder, if it has one. Raises CorruptFile when it holds something else."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return Record.model_validate_json(path.read_bytes())
    except (ValidationError, OSError):
        raise CorruptFile(f"{path} is damaged; delete it and download again") from None


def write(folder: Path, record: Record) -> None:
    """Leave the note."""
    write_atomic(folder / FILE, record.model_dump_json(indent=2, exclude_none=True) + "\n")


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
