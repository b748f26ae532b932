"""Options that several commands share, so that they read the same everywhere.

No option has an optional value: typer lets `--resume --dry-run` swallow the second flag as the
value of the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


def complete_preset(incomplete: str) -> list[str]:
    """Names of shipped presets, for shell completion."""
    from vlarl.config.presets import names

    return [name for name in names() if name.startswith(incomplete)]


PresetOpt = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME|FILE",
        help="A shipped preset (see `vlarl presets list`) or a .yaml file.",
        autocompletion=complete_preset,
        rich_help_panel="Config",
    ),
]
OverridesArg = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, e.g. optim.lr=1e-5 rollout.episodes=96; values are YAML.",
        show_default=False,
    ),
]
SeedOpt = Annotated[
    int | None,
    typer.Option("--seed", help="Root of all randomness; same as seed=N.", rich_help_panel="Run"),
]
NprocOpt = Annotated[
    str,
    typer.Option(
        "--nproc",
        metavar="N|auto",
        help="Processes on this machine; auto is one per CUDA device, or 1 on a CPU.",
        rich_help_panel="Launch",
    ),
]
DryRunOpt = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything and say what would happen; write and start nothing.",
        rich_help_panel="Run",
    ),
]
OverwriteOpt = Annotated[
    bool, typer.Option("--overwrite", help="Replace FILE.", rich_help_panel="Output")
]
JsonOpt = Annotated[
    bool,
    typer.Option("--json", help="One JSON document on stdout.", rich_help_panel="Output"),
]
QuietOpt = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Only the id or path on stdout.", rich_help_panel="Output"),
]


def words(text: str | None) -> tuple[str, ...]:
    """The parts of `A,B,...` without spaces around them; none when the option was left out."""
    return () if text is None else tuple(word.strip() for word in text.split(","))


def named(ctx: typer.Context, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those flags, by parameter name, that stand on the command line, with their plain values."""
    return {
        key: value.value if isinstance(value, Enum) else value
        for key, value in flags.items()
        if (source := ctx.get_parameter_source(key)) and source.name == "COMMANDLINE"
    }


def merge_overrides(args: list[str] | None, **flags: object) -> list[str]:
    """KEY=VALUE arguments plus sugar flags that were given (`max_steps=3` -> "max_steps=3").

    A flag left at None adds nothing. A double underscore in a flag's name stands for a dot:
    `rollout__temperature`. Words and paths are quoted, so that `--name 7` stays a word.
    """
    named = [
        f"{key.replace('__', '.')}={_as_yaml(value)}"
        for key, value in flags.items()
        if value is not None
    ]
    return [*(args or []), *named]


def _as_yaml(value: object) -> str:
    return json.dumps(str(value)) if isinstance(value, (str, Path)) else str(value)


def examples(*lines: str) -> str:
    """An epilog with one example a line; square brackets are data, not markup."""
    return "\n\n".join(["Examples:", *(f"$ {line}".replace("[", r"\[") for line in lines)])
