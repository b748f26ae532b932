"""Decisions and resets per second of the LIBERO env against the package as it is usually driven.

    python tests/benchmarks/bench_libero.py [--size 256] [--quality full] [--rounds 3]

One simulator process on each side, the same task, frame size and random actions; no policy. The
baseline is the package's OffScreenRenderEnv with its defaults: a frame of both cameras every step,
so eight steps make one decision, and a model compiled anew at every reset, ten settling steps
included. Ours renders, once per chunk of 8, the cameras that are asked for. Every reset is to a
trial not played before. Rounds alternate, so a busy machine disturbs both alike; look at the
ratios, not at the rates. Start-up is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from vlarl.envs import gl, libero, libero_sim, libero_tasks
from vlarl.episode import Episode

CHUNK = 8
SETTLE = 10


def baseline_process(conn: Connection, task: str, size: int) -> None:
    """Serves "reset" and "play": seconds that one of it took."""
    with contextlib.redirect_stdout(io.StringIO()):
        from libero.libero.envs import OffScreenRenderEnv

    env = OffScreenRenderEnv(
        bddl_file_name=str(libero_tasks.task_named(task).bddl),
        camera_heights=size,
        camera_widths=size,
    )
    env.seed(0)
    states = libero_tasks.init_states(task)
    random = np.random.default_rng(0)
    trial = 0
    while (message := conn.recv()) != "end":
        start = time.perf_counter()
        if message == "reset":
            env.reset()
            env.set_init_state(states[trial % len(states)])
            for _ in range(SETTLE):
                env.step([0, 0, 0, 0, 0, 0, -1])
            trial += 1
        else:
            for _ in range(CHUNK):
                env.step(random.uniform(-1, 1, 7))
        conn.send(time.perf_counter() - start)
    os._exit(0)  # the package's renderer cannot be taken down in order


class Baseline:
    def __init__(self, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(
            target=baseline_process, args=(theirs, args.task, args.size), daemon=True
        )
        self.process.start()
        self._ask("reset")

    def _ask(self, what: str) -> float:
        self.conn.send(what)
        return self.conn.recv()

    def reset(self) -> float:
        """Seconds of one reset to a fresh trial, first observation included."""
        return self._ask("reset")

    def decide(self) -> float:
        """Seconds of one chunk."""
        return self._ask("play")

    def close(self) -> None:
        self.conn.send("end")
        self.process.join()


class Ours:
    def __init__(self, args: argparse.Namespace, cameras: tuple[str, ...]) -> None:
        cfg = libero.Config(
            suite=args.task,
            frame_size=args.size,
            video_size=args.size,
            render_quality=args.quality,
            cameras=cameras,
            settle_steps=SETTLE,
            max_steps=10_000,
        )
        self.task, self.trial = args.task, 0
        self.random = torch.Generator().manual_seed(0)
        self.env = libero.make(cfg, num_slots=1, final_frames=False)
        self.reset()

    def reset(self) -> float:
        start = time.perf_counter()
        self.env.reset([0], [Episode(task=self.task, trial=self.trial, index=0)])
        self.env.recv(1)
        self.trial += 1
        return time.perf_counter() - start

    def decide(self) -> float:
        action = torch.rand(1, CHUNK, 7, generator=self.random) * 2 - 1
        start = time.perf_counter()
        self.env.send([0], action)
        self.env.recv(1)
        return time.perf_counter() - start

    def close(self) -> None:
        self.env.close()


def costs(args: argparse.Namespace) -> dict[str, float]:
    """CPU milliseconds of one action, reset, frame and compilation, without the process between."""
    sim = libero_sim.make(
        libero_sim.SimConfig(
            layout_seed=0,
            settle_steps=SETTLE,
            reset_gripper_open=True,
            quality=args.quality,
            max_size=(args.size, args.size),
            max_models=1,
        )
    )
    trials = iter(range(50))

    def reset(task: str = args.task) -> None:
        sim.reset(Episode(task=task, trial=next(trials), index=0))
        sim.render("agentview", (args.size, args.size))

    def timed(call, repeats: int) -> float:
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats * 1e3

    # Another task first: it pays for imports, just-in-time compilation and the GL context.
    others = [name for name in libero_tasks.suite_named("libero_spatial") if name != args.task]
    reset(others[0])
    first, fresh = timed(reset, 1), timed(reset, 5)
    frame = timed(lambda: sim.render("agentview", (args.size, args.size)), 20)
    again = Episode(task=args.task, trial=next(trials) - 1, index=0)
    action = np.array([0.1, 0.2, -0.1, 0, 0.1, 0, 1], np.float32)
    return {
        "action": timed(lambda: sim.step(action), 100),
        "frame": frame,
        "reset": fresh - frame,
        "reset_to_a_known_trial": timed(lambda: sim.reset(again), 20),
        "compile": first - fresh,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--task", default="pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate"
    )
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--quality", choices=["fast", "full"], default="full")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resets", type=int, default=3, help="of each side, per round")
    parser.add_argument("--decisions", type=int, default=8, help="of each side, per round")
    args = parser.parse_args()
    gl.choose_backend()
    os.environ.setdefault("LP_NUM_THREADS", "1")
    sides = {
        "baseline": Baseline(args),
        "ours": Ours(args, ("agentview",)),
        "ours_both_cameras": Ours(args, ("agentview", "wrist")),
    }
    seconds = {name: {"decision": 0.0, "reset": 0.0} for name in sides}
    try:
        for _ in range(args.rounds):
            for name, side in sides.items():
                seconds[name]["reset"] += sum(side.reset() for _ in range(args.resets))
                seconds[name]["decision"] += sum(side.decide() for _ in range(args.decisions))
    finally:
        for side in sides.values():
            side.close()
    counts = {"decision": args.rounds * args.decisions, "reset": args.rounds * args.resets}
    base = seconds.pop("baseline")
    result = {
        "setting": vars(args),
        "baseline_s": {kind: round(base[kind] / counts[kind], 3) for kind in counts},
        **{f"{n}_s": {k: round(s[k] / counts[k], 3) for k in counts} for n, s in seconds.items()},
        "times_faster": {
            n: {k: round(base[k] / s[k], 1) for k in counts} for n, s in seconds.items()
        },
        "cpu_ms": {name: round(ms, 2) for name, ms in costs(args).items()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
