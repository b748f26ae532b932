"""Files that appear whole or not at all. Torch-free."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from vlarl.errors import ConfigError

# What file systems without hard links answer (FAT, some network mounts).
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def refuse_existing(path: Path) -> None:
    """Raise ConfigError when `path` is taken: nothing is overwritten unless asked."""
    if path.exists():
        raise ConfigError(
            f"{path} exists and is not overwritten; choose another name, or replace it "
            "with --overwrite"
        )


def check_writable(path: Path, *, overwrite: bool) -> None:
    """Fail now rather than after the work; makes nothing.

    Raises:
        ConfigError: the file exists and overwrite is False, or its folder could not be written.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if not overwrite:
        refuse_existing(path)
    folder = next(p for p in path.absolute().parents if p.exists())
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: {folder} is a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: no permission to write in {folder}")


@contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Generator[Path]:
    """A temporary path next to `path`; it becomes `path` when the block ends without an exception.

    The temporary name is hidden and keeps the suffix, from which some writers take the format.
    After an exception nothing is left. Parent folders are made.

    Raises:
        ConfigError: when `path` exists, before or after the block, and overwrite is False.
    """
    if not overwrite:
        refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _draft(path) as temporary:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            _move_new(temporary, path)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Make `content` the whole of a file in one step: readers see the old or the new one.

    Text is written as UTF-8. The folder must exist. durable: also survive a power cut (fsync); off
    for files that only matter while the run lives.
    """
    with _draft(path) as temporary:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def _draft(path: Path) -> Generator[Path]:
    """A hidden name next to `path`; what still has it at the end is removed."""
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
    except OSError as error:
        if error.filename is None:  # a write to an open file, e.g. on a full disk
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _move_new(temporary: Path, path: Path) -> None:
    """Rename that fails when the target exists; os.rename would replace it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        refuse_existing(path)
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refuse_existing(path)
        temporary.rename(path)
