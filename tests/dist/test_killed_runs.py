"""A run that is killed, at whatever moment, ends like one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vlarl import metrics, run_dir
from vlarl.result_file import load

DRIVER = Path(__file__).with_name("killed_runs.py")
TOYS = Path(__file__).parent / "plugins"

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def environ():
    """For processes of their own: the toys are registered there, and there is one thread."""
    paths = [str(TOYS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def lines(folder):
    return [json.dumps(metrics.strip_timing(line)) for line in metrics.read(folder.metrics)]


def weights(folder):
    state = load_file(run_dir.latest_checkpoint(folder) / "policy" / "model.safetensors")
    return {name: tensor.tolist() for name, tensor in state.items()}


def evaluations(folder):
    return {path.name: load(path).episodes for path in folder.eval.glob("step_*.json")}


def test_killed_between_any_two_file_operations(toy_run, environ):
    folder = toy_run("max_steps=3", "save.every=2", "eval.every=2", "rollout.episodes=8")
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(folder.path), "0", "8"],
        capture_output=True, text=True, check=False, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert done.stdout.endswith("0 of 8 wrong\n"), done.stdout


def start(folder, environ):
    with (folder.path / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vlarl.worker", str(folder.path)],
            env=environ, stdout=log, stderr=log,
        )  # fmt: skip


def wait_for_a_line(folder, process):
    """Until the run is under way: importing takes longer than all of it."""
    end = time.monotonic() + 60
    before = folder.status.stat().st_mtime_ns if folder.status.exists() else 0
    while not folder.status.exists() or folder.status.stat().st_mtime_ns == before:
        assert process.poll() is None, (folder.path / "worker.log").read_text()
        assert time.monotonic() < end
        time.sleep(0.005)


def test_killed_at_random_moments(toy_run, environ):
    overrides = ("max_steps=8", "save.every=3", "eval.every=4", "log.tensorboard=true")
    whole, folder = toy_run(*overrides), toy_run(*overrides)
    process = start(whole, environ)
    wait_for_a_line(whole, process)
    began = time.monotonic()
    assert process.wait() == 0, (whole.path / "worker.log").read_text()
    took = time.monotonic() - began

    rng, killed = random.Random(7), 0
    for _ in range(3):
        process = start(folder, environ)
        wait_for_a_line(folder, process)
        time.sleep(rng.uniform(0, took / 2))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 1
    process = start(folder, environ)
    assert process.wait() == 0, (folder.path / "worker.log").read_text()[-5000:]

    steps = [line["step"] for line in metrics.read(folder.metrics)]
    assert steps == list(range(9))
    assert lines(folder) == lines(whole)
    assert weights(folder) == weights(whole)
    assert evaluations(folder) == evaluations(whole)
