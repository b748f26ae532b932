"""Exit codes, what goes to stdout and stderr, and start-up without torch."""

import errno
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from vlarl.errors import AssetMissing, ConfigError, RunFailed
from vlarl_cli.main import app

RUN = CliRunner()


def command(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "vlarl_cli", *args], capture_output=True, text=True, **kwargs
    )


@pytest.fixture
def raising(monkeypatch):
    """raising(error): makes `vlarl presets list` raise it."""

    def arrange(error):
        def raise_it():
            raise error

        monkeypatch.setattr("vlarl.config.presets.names", raise_it)

    return arrange


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (AssetMissing("not here", fix="get it"), 3),
        (RunFailed("broke"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code(raising, error, code):
    raising(error)
    done = RUN.invoke(app, ["presets", "list"])
    assert done.exit_code == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_missing_thing_prints_the_command_that_gets_it(raising):
    raising(AssetMissing("asset 'x' is not here", fix="hf download x"))
    done = RUN.invoke(app, ["presets", "list"])
    assert done.stderr == "error: asset 'x' is not here\n  run: hf download x\n"


def test_several_problems_are_one_message(raising):
    raising(ConfigError("a: bad\nb: worse"))
    done = RUN.invoke(app, ["presets", "list"])
    assert done.stderr == "error: 2 problems:\n  a: bad\n  b: worse\n"


def test_the_end_of_a_log_is_not_counted_as_problems(raising):
    raising(RunFailed("rank 0 was ended by SIGKILL\n  last words\nlog: a"))
    done = RUN.invoke(app, ["presets", "list"])
    assert done.stderr.splitlines() == [
        "error: rank 0 was ended by SIGKILL",
        "    last words",
        "  log: a",
    ]


def test_debug_shows_the_traceback(raising):
    raising(ConfigError("wrong"))
    done = RUN.invoke(app, ["--debug", "presets", "list"])
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: wrong\n")


def test_debug_may_stand_anywhere():
    done = command("presets", "show", "zzz", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_says_that_it_is_one(monkeypatch, capsys, raising, debug):
    from vlarl_cli import main

    raising(ZeroDivisionError("no"))
    monkeypatch.setattr(sys, "argv", ["vlarl", "presets", "list", *["--debug"][:debug]])
    with pytest.raises(ZeroDivisionError if debug else SystemExit) as caught:
        main.main()
    if not debug:
        assert caught.value.code == 1
        assert "internal error: ZeroDivisionError: no" in capsys.readouterr().err


def test_a_full_disk_is_no_bug(monkeypatch, capsys, raising):
    from vlarl_cli import main

    raising(OSError(errno.ENOSPC, "No space left on device", "/runs/a/env.json"))
    monkeypatch.setattr(sys, "argv", ["vlarl", "presets", "list"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said == "error: /runs/a/env.json: No space left on device; --debug shows where\n"


def test_unknown_commands_and_options_are_usage_errors_with_suggestions():
    done = RUN.invoke(app, ["preset"])
    assert done.exit_code == 2
    assert "presets" in done.stderr
    assert RUN.invoke(app, ["presets", "list", "--jso"]).exit_code == 2


def test_vlarl_alone_shows_the_verbs_in_order_of_use():
    done = RUN.invoke(app, [])
    assert done.exit_code == 0
    verbs = re.findall(r"^│ ([a-z]+) ", done.stdout, re.MULTILINE)
    first = ["doctor", "download", "presets", "config", "train", "eval", "compare"]
    assert verbs[: len(first)] == first
    assert set(verbs) == set(typer.main.get_command(app).commands)


def test_version():
    from vlarl import __version__

    assert RUN.invoke(app, ["--version"]).stdout == f"vlarl {__version__}\n"


def test_a_closed_pipe_is_no_error_message():
    vlarl = f"{sys.executable} -m vlarl_cli"
    done = subprocess.run(
        ["bash", "-c", f"{vlarl} config schema | head -1"], capture_output=True, text=True
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_error(closed):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m vlarl_cli presets list -q {closed}"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_talk_without_a_listener_does_not_end_a_run():
    code = (
        "import sys\n"
        "from vlarl_cli.output import print_stderr\n"
        "sys.stdin.read()\n"
        "for _ in range(3): print_stderr('x')\n"
        "print('saved')\n"
    )
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", code], text=True, **pipe)
    child.stderr.close()
    assert child.communicate("go")[0] == "saved\n"
    assert child.returncode == 0


def _leaves(group, path=()):
    for name, child in group.commands.items():
        if hasattr(child, "commands"):
            yield from _leaves(child, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(_leaves(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_help(path):
    done = RUN.invoke(app, [*path, "--help"])
    assert done.exit_code == 0
    assert "Usage: " in done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "vlarl",
        "vlarl.config.compose, vlarl.config.presets, vlarl.config.resolved",
        "vlarl.envs.subproc, vlarl.envs.sim_worker, vlarl.envs.metaworld_sim",
        "vlarl.assets.store, vlarl.run_dir, vlarl.doctor",
        "vlarl_cli.main",
    ],
)
def test_start_up_does_without_torch(modules):
    code = f"import sys, {modules}; print([m for m in ('torch', 'mujoco') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_command_line_starts_without_anything_slow():
    slow = ("torch", "numpy", "pydantic", "rich", "yaml")
    code = f"import sys, vlarl_cli.main; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "args",
    ["--help", "presets list", "presets show base/grpo", "presets diff base/grpo base/ppo"],
)
def test_commands_that_train_nothing_do_without_torch(args):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['vlarl', *{args!r}.split()]\n"
        "from vlarl_cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == "False\n"


@pytest.mark.parametrize(
    "args",
    [
        "train --preset tiny_metaworld_grpo --dry-run",
        "eval tiny-oft-metaworld --preset tiny_metaworld_grpo --dry-run",
        "config validate tiny_metaworld_grpo",
    ],
)
def test_commands_that_load_no_weights_do_without_the_libraries_of_networks(args, tmp_path):
    slow = ("transformers", "timm", "peft", "torchvision", "scipy", "torch.distributed.fsdp")
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([m for m in {slow} if m in sys.modules]))\n"
        f"sys.argv = ['vlarl', *{args!r}.split(), '-q']\n"
        "from vlarl_cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_colour_when_told_or_when_no_terminal(monkeypatch):
    from vlarl_cli.output import paint

    class Terminal:
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert paint("x", "1", Terminal()) == "\033[1mx\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "1", Terminal()) == "x"
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    assert "\033" not in command("presets", "list", env=environment).stdout


def test_a_working_directory_that_is_gone_is_named(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
    code += "import sys; sys.argv = ['vlarl', '--version']; "
    code += "from vlarl_cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the working directory is not there any more" in done.stderr


def test_ctrl_c_is_answered_wherever_it_comes(monkeypatch):
    def asked(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("vlarl.doctor.report", asked)
    done = CliRunner().invoke(app, ["doctor"])
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")
