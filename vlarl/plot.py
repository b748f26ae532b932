"""Pictures of runs and results: learning curves, and bars before and after.

Drawn with matplotlib's object interface, so neither a display nor a global backend is involved. The
colours are Okabe and Ito's, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vlarl import metrics
from vlarl.atomic import new_file
from vlarl.comparison import compare
from vlarl.config import resolved
from vlarl.errors import ConfigError
from vlarl.proportions import Interval, Rate
from vlarl.results import EvalResult, counted
from vlarl.run_dir import RunDir
from vlarl.seeds import mean_of_seeds, recipe

SUCCESS = "eval/success_once"

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#9AA0A6"
_INK = "#3C4043"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titlecolor": _INK,
    "grid.color": "#E8EAED",
    "legend.frameon": False,
    "svg.hashsalt": "vlarl",
    "text.color": _INK,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}
_LABEL, _LINE = 34, 96
"""Characters in a line of an axis label, and of the words under a picture."""

_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one run. rates: the counts behind `values`, when it is an evaluated success."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    rates: tuple[Rate, ...] | None


def read_curve(run: Path, metric: str = SUCCESS) -> Curve:
    """A metric over the iterations that have it.

    Raises ConfigError when the folder is no run or has no such metric; then it lists those it has.
    """
    lines = metrics.read(RunDir(run).metrics)
    if not lines:
        raise ConfigError(f"{run} has no metrics.jsonl with a whole line; is it a run directory?")
    points = [line for line in lines if line.get(metric) is not None]
    if not points:
        known = dict.fromkeys(key for line in lines for key in line if key != "step")
        raise ConfigError(f"{run} never recorded '{metric}'; it has: {', '.join(known)}")
    rates = None
    if metric == SUCCESS:
        counts = [round(line["eval/num_trajectories"]) for line in points]
        rates = tuple(
            Rate(round(line[metric] * n), n) for line, n in zip(points, counts, strict=True)
        )
    return Curve(
        tuple(line["step"] for line in points), tuple(float(line[metric]) for line in points), rates
    )


def group_runs(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """Label -> the runs that are one experiment: their settings differ in seed and names only.

    The label is the first run's name without a number at its end.
    """
    groups: dict[str, list[Path]] = {}
    names: dict[str, str] = {}
    for run in runs:
        name = resolved.load(RunDir(run).config).name
        key = json.dumps(recipe(RunDir(run)), sort_keys=True)
        if key not in names:
            stem = re.sub(r"[-_]?(seed|s)?[-_]?\d+$", "", name) or name
            names[key] = stem if stem not in groups else f"{stem} ({len(groups) + 1})"
        groups.setdefault(names[key], []).append(run)
    return groups


def learning_curves(
    experiments: Mapping[str, Sequence[Curve]],
    path: Path,
    *,
    metric: str = SUCCESS,
    title: str = "",
    overwrite: bool = False,
) -> None:
    """One bold line per experiment, on a band that says how sure it is.

    Several seeds: their mean, its 95 % t interval, and each seed as a thin line; iterations that
    not all seeds have are left out. One seed: the curve, and Wilson's 95 % interval when the metric
    is the evaluated success. path: .png, .svg or .pdf.

    Raises ConfigError when the file exists and overwrite is False, or seeds share no iteration.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, (label, curves) in zip(
            _cycle(len(experiments)), experiments.items(), strict=True
        ):
            _draw_experiment(axes, label, curves, colour, bounded=_is_fraction(metric))
        if _is_fraction(metric):
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("iteration")
        axes.set_ylabel("success on held-out trials" if metric == SUCCESS else metric)
        axes.set_title(title)
        axes.grid(axis="y")
        axes.margins(x=0.02)
        axes.legend(loc="best")

    _save(draw, path, size=(6.4, 4.0), overwrite=overwrite)


def _is_fraction(metric: str) -> bool:
    return "success_once" in metric


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _draw_experiment(
    axes: Axes, label: str, curves: Sequence[Curve], colour: str, *, bounded: bool
) -> None:
    if len(curves) == 1:
        (curve,) = curves
        steps, means = list(curve.steps), list(curve.values)
        bands = None if curve.rates is None else [rate.interval for rate in curve.rates]
    else:
        steps, means, bands = mean_curve(curves, bounded=bounded)
        for curve in curves:
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.35, linewidth=0.9)
        label = f"{label}, {len(curves)} seeds"
    if bands is not None:
        low, high = zip(*bands, strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(steps, means, color=colour, linewidth=2.2, label=label, marker="o", markersize=3.5)


def mean_curve(
    curves: Sequence[Curve], *, bounded: bool
) -> tuple[list[int], list[float], list[Interval]]:
    """Steps that all curves have, mean over curves, and its 95 % t interval.

    bounded: cut the interval to [0, 1]. Raises ConfigError when the curves share no step.
    """
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = [step for step in curves[0].steps if all(step in table for table in tables)]
    if not steps:
        raise ConfigError("the seeds of one experiment share no iteration with this metric")
    means, bands = [], []
    for step in steps:
        mean, (low, high) = mean_of_seeds([table[step] for table in tables])
        means.append(mean)
        bands.append((max(low, 0.0), min(high, 1.0)) if bounded else (low, high))
    return steps, means, bands


def success_bars(
    results: Mapping[str, EvalResult],
    path: Path,
    *,
    title: str = "",
    overwrite: bool = False,
) -> None:
    """Success of each task and of all episodes, one bar per result, with Wilson's 95 % interval.

    results: label -> result, in drawing order; the first is grey, as what the others are measured
    against. Two results that share episodes get their paired difference written underneath; so does
    what is missing of an incomplete one, and what long task names have in common.
    path: .png, .svg or .pdf.

    Raises ConfigError when the file exists and overwrite is False.
    """
    tasks = list(dict.fromkeys(task for r in results.values() for task in r.by_task))
    is_complete = all(result.is_complete for result in results.values())
    total = "all episodes" if is_complete else "played episodes"
    rows = [*tasks, total] if len(tasks) > 1 else tasks
    shown, common = _row_labels(tasks)
    ticks = [*shown, total][: len(rows)]
    notes = [f"... = {common}"] if common else []
    notes += [f"{label}: {r.coverage}" for label, r in results.items() if not r.is_complete]
    notes += filter(None, [_difference(list(results.values()))])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        colours = [_GREY, *_cycle(len(results) - 1)]
        for i, (label, result) in enumerate(results.items()):
            rates = {**result.by_task, total: result.total}
            own = [(row, rates[name]) for row, name in enumerate(rows) if name in rates]
            _draw_bars(axes, own, label, colours[i], place=(i, len(results)))
        axes.set_yticks(range(len(rows)), ticks)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("success, 95 % interval")
        axes.set_title(title)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        in_one_line = sum(map(len, results)) <= _LINE - 10 * len(results)
        figure.legend(loc="outside upper left", ncols=len(results) if in_one_line else 1)
        text = "\n".join(fill(note, _LINE, subsequent_indent="    ") for note in notes)
        figure.supxlabel(text, x=0.02, ha="left", fontsize=9)

    lines = max(label.count("\n") + 1 for label in ticks)
    height = 1.3 + 0.18 * max(len(results) + 1, lines) * len(rows) + 0.16 * len(notes)
    _save(draw, path, size=(6.4, max(2.4, height)), overwrite=overwrite)


def _row_labels(tasks: Sequence[str]) -> tuple[list[str], str]:
    """Names of tasks for the axis, in lines, and what was left out of each for an ellipsis.

    Long names of one suite begin and end alike; only in between can they be told apart.
    """
    words = [re.split(r"[_\s]+", task) for task in tasks]
    if max(map(len, tasks)) <= _LABEL:
        return list(tasks), ""
    shortest = min(map(len, words)) - 1  # something of each name stays
    start = end = 0
    if len(tasks) > 1:
        start = _alike(words, shortest)
        end = _alike([own[::-1] for own in words], shortest - start)
    start, end = (count if count > 2 else 0 for count in (start, end))
    first = words[0]
    kept = [
        [*["..."][: start and 1], *own[start : len(own) - end], *["..."][: end and 1]]
        for own in words
    ]
    left_out = [" ".join(part) for part in (first[:start], first[len(first) - end :]) if part]
    return [fill(" ".join(own), _LABEL) for own in kept], " ... ".join(left_out)


def _alike(names: Sequence[Sequence[str]], limit: int) -> int:
    """How many words all names begin with alike, at most `limit`."""
    columns = zip(*names, strict=False)
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
    return min(sum(1 for _ in alike), limit)


def _draw_bars(
    axes: Axes,
    rows: Sequence[tuple[int, Rate]],
    label: str,
    colour: str,
    *,
    place: tuple[int, int],
) -> None:
    i, count = place
    thickness = 0.8 / count
    at = [row - 0.4 + (i + 0.5) * thickness for row, _ in rows]
    values = [rate.value for _, rate in rows]
    below = [rate.value - rate.interval[0] for _, rate in rows]
    above = [rate.interval[1] - rate.value for _, rate in rows]
    axes.barh(at, values, height=0.88 * thickness, color=colour, label=label)
    axes.errorbar(
        values, at, xerr=(below, above), fmt="none", ecolor=_INK, elinewidth=1.0, capsize=2
    )
    for y, (_, rate) in zip(at, rows, strict=True):
        axes.annotate(
            f"{rate.k}/{rate.n}",
            (1.0, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            annotation_clip=False,
        )


def _difference(results: Sequence[EvalResult]) -> str:
    """The paired difference of two results that share trials; nothing otherwise."""
    if len(results) != 2 or not set.intersection(*({e.key for e in r.episodes} for r in results)):
        return ""
    total = compare(*results).total
    low, high = total.interval
    return (
        f"Paired difference {100 * total.difference:+.1f} points "
        f"(95 % interval {100 * low:+.1f} to {100 * high:+.1f}, {counted(total.n, 'pair')})"
    )


def _save(
    draw: Callable[[Figure], None], path: Path, *, size: tuple[float, float], overwrite: bool
) -> None:
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: name a {', '.join(_FORMATS)} file")
    with mpl.rc_context(_STYLE), new_file(path, overwrite=overwrite) as temporary:
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        # No date and no version inside, so that equal data give equal bytes.
        figure.savefig(temporary, dpi=160, metadata=_METADATA[path.suffix])


_METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
