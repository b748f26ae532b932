"""From the words of a command to a CollectJob: which env, tasks and teacher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlarl import registry
from vlarl.collect_job import EXPERT, CollectJob, build_job
from vlarl.config import resolved
from vlarl.config.compose import CLI, compose, parse_overrides
from vlarl.config.sources import values_of
from vlarl.errors import ConfigError
from vlarl.eval_setup import find_env, find_policy, find_subject, pick_tasks, refuse_twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What somebody asked for.

    suite: a suite or task. tasks: names, or positions in the suite; empty = all. preset: name or
    file to take env settings from. policy: "expert", an asset, a checkpoint folder or a run.
    overrides: KEY=VALUE. fields: CollectJob fields by name; without `to` the folder is
    data/SUITE_TEACHER.
    """

    suite: str | None = None
    tasks: Sequence[str] = ()
    preset: str | None = None
    policy: str = EXPERT
    overrides: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def set_up(wanted: Wanted) -> CollectJob:
    """The validated job. Nothing is loaded or started.

    Env settings come from the preset or the policy's run, then the suite, then overrides.

    Raises:
        AssetMissing: no such checkpoint. ConfigError: anything else that is wrong.
    """
    base = dict(compose(wanted.preset).values) if wanted.preset else {}
    if wanted.preset and "env" not in base:
        raise ConfigError(
            f"preset {wanted.preset} has no env to play in; name one of `vlarl train`, or a --suite"
        )
    values: dict[str, Any] = {}
    teacher = EXPERT
    if wanted.policy != EXPERT:
        subject = find_subject(wanted.policy)
        run = {} if subject.run is None else resolved.load(subject.run.config).values
        base = base or run
        name = find_policy(subject.checkpoint)
        own = run.get("policy", base.get("policy", {}))
        kept = own if own.get("name") == name else {}
        values["policy"] = {**kept, "name": name, "checkpoint": str(subject.checkpoint)}
        teacher = subject.name
    values["env"] = _env(wanted, base.get("env", {}))
    tree = parse_overrides(wanted.overrides)
    refuse_twice(tree, wanted.fields, suite=wanted.suite, tasks=wanted.tasks)
    given = values_of(tree)
    if "checkpoint" in given.get("policy", {}):
        raise ConfigError("policy.checkpoint: name the checkpoint with --policy instead")
    if "policy" in given and "policy" not in values:
        raise ConfigError("policy: the expert has no settings; name a --policy")
    values = _merged(_merged(values, wanted.fields), given)
    label = wanted.suite or "-".join(wanted.tasks) or values["env"].get("suite", "tasks")
    values.setdefault("to", str(Path("data") / re.sub(r"[^\w.-]+", "_", f"{label}_{teacher}")))
    sources = {key: CLI for key, _ in resolved.flatten(given)}
    job = build_job(values, sources)
    if wanted.tasks:
        offered = registry.module("env", job.env.name).spec(job.env).tasks
        picked = {"env": {"tasks": list(pick_tasks(offered, wanted.tasks))}}
        job = build_job(_merged(values, picked), sources)
    return job


def _env(wanted: Wanted, base: Mapping[str, Any]) -> dict[str, Any]:
    suite = wanted.suite
    if suite is None and wanted.tasks and not base:
        # Tasks alone: any suite that has them all will do, the largest does.
        name = find_env(wanted.tasks[0])
        module = registry.module("env", name)
        sizes = {s: len(module.spec(module.Config(suite=s)).tasks) for s in module.suites()}
        suite = max(sizes, key=lambda s: sizes[s])
    if suite is None:
        if not base:
            raise ConfigError("name what to play: --suite, --tasks or --preset")
        return dict(base)
    name = find_env(suite)
    kept = base if base.get("name") == name else {}
    return {**kept, "name": name, "suite": suite, "tasks": []}


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, section by section."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = {**below, **value} if both else value
    return merged
