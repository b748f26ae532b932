"""The `vlarl` command: its subcommands in order of use, and its exit codes.

0 done · 1 the run failed · 2 usage or config wrong, nothing started · 3 something is missing, the
fix is printed · 4 `--fail-under` not met · 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import vlarl
from vlarl.errors import VlarlError
from vlarl.signals import INTERRUPTED

from . import collect, compare, config, doctor, download, plot, presets, sft, train, video
from . import eval as eval_
from . import report as report_
from .errors import report
from .options import examples
from .output import print_error, print_stderr, print_stdout

_IN_ORDER_OF_USE = (
    "doctor",
    "download",
    "presets",
    "config",
    "train",
    "eval",
    "compare",
    "report",
    "merge",
    "plot",
    "video",
    "collect",
    "sft",
)


class _Group(TyperGroup):
    """Turns VlarlError into a message and an exit code, for the shell and for tests alike."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=_IN_ORDER_OF_USE.index)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VlarlError as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            raise typer.Exit(report(error)) from error
        except KeyboardInterrupt:  # where nothing waits for a request to stop
            print_stderr("interrupted")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Group,
    help="Reinforcement learning of vision-language-action policies.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_stdout(f"vlarl {vlarl.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks. May stand anywhere on the line."),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print_stdout(ctx.get_help())


app.command("doctor", epilog=examples(*doctor.EXAMPLES))(doctor.doctor)
app.command("download", epilog=examples(*download.EXAMPLES))(download.download)
app.add_typer(presets.app, name="presets")
app.add_typer(config.app, name="config")
app.command("collect", epilog=examples(*collect.EXAMPLES))(collect.collect)
app.command("sft", epilog=examples(*sft.EXAMPLES))(sft.sft)
app.command("train", epilog=examples(*train.EXAMPLES))(train.train)
app.command("video", epilog=examples(*video.EXAMPLES))(video.video)
app.command("eval", epilog=examples(*eval_.EXAMPLES))(eval_.evaluate)
app.command("compare", epilog=examples(*compare.EXAMPLES))(compare.compare)
app.command("report", epilog=examples(*report_.REPORT_EXAMPLES))(report_.report)
app.command("merge", epilog=examples(*report_.MERGE_EXAMPLES))(report_.merge)
app.command("plot", epilog=examples(*plot.EXAMPLES))(plot.plot)


def main() -> None:
    """Entry point of the console script. Always ends by SystemExit with a documented code."""
    _open_closed_streams()
    _share_cores()
    _require_working_directory()
    args = sys.argv[1:]
    debug = "--debug" in args
    if debug:  # an option of the root, for click's parser
        args = ["--debug", *(a for a in args if a != "--debug")]
    try:
        app(args, prog_name="vlarl")
    except OSError as error:  # a full or read-only disk, a folder of somebody else
        if debug:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print_error(f"{where}{error.strerror or error}; --debug shows where")
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        print_error(f"internal error: {type(error).__name__}: {error}")
        print_error("this is a bug in vlarl; the same command with --debug shows where")
        sys.exit(1)
    finally:
        _flush()


def _require_working_directory() -> None:
    """Libraries of torch fail in words of their own where there is none."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print_error("the working directory is not there any more; change to another one")
        sys.exit(2)


def _share_cores() -> None:
    """Let waiting threads of torch sleep, here and in what is started from here.

    By default they spin, which starves simulators on the same cores: with one other busy process on
    two cores, an update takes three to four times as long. Must be set before torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _open_closed_streams() -> None:
    """After `vlarl ... >&-`, words go nowhere, and no file takes the place of a stream."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _flush() -> None:
    """Let `vlarl ... | head` end without a complaint from the interpreter."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
