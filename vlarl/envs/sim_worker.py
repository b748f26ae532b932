"""The process at the other end of a SubprocPool: answers method calls until its parent goes away.

Started as `python -m vlarl.envs.sim_worker SOCKET_FD MEMORY_FD`. Never imports torch, and never the
user's `__main__`.
"""

from __future__ import annotations

import importlib
import mmap
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from vlarl.errors import MissingError, VlarlError

ALIVE = "alive"
"""Sent instead of an answer that is still being worked on."""

_PARENT_CHECK_S = 5.0


def _build(conn: Connection, memory_fd: int) -> Any:
    """The served object: the first message is ("module:callable", arguments, number of bytes)."""
    target, arguments, size = conn.recv()
    module, _, name = target.partition(":")
    memory = memoryview(mmap.mmap(memory_fd, size))
    return getattr(importlib.import_module(module), name)(memory, *arguments)


def _request(conn: Connection) -> tuple[str, tuple[Any, ...]]:
    """The next call. Exits when the parent is gone, even if a fork of it still holds the socket."""
    parent = os.getppid()
    while not conn.poll(_PARENT_CHECK_S):
        if os.getppid() != parent:
            raise EOFError
    return conn.recv()


def main() -> None:
    """Serve. User errors are sent back by type; any other ends the process with a traceback."""
    # Ctrl-C goes to the whole foreground group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    conn = Connection(int(sys.argv[1]))
    server = None
    memory_fd = int(sys.argv[2])
    try:
        while True:
            if server is None:
                server = _build(conn, memory_fd)
                if hasattr(server, "alive"):
                    server.alive = lambda: conn.send(ALIVE)
            method, arguments = _request(conn)
            conn.send((True, getattr(server, method)(*arguments)))
    except VlarlError as error:
        fix = error.fix if isinstance(error, MissingError) else None
        conn.send((False, (type(error).__name__, str(error), fix)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        conn.close()


if __name__ == "__main__":
    main()
