"""What an evaluation has played so far, on disk: nothing is lost, however it ends. Torch-free.

While it plays, OUT.work/ holds `empty.json`, a result file without episodes, and in `logs/` one
JSON line per finished episode from each rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from vlarl.atomic import check_writable
from vlarl.comparison import merge
from vlarl.config.explain import first_problem
from vlarl.errors import ConfigError, CorruptFile, RunFailed, VlarlError
from vlarl.result_file import load
from vlarl.results import EpisodeResult, EvalResult
from vlarl.run_dir import RunDir, RunLock

_EMPTY = "empty.json"
_JOURNALS = "episodes_*.jsonl"
_EPISODE = TypeAdapter(EpisodeResult)


def work_dir(out: Path) -> RunDir:
    """Where the evaluation that will write `out` keeps its journals and logs."""
    return RunDir(out.with_suffix(".work"))


def partial_file(out: Path) -> Path:
    """Where an evaluation that ended early leaves what it has."""
    return out.with_suffix(".partial.json")


def begin(work: RunDir, empty: EvalResult) -> None:
    """Say what is being played: plan, protocol and groups. By one rank."""
    empty.save(work.path / _EMPTY, overwrite=True)


@contextmanager
def writer(work: RunDir, rank: int) -> Generator[Callable[[EpisodeResult], None]]:
    """Appends finished episodes to a rank's journal, each at once."""
    path = _journal(work, rank)
    with path.open("ab", buffering=0) as lines:

        def note(episode: EpisodeResult) -> None:
            line, start = json.dumps(asdict(episode)).encode() + b"\n", lines.tell()
            try:
                while line:
                    line = line[lines.write(line) :]
            except OSError as error:
                lines.truncate(start)  # no half line, whatever comes after it
                raise RunFailed(f"cannot write {path}: {error.strerror}") from None

        yield note


def count(work: RunDir, ranks: int) -> tuple[int, int]:
    """Episodes and successes in the journals so far; cheap enough to ask often."""
    paths = [_journal(work, rank) for rank in range(ranks)]
    lines = b"".join(path.read_bytes() for path in paths if path.exists())
    return lines.count(b"\n"), lines.count(b'"success": true')


def recover(out: Path) -> EvalResult | None:
    """What an evaluation left that did not come to its end: its partial file and its journals.

    None when there is nothing. Raises CorruptFile when they were changed.
    """
    work = work_dir(out)
    parts = [load(partial_file(out))] if partial_file(out).exists() else []
    journals = sorted(work.logs.glob(_JOURNALS))
    episodes = tuple(e for path in journals for e in _read(path))
    if episodes:
        parts.append(replace(load(work.path / _EMPTY), episodes=episodes))
    return merge(parts) if parts else None


def left_over(out: Path, *, resume: bool, overwrite: bool) -> EvalResult | None:
    """What an evaluation is to go on with; None when it starts anew.

    Raises ConfigError when there is something although it is to start anew, unless it may be
    overwritten, when there is nothing to resume, when `out` cannot be written, and when an
    evaluation for it is under way.
    """
    check_writable(out, overwrite=overwrite)
    if work_dir(out).path.is_dir():
        _lock(out).release()
    try:
        left = recover(out) if resume or not overwrite else None
    except VlarlError as error:
        raise CorruptFile(
            f"what a stopped evaluation left for {out} is damaged: {error}; start anew with "
            "--overwrite"
        ) from None
    if resume and left is None:
        raise ConfigError(
            f"--resume: no stopped evaluation left anything for {out}; name its result file with "
            "--out, or leave out --resume"
        )
    if left is not None and not resume:
        raise ConfigError(
            f"an evaluation that was stopped left {len(left.episodes)} of {len(left.plan)} "
            f"episodes for {out}; go on with --resume, or start anew with --overwrite"
        )
    return left


def keep(out: Path) -> tuple[EvalResult, Path] | None:
    """Put what was played so far in the partial file; it and its place, None when there is nothing.

    Without room for that file it stays in the work folder.
    """
    found = recover(out)
    if found is None:
        return None
    try:
        found.save(partial_file(out), overwrite=True)
    except RunFailed:
        return found, work_dir(out).path
    for path in work_dir(out).logs.glob(_JOURNALS):
        path.unlink()
    return found, partial_file(out)


@contextmanager
def kept(
    out: Path, before: EvalResult | None, on_failure: Callable[[EvalResult, Path], None]
) -> Generator[None]:
    """Around an evaluation: makes the work folder, and removes it after success.

    before: what it goes on with; without it, what was left is dropped. After an exception what was
    played is in the partial file, or where there was room for it; on_failure is called with it and
    its place when there is news. The logs stay then.
    """
    work = work_dir(out)
    work.path.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        if before is None:
            partial_file(out).unlink(missing_ok=True)
        else:
            before.save(partial_file(out), overwrite=True)
        _clear(work)
        work.logs.mkdir(parents=True)
        try:
            yield
        # A supervisor: whatever it was, it goes on from here.
        except BaseException:
            with suppress(VlarlError):
                left = keep(out)
                if left is not None and (before is None or left[0].episodes != before.episodes):
                    on_failure(*left)
            for path in work.logs.glob(_JOURNALS):
                if path.stat().st_size == 0:
                    path.unlink()
            if not any(work.logs.iterdir()):
                _remove(work)
            raise
        _remove(work)


def _lock(out: Path) -> RunLock:
    """The right to play for `out`. Raises ConfigError when another process has it, or the work
    folder is somebody else's.
    """
    work = work_dir(out)
    if any(work.path.iterdir()) and not work.lock.exists():
        raise ConfigError(
            f"{work.path} is where the evaluation for {out} would keep what it plays, and somebody "
            "else's files are there; choose another --out"
        )
    try:
        return RunLock(work)
    except ConfigError:
        raise ConfigError(
            f"another evaluation is playing for {out}; wait for it, or choose another --out"
        ) from None


def _clear(work: RunDir) -> None:
    """Remove what an evaluation makes in its work folder, but for its lock."""
    shutil.rmtree(work.logs, ignore_errors=True)
    for path in (work.path / _EMPTY, work.config):
        path.unlink(missing_ok=True)


def _remove(work: RunDir) -> None:
    _clear(work)
    work.lock.unlink(missing_ok=True)
    with suppress(OSError):  # somebody put something there meanwhile
        work.path.rmdir()


def _journal(work: RunDir, rank: int) -> Path:
    return work.logs / _JOURNALS.replace("*", str(rank))


def _read(path: Path) -> list[EpisodeResult]:
    """The whole lines of a journal; the last one may be on its way."""
    if not path.exists():
        return []
    try:
        return [_EPISODE.validate_json(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except ValidationError as error:
        raise CorruptFile(f"{path}: {first_problem(error)}") from None
