"""Runs of the toys that are killed, one fork a run: `killed_runs.py TEMPLATE SEED KILLS`.

TEMPLATE is a prepared run directory. It is copied and played unbroken once, then again and again,
each time killed at another file operation inside the run directory and continued. Prints a line for
each run that does not end like the unbroken one. A fork costs no imports, so many moments can be
tried.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from vlarl import metrics, registry, run_dir, worker
from vlarl.config import resolved
from vlarl.config.compose import build
from vlarl.distributed.world import World
from vlarl.result_file import load
from vlarl.run_dir import RunDir
from vlarl.train.trainer import Stopped

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}


def play(path: Path, *, kill_at: int = 0, stop_at: int = 0) -> int:
    """Start or continue a run in a fork; SIGKILL at its kill_at-th file operation.

    Returns the number of its file operations, 0 when it was killed. stop_at: ask it to stop, once,
    at that file operation.
    """
    counted = path.with_suffix(".count")
    counted.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(path, counted, kill_at, stop_at)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        assert kill_at, "only the test kills"
        return 0
    assert os.WEXITSTATUS(status) == 0, f"{path}: a continued run failed, see its traceback"
    return int(counted.read_text())


def _child(path: Path, counted: Path, kill_at: int, stop_at: int) -> None:
    count, inside = 0, str(path)

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if event in EVENTS and any(str(a).startswith(inside) for a in args[:2]):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = 1
    try:
        config = build(resolved.load(path / "config.json"))
        world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
        should_stop: Callable[[], bool] = lambda: bool(stop_at) and count >= stop_at  # noqa: E731
        worker.run(RunDir(path), config, world, should_stop)
        code = 0
    except Stopped:
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        counted.write_text(str(count))
        sys.stderr.flush()
        os._exit(code)


def found(path: Path) -> tuple:
    """Everything a run leaves that must not depend on where it was killed."""
    folder = RunDir(path)
    lines = [json.dumps(metrics.strip_timing(line)) for line in metrics.read(folder.metrics)]
    latest = run_dir.latest_checkpoint(folder)
    assert latest is not None
    weights = load_file(latest / "policy" / "model.safetensors")
    # A kill may leave a hidden draft beside them, which no reader looks at.
    evaluations = {p.name: load(p).episodes for p in sorted(folder.eval.glob("step_*.json"))}
    leftovers = sorted(p.name for p in folder.ckpt.iterdir())
    return lines, {n: w.tolist() for n, w in weights.items()}, evaluations, leftovers


def main() -> None:
    template, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    registry._BUILT_IN["env"]["reach"] = "vlarl.testing.reach"
    registry._BUILT_IN["policy"]["token_toy"] = "vlarl.testing.token_policy"
    build(resolved.load(template / "config.json"))  # imports, once for all forks

    def copy(name: str) -> Path:
        path = template.with_name(name)
        shutil.copytree(template, path)
        return path

    whole = copy("whole")
    total = play(whole)
    expected = found(whole)
    print(f"{total} file operations, {len(expected[0])} lines")
    rng, wrong = random.Random(seed), 0
    for i in range(kills):
        path = copy(f"killed-{i}")
        # Spread over the run; every other one was stopped and continued before.
        stop_at = rng.randrange(total // 4, total) if i % 2 else 0
        kill_at = 1 + (i * total + rng.randrange(total)) // kills
        if stop_at:
            play(path, stop_at=stop_at)
            kill_at = 1 + rng.randrange(total - stop_at)
        play(path, kill_at=kill_at)
        play(path)
        if found(path) != expected:
            wrong += 1
            names = ("metrics", "weights", "evaluations", "checkpoints")
            parts = zip(names, found(path), expected, strict=True)
            print(f"WRONG stop {stop_at} kill {kill_at}", [name for name, a, b in parts if a != b])
        shutil.rmtree(path)
    print(f"{wrong} of {kills} wrong")


if __name__ == "__main__":
    main()
