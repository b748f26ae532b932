"""The folder of a run: layout, who may write into it, and the small files other programs read.

RUN_DIR/
├── config.json            the resolved configuration with provenance
├── env.json               versions of everything that matters
├── command.txt            the command lines that started and resumed the run
├── metrics.jsonl          one line per iteration (vlarl.metrics)
├── status.json            what the run is doing right now, replaced atomically
├── logs/                  rank_N.log, rank_N.exit.json, launcher.log
├── ckpt/step_000100/      checkpoints (vlarl.distributed.checkpoint); `*.tmp` is never complete
├── eval/*.json            evaluation results
├── video/*.mp4
└── tensorboard/, wandb/, swanlog/

Torch-free, so the command line can look at a run without loading torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shlex
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vlarl.atomic import write_atomic
from vlarl.errors import ConfigError, CorruptFile, MissingError, VlarlError
from vlarl.signals import INTERRUPTED

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Written last into a checkpoint: a folder without it is not a checkpoint."""

_FILES = ("env.json", "command.txt", "metrics.jsonl", "status.json", "config.json")
_FOLDERS = ("logs", "ckpt", "eval", "video", "tensorboard", "wandb", "swanlog")

Phase = Literal[
    "starting", "rollout", "update", "evaluate", "save", "done", "interrupted", "failed"
]


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Makes nothing on disk by itself."""

    path: Path

    @property
    def config(self) -> Path:
        """config.json."""
        return self.path / "config.json"

    @property
    def env(self) -> Path:
        """env.json."""
        return self.path / "env.json"

    @property
    def command(self) -> Path:
        """command.txt."""
        return self.path / "command.txt"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def status(self) -> Path:
        """status.json."""
        return self.path / "status.json"

    @property
    def lock(self) -> Path:
        """The file that whoever writes into the run holds."""
        return self.path / ".lock"

    @property
    def logs(self) -> Path:
        """Folder of the logs of all ranks."""
        return self.path / "logs"

    @property
    def ckpt(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "ckpt"

    @property
    def eval(self) -> Path:
        """Folder of evaluation results."""
        return self.path / "eval"

    @property
    def video(self) -> Path:
        """Folder of videos."""
        return self.path / "video"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard event files."""
        return self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        """Everything rank `rank` said, on stdout and on stderr."""
        return self.logs / f"rank_{rank}.log"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` iterations is or would be."""
        return self.ckpt / f"step_{step:06d}"


def create(path: Path, *, resume: bool = False, overwrite: bool = False) -> RunDir:
    """A run folder that is ready to be written into.

    A new or empty folder is filled with the sub-folders. A folder that is in use is refused unless
    `resume` (keeps everything) or `overwrite` (deletes the files and folders named in the layout
    above, nothing else, and only from a folder with the config.json of a run, or a damaged one
    beside the command.txt of a run). Raises ConfigError otherwise, when another process is writing
    into the run, and when the folder cannot be made.
    """
    run = check(path, resume=resume, overwrite=overwrite)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        with RunLock(run):
            if overwrite and _is_run(run):
                _clear(run)
            for folder in (run.logs, run.ckpt, run.eval, run.video):
                folder.mkdir(exist_ok=True)
    except OSError as error:
        where = "" if error.filename in (None, str(run.path)) else f" ({error.filename})"
        raise ConfigError(
            f"cannot write into run directory {run.path}: {error.strerror}{where}; "
            "choose another with --run-dir, or set VLARL_RUNS"
        ) from None
    return run


def check(path: Path, *, resume: bool = False, overwrite: bool = False) -> RunDir:
    """What `create` refuses, without touching anything. Raises ConfigError."""
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one of them")
    run = RunDir(path.expanduser().absolute())
    unusable = _unusable(run.path)
    if unusable is not None:
        raise ConfigError(f"run directory {run.path} {unusable}; choose another with --run-dir")
    folder = next(p for p in (run.path, *run.path.parents) if p.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        why = "no permission to write in" if folder.is_dir() else "there is a file"
        raise ConfigError(
            f"cannot write into run directory {run.path}: {why} {folder}; "
            "choose another with --run-dir, or set VLARL_RUNS"
        )
    used = run.path.is_dir() and any(entry != run.lock for entry in run.path.iterdir())
    if resume and not run.config.is_file():
        raise ConfigError(
            f"nothing to resume: {run.path} holds no config.json; leave out --resume to start it"
        )
    if used and not (resume or overwrite):
        raise ConfigError(
            f"run directory {run.path} is not empty{_progress(run)}; "
            "continue it with --resume, replace it with --overwrite, or choose another --run-dir"
        )
    if used and overwrite and not _is_run(run):
        raise ConfigError(
            f"--overwrite refused: {run.path} does not look like a run (no config.json of "
            "`vlarl train`); choose another --run-dir"
        )
    return run


def _unusable(path: Path) -> str | None:
    """Why there can be no folder of that name, None when there can."""
    try:
        if path.is_symlink() and not path.exists():
            return f"is a link to {path.readlink()}, which is not there"
        return "is a file" if path.exists() and not path.is_dir() else None
    except OSError as error:  # e.g. a name that is too long
        return f"cannot be: {error.strerror}"


def _is_run(run: RunDir) -> bool:
    """Whether config.json is a run's: checkpoints have a file of that name, too.

    Where it is damaged, command.txt tells: nobody else writes command lines of ours there.
    """
    try:
        content = json.loads(run.config.read_text(encoding="utf-8"))
    except OSError:
        return False
    except ValueError:
        content = None
    is_ours = isinstance(content, dict) and {"config", "sources"} <= content.keys()
    return is_ours or _was_started_by_us(run)


def _was_started_by_us(run: RunDir) -> bool:
    try:
        with run.command.open(encoding="utf-8") as file:
            words = shlex.split(file.readline())
    except (OSError, ValueError):
        return False
    return words[:2] == ["vlarl", "train"]


def _progress(run: RunDir) -> str:
    done = checkpoints(run)
    return f" (its latest checkpoint is {done[-1].name})" if done else ""


def _clear(run: RunDir) -> None:
    # config.json goes last: were the deletion cut short, the folder still looks like a run.
    for name in _FOLDERS:
        if (run.path / name).is_dir():
            shutil.rmtree(run.path / name)
    for name in _FILES:
        (run.path / name).unlink(missing_ok=True)


class RunLock:
    """The right to write into a run, for one process on this machine.

    Held until `release` or the end of the process, however it ends: the kernel drops an flock with
    its file. Raises ConfigError naming the holder when somebody else has it. A file system without
    locks (some network mounts) is accepted with a warning.
    """

    def __init__(self, run: RunDir) -> None:
        self._file = open(run.lock, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._holder()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._file.close()
                raise ConfigError(
                    f"run directory {run.path} is being written by {holder}; "
                    "wait for it, stop it, or choose another --run-dir"
                ) from None
            log.warning("%s: this file system has no locks (%s)", run.path, error)
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def _holder(self) -> str:
        self._file.seek(0)
        return self._file.read().strip() or "another process"

    def release(self) -> None:
        """Let others in. Safe to call twice."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises CorruptFile naming it when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path}: not valid JSON ({error}); the file is damaged") from None


# --- checkpoints, as far as they can be judged without torch -------------------------------------


def checkpoint_step(folder: Path) -> int | None:
    """100 for a folder named step_000100; None for any other name, `step_000100.tmp` included."""
    prefix, _, digits = folder.name.partition("_")
    return int(digits) if prefix == "step" and digits.isdecimal() else None


def checkpoints(run: RunDir) -> list[Path]:
    """All complete checkpoints of a run, oldest first. Half-written ones are left out."""
    if not run.ckpt.is_dir():
        return []
    found = [
        (step, folder)
        for folder in run.ckpt.iterdir()
        if (step := checkpoint_step(folder)) is not None and (folder / MANIFEST).is_file()
    ]
    return [folder for _, folder in sorted(found)]


def latest_checkpoint(run: RunDir) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = checkpoints(run)
    return found[-1] if found else None


def find_checkpoint(run: RunDir, which: str | None) -> Path:
    """The checkpoint that `--resume-from` names: a step, a folder, or the newest one for None.

    Raises ConfigError listing the complete checkpoints when there is no such one.
    """
    found = {str(checkpoint_step(folder)): folder for folder in checkpoints(run)}
    if which is None and found:
        return list(found.values())[-1]
    if which in found:
        return found[which]
    if which is not None and (Path(which) / MANIFEST).is_file():
        return Path(which).absolute()
    there = f"there are those of steps {', '.join(found)}" if found else "there is none yet"
    wanted = "no complete checkpoint" if which is None else f"no checkpoint '{which}'"
    raise ConfigError(f"{wanted} in {run.ckpt}; {there}")


def drop_after(run: RunDir, step: int) -> None:
    """Delete the checkpoints after `step`, so that a resume goes on from there. Hold the lock."""
    for folder in checkpoints(run):
        if (checkpoint_step(folder) or 0) > step:
            log.info("dropping %s: the run goes on from step %d", folder, step)
            remove_checkpoint(folder)


def remove_checkpoint(folder: Path) -> None:
    """Delete one checkpoint; cut short, it leaves nothing that looks complete."""
    doomed = folder.with_name(folder.name + ".tmp")
    folder.rename(doomed)
    shutil.rmtree(doomed)


# --- what the run is doing right now -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a live view shows besides the metrics.

    step: finished iterations. done of total: episodes in `rollout` and `evaluate`, optimizer steps
    in `update`; 0 of 0 when unknown. updated: Unix time in seconds. message: why, when
    `failed`.
    """

    phase: Phase
    step: int
    max_steps: int
    done: int = 0
    total: int = 0
    message: str = ""
    updated: float = 0.0


def write_status(run: RunDir, status: Status) -> None:
    """Publish what the run is doing. Rank 0 only; takes about 0.1 ms, so call it freely.

    Never ends a run: when the file cannot be written the view is stale and a warning says so.
    """
    content = {**asdict(status), "updated": time.time()}
    try:
        write_atomic(run.status, json.dumps(content), durable=False)
    except OSError as error:
        log.warning("cannot write %s: %s", run.status, error)


def read_status(run: RunDir) -> Status | None:
    """The last published status; None before the first one, or when something spoiled the file."""
    try:
        return Status(**json.loads(run.status.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # it only serves views, and comes anew
        return None


# --- how a rank ended ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How a rank ended. code: its exit code. kind: class name of the error, "" without one.

    fix: the command that helps, "" without one. time: Unix time in seconds.
    """

    rank: int
    code: int
    kind: str = ""
    message: str = ""
    fix: str = ""
    time: float = 0.0

    @staticmethod
    def of(rank: int, error: Exception) -> RankExit:
        """The end of a rank by an error: with its exit code, or 1 when it is none of ours."""
        return RankExit(
            rank=rank,
            code=error.exit_code if isinstance(error, VlarlError) else 1,
            kind=type(error).__name__,
            message=str(error),
            fix=error.fix if isinstance(error, MissingError) else "",
        )

    @staticmethod
    def interrupted(rank: int) -> RankExit:
        """The end of a rank that stopped because it was asked to."""
        return RankExit(rank=rank, code=INTERRUPTED, kind="Stopped", message="interrupted")


def write_exit(run: RunDir, end: RankExit) -> None:
    """Leave a note for the launcher; the last thing a rank does."""
    content = json.dumps({**asdict(end), "time": time.time()})
    write_atomic(run.logs / f"rank_{end.rank}.exit.json", content, durable=False)


def read_exits(run: RunDir) -> list[RankExit]:
    """The notes of all ranks that left one, the earliest first."""
    notes = [RankExit(**read_json(path)) for path in run.logs.glob("rank_*.exit.json")]
    return sorted(notes, key=lambda note: note.time)


def clear_exits(run: RunDir) -> None:
    """Forget the notes of an earlier start."""
    for path in run.logs.glob("rank_*.exit.json"):
        path.unlink(missing_ok=True)


def append_command(run: RunDir, argv: Sequence[str]) -> None:
    """Add one line to command.txt, quoted so that a shell takes it back."""
    with open(run.command, "a", encoding="utf-8") as file:
        file.write(shlex.join(argv) + "\n")
