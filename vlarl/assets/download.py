"""Carry out a plan: fetch, verify, put in place. Torch-free.

Files are collected in a hidden folder `.NAME.partial` beside the final one, each verified by size
and hash, unfinished ones with a name that ends in `.part`. Only a complete folder gets its final
name, so whoever finds a folder finds all of it. What was interrupted is continued.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from vlarl.assets import hub, record, store
from vlarl.assets.download_plan import (
    UNFINISHED,
    Plan,
    check_space,
    part_of,
    refuse_unreachable,
)
from vlarl.assets.record import HubFile, Record
from vlarl.errors import CorruptFile, DownloadFailed

_WORKERS = 4


def download(
    plan: Plan,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Carry a plan out. True when the asset is in place, False when stopped before.

    on_bytes: gets the number of bytes that came, from several threads. should_stop: is asked often;
    what has come by then is kept, and continued by the next plan.

    Raises:
        DownloadFailed: the hub failed repeatedly, or sent what does not have the promised hash.
        MissingError: a token is needed, or the disk is full. OSError: the disk's errors.
    """
    if plan.is_complete:
        return True
    refuse_unreachable([plan])
    assert plan.commit is not None
    plan.folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(plan.folder.parent / f".{plan.folder.name}.lock"):
        if not plan.force and _was_completed_meanwhile(plan):
            return True
        check_space([plan])
        draft = store.draft_of(plan.folder)
        if not draft.exists() and not plan.force and plan.folder.exists():
            plan.folder.rename(draft)
        draft.mkdir(exist_ok=True)
        files = {f.path: f.hub for f in plan.files if f.hub is not None}
        _prepare(draft, Record(repo=plan.asset.repo, commit=plan.commit, files=files))
        if not _fetch_all(plan, draft, on_bytes, should_stop):
            return False
        _put_in_place(draft, plan.folder)
    return True


def _was_completed_meanwhile(plan: Plan) -> bool:
    """Whether another process did it while this one waited for the lock."""
    note = record.read(plan.folder)
    return note is not None and note.commit == plan.commit and not note.damaged(plan.folder)


def _prepare(draft: Path, wanted: Record) -> None:
    """Remove what an earlier attempt fetched of another commit; note what is wanted now."""
    try:
        before = record.read(draft)
    except CorruptFile:
        before = None
    stale = {draft / path for path in before.files} if before is not None else set()
    stale -= {draft / path for path in wanted.files}
    parts = {part_of(draft / path, file) for path, file in wanted.files.items()}
    stale |= set(draft.rglob(f".*{UNFINISHED}")) - parts
    for path in stale:
        path.unlink(missing_ok=True)
    record.write(draft, wanted)


def _fetch_all(
    plan: Plan, draft: Path, on_bytes: Callable[[int], None], should_stop: Callable[[], bool]
) -> bool:
    """Fetch what is missing, several files at once. False when stopped."""
    failed = threading.Event()

    def count(num_bytes: int) -> None:
        if failed.is_set() or should_stop():
            raise _Stopped
        on_bytes(num_bytes)

    with ThreadPoolExecutor(_WORKERS) as pool:
        futures = [
            pool.submit(_fetch, plan, file.path, file.hub, draft, count)
            for file in plan.files
            if file.hub is not None and not file.is_here
        ]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed.set()
        for future in futures:
            future.cancel()
    errors = [e for f in futures if not f.cancelled() and (e := f.exception()) is not None]
    for error in errors:
        if not isinstance(error, _Stopped):
            raise error
    return not errors


class _Stopped(Exception):
    """Ends a transfer that is not wanted any more."""


def _fetch(
    plan: Plan, path: str, file: HubFile, draft: Path, on_bytes: Callable[[int], None]
) -> None:
    """One file, from where it stopped, verified, under its final name in the draft."""
    repo, commit = plan.asset.repo, plan.commit or ""
    on_bytes(0)
    target = draft / path
    target.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(target, file)
    if (record.size_of(part) or 0) > file.size:
        part.unlink()
    trials = len(hub.WAITS_S) + 1
    for trial in range(trials):
        try:
            hub.append(repo, commit, path, part, size=file.size, on_bytes=on_bytes)
        except (hub.Interrupted, hub.Unreachable) as error:
            if trial == trials - 1:
                raise DownloadFailed(
                    f"{error}; gave up after {trials} attempts, the same command continues"
                ) from None
            time.sleep(hub.WAITS_S[trial])
            continue
        if file.matches(part):
            part.replace(target)
            return
        part.unlink()
        on_bytes(-file.size)
        if trial == 1:
            break
    raise DownloadFailed(
        f"{path} of {repo} arrived twice without the hash the hub states "
        f"({file.sha256 or file.git_sha1}); is there a proxy that changes files?"
    )


def _put_in_place(draft: Path, folder: Path) -> None:
    """Give a complete folder its name; what had it before goes away afterwards."""
    if not folder.exists() and not folder.is_symlink():
        draft.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old")
    folder.rename(old)
    draft.rename(folder)
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old)
