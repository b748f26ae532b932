"""`vlarl download` on a command line, against a hub on this machine."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from vlarl.assets import manifest, store
from vlarl_cli import download as command
from vlarl_cli.main import app

TOKEN = "hf_SecretSecretSecret"
REPO = "RLinf/RLinf-Pi0-MetaWorld-SFT"
NAME = "pi0-metaworld-sft"


def run(*args, code=0):
    done = CliRunner().invoke(app, ["download", *map(str, args)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done


def environment(hub, tmp_path, **more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    mine = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1"}
    return kept | mine | more


def process(*args, env):
    return subprocess.Popen(
        [sys.executable, "-m", "vlarl_cli", "download", *args],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def pi0(hub):
    """The files of a real entry of the manifest; weights larger than what the client buffers."""
    hub.repos[REPO] = {
        "model.safetensors": os.urandom(25_000_000),
        "lerobot/metaworld_mt50/norm_stats.json": b"{}",
        "metadata.pt": b"not wanted",
    }
    return hub


def test_a_download_says_what_it_did(duck):
    done = run("duck", "swan")
    folders = [store.home() / name for name in ("duck", "swan")]
    assert [f.is_dir() for f in folders] == [True, True]
    assert f"duck is in {folders[0]}, complete and verified" in done.stdout
    assert "duck: 52.0 kB of 52.0 kB to fetch from o/duck, commit c0ffee" in done.stderr
    assert "57.0 kB to fetch, " in done.stderr
    assert "duck: 52.0 kB of 52.0 kB\n" in done.stderr
    again = run("duck", "swan", "-q")
    assert again.stdout == "".join(f"{f}\n" for f in folders)
    assert again.stderr == ""
    assert json.loads(run("duck", "--json").stdout)[0]["fetched_bytes"] == 0


def test_a_dry_run_shows_every_file_and_writes_nothing(duck):
    done = run("duck", "--dry-run")
    assert not store.home().exists()
    assert "/resolve/" not in str(duck.seen)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["duck", "model.safetensors", "50.0", "kB", "no"] in rows
    assert " free" in done.stderr
    data = json.loads(run("duck", "--dry-run", "--json").stdout)[0]
    assert data["bytes_to_fetch"] == 52_013
    assert len(data["files"]) == 5


def test_many_small_files_are_one_line(duck):
    duck.repos["o/swan"] |= {f"f{i:02}.txt": b"x" for i in range(40)}
    done = run("swan", "--dry-run")
    assert done.stdout.splitlines()[-1].split() == [
        "swan",
        "22",
        "smaller",
        "files",
        "22",
        "B",
        "0",
        "of",
        "22",
    ]
    assert len(json.loads(run("swan", "--dry-run", "--json").stdout)[0]["files"]) == 42


def test_without_a_hub_the_plan_is_the_manifests(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("VLARL_HOME", str(tmp_path))
    done = run("wan-libero-spatial", "--dry-run")
    assert "what follows is from the manifest" in done.stderr
    for name in ("model-*.safetensors", "Wan2.2_VAE.pth", "resnet_rm.pth", "dataset/*.npy (692"):
        assert name in done.stdout
    assert "unknown" in done.stdout
    assert "files of unknown size to fetch, " in done.stderr
    assert f"-> {tmp_path / 'wan-libero-spatial'}" in done.stderr
    goal = run("wan-libero-goal", "--dry-run", "--json")
    assert json.loads(goal.stdout)[0]["bytes_to_fetch"] == 14_223_247_492
    real = run("wan-libero-spatial", code=3)
    assert "missing of wan-libero-spatial: model-*.safetensors" in real.stderr
    assert "run: HF_HUB_OFFLINE=0 vlarl download wan-libero-spatial" in real.stderr


def test_a_full_disk_is_refused_before_anything_comes(duck, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=7_000))
    for args in (["--dry-run"], []):
        done = run("duck", *args, code=3)
        assert "duck needs 52.0 kB but" in done.stderr
        assert "has 7.0 kB free" in done.stderr
    assert not store.home().exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name what to download, or see --list"),
        (["--list", "duck"], "leave out the names"),
        (["dukc", "swan"], "no asset named 'dukc' to download; did you mean 'duck'?"),
        (["swan", "zebra"], "there are: duck, swan"),
        (["dukc", "swn"], "no asset named 'swn' to download; did you mean 'swan'?"),
        (["tiny-oft-libero"], "tiny-oft-libero comes with vlarl; there is nothing to download"),
        (["duck", "swan", "--revision", "a"], "--revision goes with one asset"),
        (["duck", "--revision", "v9"], "o/duck has no revision 'v9'"),
        (["duck", "--to", "./a-file"], "a-file is a file"),
        (["duck", "--revision", ""], "--revision is empty"),
        (["duck", "--json", "-q"], "exclude each other"),
    ],
)
def test_bad_requests_are_one_message_and_leave_nothing(
    duck, monkeypatch, tmp_path, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    done = run(*words, code=2)
    assert message in done.stderr
    assert done.stdout == ""
    assert not store.home().exists()


@pytest.mark.parametrize(
    "address", ["", "huggingface.co", "ftp://x", "https://", "http://u:secret@[::1"]
)
def test_an_endpoint_that_is_no_address_is_named(monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    done = run(NAME, code=2)
    shown = address.rpartition("@")[2]
    assert f"HF_ENDPOINT is '{shown}'; expected an address such as" in done.stderr


def test_the_fix_keeps_what_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = run("pi0-metaworld-sft", "--to", tmp_path / "a b", "--revision", "v2", code=3)
    line = f"vlarl download pi0-metaworld-sft --to '{tmp_path}/a b' --revision v2"
    assert line in done.stderr


def test_waiting_for_a_busy_hub_is_said(duck, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    duck.faults["tree"] = [429, 503]
    done = run("duck")
    assert done.stderr.count(f"{duck.url} is busy or does not answer; asking again in") == 2
    assert "cursor" not in done.stderr


def test_the_list_says_what_is_here(duck):
    draft = store.home() / ".duck.partial"
    draft.mkdir(parents=True)
    assert run("--list").stdout.splitlines()[1].split()[:2] == ["duck", "incomplete"]
    draft.rmdir()
    run("duck", "swan")
    (store.home() / "swan" / "model.safetensors").unlink()
    lines = run("--list").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["duck", "yes"], ["swan", "incomplete"]]
    assert run("--list", "-q").stdout == "duck\nswan\n"
    data = json.loads(run("--list", "--json").stdout)
    assert (data[0]["repo"], data[0]["here"], data[0]["presets"]) == ("o/duck", "yes", [])


def test_names_complete():
    assert command.complete_asset("wan-") == [
        "wan-libero-spatial",
        "wan-libero-object",
        "wan-libero-goal",
    ]


@pytest.mark.parametrize("line", command.EXAMPLES)
def test_examples_pass_their_dry_run_offline(line, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("VLARL_HOME", str(tmp_path))
    words = [w for w in line.split()[2:] if w != "/data/checkpoints"]
    words = [w if w != "--to" else f"--to={tmp_path}" for w in words]
    run(*words, *([] if {"--list", "--dry-run"} & set(words) else ["--dry-run"]))
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_hub_token_and_offline_mode(pi0, tmp_path):
    """As a user runs it: HF_ENDPOINT, a gated repository, HF_TOKEN, HF_HUB_OFFLINE, --debug."""
    pi0.needs_token.add(REPO)
    env = environment(pi0, tmp_path)
    child = process(NAME, env=env)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (3, ""), err
    assert f"error: {REPO} is gated (401 from {pi0.url})" in err
    assert "run: hf auth login" in err
    child = process(NAME, "--debug", env=env | {"HF_TOKEN": "hf_WrongWrongWrong"})
    out, err = child.communicate(timeout=60)
    assert child.returncode == 3
    assert "Traceback" in err
    assert "hf_WrongWrongWrong" not in out + err
    child = process(NAME, "--debug", env=env | {"HF_TOKEN": TOKEN})
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert TOKEN not in out + err
    model = store.home() / NAME / "model.safetensors"
    assert hashlib.sha256(model.read_bytes()).digest() == (
        hashlib.sha256(pi0.repos[REPO]["model.safetensors"]).digest()
    )
    assert not (model.parent / "metadata.pt").exists()
    pi0.seen.clear()
    child = process(NAME, "-q", env=env | {"HF_HUB_OFFLINE": "1"})
    assert child.communicate(timeout=60) == (f"{model.parent}\n", "")
    assert pi0.seen == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_process_is_continued_by_the_same_command(pi0, tmp_path, number):
    env = environment(pi0, tmp_path)
    pi0.faults["model.safetensors"] = [("pause", 12_000_000)]
    child = process(NAME, env=env)
    assert pi0.paused.wait(60)
    partial = store.home() / f".{NAME}.partial"
    deadline = time.monotonic() + 20
    while not any(p.stat().st_size for p in partial.glob(".model*.part")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(number)
    if number == signal.SIGINT:
        pi0.go.set()
    _, err = child.communicate(timeout=60)
    if number == signal.SIGINT:
        assert child.returncode == 130
        assert "warning: interrupted; the same command continues" in err
    pi0.go.set()
    (part,) = partial.glob(".model*.part")
    kept = part.stat().st_size
    assert store.names() == store._folders(store._shipped())
    pi0.seen.clear()
    child = process(NAME, env=env)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    (again,) = pi0.gets("/cdn/")
    assert again.range == f"bytes={kept}-"
    model = (store.home() / NAME / "model.safetensors").read_bytes()
    assert model == pi0.repos[REPO]["model.safetensors"]
    assert not partial.exists()


def test_the_bar_counts_bytes_on_a_terminal(monkeypatch, capsys):
    from vlarl_cli.transfer import Transfer

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Transfer("duck", 100, quiet=False) as transfer:
        transfer.add(60)
        transfer.add(-20)
        assert transfer._bar.tasks[0].completed == 40
    with Transfer("duck", 100, quiet=True) as transfer:
        transfer.add(100)
    assert "duck: " not in capsys.readouterr().err


def test_nothing_slow_is_loaded_for_a_list():
    code = (
        "import atexit, sys\n"
        "slow = ('torch', 'huggingface_hub')\n"
        "atexit.register(lambda: print([m for m in slow if m in sys.modules], file=sys.stderr))\n"
        "sys.argv = ['vlarl', 'download', '--list', '-q']\n"
        "from vlarl_cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.split() == manifest.names()


def test_help_loads_no_hub():
    code = "import sys, vlarl_cli.main, vlarl.assets.store; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"
