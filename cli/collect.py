"""`vlarl collect`: play episodes and keep them as trajectories."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlarl.signals import INTERRUPTED, stop_on_signals

from .options import DryRunOpt, JsonOpt, OverridesArg, QuietOpt, complete_preset, named, words
from .output import Output, format_table

if TYPE_CHECKING:
    from vlarl.dataset import DataSet

EXAMPLES = (
    "vlarl collect --tasks button-press-topdown-v3,drawer-open-v3 --episodes 10 --noise 0.15",
    "vlarl collect --suite mt10 --episodes 5 --to data/mt10 env.frame_size=64",
    "vlarl collect --preset tiny_metaworld_grpo --policy runs/tiny_metaworld_grpo --keep-failures",
)


class Split(str, Enum):
    """Whose trials."""

    train = "train"
    eval = "eval"


def collect(
    ctx: typer.Context,
    overrides: OverridesArg = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="SUITE", help="A suite, or one task.", rich_help_panel="Config"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Only these tasks, by name, or by position in the suite.",
            rich_help_panel="Config",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Take the env's settings (frame size, cameras, tasks) from a preset.",
            autocompletion=complete_preset,
            rich_help_panel="Config",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="expert|CHECKPOINT|RUN",
            help="Who plays: the env's scripted expert, an asset, a checkpoint, or a run.",
            rich_help_panel="Config",
        ),
    ] = "expert",
    episodes: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Episodes per task.", rich_help_panel="Config"),
    ] = 10,
    noise: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0.0,
            help="Standard deviation of noise on the executed actions; what the teacher wanted is "
            "stored beside.",
            rich_help_panel="Config",
        ),
    ] = 0.0,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T",
            min=0.0,
            help="Sampling temperature of a policy, 0 = greedy.",
            rich_help_panel="Config",
        ),
    ] = 0.0,
    keep_failures: Annotated[
        bool,
        typer.Option(
            "--keep-failures/--successes-only",
            help="Whether failed episodes are written, too.",
            rich_help_panel="Config",
        ),
    ] = False,
    split: Annotated[
        Split, typer.Option(help="Training or held-out trials.", rich_help_panel="Config")
    ] = Split.train,
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Root of the noise.", rich_help_panel="Config"),
    ] = 0,
    num_slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Episodes played at once; same as env.num_slots=N.",
            rich_help_panel="Launch",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the data set, continued when it has the same settings. Left out, "
            "data/SUITE_TEACHER.",
            rich_help_panel="Output",
        ),
    ] = None,
    dry_run: DryRunOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Play episodes with a scripted expert or a policy and write one .npy file per episode."""
    from vlarl.collect_job import prepare, remaining
    from vlarl.collect_setup import Wanted, set_up
    from vlarl.results import counted

    out = Output(json=json, quiet=quiet)
    fields = named(
        ctx,
        {
            "episodes": episodes,
            "noise": noise,
            "temperature": temperature,
            "keep_failures": keep_failures,
            "split": split,
            "seed": seed,
            "to": None if to is None else str(to),
        },
    )
    slots = () if num_slots is None else (f"env.num_slots={num_slots}",)
    job = set_up(
        Wanted(
            suite=suite,
            tasks=words(tasks),
            preset=preset,
            policy=policy,
            overrides=(*(overrides or ()), *slots),
            fields=fields,
        )
    )
    prepared = prepare(job)
    todo = len(remaining(prepared))
    tasks_of_plan = counted(len({e.task for e in prepared.plan}), "task")
    out.hint(
        f"{prepared.origin.teacher} in {job.env.name}: {tasks_of_plan}, "
        f"{counted(len(prepared.plan), 'episode')}, {todo} to play, noise {job.noise:g} -> {job.to}"
    )
    if dry_run:
        found = {"to": job.to, "episodes": todo, "job": job.model_dump(mode="json")}
        out.result(found, text=f"would play {counted(todo, 'episode')} into {job.to}", ident=job.to)
        return
    data, stopped = _run(prepared, todo, quiet=quiet)
    out.result(_summary(data), text=format_table(_rows(data)), ident=job.to)
    if stopped:
        out.warn("interrupted; the same command continues")
        raise typer.Exit(INTERRUPTED)
    out.hint(f"wrote {counted(len(data.kept), 'episode')} to {job.to}")


def _run(prepared: Any, todo: int, *, quiet: bool) -> tuple[DataSet, bool]:
    """Play what is missing; the data set, and whether somebody interrupted."""
    from vlarl.collect_job import collect as play
    from vlarl.distributed.world import init_world

    from .progress import Progress

    progress = Progress(todo, quiet=quiet)
    world = init_world(prepared.job.compute)
    with stop_on_signals() as should_stop:
        data = play(
            prepared,
            world,
            on_episode=lambda entry: progress.add(entry.success),
            should_stop=should_stop,
        )
        progress.break_line()
        return data, should_stop() and progress.done < todo


def _summary(data: DataSet) -> dict[str, object]:
    return {
        "to": data.folder,
        "episodes": len(data.kept),
        "steps": sum(entry.num_steps for entry in data.kept),
        "tasks": _rows(data)[:-1],
    }


def _rows(data: DataSet) -> list[dict[str, object]]:
    """Successes and size of every task, then of all."""
    tasks = list(dict.fromkeys(entry.task for entry in data.entries))
    groups = {task: [e for e in data.entries if e.task == task] for task in tasks}
    groups["all"] = data.entries
    return [
        {
            "task": name,
            "k/n": f"{sum(e.success for e in entries)}/{len(entries)}",
            "kept": sum(e.file is not None for e in entries),
            "steps": sum(e.num_steps for e in entries if e.file is not None),
        }
        for name, entries in groups.items()
    ]
