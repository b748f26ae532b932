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

from vlarl.comparison import merge
from vlarl.errors import ConfigError, CorruptFile, VlarlError
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
    with _journal(work, rank).open("w", encoding="utf-8") as lines:

        def note(episode: EpisodeResult) -> None:
            lines.write(json.dumps(asdict(episode)) + "\n")
            lines.flush()

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
    overwritten, when there is nothing to resume, and when an evaluation for `out` is under way.
    """
    if work_dir(out).path.is_dir():
        _lock(out).release()
    left = recover(out) if resume or not overwrite else None
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


def keep(out: Path) -> EvalResult | None:
    """Put what was played so far in the partial file; None when there is nothing."""
    found = recover(out)
    if found is not None:
        found.save(partial_file(out), overwrite=True)
        for path in work_dir(out).logs.glob(_JOURNALS):
            path.unlink()
    return found


@contextmanager
def kept(
    out: Path, before: EvalResult | None, on_failure: Callable[[EvalResult], None]
) -> Generator[None]:
    """Around an evaluation: makes the work folder, and removes it after success.

    before: what it goes on with; without it, what was left is dropped. After an exception what was
    played is in the partial file, as far as the disk has room for it, on_failure is called with it,
    and the logs stay.
    """
    work = work_dir(out)
    work.logs.mkdir(parents=True, exist_ok=True)
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
                found = keep(out)
                if found is not None:
                    on_failure(found)
            if not any(work.logs.iterdir()):
                _remove(work)
            raise
        _remove(work)


def _lock(out: Path) -> RunLock:
    """The right to play for `out`. Raises ConfigError when another process has it."""
    try:
        return RunLock(work_dir(out))
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
    """Remove the work folder, unless there are somebody else's files in it."""
    _clear(work)
    work.lock.unlink(missing_ok=True)
    with suppress(OSError):
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
        raise CorruptFile(f"{path}: {error.errors()[0]['msg']}") from None
