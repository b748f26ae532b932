"""From the words of a command to an EvalJob: which checkpoint, policy, env and tasks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlarl import registry
from vlarl.assets import companion, store
from vlarl.config import resolved
from vlarl.config.compose import CLI, compose, merge, parse_overrides
from vlarl.config.sources import Leaf, Tree, sources_of, tree_of, values_of
from vlarl.errors import ConfigError
from vlarl.eval_job import EvalJob, build_job
from vlarl.run_dir import RunDir, latest_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What somebody asked for.

    checkpoint: an asset, a folder or a run; None takes the preset's. preset: name or file. suite: a
    suite or task; None plays what the run or preset plays. tasks: names or positions, empty = all.
    overrides: KEY=VALUE. fields: EvalJob fields by name.
    """

    checkpoint: str | None = None
    preset: str | None = None
    suite: str | None = None
    tasks: Sequence[str] = ()
    overrides: Sequence[str] = ()
    fields: Mapping[str, Any] | None = None


def set_up(wanted: Wanted, *, out: Callable[[Subject, str], Path]) -> tuple[EvalJob, Subject]:
    """The validated job and what it evaluates. Nothing is loaded or started.

    Settings come from the run's config, the preset or the note beside the checkpoint, then the
    command's fields and overrides; seed and temperature too (that of the run's own evaluations),
    else 0. out: makes the result file's name from the subject and the env's name.

    Raises:
        AssetMissing: no such checkpoint. ConfigError: anything else that is wrong.
    """
    subject, values, source = _base(wanted)
    tree: Tree = {
        **tree_of(_inherited(values), source),
        "compute": merge(_section(values, "compute", source), {"shard": Leaf("none", CLI)}),
        "env": _env(wanted, values, source),
        "policy": _policy(subject, values, source),
    }
    given = parse_overrides(wanted.overrides)
    for section in ("env", "policy"):
        if section in given and not isinstance(given[section], dict):
            raise ConfigError(f"{section}: is a section; set its fields, e.g. {section}.name=...")
    if "checkpoint" in _sub(given, "policy"):
        raise ConfigError("policy.checkpoint: name the checkpoint as the first argument instead")
    if "out" in given:
        raise ConfigError("out: name the result file with --out instead")
    refuse_twice(given, wanted.fields or {}, suite=wanted.suite, tasks=wanted.tasks)
    tree = merge(merge(tree, tree_of(wanted.fields or {}, CLI)), given)
    name = values_of(_sub(tree, "env"))["name"]
    tree["out"] = Leaf(str(out(subject, name)), CLI)
    job = build_job(values_of(tree), dict(sources_of(tree)))
    if wanted.tasks:
        offered = registry.module("env", job.env.name).spec(job.env).tasks
        picked = Leaf(list(pick_tasks(offered, wanted.tasks)), CLI)
        tree = merge(tree, {"env": {"tasks": picked}})
        job = build_job(values_of(tree), dict(sources_of(tree)))
    return job, subject


def refuse_twice(
    given: Tree, fields: Mapping[str, Any], *, suite: str | None, tasks: Sequence[str]
) -> None:
    """Raise ConfigError for everything that was said by an option and by KEY=VALUE."""
    options = {key: f"--{key.replace('_', '-')}" for key in fields}
    options |= {"env.name": "--suite", "env.suite": "--suite"} if suite is not None else {}
    options |= {"env.tasks": "--tasks"} if tasks else {}
    twice = [
        f"{key}: {options[key]} says it already; leave one of them out"
        for key, _ in sources_of(given)
        if key in options
    ]
    if twice:
        raise ConfigError("\n".join(twice))


def _base(wanted: Wanted) -> tuple[Subject, Mapping[str, Any], str]:
    """The subject, the settings to start from and where they come from."""
    if wanted.preset is None:
        if wanted.checkpoint is None:
            raise ConfigError("name what to evaluate: a CHECKPOINT, a RUN or --preset")
        subject = find_subject(wanted.checkpoint)
        if subject.run is None:
            env = companion.read_env(subject.checkpoint)
            return subject, {"env": env} if env else {}, companion.FILE
        return subject, resolved.load(subject.run.config).values, str(subject.run.config)
    values = compose(wanted.preset).values
    named = wanted.checkpoint or (values.get("policy") or {}).get("checkpoint")
    if named is None:
        raise ConfigError(
            f"preset {wanted.preset} names no checkpoint; name one as the first argument"
        )
    subject = find_subject(str(named))
    if subject.run is not None:
        raise ConfigError("a run has its own settings; leave out --preset, or name a checkpoint")
    return subject, values, f"preset {wanted.preset}"


def _inherited(values: Mapping[str, Any]) -> dict[str, Any]:
    """Seed and temperature of the run's own evaluations."""
    if "rollout" not in values:
        return {}
    own = values.get("eval", {}).get("temperature")
    rollout = values.get("rollout", {}).get("temperature", 1.0)
    return {"seed": values.get("seed", 0), "temperature": rollout if own is None else own}


def _policy(subject: Subject, values: Mapping[str, Any], source: str) -> Tree:
    name = find_policy(subject.checkpoint)
    base = _section(values, "policy", source)
    fixed: Tree = {"name": Leaf(name, CLI), "checkpoint": Leaf(str(subject.checkpoint), CLI)}
    return merge(base, fixed, nested=True)


def _env(wanted: Wanted, values: Mapping[str, Any], source: str) -> Tree:
    base = _section(values, "env", source)
    if wanted.suite is None:
        if not base or source == companion.FILE:
            env = values_of(base).get("name")
            suites = _all_suites([env] if env else registry.names("env"))
            raise ConfigError(
                "--suite is needed with a bare checkpoint; suites: " + ", ".join(suites)
            )
        return base
    fixed: Tree = {
        "name": Leaf(find_env(wanted.suite), CLI),
        "suite": Leaf(wanted.suite, CLI),
        "tasks": Leaf([], CLI),
    }
    return merge(base, fixed, nested=True)


def _all_suites(envs: Sequence[str]) -> list[str]:
    return [suite for name in envs for suite in registry.module("env", name).suites()]


def _section(values: Mapping[str, Any], name: str, source: str) -> Tree:
    return tree_of(values.get(name, {}), source)


def _sub(tree: Tree, name: str) -> Tree:
    below = tree.get(name, {})
    return below if isinstance(below, dict) else {}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated. checkpoint: folder of the weights. run: the run it belongs to, if any."""

    checkpoint: Path
    run: RunDir | None

    @property
    def name(self) -> str:
        """A word for file names: the run and its step, or the checkpoint's folder."""
        if self.run is None:
            return self.checkpoint.resolve().name
        return f"{self.run.path.resolve().name}_{self.checkpoint.parent.name}"


def find_subject(named: str) -> Subject:
    """The checkpoint that a word means: an asset, a folder, or a run's latest checkpoint.

    Raises AssetMissing with near names, and ConfigError for a run without a complete checkpoint.
    """
    folder = store.resolve(named)
    run = RunDir(folder)
    if not (run.config.is_file() and run.ckpt.is_dir()):
        return Subject(folder, None)
    latest = latest_checkpoint(run)
    if latest is None:
        raise ConfigError(
            f"run {folder} has no complete checkpoint yet; let it train longer, or name the "
            "checkpoint it started from"
        )
    return Subject(latest / "policy", run)


def find_policy(folder: Path) -> str:
    """Registered name of the policy whose checkpoint this is. ConfigError when there is none."""
    for name in registry.names("policy"):
        if registry.module("policy", name).recognises(folder):
            return name
    raise ConfigError(
        f"{folder} is not a checkpoint of a known policy ({', '.join(registry.names('policy'))}); "
        "expected a folder with config.json and weights"
    )


def find_env(suite: str) -> str:
    """Registered name of the env with that suite or task. ConfigError with near names if none."""
    suites: list[str] = []
    tasks: dict[str, None] = {}
    for name in registry.names("env"):
        module = registry.module("env", name)
        own = module.suites()
        offered = {t: None for s in own for t in module.spec(module.Config(suite=s)).tasks}
        if suite in own or suite in offered:
            return name
        suites += own
        tasks |= offered
    near = difflib.get_close_matches(suite, [*suites, *tasks], n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(suite.lower(), suites, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"no suite or task named '{suite}'{hint} (suites: {', '.join(suites)})")


def pick_tasks(offered: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """Tasks by name or by position in the suite, in the order asked for.

    Raises ConfigError naming every word that is neither, with near names, and repeated tasks.
    """
    picked, problems = [], []
    for word in wanted:
        if word.isdecimal() and int(word) < len(offered):
            picked.append(offered[int(word)])
        elif word in offered:
            picked.append(word)
        elif word.isdecimal():
            problems.append(f"--tasks: {word} is not a position; the suite has {len(offered)}")
        else:
            near = difflib.get_close_matches(word, offered, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else f"; it has {', '.join(offered)}"
            problems.append(f"--tasks: the suite has no task '{word}'{hint}")
    twice = [task for task in dict.fromkeys(picked) if picked.count(task) > 1]
    problems += [f"--tasks: {task} is named twice" for task in twice]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(picked)
