"""A rank that the command line started: `python -m vlarl.distributed.launched MODULE RUN_DIR`.

Runs MODULE.main([RUN_DIR]) and adds what a rank without a terminal needs:
- everything it says, from Python or from C, goes to RUN_DIR/logs/rank_N.log;
- it ends when its launcher is gone, however that died: standard input is a pipe that the launcher
  never writes to, and its end means that nobody holds the other side;
- an error nobody expected is left as a traceback in the log and as a note for the launcher;
- stopping on request (130) is told by the note alone and the process ends with 0, since torchrun
  takes any other code for a failure and ends the ranks that are still about to stop.
Ranks started by hand with `torchrun -m vlarl.worker RUN_DIR` need none of this.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from vlarl.run_dir import RankExit, RunDir, write_exit
from vlarl.signals import INTERRUPTED

_KILLED = 137


def main(argv: list[str]) -> int:
    """Run the rank; returns the exit code of this process."""
    module, path = argv
    run, rank = RunDir(Path(path)), int(os.environ.get("RANK", "0"))
    _redirect_output(run.log(rank))
    threading.Thread(target=_end_with_launcher, name="launcher-watch", daemon=True).start()
    try:
        code = importlib.import_module(module).main([path])
    except KeyboardInterrupt:  # before the worker has put its own handler in place
        code = INTERRUPTED
    # The supervisor of this process: whatever it was, say so where it will be found.
    except Exception as error:
        traceback.print_exc()
        write_exit(run, RankExit.of(rank, error))
        return 1
    if code == INTERRUPTED:
        write_exit(run, RankExit.interrupted(rank))
        return 0
    return code


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stderr.write(f"--- started {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n")


def _end_with_launcher() -> None:
    while os.read(0, 4096):
        pass
    os.write(2, b"the launcher is gone; this rank ends\n")
    os._exit(_KILLED)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code == 0:
        sys.exit()
    # Peers may be gone, so nothing is torn down that could wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
