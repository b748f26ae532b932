"""`vlarl report` and `vlarl merge`: results of evaluations, as tables and put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlarl.atomic import check_writable
from vlarl.errors import ConfigError

from .options import JsonOpt, OverwriteOpt, QuietOpt
from .output import Output, format_table
from .tables import escaped, result_rows, seed_rows, side_by_side
from .tables import markdown as to_markdown

if TYPE_CHECKING:
    from vlarl.results import EvalResult

REPORT_EXAMPLES = (
    "vlarl report results/run.json --markdown",
    "vlarl report seed0.json seed1.json seed2.json --seeds",
    "vlarl report sft.json grpo.json ppo.json",
)
MERGE_EXAMPLES = ("vlarl merge part1.json part2.json part3.json part4.json --out whole.json",)


def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json...", help="Results of `vlarl eval`.")
    ],
    seeds: Annotated[
        bool,
        typer.Option(
            "--seeds",
            help="Results of one recipe with different seeds: their mean with its 95 % interval.",
            rich_help_panel="Config",
        ),
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="A Markdown table.", rich_help_panel="Output"),
    ] = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Show results as a table: one with intervals, several side by side, or a mean over seeds.

    Under a Markdown table stands the protocol, so that a number never travels without it. -q prints
    the success rate of each result.
    """
    from vlarl.comparison import unlike
    from vlarl.result_file import load
    from vlarl.seeds import over_seeds, training_warnings

    output = Output(json=json, quiet=quiet)
    names = _distinct(files)
    results = [load(path) for path in files]
    for path, result in zip(files, results, strict=True):
        if not result.episodes:
            raise ConfigError(f"{path}: no episode was played, so there is nothing to report")
    ident: list[str] = [f"{result.total.value:.4f}" for result in results]
    by_file = dict(zip(map(str, files), results, strict=True))
    warnings = _warnings(by_file)
    document: object
    if seeds:
        found = over_seeds(by_file)
        warnings += training_warnings(by_file)
        rows, document = seed_rows(found), {**found.document(), "warnings": warnings}
        ident = [f"{found.total.mean:.4f}"]
    elif len(results) == 1:
        rows, document = result_rows(results[0]), results[0].summary()
    else:
        warnings += unlike(by_file)
        rows = side_by_side(dict(zip(names, results, strict=True)))
        document = {n: r.summary() for n, r in zip(names, results, strict=True)}
    text = format_table(rows)
    if markdown:
        notes = [f"- **warning**: {escaped(warning)}" for warning in warnings]
        stamps = [line for file, result in by_file.items() for line in _stamp(file, result)]
        text = "\n".join([to_markdown(rows), "", *notes, *stamps])
    output.result(document, text=text, ident=ident)
    for warning in warnings:
        output.warn(warning)


def _distinct(files: list[Path]) -> list[str]:
    """File names without ending; whole paths where those are alike."""
    if len({path.resolve() for path in files}) < len(files):
        raise ConfigError("a result file is named twice")
    stems = [path.stem for path in files]
    names = [
        stem if stems.count(stem) == 1 else str(path.with_suffix(""))
        for stem, path in zip(stems, files, strict=True)
    ]
    return names if len(set(names)) == len(names) else [str(path) for path in files]


def _warnings(results: Mapping[str, EvalResult]) -> list[str]:
    """What has to be known of each result before its numbers are quoted."""
    from vlarl.protocol import caveats
    from vlarl.results import counted

    found = []
    for path, result in results.items():
        if not result.is_complete:
            found.append(f"{path} is {result.coverage}")
        if result.num_diverged:
            lost = counted(result.num_diverged, "episode")
            found.append(f"{path}: the simulator diverged in {lost}, counted as failures")
        if caveats(result.protocol):
            found.append(f"{path}: {caveats(result.protocol)}")
    return found


def _stamp(file: str, result: EvalResult) -> list[str]:
    """How it was measured, as a Markdown list."""
    from vlarl.protocol import in_words

    first = f"{Path(file).name}: {result.coverage}; plan {result.plan_hash[:12]}"
    return [f"- {escaped(first)}", *(f"  - {escaped(line)}" for line in in_words(result.protocol))]


def merge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="PART.json...", help="Parts of one evaluation (`eval --shard`)."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The whole result.", rich_help_panel="Output")
    ],
    overwrite: OverwriteOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Make the parts of one evaluation whole.

    An episode that several parts played alike counts once; one that came out differently is an
    error. When episodes are missing they are named, and nothing is written.
    """
    from vlarl.comparison import merge as merged
    from vlarl.result_file import load
    from vlarl.results import counted, name_some

    output = Output(json=json, quiet=quiet)
    check_writable(out, overwrite=overwrite)
    parts = [load(path) for path in files]
    whole = merged(parts, list(map(str, files)))
    if not whole.is_complete:
        raise ConfigError(
            f"{len(whole.missing)} of {counted(len(whole.plan), 'planned episode')} are in none of "
            f"the parts: {name_some(whole.missing)}; {_advice(parts)}"
        )
    whole.save(out, overwrite=overwrite)
    twice = sum(len(part.episodes) for part in parts) - len(whole.episodes)
    if twice:
        was = "was" if twice == 1 else "were"
        output.hint(f"{counted(twice, 'episode')} {was} in more than one part, counted once")
    output.result(whole.document(), text=format_table(result_rows(whole)), ident=out)
    output.hint(f"wrote {out}")


def _advice(parts: Sequence[EvalResult]) -> str:
    """How to play what no part has."""
    shards = {part.shard for part in parts if part.shard is not None}
    counts = {count for _, count in shards}
    if len(counts) != 1 or any(part.shard is None for part in parts):
        return "play them with `vlarl eval --shard I/N`"
    (count,) = counts
    missing = [f"{i}/{count}" for i in range(1, count + 1) if (i, count) not in shards]
    which = f"shard {missing[0]} is" if len(missing) == 1 else f"shards {', '.join(missing)} are"
    return f"{which} missing: `vlarl eval ... --shard {missing[0]}`"
