"""What a checkpoint folder consists of, and whether it still does. Torch-free."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from vlarl.atomic import write_atomic
from vlarl.config.explain import first_problem
from vlarl.errors import CorruptFile
from vlarl.run_dir import MANIFEST

FORMAT: Literal[1] = 1
"""Changes with the layout; another format is refused, not guessed at."""

_HASHED = 16 * 2**20
"""Bytes up to which a file's content is checked, not only its size: all but large weights."""
_ELSEWHERE = "resume from another checkpoint (--resume-from)"


class Manifest(BaseModel):
    """manifest.json. files: sizes in bytes. sha256: hex digests of the files that are not large."""

    format: Literal[1]
    step: int
    ranks: Annotated[int, Field(ge=1)]
    files: dict[str, int]
    sha256: dict[str, str] = Field(default_factory=dict)


def write(folder: Path, *, step: int, ranks: int) -> None:
    """Write the manifest of all files that are in a folder now."""
    manifest = Manifest(format=FORMAT, step=step, ranks=ranks, files={})
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, size = str(path.relative_to(folder)), path.stat().st_size
        manifest.files[name] = size
        if size <= _HASHED:
            manifest.sha256[name] = _sha256(path)
    write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=1))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CorruptFile when there is none or it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CorruptFile(f"{folder}: not a complete checkpoint, it has no {MANIFEST}")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CorruptFile(
            f"{path}: {first_problem(error)}; the file is damaged or of another version; "
            f"{_ELSEWHERE}"
        ) from None


def verify(folder: Path) -> Manifest:
    """Check that every file of a checkpoint is there and what it was; the manifest.

    Raises CorruptFile naming the first one that is not, or the folder when it is no checkpoint.
    """
    manifest = read(folder)
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptFile(f"{path}: missing; {_ELSEWHERE}")
        if path.stat().st_size != size:
            raise CorruptFile(
                f"{path}: {path.stat().st_size} bytes instead of {size}, the file is damaged; "
                f"{_ELSEWHERE}"
            )
        # Early manifests have no hashes at all; a single one that lacks is damage.
        hashed = bool(manifest.sha256) and size <= _HASHED
        if hashed and _sha256(path) != manifest.sha256.get(name):
            raise CorruptFile(
                f"{path}: its content is not what was written, the file is damaged; {_ELSEWHERE}"
            )
    return manifest


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
