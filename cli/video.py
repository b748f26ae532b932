"""`vlarl video`: show episodes of a run or a result."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vlarl.signals import INTERRUPTED, stop_on_signals

from .options import DryRunOpt, JsonOpt, OverwriteOpt, QuietOpt
from .output import Output

EXAMPLES = (
    "vlarl video runs/tiny_metaworld_grpo",
    "vlarl video runs/tiny_metaworld_grpo/eval/step_000016.json --only failures --grid 4x2",
    "vlarl video results/mine.json --episodes 3,17 --out two.mp4",
)


class Only(str, Enum):
    """Which episodes."""

    all = "all"
    failures = "failures"
    successes = "successes"


def video(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|EVAL.json",
            help="A result of `vlarl eval`, or a run directory (its newest result).",
        ),
    ],
    episodes: Annotated[
        str | None,
        typer.Option(
            metavar="3,17,...",
            help="Positions in the result's plan. Left out, as many as fit the grid.",
            rich_help_panel="Config",
        ),
    ] = None,
    only: Annotated[
        Only, typer.Option(help="Which outcomes, as recorded.", rich_help_panel="Config")
    ] = Only.all,
    grid: Annotated[
        str,
        typer.Option(metavar="COLUMNSxROWS", help="Layout.", rich_help_panel="Output"),
    ] = "4x2",
    fps: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0.1,
            max=240.0,
            help="Frames per second. Left out, simulated time.",
            rich_help_panel="Output",
        ),
    ] = None,
    strip: Annotated[
        bool,
        typer.Option(
            "--strip",
            help="A still picture (PNG) instead: one row per episode, first to last frame.",
            rich_help_panel="Output",
        ),
    ] = False,
    num_slots: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Episodes played at once.", rich_help_panel="Launch"),
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Left out, RUN/video/... or next to the result.",
            rich_help_panel="Output",
        ),
    ] = None,
    overwrite: OverwriteOpt = False,
    dry_run: DryRunOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Play episodes of a result again and write them side by side as MP4."""
    from vlarl.atomic import check_writable
    from vlarl.video_job import default_out, prepare

    out = Output(json=json, quiet=quiet)
    columns, rows = _grid(grid)
    wanted = _positions(episodes)
    prepared = prepare(
        source, episodes=wanted, only=only.value, limit=columns * rows, num_slots=num_slots
    )
    path = out_file or default_out(source, only.value)
    if strip and out_file is None:
        path = path.with_suffix(".png")
    check_writable(path, overwrite=overwrite)
    for note in prepared.notes:
        out.warn(note)
    shown = [e.index for e in prepared.episodes]
    of = "" if len(shown) == prepared.num_passing else f" of {prepared.num_passing}"
    which = "episodes" if only is Only.all else only.value
    out.hint(f"playing {len(shown)}{of} {which} again: {', '.join(map(str, shown))} -> {path}")
    if dry_run:
        out.result({"out": path, "episodes": shown}, text=f"would write {path}", ident=path)
        return
    from vlarl.config.schema import ComputeSection
    from vlarl.distributed.world import init_world
    from vlarl.video import write_grid, write_strip
    from vlarl.video_job import replay

    from .progress import Progress

    progress = Progress(len(shown), quiet=quiet)
    with stop_on_signals() as should_stop:
        found = replay(
            prepared,
            init_world(ComputeSection()),
            on_episode=lambda outcome: progress.add(outcome.success),
            should_stop=should_stop,
        )
    progress.break_line()
    if len(found.clips) < len(shown):
        out.warn("interrupted; nothing was written")
        raise typer.Exit(INTERRUPTED)
    if strip:
        write_strip(found.clips, path, overwrite=overwrite)
    else:
        rate = fps or prepared.fps
        width = min(columns, len(found.clips))
        write_grid(found.clips, path, fps=rate, columns=width, overwrite=overwrite)
    for text in found.changed:
        out.warn(f"another outcome than recorded: {text}")
    document = {"out": path, "episodes": shown, "changed": list(found.changed)}
    out.result(document, text=str(path), ident=path)


def _grid(text: str) -> tuple[int, int]:
    from vlarl.errors import ConfigError

    match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text)
    if match is None:
        raise ConfigError(f"--grid: '{text}' is no layout; expected COLUMNSxROWS, e.g. 4x2")
    return int(match.group(1)), int(match.group(2))


def _positions(text: str | None) -> list[int]:
    from vlarl.errors import ConfigError

    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    bad = [word for word in words if not word.isdecimal()]
    if bad:
        raise ConfigError(f"--episodes: '{bad[0]}' is no position; expected e.g. 3,17")
    return sorted({int(word) for word in words})
