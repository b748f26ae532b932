"""Names of envs, policies and algorithms -> the module that holds the plug-in.

Nothing is imported until asked.

A plug-in module offers:
  env        `Config` (an EnvSection), `make(cfg, *, num_slots, final_frames) -> VecEnv`,
             `spec(cfg) -> EnvSpec` (cheap: no simulator process, no rendering),
             `trials(cfg, split) -> dict[str, tuple[int, ...]]` (task -> trial ids; split "train" or
             "eval"; they share initial states only with EnvSpec.share_trials),
             `suites() -> tuple[str, ...]`, `instruction(task) -> str`,
             `groups(cfg) -> dict[str, tuple[str, ...]]` (name -> tasks, for averages in results;
             may be empty), and, where there is a scripted expert,
             `demonstrate(cfg, episodes, *, noise_std, seed) -> Iterator[Trajectory]`; for
             estimates, `worker_bytes(cfg) -> int` (memory of one simulator process), and, where it
             needs a driver or a device, `require_device(cfg)` (raises DeviceMissing, cheaply)
  policy     `Config` (a PolicySection), `spec(cfg) -> PolicySpec` (reads small files only) and
             `load(cfg, *, device, needs_value, train) -> Policy`, `check(cfg, *, needs_value,
             train)` (raises what `load` would, from headers alone where weights are large) and
             `recognises(folder) -> bool`; for a dry run without the checkpoint,
             `declared(cfg, *, needs_value, action) -> PolicySpec` (by the config alone) and
             `footprint(cfg, spec, *, compute) -> Footprint`
  algorithm  `Config` (an AlgoSection) and `ALGORITHM`
Third parties register with entry points in the groups vlarl.envs, vlarl.policies and vlarl.algos.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points
from types import ModuleType
from typing import Literal

from vlarl.errors import ConfigError

Kind = Literal["env", "policy", "algo"]
KINDS: tuple[Kind, ...] = ("env", "policy", "algo")

_BUILT_IN: dict[Kind, dict[str, str]] = {
    "env": {"metaworld": "vlarl.envs.metaworld", "libero": "vlarl.envs.libero"},
    "policy": {"openvla_oft": "vlarl.policies.openvla_oft"},
    "algo": {"grpo": "vlarl.algos.grpo", "ppo": "vlarl.algos.ppo"},
}
_GROUP: dict[Kind, str] = {"env": "vlarl.envs", "policy": "vlarl.policies", "algo": "vlarl.algos"}


def names(kind: Kind) -> list[str]:
    """All registered names of a kind, built-in first."""
    found = list(_BUILT_IN[kind])
    return found + sorted(e.name for e in entry_points(group=_GROUP[kind]) if e.name not in found)


def module(kind: Kind, name: str) -> ModuleType:
    """The plug-in module of that name; imports it.

    Raises ConfigError with near names when there is none.
    """
    check_name(kind, name)
    if name in _BUILT_IN[kind]:
        return importlib.import_module(_BUILT_IN[kind][name])
    found = next(e for e in entry_points(group=_GROUP[kind]) if e.name == name)
    return importlib.import_module(found.value)


def check_name(kind: Kind, name: str) -> None:
    """Raise ConfigError with near names when nothing of that kind has the name."""
    if name in names(kind):
        return
    near = difflib.get_close_matches(name, names(kind), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; there are: {', '.join(names(kind))}"
    raise ConfigError(f"{kind}.name: no {kind} named '{name}'{hint}")
