"""A folder of trajectories: a `.npy` file per episode and `dataset.json`, which says what they are.

Torch-free. Files are only added: nothing is overwritten, an interrupted collection is continued.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from vlarl.atomic import new_file
from vlarl.config.explain import first_problem
from vlarl.episode import Episode
from vlarl.errors import AssetMissing, ConfigError, CorruptFile, SpecMismatch
from vlarl.specs import EnvSpec
from vlarl.trajectories import Trajectory, read_trajectory, write_trajectory

INDEX = "dataset.json"
_FLUSH_S = 2.0


class EntryKey(NamedTuple):
    """Identity of an episode in a data set."""

    task: str
    trial: int
    repeat: int

    @classmethod
    def of(cls, episode: Episode) -> EntryKey:
        """The key of a planned episode."""
        return cls(episode.task, episode.trial, episode.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One finished episode. file: its name in the folder; None when it was not kept."""

    task: str
    trial: int
    repeat: int
    success: bool
    num_steps: int
    file: str | None

    @property
    def key(self) -> EntryKey:
        """(task, trial, repeat)."""
        return EntryKey(self.task, self.trial, self.repeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How the episodes of a data set came about.

    env: the env's section as JSON values. spec: what that env offers. teacher: "expert" or the
    checkpoint. noise: standard deviation of the action noise, in action units. temperature: of a
    policy's sampling. seed: root of the noise. split: whose trials. keep_failures: failed episodes
    have files, too. versions: of the packages that matter.
    """

    env: Mapping[str, Any]
    spec: EnvSpec
    teacher: str
    noise: float
    temperature: float
    seed: int
    split: str
    keep_failures: bool
    versions: Mapping[str, str]

    def differences(self, other: Origin) -> list[str]:
        """What must agree before episodes of both may lie in one folder and does not.

        Tasks and number of slots may differ: they say which episodes, not what an episode is.
        """
        mine, theirs = _identity(self), _identity(other)
        return [
            f"{name}: {mine.get(name)!r} here, {theirs.get(name)!r} asked for"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]


def _identity(origin: Origin) -> dict[str, Any]:
    free = {"num_slots", "suite", "tasks", "train_trials", "eval_trials", "worker_models"}
    env = {f"env.{k}": v for k, v in _json(origin.env).items() if k not in free}
    rest = ("teacher", "noise", "temperature", "seed", "split", "keep_failures")
    return env | {name: getattr(origin, name) for name in rest}


class _Document(BaseModel):
    """`dataset.json` as it must be."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    format: Literal["vlarl-trajectories"] = "vlarl-trajectories"
    version: Literal[1] = 1
    counts: dict[str, int]
    origin: Origin
    episodes: tuple[Entry, ...]


class DataSet:
    """The episodes in a folder. Make one with `create` or `open_`.

    origin: how they came about. entries: by key, in order of arrival.
    """

    def __init__(self, folder: Path, origin: Origin, entries: Mapping[EntryKey, Entry]) -> None:
        self.folder = folder
        self.origin = origin
        self._entries = dict(entries)
        self._saved = time.monotonic()

    @property
    def entries(self) -> list[Entry]:
        """All finished episodes, those that were not kept included."""
        return list(self._entries.values())

    @property
    def kept(self) -> list[Entry]:
        """Episodes with a file."""
        return [entry for entry in self.entries if entry.file is not None]

    def __contains__(self, key: EntryKey) -> bool:
        return key in self._entries

    def add(self, trajectory: Trajectory, repeat: int = 0) -> Entry:
        """Write one episode, unless it failed and failures are not kept.

        `dataset.json` follows within seconds; call `flush` at the end.
        """
        keep = trajectory.success or self.origin.keep_failures
        key = EntryKey(trajectory.task, trajectory.trial, repeat)
        name = file_name(key)
        if keep:
            write_trajectory(trajectory, self.folder / name)
        entry = _entry(trajectory, repeat, name if keep else None)
        self._entries[key] = entry
        if time.monotonic() - self._saved > _FLUSH_S:
            self.flush()
        return entry

    def flush(self) -> None:
        """Write `dataset.json`."""
        document = _Document(
            counts={
                "episodes": len(self.kept),
                "successes": sum(entry.success for entry in self.kept),
                "steps": sum(entry.num_steps for entry in self.kept),
            },
            origin=self.origin,
            episodes=tuple(self.entries),
        )
        with new_file(self.folder / INDEX, overwrite=True) as temporary:
            temporary.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
        self._saved = time.monotonic()

    def read(self) -> Iterator[Trajectory]:
        """The kept episodes, one after another.

        Raises:
            AssetMissing, CorruptFile: as `read_trajectory`.
        """
        for entry in self.kept:
            assert entry.file is not None
            trajectory = read_trajectory(self.folder / entry.file)
            if _entry(trajectory, entry.repeat, entry.file) != entry:
                raise CorruptFile(
                    f"{self.folder / entry.file} is another episode than {INDEX} says; "
                    f"collect into a new folder"
                )
            yield trajectory

    def check_files(self) -> None:
        """Raise AssetMissing when the file of a kept episode is not there. Reads none."""
        lost = [str(e.file) for e in self.kept if not (self.folder / str(e.file)).is_file()]
        if lost:
            raise AssetMissing(
                f"{self.folder} lacks {len(lost)} of {len(self.kept)} episodes that its {INDEX} "
                f"names, the first is {lost[0]}; collect into a new folder",
                fix="vlarl collect --suite SUITE --to NEW_FOLDER",
            )

    def check_matches(self, spec: EnvSpec) -> None:
        """Raise SpecMismatch when these episodes are not from such an env."""
        own = self.origin.spec
        problems = [
            f"{what} is {mine!r}, but {theirs!r} is needed"
            for what, mine, theirs in (
                ("env", own.name, spec.name),
                ("action", own.action, spec.action),
                ("state", own.state_format, spec.state_format),
            )
            if mine != theirs
        ]
        if problems:
            raise SpecMismatch("\n".join(f"data set {self.folder}: {p}" for p in problems))


def exists(folder: Path) -> bool:
    """Whether there is a data set in this folder."""
    return (folder / INDEX).is_file()


def check_usable(folder: Path, origin: Origin) -> None:
    """Whether episodes of this origin may be added to `folder`; writes nothing.

    Raises:
        ConfigError: the folder is in use for something else, or its origin differs; every
            difference is listed.
    """
    if exists(folder):
        problems = open_(folder).origin.differences(origin)
        if problems:
            raise ConfigError(
                f"{folder} holds episodes of another kind ({'; '.join(problems)}); "
                f"choose another folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is in use and has no {INDEX}; choose another folder")


def create(folder: Path, origin: Origin) -> DataSet:
    """A data set to add to: a new one, or the one in `folder` when it has the same origin.

    Episodes whose file is there but which `dataset.json` does not know yet, because the collection
    was killed, are taken in.

    Raises:
        ConfigError: as `check_usable`.
    """
    check_usable(folder, origin)
    found = open_(folder).entries if exists(folder) else []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make {folder}: {error.strerror}; choose another folder"
        ) from None
    data = DataSet(folder, origin, {entry.key: entry for entry in found})
    _take_in(data)
    data.flush()
    return data


def open_(folder: Path) -> DataSet:
    """The data set in a folder.

    Raises:
        AssetMissing: there is none.
        CorruptFile: `dataset.json` is damaged or of another version.
    """
    path = folder / INDEX
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise AssetMissing(
            f"no data set in {folder}: there is no {INDEX}",
            fix=f"vlarl collect --suite SUITE --to {folder}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFile(f"cannot read {path}: {error}") from None
    try:
        document = _Document.model_validate_json(text)
    except ValidationError as error:
        raise CorruptFile(f"{path}: {first_problem(error)}; collect into a new folder") from None
    return DataSet(folder, document.origin, {entry.key: entry for entry in document.episodes})


def file_name(key: EntryKey) -> str:
    """E.g. `button-press-v3_trial_0017.npy`; repeats after the first end in `_repeat_1`."""
    task = re.sub(r"[^A-Za-z0-9.-]+", "-", key.task)
    repeat = f"_repeat_{key.repeat}" if key.repeat else ""
    return f"{task}_trial_{key.trial:04d}{repeat}.npy"


def _take_in(data: DataSet) -> None:
    known = {entry.file for entry in data.entries}
    for path in sorted(data.folder.glob("[!.]*.npy")):
        if path.name in known:
            continue
        trajectory = read_trajectory(path)
        match = re.search(r"_repeat_(\d+)\.npy$", path.name)
        repeat = int(match.group(1)) if match else 0
        key = EntryKey(trajectory.task, trajectory.trial, repeat)
        if path.name != file_name(key):
            raise ConfigError(f"{path} is no episode of this data set; move it elsewhere")
        data._entries[key] = _entry(trajectory, repeat, path.name)


def _entry(trajectory: Trajectory, repeat: int, file: str | None) -> Entry:
    return Entry(
        task=trajectory.task,
        trial=trajectory.trial,
        repeat=repeat,
        success=trajectory.success,
        num_steps=len(trajectory),
        file=file,
    )


def _json(values: Any) -> Any:
    """As a round trip through a file would leave them: tuples are lists."""
    return json.loads(json.dumps(values))
