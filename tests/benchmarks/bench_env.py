"""Decisions per second of the MetaWorld env against gymnasium's AsyncVectorEnv, in one run.

    python tests/benchmarks/bench_env.py [--slots 2] [--size 64] [--quality fast] [--rounds 3]

Both sides: the same task, number of processes, frame size, render quality, horizon and random
actions; no policy. The baseline is the package's own gymnasium env in an AsyncVectorEnv with shared
memory that renders a frame every step, so eight steps of it make one decision; ours renders what a
policy with chunks of 8 reads. Rounds alternate, so a busy machine disturbs both alike; look at the
ratio, not at the rates. Start-up is not counted, resets are.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time

import gymnasium
import numpy as np
import torch

from vlarl.envs import gl, metaworld, metaworld_sim
from vlarl.episode import Episode

CHUNK = 8


class FrameEveryStep(gymnasium.ObservationWrapper):
    """The package's env with the frame a policy would read in its observation."""

    def __init__(self, env: gymnasium.Env, size: int, quality: str) -> None:
        super().__init__(env)
        self.fast = quality == "fast"
        if self.fast:
            env.unwrapped.model.vis.quality.offsamples = 0
            env.unwrapped.model.vis.quality.shadowsize = 0
        self.observation_space = gymnasium.spaces.Dict(
            {
                "state": gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32),
                "frame": gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8),
            }
        )

    def observation(self, observation):
        frame = self.env.render()
        if self.fast:
            import mujoco

            # The viewer exists once it has rendered; its flags hold from the next frame on.
            flags = self.env.unwrapped.mujoco_renderer.viewer.scn.flags
            flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return {
            "state": observation[:4].astype(np.float32),
            "frame": np.ascontiguousarray(frame[::-1, ::-1]),
        }


def package_env(task: str, size: int, quality: str, max_steps: int) -> gymnasium.Env:
    import metaworld  # noqa: F401 - registers the ids

    env = gymnasium.make(
        "Meta-World/MT1",
        env_name=task,
        render_mode="rgb_array",
        camera_name="corner4",
        width=size,
        height=size,
        max_episode_steps=max_steps,
        seed=0,
    )
    return FrameEveryStep(env, size, quality)


class Baseline:
    """Steps all envs of an AsyncVectorEnv, a frame every step."""

    def __init__(self, args: argparse.Namespace) -> None:
        make = functools.partial(package_env, args.task, args.size, args.quality, args.max_steps)
        self.envs = gymnasium.vector.AsyncVectorEnv([make] * args.slots, context="spawn")
        self.envs.reset()
        self.slots = args.slots
        self.random = np.random.default_rng(0)

    def run(self, seconds: float) -> float:
        """Decisions per second over at least that long."""
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds or steps % CHUNK:
            self.envs.step(self.random.uniform(-1, 1, (self.slots, 4)).astype(np.float32))
            steps += 1
        return steps * self.slots / CHUNK / (time.perf_counter() - start)

    def close(self) -> None:
        self.envs.close()


class Ours:
    """Keeps all slots of the env busy with chunks of 8."""

    def __init__(self, args: argparse.Namespace) -> None:
        cfg = metaworld.Config(
            suite=args.task,
            frame_size=args.size,
            video_size=args.size,
            render_quality=args.quality,
            max_steps=args.max_steps,
        )
        self.env = metaworld.make(cfg, num_slots=args.slots, final_frames=True)
        self.random = torch.Generator().manual_seed(0)
        self.task, self.trial = args.task, 0
        self._reset(range(args.slots))
        self.ready, step = self.env.recv(args.slots)
        self.done = step.done

    def _reset(self, slots) -> None:
        for slot in slots:
            self.env.reset([slot], [Episode(task=self.task, trial=self.trial % 50, index=0)])
            self.trial += 1

    def run(self, seconds: float) -> float:
        """Decisions per second over at least that long."""
        start, decisions = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            done = self.done.tolist()
            going = [slot for slot, over in zip(self.ready, done, strict=True) if not over]
            self._reset(slot for slot, over in zip(self.ready, done, strict=True) if over)
            if going:
                action = torch.rand(len(going), CHUNK, 4, generator=self.random) * 2 - 1
                self.env.send(going, action)
                decisions += len(going)
            self.ready, step = self.env.recv(1)
            self.done = step.done
        return decisions / (time.perf_counter() - start)

    def close(self) -> None:
        self.env.close()


def costs(args: argparse.Namespace) -> dict[str, float]:
    """CPU milliseconds of one action, reset (15 settle steps included), frame and compilation."""
    config = metaworld_sim.SimConfig(
        goal_seed=0,
        settle_steps=15,
        quality=args.quality,
        max_size=(args.size, args.size),
        max_models=1,
    )
    sim = metaworld_sim.make(config)
    episode = Episode(task=args.task, trial=0, index=0)
    # The first task pays for imports and the GL context; the second shows a compilation.
    sim.reset(Episode(task="reach-v3" if args.task != "reach-v3" else "push-v3", trial=0, index=0))
    sim.render("corner4", (args.size, args.size))

    def timed(call, repeats: int) -> float:
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats * 1e3

    first = timed(lambda: sim.reset(episode), 1)
    reset = timed(lambda: sim.reset(episode), 10)
    action = np.array([0.1, 0.2, -0.1, 0.5], np.float32)
    return {
        "action": timed(lambda: sim.step(action), 200),
        "reset": reset,
        "frame": timed(lambda: sim.render("corner4", (args.size, args.size)), 20),
        "compile": first - reset,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="button-press-topdown-v3")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--quality", choices=["fast", "full"], default="fast")
    parser.add_argument("--max-steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    gl.choose_backend()
    os.environ.setdefault("LP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.slots)))
    sides = {"baseline": Baseline(args), "ours": Ours(args)}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for _ in range(args.rounds):
            for name, side in sides.items():
                rates[name].append(side.run(args.seconds))
    finally:
        for side in sides.values():
            side.close()
    ratios = sorted(o / b for o, b in zip(rates["ours"], rates["baseline"], strict=True))
    result = {
        "setting": {key: value for key, value in vars(args).items()},
        "decisions_per_s": {name: [round(r, 2) for r in found] for name, found in rates.items()},
        "ratio": round(sum(rates["ours"]) / sum(rates["baseline"]), 2),
        "ratio_range": [round(ratios[0], 2), round(ratios[-1], 2)],
        "cpu_ms": {name: round(ms, 2) for name, ms in costs(args).items()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
