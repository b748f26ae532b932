"""`vlarl config`: the resolved settings of a preset or a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlarl.errors import ConfigError

from .options import JsonOpt, OverridesArg, PresetOpt, QuietOpt, complete_preset, examples
from .output import Output, to_json

if TYPE_CHECKING:
    from pydantic import BaseModel

    from vlarl.config.compose import Composed

EXAMPLES = (
    "vlarl config show --preset tiny_metaworld_grpo optim.lr=1e-5 --sources",
    "vlarl config validate tiny_metaworld_grpo tiny_metaworld_ppo",
    "vlarl config schema > preset.schema.json",
    "vlarl config diff runs/a runs/b",
)

app = typer.Typer(
    help="Show, check and compare settings.", no_args_is_help=True, epilog=examples(*EXAMPLES)
)


@app.command()
def show(
    preset: PresetOpt,
    overrides: OverridesArg = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Say where every value was set.")
    ] = False,
    json: JsonOpt = False,
) -> None:
    """Print every setting of a run, defaults included, as YAML."""
    from vlarl.config.compose import compose
    from vlarl.config.resolved import resolved, to_yaml

    composed = compose(preset, overrides or ())
    full = resolved(_build(composed), composed.sources)
    data = {"config": full.values, "sources": full.sources} if sources else full.values
    Output(json=json).result(data, text=to_yaml(full, with_sources=sources))


@app.command()
def validate(
    preset: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE...",
            help="Shipped presets or .yaml files.",
            autocompletion=complete_preset,
        ),
    ],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Check presets or .yaml files; exit code 2 when one is wrong."""
    from vlarl.config.compose import compose

    out = Output(json=json, quiet=quiet)
    rows, wrong = [], []
    for name in preset:
        try:
            _build(compose(name))
            problems = []
        except ConfigError as error:
            problems = str(error).splitlines()
            wrong += [f"{name}: {line}" for line in problems]
        rows.append({"preset": name, "ok": not problems, "problems": problems})
    good = [row["preset"] for row in rows if row["ok"]]
    out.result(rows, text="\n".join(f"ok  {name}" for name in good), ident=good)
    if wrong:
        raise ConfigError("\n".join(wrong))


@app.command()
def schema() -> None:
    """Print the JSON schema of presets of `vlarl train`, for editors."""
    from vlarl.config.editor import preset_schema

    Output().result(None, text=to_json(preset_schema()))


@app.command()
def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run directory.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.")],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Compare the settings of two run directories."""
    from vlarl.config.resolved import differences, load

    out = Output(json=json, quiet=quiet)
    a, b = (load(run / "config.json") for run in (run_a, run_b))
    rows = [
        {"key": key, "a": left, "b": right} for key, left, right in differences(a.values, b.values)
    ]
    out.table(rows, ident="key")


def _build(composed: Composed) -> BaseModel:
    """The config of the command that the preset is for."""
    from vlarl import sft_config
    from vlarl.config.compose import build, command_of

    return sft_config.build(composed) if command_of(composed) == "sft" else build(composed)
