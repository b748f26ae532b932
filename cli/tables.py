"""Rates as rows of text: for the terminal, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlarl.proportions import Interval, Rate
    from vlarl.results import EvalResult
    from vlarl.seeds import OverSeeds, SeedMean

Row = Mapping[str, object]


def result_rows(result: EvalResult) -> list[Row]:
    """Success of every task, of groups of tasks, both averages where there are two."""
    rows = [_rate_row(task, rate) for task, rate in result.by_task.items()]
    mean = result.mean_of_groups
    if mean is not None:
        rows += [_rate_row(f"[{name}]", rate) for name, rate in result.by_group.items()]
        rows.append(
            {
                "task": f"mean of {len(result.by_group)} groups",
                "k/n": "",
                "success": percent(mean[0]),
                "95% interval": span(mean[1]),
            }
        )
    return [*rows, _rate_row(_all(result), result.total)]


def seed_rows(found: OverSeeds) -> list[Row]:
    """k/n with each seed, their mean, and the interval of the mean."""
    rows = [_seed_row(found, task, mean) for task, mean in found.by_task.items()]
    rows += [_seed_row(found, f"[{name}]", mean) for name, mean in found.by_group.items()]
    return [*rows, _seed_row(found, "all episodes", found.total)]


def side_by_side(results: Mapping[str, EvalResult]) -> list[Row]:
    """One column of k/n, success and interval per result; a task that it lacks is left empty."""
    last = _all(*results.values())
    tables = {name: {**r.by_task, last: r.total} for name, r in results.items()}
    tasks = dict.fromkeys(task for r in results.values() for task in r.by_task)
    return [
        {"task": task}
        | {name: _short(table[task]) if task in table else "" for name, table in tables.items()}
        for task in [*tasks, last]
    ]


def markdown(rows: Sequence[Row]) -> str:
    """A table as GitHub and most papers' tools read it."""
    header = list(rows[0])
    cells = [header, *([str(row[key]) for key in header] for row in rows)]
    first, *rest = ["| " + " | ".join(map(escaped, line)) + " |" for line in cells]
    return "\n".join([first, "| --- " * len(header) + "|", *rest])


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one cell of a table."""
    return re.sub(r"([\\|*`<])", r"\\\1", " ".join(text.split("\n")))


def percent(value: float) -> str:
    """0.5 -> ' 50.0 %', aligned up to 100."""
    return f"{100 * value:5.1f} %"


def span(interval: Interval) -> str:
    """(0.4, 0.6) -> '40.0 to 60.0 %'."""
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


def _all(*results: EvalResult) -> str:
    return "all episodes" if all(r.is_complete for r in results) else "played episodes"


def _rate_row(name: str, rate: Rate) -> Row:
    return {
        "task": name,
        "k/n": f"{rate.k}/{rate.n}",
        "success": percent(rate.value),
        "95% interval": span(rate.interval),
    }


def _seed_row(found: OverSeeds, name: str, mean: SeedMean) -> Row:
    each = {
        f"seed {seed}" if found.seeds.count(seed) == 1 else result: f"{rate.k}/{rate.n}"
        for result, seed, rate in zip(found.names, found.seeds, mean.rates, strict=True)
    }
    return {
        "task": name,
        **each,
        "mean": percent(mean.mean),
        "95% interval of the mean": span(mean.interval),
    }


def _short(rate: Rate) -> str:
    return f"{rate.k}/{rate.n}, {percent(rate.value).strip()} ({span(rate.interval)})"
