"""`vlarl eval`: measure a policy on an explicit plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlarl.signals import INTERRUPTED

from .options import (
    DryRunOpt,
    JsonOpt,
    NprocOpt,
    OverridesArg,
    OverwriteOpt,
    QuietOpt,
    complete_preset,
    named,
    words,
)
from .output import Output, format_table
from .tables import result_rows

if TYPE_CHECKING:
    from vlarl.eval_job import EvalJob, Prepared
    from vlarl.eval_setup import Subject

EXAMPLES = (
    "vlarl eval runs/tiny_metaworld_grpo",
    "vlarl eval tiny-oft-metaworld --suite mt50 --episodes 2 --temperature 0",
    "vlarl eval tiny-oft-metaworld --preset tiny_metaworld_grpo --fail-under 0.3 --json",
)

NOT_MET = 4


class Split(str, Enum):
    """Which trials."""

    eval = "eval"
    train = "train"


class Videos(str, Enum):
    """Which episodes become videos."""

    none = "none"
    failures = "failures"
    all = "all"


def evaluate(
    ctx: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT|RUN]",
            help="An asset's name, a checkpoint folder, or a run directory (its latest "
            "checkpoint). Left out, the preset's checkpoint.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArg = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="SUITE",
            help="A suite, or the name of one task. Left out, what the run or preset plays.",
            rich_help_panel="Config",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Only these tasks of the suite, by name or position.",
            rich_help_panel="Config",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Take env and policy settings from a preset.",
            autocompletion=complete_preset,
            rich_help_panel="Config",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Sampling temperature, 0 = greedy. Left out, the run's or preset's, else 0.",
            rich_help_panel="Config",
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Trials per task; all of them if left out.",
            rich_help_panel="Config",
        ),
    ] = None,
    split: Annotated[
        Split, typer.Option(help="Held-out or training trials.", rich_help_panel="Config")
    ] = Split.eval,
    repeats: Annotated[
        int, typer.Option(metavar="R", help="Episodes per trial.", rich_help_panel="Config")
    ] = 1,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Root of the sampling noise.", rich_help_panel="Config"),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Play the I-th of N parts; `vlarl merge` puts the files together.",
            rich_help_panel="Launch",
        ),
    ] = "1/1",
    num_slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Episodes played at once on each rank; same as env.num_slots=N.",
            rich_help_panel="Launch",
        ),
    ] = None,
    nproc: NprocOpt = "1",
    video: Annotated[
        Videos,
        typer.Option(help="Write episodes as MP4 next to the result.", rich_help_panel="Output"),
    ] = Videos.none,
    fail_under: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            min=0.0,
            max=1.0,
            help="Exit with code 4 when the success rate is below P (0 to 1).",
            rich_help_panel="Output",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Result, NAME.json. Left out, RUN/eval/... or results/CHECKPOINT_SUITE_TIME.json.",
            rich_help_panel="Output",
        ),
    ] = None,
    overwrite: OverwriteOpt = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with what a stopped evaluation left for --out FILE.",
            rich_help_panel="Run",
        ),
    ] = False,
    dry_run: DryRunOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Play every (task, trial) of a plan exactly once and report success with 95 % intervals."""
    from vlarl.results import counted

    from .eval_launch import play_all, worker_line
    from .launch import layout

    output = Output(json=json, quiet=quiet)
    asked = Asked(
        checkpoint=checkpoint,
        overrides=tuple(overrides or ()),
        suite=suite,
        tasks=tasks,
        preset=preset,
        flags=named(
            ctx,
            {
                "temperature": temperature,
                "episodes": episodes,
                "split": split,
                "repeats": repeats,
                "seed": seed,
                "shard": shard,
                "video": video,
                "overwrite": overwrite,
                "resume": resume,
            },
        ),
        num_slots=num_slots,
        out=out,
    )
    where = layout(nproc)
    prepared, subject = _prepare(asked)
    job = prepared.job
    output.hint(_intent(prepared, subject, where.nproc))
    if prepared.before is not None and job.video != "none":
        known = counted(len(prepared.before.episodes), "episode")
        output.hint(f"{known} played before are not filmed; `vlarl video {job.out}` can do that")
    if dry_run:
        line = "here" if where.nproc == 1 else f"by\n{worker_line(job, where)}"
        count = len(prepared.share)
        found = {"out": job.out, "episodes": count, "job": job.model_dump(mode="json")}
        output.result(found, text=f"would play {counted(count, 'episode')} {line}", ident=job.out)
        return
    _finish(output, job, play_all(prepared, where, output), fail_under)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The words of the command line. flags: EvalJob fields that were named."""

    checkpoint: str | None
    overrides: tuple[str, ...]
    suite: str | None
    tasks: str | None
    preset: str | None
    flags: Mapping[str, Any]
    num_slots: int | None
    out: Path | None


def _prepare(asked: Asked) -> tuple[Prepared, Subject]:
    """Everything that can be checked without weights or simulators."""
    from vlarl.eval_job import prepare
    from vlarl.eval_journal import left_over
    from vlarl.eval_setup import Wanted, set_up

    checkpoint, overrides = asked.checkpoint, asked.overrides
    if checkpoint is not None and "=" in checkpoint and not Path(checkpoint).exists():
        checkpoint, overrides = None, (checkpoint, *overrides)
    slots = () if asked.num_slots is None else (f"env.num_slots={asked.num_slots}",)
    job, subject = set_up(
        Wanted(
            checkpoint=checkpoint,
            preset=asked.preset,
            suite=asked.suite,
            tasks=words(asked.tasks),
            overrides=(*overrides, *slots),
            fields=asked.flags,
        ),
        out=lambda subject, env: asked.out or _default_out(subject, asked.suite or env),
    )
    left = left_over(job.out, resume=job.resume, overwrite=job.overwrite)
    prepared = prepare(job, left)
    prepared.policy_module.check(job.policy, needs_value=False, train=False)
    return prepared, subject


def _default_out(subject: Subject, suite: str) -> Path:
    """A new file name, in the run directory when there is one."""
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "_", f"{subject.name}_{suite}_{now}")
    folder = Path("results") if subject.run is None else subject.run.eval
    return folder / f"{name}.json"


def _intent(prepared: Prepared, subject: Subject, ranks: int) -> str:
    from vlarl.results import counted

    job = prepared.job
    tasks = counted(len({e.task for e in prepared.share}), "task")
    where = f" on {ranks} ranks" if ranks > 1 else ""
    part = f" (part {job.shard} of {len(prepared.plan)})" if job.part[1] > 1 else ""
    suite = getattr(job.env, "suite", "")
    return (
        f"{subject.checkpoint} in {job.env.name} {suite}: {tasks}, "
        f"{counted(len(prepared.share), 'episode')}{part}, "
        f"temperature {job.temperature:g}, seed {job.seed}{where} -> {job.out}"
    )


def _finish(
    output: Output,
    job: EvalJob,
    path: Path | None,
    fail_under: float | None,
) -> None:
    """Show what was written to `path` and leave with the right code."""
    from vlarl.eval_job import is_finished
    from vlarl.result_file import load
    from vlarl.results import name_some

    from .eval_launch import go_on

    if path is None:
        output.warn("interrupted before an episode was finished; nothing was written")
        raise typer.Exit(INTERRUPTED)
    result = load(path)
    output.result(result.document(), text=format_table(result_rows(result)), ident=path)
    shared = result.protocol["plan"]["start_from_training_trial"]
    output.hint(
        f"{shared} of {len(result.plan)} planned episodes start from a trial of env.train_trials"
    )
    if result.num_diverged:
        output.warn(
            f"the simulator diverged in {result.num_diverged} of {len(result.episodes)} episodes, "
            "which count as failures"
        )
    output.hint(f"wrote {path}")
    if not is_finished(job, result):
        output.warn(
            f"interrupted; {len(result.missing)} missing: {name_some(result.missing)}; {go_on(job)}"
        )
        raise typer.Exit(INTERRUPTED)
    if fail_under is not None and result.total.value < fail_under:
        output.warn(f"success {result.total.value:.1%} is below --fail-under {fail_under:.1%}")
        raise typer.Exit(NOT_MET)
