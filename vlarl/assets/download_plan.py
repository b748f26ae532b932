"""What there is to do to have an asset, file by file. Torch-free; writes nothing."""

from __future__ import annotations

import fnmatch
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlarl.assets import hub, manifest, record, store
from vlarl.assets.manifest import Asset
from vlarl.assets.record import HubFile, Record
from vlarl.assets.sizes import readable
from vlarl.atomic import check_writable
from vlarl.errors import AssetMissing, ConfigError, DownloadFailed, MissingError

UNFINISHED = ".part"
"""End of the name of a file that has not come whole."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One line of a plan.

    path: in the folder; a pattern when the hub was not asked. size: bytes, None when not known.
    have: bytes that are here already. is_here: all of it is, verified. hub: size and hash, when the
    hub was asked.
    """

    path: str
    size: int | None
    have: int = 0
    is_here: bool = False
    hub: HubFile | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to do for one asset.

    commit: None when the hub was not asked. unreachable: why it could not be asked; the files are
    then what the manifest knows. is_complete: the folder is in place and verified. force, revision:
    as asked for.
    """

    asset: Asset
    folder: Path
    commit: str | None
    files: tuple[PlannedFile, ...]
    is_complete: bool = False
    unreachable: str | None = None
    force: bool = False
    revision: str | None = None

    @property
    def num_bytes(self) -> int | None:
        """Size of the asset; None when a part is not known."""
        return manifest.total(file.size for file in self.files)

    @property
    def bytes_to_fetch(self) -> int | None:
        """What is still to come; None when a part is not known."""
        if self.is_complete:
            return 0
        return manifest.total(None if f.size is None else f.size - f.have for f in self.files)


def require(names: Sequence[str]) -> None:
    """Raise ConfigError for all names that are not in the manifest."""
    problems = []
    for name in dict.fromkeys(names):
        if name in store.shipped():
            problems.append(f"{name} comes with vlarl; there is nothing to download")
            continue
        try:
            manifest.get(name)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def plan(
    name: str, *, to: Path | None = None, revision: str | None = None, force: bool = False
) -> Plan:
    """What `download` would do for an asset; writes nothing. Reads and hashes what is here.

    to: the folder that holds the asset's folder; default `store.home()`. revision: other than the
    manifest's. force: fetch all of it again. When the hub cannot be reached, the plan says so.

    Raises:
        ConfigError: no such asset or revision, or the folder holds something else.
        MissingError: the hub wants a token. DownloadFailed: it refuses for another reason.
    """
    asset = manifest.get(name)
    folder = (store.home() if to is None else to.expanduser()) / name
    _refuse_unusable(folder)
    note = None if force else record.read(folder)
    asked = revision
    if note is not None:
        if revision not in (None, note.commit):
            raise ConfigError(
                f"{folder} holds commit {note.commit}, not '{revision}'; --force replaces it, "
                "--to DIR puts the other one elsewhere"
            )
        if not note.damaged(folder):
            return _of_folder(asset, folder, note)
        revision = note.commit
    base = store.draft_of(folder) if force or store.draft_of(folder).exists() else folder
    why = None
    try:
        found = _listing(asset, revision)
    except hub.Unreachable as error:
        why = str(error)
        if note is None:
            files = _of_manifest(asset, base)
            return Plan(asset, folder, None, files, unreachable=why, force=force, revision=asked)
        found = hub.Listing(note.commit, dict(note.files))
    if note is None and not force:
        _refuse_foreign(folder, found)
    files = tuple(_planned(base, path, file) for path, file in sorted(found.files.items()))
    return Plan(asset, folder, found.commit, files, unreachable=why, force=force, revision=asked)


def check_space(plans: Sequence[Plan]) -> tuple[int, int]:
    """(bytes to fetch, bytes free) where the plans write. Sizes that are not known count nothing.

    Raises MissingError, with both numbers, when it does not fit.
    """
    needed = sum(p.bytes_to_fetch or 0 for p in plans)
    parent = plans[0].folder.parent.absolute()
    existing = next(p for p in (parent, *parent.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        names = " ".join(p.asset.name for p in plans if not p.is_complete)
        raise MissingError(
            f"{names} needs {readable(needed)} but {existing} has {readable(free)} free",
            fix=_command(plans, to="/a/larger/disk"),
        )
    return needed, free


def refuse_unreachable(plans: Sequence[Plan]) -> None:
    """Raise AssetMissing, with what is missing, when the hub could not be asked for a plan."""
    lost = [p for p in plans if p.unreachable is not None]
    if not lost:
        return
    lines = [f"cannot download: {lost[0].unreachable}"]
    for p in lost:
        missing = [f.path for f in p.files if not f.is_here]
        what = ", ".join(missing) or "nothing that the manifest names, but it cannot be verified"
        lines.append(f"missing of {p.asset.name}: {what}")
    offline = "HF_HUB_OFFLINE=0 " if "HF_HUB_OFFLINE" in lines[0] else ""
    raise AssetMissing("\n".join(lines), fix=f"{offline}{_command(plans)}")


def _command(plans: Sequence[Plan], to: str | None = None) -> str:
    """The line that carries these plans out. to: another place than theirs."""
    parent = plans[0].folder.parent
    if to is None and parent != store.home():
        to = shlex.quote(str(parent))
    words = ["vlarl download", *(p.asset.name for p in plans if not p.is_complete)]
    words += [f"--to {to}"] if to else []
    words += [f"--revision {shlex.quote(plans[0].revision)}"] if plans[0].revision else []
    words += ["--force"] if plans[0].force else []
    return " ".join(words)


def part_of(path: Path, file: HubFile) -> Path:
    """The unfinished file; its name holds the hash, so that no two versions are mixed."""
    return path.with_name(f".{path.name}.{(file.sha256 or file.git_sha1 or '')[:12]}{UNFINISHED}")


def _listing(asset: Asset, revision: str | None) -> hub.Listing:
    """The wanted files of an asset's repository. Raises DownloadFailed when one is not there."""
    try:
        found = _patiently(lambda: hub.listing(asset.repo, revision or asset.revision), hub.WAITS_S)
    except hub.NoRevision as error:
        if revision is None:
            raise
        raise ConfigError(str(error)) from None
    files = {path: file for path, file in found.files.items() if asset.wants(path)}
    absent = asset.lacking({path: file.size for path, file in files.items()})
    absent += [
        f"{path} with the hash {file.sha256}"
        for file in asset.files
        for path in fnmatch.filter(files, file.pattern)
        if file.sha256 not in (None, files[path].sha256)
    ]
    if absent:
        raise DownloadFailed(
            f"{asset.repo} at {found.commit} is not what the manifest expects: "
            f"no {', no '.join(absent)}"
        )
    return hub.Listing(found.commit, files)


def _patiently(request: Callable[[], hub.Listing], pauses: Sequence[float]) -> hub.Listing:
    """Send a request again while the hub fails in a way that may pass."""
    try:
        return request()
    except hub.Interrupted as error:
        if not pauses:
            raise DownloadFailed(
                f"{error}; gave up after {len(hub.WAITS_S) + 1} attempts"
            ) from None
    time.sleep(pauses[0])
    return _patiently(request, pauses[1:])


def _of_folder(asset: Asset, folder: Path, note: Record) -> Plan:
    files = tuple(PlannedFile(p, f.size, f.size, True, f) for p, f in sorted(note.files.items()))
    return Plan(asset, folder, note.commit, files, is_complete=True)


def _of_manifest(asset: Asset, base: Path) -> tuple[PlannedFile, ...]:
    """What is known without the hub; what is here counts unverified."""
    sizes = record.sizes_in(base)
    files = []
    for file in asset.files:
        lacking = file.lacking(sizes)
        have = (file.bytes or 0) if lacking is None else 0
        files.append(PlannedFile(lacking or file.label, file.bytes, have, lacking is None))
    return tuple(files)


def _refuse_unusable(folder: Path) -> None:
    """Raise ConfigError when there can be no such folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; remove it, or choose another place by --to DIR")
    check_writable(folder.with_name(f".{folder.name}.lock"), overwrite=True)


def _refuse_foreign(folder: Path, found: hub.Listing) -> None:
    """Files of somebody else are not replaced; those that are the hub's own may stay."""
    if not folder.exists():
        return
    replaced = "--force replaces it, --to DIR downloads elsewhere"
    if store.draft_of(folder).exists():
        raise ConfigError(
            f"{folder} was not made by `vlarl download`, and a download of it was interrupted "
            f"before; {replaced}"
        )
    other = [
        path
        for path, file in found.files.items()
        if (folder / path).exists() and not file.matches(folder / path)
    ]
    if other:
        raise ConfigError(
            f"{folder} was not made by `vlarl download` and differs from the hub in "
            f"{', '.join(sorted(other))}; {replaced}"
        )


def _planned(base: Path, path: str, file: HubFile) -> PlannedFile:
    if file.matches(base / path):
        return PlannedFile(path, file.size, file.size, True, file)
    part = record.size_of(part_of(base / path, file)) or 0
    return PlannedFile(path, file.size, part if part <= file.size else 0, False, file)
