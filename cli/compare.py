"""`vlarl compare`: two measurements against each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOpt, QuietOpt
from .output import Output, format_table

if TYPE_CHECKING:
    from vlarl.proportions import Paired

EXAMPLES = (
    "vlarl compare before.json after.json",
    "vlarl compare runs/a/eval/step_000000.json runs/a/eval/step_000020.json --json",
)


def compare(
    file_a: Annotated[Path, typer.Argument(metavar="A.json", help="The result to start from.")],
    file_b: Annotated[Path, typer.Argument(metavar="B.json", help="The result to judge.")],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Compare two results of `vlarl eval` on the episodes both played, pair by pair.

    The difference is B minus A, with Newcombe's 95 % interval for paired data and the p-value of
    the exact McNemar test. -q prints the difference alone.
    """
    from vlarl import comparison
    from vlarl.result_file import load

    output = Output(json=json, quiet=quiet)
    files = {"a": file_a, "b": file_b}
    results = {side: load(path) for side, path in files.items()}
    found = comparison.compare(results["a"], results["b"])
    document = found.document() | {
        "files": files,
        "checkpoints": {side: r.protocol.get("checkpoint") for side, r in results.items()},
    }
    rows = [_paired_row(task, paired) for task, paired in found.by_task.items()]
    rows.append(_paired_row("all pairs", found.total))
    output.result(document, text=format_table(rows), ident=f"{found.total.difference:+.4f}")
    for warning in found.warnings():
        output.warn(warning)


def _paired_row(name: str, paired: Paired) -> dict[str, object]:
    return {
        "task": name,
        "A": f"{paired.a.k}/{paired.n}",
        "B": f"{paired.b.k}/{paired.n}",
        "B - A": f"{100 * paired.difference:+.1f} points",
        "95% interval": f"{100 * paired.interval[0]:+.1f} to {100 * paired.interval[1]:+.1f}",
        "only A / only B": f"{paired.only_a} / {paired.only_b}",
        "p (McNemar)": f"{paired.p_value:.2g}",
    }
