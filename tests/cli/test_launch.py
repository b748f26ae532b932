import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlarl import run_dir
from vlarl.errors import ConfigError, MissingError, NonFiniteLoss, RunFailed
from vlarl_cli import launch as launcher
from vlarl_cli.launch import Layout, command, launch, layout, refuse_nested

WORKERS = {
    "fine": """
        print("hello from rank", RANK)
        return 0
    """,
    "crash": """
        if RANK == LAST:
            raise KeyError("a bug")
        time.sleep(60)
    """,
    "mute": """
        print("an earlier start")
        print("--- started later")
        print("my last words")
        return 1
    """,
    "segfault": """
        if RANK == LAST:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    """,
    "typed": """
        note = RankExit(rank=RANK, code=1, kind="NonFiniteLoss", message="loss nan in iteration 3")
        write_exit(RunDir(Path(path)), note)
        return 1
    """,
    "missing": """
        lack = {"kind": "AssetMissing", "message": "no x", "fix": "vlarl download x"}
        write_exit(RunDir(Path(path)), RankExit(rank=RANK, code=3, **lack))
        return 3
    """,
    "stoppable": """
        got = []
        signal.signal(signal.SIGINT, lambda *_: got.append("INT"))
        Path(path, f"ready_{RANK}").touch()
        while not got:
            time.sleep(0.02)
        time.sleep(0.5 + RANK)  # a second delivery would show, and torchrun must not be hasty
        Path(path, f"signals_{RANK}").write_text(" ".join(got))
        return 130
    """,
    "stubborn": """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(path, f"ready_{RANK}").write_text(str(os.getpid()))
        time.sleep(600)
    """,
}
HEAD = """
import os, signal, sys, time
from pathlib import Path
from vlarl.run_dir import RankExit, RunDir, write_exit
RANK, LAST = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) - 1

def main(argv):
    (path,) = argv
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    code = tmp_path / "code"
    code.mkdir()
    for name, body in WORKERS.items():
        body = textwrap.indent(textwrap.dedent(body), "    ")
        (code / f"fake_{name}.py").write_text(HEAD + body)
    monkeypatch.setenv("PYTHONPATH", str(code))
    return run_dir.create(tmp_path / "run")


ONE = Layout()
RANKS = [
    ONE,
    pytest.param(Layout(nproc=2), marks=[pytest.mark.dist, pytest.mark.slow], id="two"),
]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 60
    while not all(p.exists() for p in paths):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("where", RANKS)
def test_success_returns_zero_and_every_rank_has_a_log(run, where):
    assert launch(run, where, module="fake_fine") == 0
    for rank in range(where.nproc):
        assert f"hello from rank {rank}" in run.log(rank).read_text()


@pytest.mark.parametrize("where", RANKS)
def test_an_unexpected_error_names_rank_words_and_log(run, where):
    with pytest.raises(RunFailed) as caught:
        launch(run, where, module="fake_crash")
    rank = where.nproc - 1
    assert str(caught.value).startswith(f"rank {rank}: KeyError: 'a bug'\n")
    assert 'raise KeyError("a bug")' in str(caught.value)
    assert str(caught.value).endswith(f"log: {run.log(rank)}")


@pytest.mark.parametrize("free", [0, 10**9])
def test_a_rank_that_says_nothing_is_quoted_and_a_full_disk_is_named(run, monkeypatch, free):
    monkeypatch.setattr(launcher.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(RunFailed, match="left no note" if free else "disk of .* is full") as caught:
        launch(run, ONE, module="fake_mute")
    assert "my last words" in str(caught.value)
    assert "an earlier start" not in str(caught.value)
    assert str(caught.value).endswith(f"log: {run.log(0)}")


@pytest.mark.parametrize("where", RANKS)
def test_a_rank_that_a_signal_ended_is_named(run, where):
    with pytest.raises(RunFailed, match=f"rank {where.nproc - 1} was ended by SIGSEGV"):
        launch(run, where, module="fake_segfault")


def test_a_known_error_comes_through_as_itself(run):
    with pytest.raises(NonFiniteLoss, match=r"rank 0: loss nan in iteration 3 \(log: .*rank_0.log"):
        launch(run, ONE, module="fake_typed")
    with pytest.raises(MissingError) as caught:
        launch(run, ONE, module="fake_missing")
    assert caught.value.fix == "vlarl download x"
    assert caught.value.exit_code == 3


def test_an_old_note_is_not_taken_for_a_new_one(run):
    with pytest.raises(NonFiniteLoss):
        launch(run, ONE, module="fake_typed")
    assert launch(run, ONE, module="fake_fine") == 0


def test_a_module_that_does_not_exist_is_an_error(run):
    with pytest.raises(RunFailed, match="ModuleNotFoundError: No module named 'fake_nothing'"):
        launch(run, ONE, module="fake_nothing")


@pytest.mark.parametrize("where", RANKS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_exactly_once(run, where, number):
    said = []
    ready = [run.path / f"ready_{rank}" for rank in range(where.nproc)]

    def stop() -> None:
        wait_for(*ready)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert launch(run, where, module="fake_stoppable", say=said.append) == 130
    thread.join()
    assert [(run.path / f"signals_{r}").read_text() for r in range(where.nproc)] == [
        "INT"
    ] * where.nproc
    assert len(said) == 1


SCRIPT = """
import sys
from pathlib import Path
from vlarl.run_dir import RunDir
from vlarl_cli.launch import Layout, launch
sys.exit(launch(RunDir(Path(sys.argv[1])), Layout(nproc=int(sys.argv[2])), module=sys.argv[3]))
"""


def start(run, where, module):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(run.path), str(where.nproc), module],
        start_new_session=True,
    )


def test_ctrl_c_for_the_whole_terminal_arrives_once(run):
    process = start(run, ONE, "fake_stoppable")
    wait_for(run.path / "ready_0")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert (run.path / "signals_0").read_text() == "INT"


def test_a_second_signal_kills_what_does_not_stop(run):
    process = start(run, ONE, "fake_stubborn")
    wait_for(run.path / "ready_0")
    pid = int((run.path / "ready_0").read_text())
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert gone(pid)


@pytest.mark.parametrize("where", RANKS)
def test_ranks_do_not_outlive_a_killed_launcher(run, where):
    process = start(run, where, "fake_stubborn")
    ready = [run.path / f"ready_{rank}" for rank in range(where.nproc)]
    wait_for(*ready)
    time.sleep(0.2)
    pids = [int(path.read_text()) for path in ready]
    assert not any(map(gone, pids))
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    while not all(map(gone, pids)):
        assert time.monotonic() < end, "an orphan trains on"
        time.sleep(0.1)


def test_layout_checks_its_numbers():
    assert layout("3") == Layout(nproc=3)
    assert layout("2", 4, "head:29400") == Layout(nproc=2, nnodes=4, rdzv="head:29400")
    for bad in ("0", "-1", "two", "1.5", ""):
        with pytest.raises(ConfigError, match="--nproc"):
            layout(bad)
    for nnodes, rdzv in ((2, None), (1, "head:1")):
        with pytest.raises(ConfigError, match="--rdzv"):
            layout("1", nnodes, rdzv)


def test_auto_is_one_rank_without_a_gpu_and_loads_no_torch(monkeypatch):
    monkeypatch.setattr(launcher, "_GPU_DEVICES", ("no-such-device",))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert layout("auto") == Layout(nproc=1)


def test_commands(tmp_path):
    run = run_dir.RunDir(tmp_path / "r")
    worker = ["-m", "vlarl.worker", str(run.path)]
    assert command(run, ONE) == [sys.executable, *worker]
    two = command(run, Layout(nproc=2))
    assert two[1:3] == ["-m", "torch.distributed.run"]
    assert two[-3:] == worker
    assert "--standalone" in two
    many = command(run, Layout(nproc=8, nnodes=2, rdzv="head:29400"))
    assert "--standalone" not in many
    assert many[many.index("--rdzv-endpoint") + 1] == "head:29400"


def test_a_rank_of_torchrun_does_not_start_ranks(tmp_path):
    run = run_dir.RunDir(tmp_path / "r")
    with pytest.raises(ConfigError, match=r"RANK is set.*--prepare.*vlarl\.worker"):
        refuse_nested({"RANK": "0"}, run)
    refuse_nested({}, run)
