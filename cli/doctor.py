"""`vlarl doctor`: what works here, and the command that fixes what does not."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import JsonOpt, QuietOpt
from .output import Output, paint

EXAMPLES = ("vlarl doctor", "vlarl doctor --env metaworld --json")


def doctor(
    env: Annotated[
        str | None, typer.Option("--env", help="Check the packages of this env only.")
    ] = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Check this machine and print the fix for what is missing (exit code 3)."""
    from vlarl.doctor import report

    out = Output(json=json, quiet=quiet)
    checks = report(env)
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = paint("ok ", "32", sys.stdout) if check.ok else paint("fix", "31;1", sys.stdout)
        lines.append(f"{mark}  {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"     {'':<{width}}  run: {check.fix}")
    broken = [check.name for check in checks if not check.ok]
    out.result(checks, text="\n".join(lines), ident=broken)
    if broken:
        raise typer.Exit(3)
