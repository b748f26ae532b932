"""`vlarl plot`: pictures of runs and results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlarl.errors import ConfigError

from .options import JsonOpt, OverwriteOpt, QuietOpt
from .output import Output

EXAMPLES = (
    "vlarl plot runs/grpo_seed0 runs/grpo_seed1 runs/grpo_seed2 --out curves.png",
    "vlarl plot runs/grpo runs/ppo --metric env/success_once --out training.svg",
    "vlarl plot runs/grpo/eval/step_000000.json runs/grpo/eval/step_000020.json --out bars.png",
)


def plot(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...|RESULT.json...",
            help="Run directories give learning curves; result files give bars, the first in grey.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="A .png, .svg or .pdf.", rich_help_panel="Output"),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What to draw of runs (docs/metrics.md); left out, eval/success_once.",
            rich_help_panel="Config",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Name of a curve or bar, once per experiment or result, in order.",
            rich_help_panel="Config",
        ),
    ] = None,
    title: Annotated[
        str, typer.Option(metavar="TEXT", help="Above the picture.", rich_help_panel="Config")
    ] = "",
    overwrite: OverwriteOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Draw learning curves of runs, or success bars of results of `vlarl eval`.

    Runs whose settings differ in the seed only are one curve: the mean of the seeds, on its 95 %
    interval. Bands and whiskers of single evaluations are Wilson's 95 % intervals.
    """
    from vlarl import plot as pictures
    from vlarl.atomic import check_writable
    from vlarl.comparison import unlike
    from vlarl.result_file import load

    output = Output(json=json, quiet=quiet)
    check_writable(out, overwrite=overwrite)
    files = [path for path in sources if path.suffix == ".json"]
    if files and len(files) < len(sources):
        raise ConfigError("give run directories or result files, not both in one picture")
    if files:
        if metric is not None:
            raise ConfigError("--metric goes with runs; bars show success")
        labels = _labels(label, [_short(path) for path in files])
        results = dict(zip(labels, map(load, files), strict=True))
        for path, result in zip(files, results.values(), strict=True):
            if not result.episodes:
                raise ConfigError(f"{path}: no episode was played, so there is nothing to draw")
            if not result.is_complete:
                output.warn(f"{path} is {result.coverage}")
        for warning in unlike(dict(zip(map(str, files), results.values(), strict=True))):
            output.warn(warning)
        pictures.success_bars(results, out, title=title, overwrite=overwrite)
        found = {name: result.summary()["success"] for name, result in results.items()}
    else:
        name = metric or pictures.SUCCESS
        groups = pictures.group_runs(sources)
        labels = _labels(label, list(groups))
        curves = [[pictures.read_curve(run, name) for run in runs] for runs in groups.values()]
        pictures.learning_curves(
            dict(zip(labels, curves, strict=True)),
            out,
            metric=name,
            title=title,
            overwrite=overwrite,
        )
        found = {k: [str(r) for r in v] for k, v in zip(labels, groups.values(), strict=True)}
    output.result({"out": out, "shown": found}, text=f"wrote {out}", ident=out)


def _short(path: Path) -> str:
    """before.json -> before; RUN/eval/step_000020.json -> RUN step_000020."""
    run = path.resolve().parent.parent.name if path.resolve().parent.name == "eval" else ""
    return f"{run} {path.stem}".strip()


def _labels(given: list[str] | None, default: list[str]) -> list[str]:
    labels = given or default
    if len(labels) != len(default):
        raise ConfigError(
            f"expected a --label for each of {', '.join(default)}; "
            f"got {len(labels)} of {len(default)}"
        )
    if len(set(labels)) < len(labels):
        raise ConfigError(f"labels must differ: {', '.join(labels)}; name them with --label")
    return labels
