"""Episodes of a result file as moving pictures: played again, and checked against the record."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from vlarl import registry, result_file
from vlarl.assets import store
from vlarl.config import resolved
from vlarl.config.explain import validate
from vlarl.config.schema import ComputeSection, EnvSection, PolicySection
from vlarl.distributed.precision import autocast
from vlarl.distributed.world import World
from vlarl.episode import Episode
from vlarl.errors import AssetMissing, ConfigError
from vlarl.evaluate import checkpoint_hash, episode_result, evaluate
from vlarl.results import EpisodeKey, EpisodeResult, EvalResult
from vlarl.rollout.play import Outcome
from vlarl.run_dir import MANIFEST, RunDir
from vlarl.specs import EnvSpec
from vlarl.video import Clip

Only = Literal["all", "failures", "successes"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What will be played again. Nothing heavy is loaded yet.

    episodes: in plan order. num_passing: how many there were to choose from. notes: reasons why the
    outcome may differ, as sentences.
    """

    result: EvalResult
    env: EnvSection
    policy: PolicySection
    env_module: ModuleType
    policy_module: ModuleType
    env_spec: EnvSpec
    episodes: tuple[Episode, ...]
    num_passing: int
    notes: tuple[str, ...]

    @property
    def fps(self) -> float:
        """Frames a second of simulated time."""
        return self.env_spec.control_hz / self.env_spec.video_every


def find_result(source: Path) -> Path:
    """The result file that a path means: itself, or the newest one of a run.

    Raises:
        ConfigError: a run without results. AssetMissing: there is nothing of that name.
    """
    if source.is_file():
        return source
    if not source.exists():
        raise AssetMissing(
            f"there is no run or result file {source}; `vlarl train` makes the one, `vlarl eval` "
            "the other",
            fix="vlarl video --help",
        )
    # Hidden ones are drafts of a result that is being written.
    written = RunDir(source).eval.glob("[!.]*.json")
    found = sorted(written, key=lambda p: (p.stat().st_mtime, p.name))
    if not found:
        raise ConfigError(
            f"{source} has no evaluation results (eval/*.json); make one with `vlarl eval {source}`"
        )
    return found[-1]


def prepare(
    source: Path,
    *,
    episodes: Sequence[int] = (),
    only: Only = "all",
    limit: int = 8,
    num_slots: int | None = None,
) -> Prepared:
    """Read a result file and choose episodes; loads no weights, starts no simulator.

    source: as in `find_result`. episodes: positions in its plan; empty = at most `limit` of those
    that `only` lets through, evenly spread.

    Raises:
        ConfigError: no such episodes, or nothing left to show.
        CorruptFile: the file is damaged. AssetMissing: the checkpoint is gone.
    """
    path = find_result(source)
    result = result_file.load(path)
    passing = _passing(result, episodes, only)
    chosen = _spread(passing, len(passing) if episodes else limit)
    protocol = result.protocol
    env_values, policy_values, _ = (
        _section(protocol, name, path) for name in ("env", "policy", "sampling")
    )
    env_module = registry.module("env", env_values["name"])
    policy_module = registry.module("policy", policy_values["name"])
    folder, notes = _checkpoint(protocol, path)
    env_values = _known(env_module.Config, env_values)
    env_values["num_slots"] = min(num_slots or 8, len(chosen))
    policy_values = _known(policy_module.Config, policy_values) | {"checkpoint": str(folder)}
    env = validate(env_module.Config, env_values)
    return Prepared(
        result=result,
        env=env,
        policy=validate(policy_module.Config, policy_values),
        env_module=env_module,
        policy_module=policy_module,
        env_spec=env_module.spec(env),
        episodes=tuple(_episode(result.plan[i], i) for i in chosen),
        num_passing=len(passing),
        notes=tuple(notes),
    )


def _passing(result: EvalResult, wanted: Sequence[int], only: Only) -> list[int]:
    """Positions, of those wanted or of all that were played, that `only` lets through."""
    outcomes = {e.key: e for e in result.episodes}
    played = [i for i, key in enumerate(result.plan) if key in outcomes]
    unknown = [i for i in wanted if i not in played]
    if unknown:
        raise ConfigError(
            f"--episodes: {', '.join(map(str, unknown))} not among the {len(played)} played "
            f"episodes (0 to {len(result.plan) - 1})"
        )
    passing = {"all": (True, False), "failures": (False,), "successes": (True,)}[only]
    left = [i for i in (wanted or played) if outcomes[result.plan[i]].success in passing]
    if not left:
        raise ConfigError(f"there are no {only} among these {len(wanted or played)} episodes")
    return sorted(left)


def _spread(positions: list[int], limit: int) -> list[int]:
    """At most `limit` of them, evenly spread."""
    n = len(positions)
    if n <= limit:
        return positions
    return [positions[(2 * k + 1) * n // (2 * limit)] for k in range(limit)]


def _episode(key: EpisodeKey, index: int) -> Episode:
    return Episode(task=key.task, trial=key.trial, member=key.repeat, index=index, record=True)


def _section(protocol: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    if name not in protocol:
        raise ConfigError(f"{path} does not say which {name} was used, so it cannot be replayed")
    return dict(protocol[name])


def _known(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the recorded values; the protocol holds derived ones beside them."""
    return {key: value for key, value in values.items() if key in config.model_fields}


def _checkpoint(protocol: Mapping[str, Any], path: Path) -> tuple[Path, list[str]]:
    """Folder of the weights that were measured, and what is doubtful about it."""
    recorded = protocol.get("checkpoint", {})
    if recorded.get("path") is not None:
        folder = store.resolve(recorded["path"])
        if checkpoint_hash(folder) != recorded.get("sha256"):
            return folder, [f"the checkpoint {folder} has changed since the evaluation"]
        return folder, []
    run, step = RunDir(path.resolve().parent.parent), recorded.get("step")
    if not run.config.is_file() or step is None:
        raise ConfigError(
            f"{path} names no checkpoint and lies in no run, so it cannot be replayed"
        )
    if step == 0:
        return store.resolve(resolved.load(run.config).values["policy"]["checkpoint"]), []
    folder = run.checkpoint(step)
    if not (folder / MANIFEST).is_file():
        raise AssetMissing(
            f"the checkpoint of step {step} was not kept ({folder}); choose another result, or "
            f"keep more with save.keep",
            fix=f"vlarl video {run.path}",
        )
    return folder / "policy", []


@dataclass(frozen=True, slots=True)
class Replay:
    """clips: in plan order. changed: episodes whose outcome differs from the record, in words."""

    clips: tuple[Clip, ...]
    changed: tuple[str, ...]


def replay(
    prepared: Prepared,
    world: World,
    *,
    compute: ComputeSection | None = None,
    on_episode: Callable[[Outcome], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Replay:
    """Play the episodes again, exactly as they were evaluated, with recording on."""
    sampling = prepared.result.protocol["sampling"]
    policy = prepared.policy_module.load(
        prepared.policy, device=world.device, needs_value=False, train=False
    )
    env = prepared.env_module.make(
        prepared.env, num_slots=prepared.env.num_slots, final_frames=False
    )
    before = {e.key: e for e in prepared.result.episodes}
    clips: list[Clip] = []
    changed: list[tuple[int, str]] = []

    def keep(outcome: Outcome) -> None:
        now = episode_result(outcome)
        clips.append(Clip.of(outcome, prepared.env_spec))
        if _outcome(now) != _outcome(before[now.key]):
            text = f"{now.key}: {_outcome(before[now.key])} then, {_outcome(now)} now"
            changed.append((outcome.episode.index, text))

    try:
        with autocast(world, compute or ComputeSection()):
            evaluate(
                env,
                policy,
                prepared.episodes,
                temperature=sampling["temperature"],
                seed=sampling["seed"],
                stages=1,
                on_episode=on_episode,
                on_frames=keep,
                should_stop=should_stop,
            )
    finally:
        env.close()
    return Replay(
        clips=tuple(sorted(clips, key=lambda clip: clip.episode)),
        changed=tuple(text for _, text in sorted(changed)),
    )


def _outcome(result: EpisodeResult) -> str:
    word = "success" if result.success else "failure"
    return f"{word} after {result.num_steps} steps"


def default_out(source: Path, only: Only) -> Path:
    """Next to the result file, or in the run's video folder."""
    path = find_result(source)
    ending = "" if only == "all" else f"_{only}"
    name = re.sub(r"[^\w.-]+", "_", f"{path.stem}{ending}_replay.mp4")
    run = RunDir(path.resolve().parent.parent)
    return (run.video if run.config.is_file() else path.parent) / name
