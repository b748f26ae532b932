"""The surface of the command line is golden, its page is generated, and its examples run."""

import shlex

import pytest
import typer
from typer.testing import CliRunner

from vlarl_cli.main import app
from vlarl_cli.reference import assets_markdown, cli_markdown, presets_markdown, surface

RUN = CliRunner()


def _examples(command):
    if command.epilog:
        for line in command.epilog.replace(r"\[", "[").split("\n\n")[1:]:
            yield line.removeprefix("$ ")
    for child in getattr(command, "commands", {}).values():
        yield from _examples(child)


EXAMPLES = list(_examples(typer.main.get_command(app)))


def test_surface(check_golden):
    check_golden("cli_surface.txt", surface())


def test_page_of_the_command_line(check_golden):
    check_golden("../../docs/cli.md", cli_markdown())


def test_page_of_the_presets(check_golden):
    check_golden("../../docs/presets.md", presets_markdown())


def test_page_of_the_assets(check_golden):
    check_golden("../../docs/assets.md", assets_markdown())


def test_there_are_examples():
    assert len(EXAMPLES) >= 8


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_use_options_that_exist(line):
    """Every word of an example is known to the parser of its command."""
    words = shlex.split(line.partition(" > ")[0].partition(" | ")[0])
    assert words[0] == "vlarl"
    command = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context("vlarl", rest)


@pytest.mark.parametrize(
    "line",
    [line for line in EXAMPLES if line.split()[1] in ("presets", "config") and "runs/" not in line],
)
def test_examples_of_presets_and_config_run(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = RUN.invoke(app, shlex.split(line.partition(" > ")[0])[1:])
    assert done.exit_code == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        line
        for line in EXAMPLES
        if line.split()[1] in ("train", "eval", "collect")
        and not any(word in line for word in ("runs/", "--resume", "--from"))
    ],
)
def test_examples_pass_their_dry_run_and_leave_nothing(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.partition(" > ")[0])[1:]
    done = RUN.invoke(app, [*words, *["--dry-run"]["--dry-run" in words :]])
    assert done.exit_code == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
