"""Seconds until commands that train nothing answer: `python tests/benchmarks/startup.py`."""

import statistics
import subprocess
import sys
import time

COMMANDS = ("--help", "train --help", "presets list", "presets show tiny_metaworld_grpo")
REPEATS = 7


def seconds(*args):
    start = time.perf_counter()
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main():
    bare = statistics.median(seconds("-c", "pass") for _ in range(REPEATS))
    print(f"{'python -c pass':<40} {bare:.2f} s")
    for command in COMMANDS:
        times = [seconds("-m", "vlarl_cli", *command.split()) for _ in range(REPEATS)]
        print(f"{'vlarl ' + command:<40} {statistics.median(times):.2f} s (best {min(times):.2f})")


if __name__ == "__main__":
    main()
