"""`vlarl report` and `vlarl merge`: results of evaluations, as tables and put together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlarl.errors import ConfigError

from .options import JsonOpt, OverwriteOpt, QuietOpt
from .output import Output, format_table
from .tables import markdown as to_markdown
from .tables import result_rows, seed_rows, side_by_side

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
    from vlarl.results import load
    from vlarl.seeds import over_seeds

    output = Output(json=json, quiet=quiet)
    results = [load(path) for path in files]
    ident: list[str] = [f"{result.total.value:.4f}" for result in results]
    document: object
    if seeds:
        found = over_seeds(results)
        rows, document = seed_rows(found), found.document()
        ident = [f"{found.total.mean:.4f}"]
    elif len(results) == 1:
        rows, document = result_rows(results[0]), results[0].summary()
    else:
        names = _distinct(files)
        rows = side_by_side(dict(zip(names, results, strict=True)))
        document = {n: r.summary() for n, r in zip(names, results, strict=True)}
    text = format_table(rows)
    if markdown:
        text = "\n".join([to_markdown(rows), "", *map(_protocol_line, results)])
    output.result(document, text=text, ident=ident)
    for path, result in zip(files, results, strict=True):
        if not result.is_complete:
            output.warn(f"{path} is incomplete: {len(result.missing)} episodes are missing")


def _distinct(files: list[Path]) -> list[str]:
    """File names without ending; whole paths where those are alike."""
    stems = [path.stem for path in files]
    names = [
        stem if stems.count(stem) == 1 else str(path.with_suffix(""))
        for stem, path in zip(stems, files, strict=True)
    ]
    if len(set(names)) < len(names):
        raise ConfigError("a result file is named twice")
    return names


def _protocol_line(result: EvalResult) -> str:
    """The parts of a protocol without which a number says nothing."""
    protocol = result.protocol
    env, plan = protocol.get("env", {}), protocol.get("plan", {})
    sampling, checkpoint = protocol.get("sampling", {}), protocol.get("checkpoint", {})
    versions = protocol.get("versions", {})
    weights = (checkpoint.get("sha256") or "")[:12] or f"step {checkpoint.get('step')}"
    parts = [
        f"{len(result.plan)} episodes of {len(result.by_task)} tasks in {env.get('name')} "
        f"({plan.get('split')} split, "
        f"{plan.get('start_from_training_trial')} from training trials)",
        f"horizon {env.get('horizon')}",
        f"settle steps {env.get('facts', {}).get('settle_steps', env.get('settle_steps'))}",
        f"render quality {env.get('render_quality')}",
        f"temperature {sampling.get('temperature')}",
        f"seed {sampling.get('seed')}",
        f"weights {weights}",
        f"plan {result.plan_hash[:12]}",
        ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    return "- " + "; ".join(parts)


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
    from vlarl.results import load, name_some

    output = Output(json=json, quiet=quiet)
    parts = [load(path) for path in files]
    whole = merged(parts)
    if not whole.is_complete:
        raise ConfigError(
            f"{len(whole.missing)} of {len(whole.plan)} planned episodes are in none of the parts: "
            f"{name_some(whole.missing)}; play them with `vlarl eval --shard`"
        )
    whole.save(out, overwrite=overwrite)
    twice = sum(len(part.episodes) for part in parts) - len(whole.episodes)
    if twice:
        output.hint(f"{twice} episodes were in more than one part, and count once")
    output.result(whole.document(), text=format_table(result_rows(whole)), ident=out)
    output.hint(f"wrote {out}")
