"""`vlarl presets`: what is shipped, and copies to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import JsonOpt, QuietOpt, complete_preset, examples
from .output import Output

EXAMPLES = (
    "vlarl presets list --algo grpo",
    "vlarl presets show tiny_metaworld_grpo",
    "vlarl presets copy tiny_metaworld_grpo mine.yaml",
    "vlarl presets diff tiny_metaworld_grpo tiny_metaworld_ppo",
)

app = typer.Typer(
    help="List, show, copy and compare the shipped presets.",
    no_args_is_help=True,
    epilog=examples(*EXAMPLES),
)

NameArg = Annotated[
    str, typer.Argument(autocompletion=complete_preset, metavar="NAME", help="A shipped preset.")
]
EitherArg = typer.Argument(help="A shipped preset or a .yaml file.", autocompletion=complete_preset)


@app.command("list")
def list_(
    env: Annotated[str | None, typer.Option("--env", help="Only presets of this env.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Only of this policy.")] = None,
    algo: Annotated[str | None, typer.Option("--algo", help="Only of this algorithm.")] = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """List the presets that can be run."""
    from vlarl import registry
    from vlarl.config import presets
    from vlarl.config.compose import command_of, compose

    out = Output(json=json, quiet=quiet)
    wanted = {"env": env, "policy": policy, "algo": algo}
    for kind in registry.KINDS:
        wish = wanted[kind]
        if wish is not None:
            registry.check_name(kind, wish)
    rows = []
    for name in presets.names():
        composed = compose(name)
        uses = {kind: _name(composed.values.get(kind)) for kind in wanted}
        if all(wish in (None, uses[kind]) for kind, wish in wanted.items()):
            about = presets.description(presets.read(name))
            rows.append(
                {"name": name, "command": command_of(composed), **uses, "description": about}
            )
    out.table(rows, ident="name")


@app.command()
def show(name: NameArg) -> None:
    """Print a preset as it is shipped; `vlarl config show` prints it resolved."""
    from vlarl.config import presets

    Output().result(None, text=presets.read(name).rstrip("\n"))


@app.command()
def copy(
    name: NameArg,
    file: Annotated[Path | None, typer.Argument(help="Where to; default ./NAME.yaml.")] = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Copy a preset to a file to edit. Never overwrites."""
    from vlarl.config import presets
    from vlarl.config.compose import command_of, compose

    out = Output(json=json, quiet=quiet)
    path = presets.copy(name, file)
    out.result({"path": path}, text=str(path), ident=path)
    out.hint(f"edit it, then: vlarl {command_of(compose(name))} --preset {path}")


@app.command()
def diff(
    a: Annotated[str, EitherArg],
    b: Annotated[str, EitherArg],
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Compare what two presets set, bases included."""
    from vlarl.config.compose import compose
    from vlarl.config.resolved import differences

    out = Output(json=json, quiet=quiet)
    found = differences(compose(a).values, compose(b).values)
    out.table([{"key": key, "a": left, "b": right} for key, left, right in found], ident="key")


def _name(section: Any) -> str | None:
    return section.get("name") if isinstance(section, dict) else None
