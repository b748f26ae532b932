"""`vlarl train`: compose, check, launch, watch, and report what it brought."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlarl import run_dir
from vlarl.atomic import write_atomic
from vlarl.errors import ConfigError
from vlarl.run_dir import RunDir
from vlarl.signals import INTERRUPTED

from . import launch, preflight
from .options import (
    DryRunOpt,
    JsonOpt,
    NprocOpt,
    OverridesArg,
    QuietOpt,
    SeedOpt,
    complete_preset,
    merge_overrides,
)
from .output import Output

if TYPE_CHECKING:
    from vlarl.config.compose import Composed
    from vlarl.config.schema import RunConfig

EXAMPLES = (
    "vlarl train --preset tiny_metaworld_grpo",
    "vlarl train --preset tiny_metaworld_grpo --dry-run optim.lr=5e-5 env.num_slots=8",
    "vlarl train --preset libero_spatial_grpo_openvlaoft --nproc 8 --dry-run",
    "vlarl train --preset tiny_metaworld_grpo --resume max_steps=40",
)


def train(
    overrides: OverridesArg = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME|FILE",
            help="A shipped preset (see `vlarl presets list`) or a .yaml file.",
            autocompletion=complete_preset,
            rich_help_panel="Config",
        ),
    ] = None,
    seed: SeedOpt = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps", metavar="N", help="Iterations; max_steps=N.", rich_help_panel="Run"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run.", rich_help_panel="Run")
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="Folder of the run. Left out, $VLARL_RUNS/NAME or runs/NAME.",
            rich_help_panel="Run",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run from its latest checkpoint, with its own configuration.",
            rich_help_panel="Run",
        ),
    ] = False,
    resume_from: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            help="Like --resume, from the checkpoint after STEP; later ones are dropped.",
            rich_help_panel="Run",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete the run that is there.", rich_help_panel="Run"),
    ] = False,
    dry_run: DryRunOpt = False,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="Write the run directory and print the worker's command line; start nothing.",
            rich_help_panel="Launch",
        ),
    ] = False,
    nproc: NprocOpt = "auto",
    nnodes: Annotated[
        int, typer.Option(metavar="K", help="Machines of the run.", rich_help_panel="Launch")
    ] = 1,
    rdzv: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the machines meet.", rich_help_panel="Launch"
        ),
    ] = None,
    no_live: Annotated[
        bool,
        typer.Option(
            "--no-live", help="One line per iteration, no panel.", rich_help_panel="Output"
        ),
    ] = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Improve a policy by reinforcement learning."""
    from vlarl import metrics
    from vlarl.config.compose import build
    from vlarl.train.preflight import is_complete, resume_point

    output = Output(json=json, quiet=quiet)
    where = launch.layout(nproc, nnodes, rdzv)
    flags = {"seed": seed, "max_steps": max_steps, "name": name, "run_dir": path}
    given = merge_overrides(overrides, **flags)
    resume = resume or resume_from is not None
    composed, folder = _configuration(preset, given, resume=resume)
    run = build(composed)
    # --prepare may be given on a machine that will not run it.
    checked = preflight.check(run, where.nproc * where.nnodes, dry_run=dry_run, device=not prepare)
    start = launch.command(RunDir(folder), where)
    run_dir.check(folder, resume=resume, overwrite=overwrite)
    if resume:
        point = resume_point(RunDir(folder), run, resume_from)
        if is_complete(RunDir(folder), run, point):
            output.hint(f"complete: all {run.max_steps} iterations are done; max_steps=N goes on")
            _report(output, RunDir(folder))
            return
        output.hint(f"going on from {point or 'the beginning: no iteration is saved yet'}")
    if dry_run:
        preflight.explain(output, run, checked, folder, start)
        return
    launch.refuse_nested(os.environ, RunDir(folder))
    home = run_dir.create(folder, resume=resume, overwrite=overwrite)
    with run_dir.RunLock(home):
        metrics.read(home.metrics)  # a damaged line is one message here, and no view trips over it
        if resume_from is not None:
            run_dir.drop_after(home, resume_from)
        _write_down(home, run, composed)
        if prepare:
            output.result({"command": start}, text=shlex.join(start), ident=home.path)
            return
        _run(output, home, where, live=not no_live, silent=json or quiet)
    _report(output, home)


def _configuration(
    preset: str | None, given: Sequence[str], *, resume: bool
) -> tuple[Composed, Path]:
    """The configuration and the folder of the run."""
    from vlarl.config import resolved
    from vlarl.config.compose import compose, parse_overrides
    from vlarl.config.resume import continued
    from vlarl.config.schema import runs_folder
    from vlarl.config.sources import Leaf

    given = [_from_anywhere(text) for text in given]
    if preset is None and not resume:
        raise ConfigError("name what to train: --preset NAME; `vlarl presets list` shows them")
    if preset is None:
        folder = parse_overrides(given).get("run_dir")
        if not isinstance(folder, Leaf) or folder.value is None:
            raise ConfigError("--resume needs --run-dir DIR or --preset NAME to find the run")
        path = Path(str(folder.value)).expanduser().absolute()
        return continued(resolved.load(path / "config.json"), given), path
    composed = _settled(compose(preset, given))
    named = composed.values.get("run_dir")
    path = Path(str(named)) if named is not None else runs_folder() / str(composed.values["name"])
    path = path.expanduser().absolute()
    if resume:
        stored = resolved.load(path / "config.json")
        _refuse_another(preset, composed, stored, path)
        composed = continued(stored, given)
    return composed, path


def _refuse_another(preset: str, composed: Composed, stored: Composed, path: Path) -> None:
    """Raise ConfigError when a run that is to be resumed has other plug-ins than the preset."""
    from vlarl import registry

    def names(of: Composed) -> list[str]:
        sections = [of.values.get(kind) for kind in registry.KINDS]
        return [str(section.get("name")) for section in sections if isinstance(section, dict)]

    if names(composed) != names(stored):
        raise ConfigError(
            f"{path} is a run of {', '.join(names(stored))}, and preset {preset} is of "
            f"{', '.join(names(composed))}; leave out --preset to resume it"
        )


_CHECKPOINT = "policy.checkpoint="


def _from_anywhere(override: str) -> str:
    """KEY=VALUE whose policy.checkpoint means the same in any folder."""
    import json

    from vlarl.assets import store

    named = override.removeprefix(_CHECKPOINT)
    settled = named if named == override else store.settled(named)
    return override if settled == named else _CHECKPOINT + json.dumps(settled)


def _settled(composed: Composed) -> Composed:
    """With a policy.checkpoint that means the same in any folder, for a later --resume."""
    from vlarl.assets import store

    policy = composed.values.get("policy")
    named = policy.get("checkpoint") if isinstance(policy, dict) else None
    if not isinstance(policy, dict) or not isinstance(named, str):
        return composed  # validation says what is wrong
    settled = {**policy, "checkpoint": store.settled(named)}
    return replace(composed, values={**composed.values, "policy": settled})


def _write_down(home: RunDir, run: RunConfig, composed: Composed) -> None:
    import json

    from vlarl.config import resolved
    from vlarl.evaluate import versions

    write_atomic(home.config, resolved.dump(run, composed.sources))
    write_atomic(home.env, json.dumps(versions(), indent=2) + "\n")
    run_dir.append_command(home, ["vlarl", *sys.argv[1:]])


def _run(output: Output, home: RunDir, where: launch.Layout, *, live: bool, silent: bool) -> None:
    from .live import open_view

    view = open_view(home, live=live, quiet=silent)
    try:
        code = launch.launch(home, where, watch=view.update, say=view.say)
    finally:
        view.close()
    if code == INTERRUPTED:
        latest = run_dir.latest_checkpoint(home)
        saved = f"saved {latest}" if latest else "no iteration was finished, nothing was saved"
        output.warn(f"interrupted; {saved}. Continue with --resume")
        raise typer.Exit(INTERRUPTED)


def _report(output: Output, home: RunDir) -> None:
    """Before and after, with intervals, and where everything is."""
    from vlarl import comparison
    from vlarl.result_file import load

    data: dict[str, Any] = {"run_dir": str(home.path)}
    lines = []
    results = sorted(home.eval.glob("step_*.json"))
    if len(results) > 1:
        before, after = load(results[0]), load(results[-1])
        found = comparison.compare(before, after)
        data["comparison"] = found.document()
        temperature = after.protocol.get("sampling", {}).get("temperature")
        lines.append(f"success before and after, at temperature {temperature}:")
        lines += _before_after(found)
    videos = sorted(home.video.glob("step_*.mp4"))
    data["video"] = str(videos[-1]) if videos else None
    lines += [f"video: {videos[-1]}"] if videos else []
    latest = run_dir.latest_checkpoint(home)
    if latest is not None:
        data["checkpoint"] = str(latest / "policy")
        lines.append(f"checkpoint: {latest / 'policy'}")
    lines += ["next:", f"  vlarl eval {home.path}"]
    if results:
        lines.append(f"  vlarl plot {home.path} --out curve.png")
    output.result(data, text="\n".join(lines), ident=home.path)


def _before_after(found: Any) -> list[str]:
    def row(name: str, p: Any) -> str:
        low, high = p.interval
        return (
            f"{name}: {p.a.k}/{p.n} -> {p.b.k}/{p.n}  "
            f"({100 * p.a.value:.1f} % -> {100 * p.b.value:.1f} %, "
            f"difference {100 * p.difference:+.1f} points, "
            f"95 % interval {100 * low:+.1f} to {100 * high:+.1f})"
        )

    rows = [row(task, paired) for task, paired in found.by_task.items()]
    if len(rows) > 1:
        rows.append(row("all held-out trials", found.total))
    return rows
