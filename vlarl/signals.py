"""Stopping on request: Ctrl-C or SIGTERM once to finish early, twice to end at once. Torch-free."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code of a process that stopped because it was asked to."""


@contextmanager
def stop_on_signals() -> Generator[Callable[[], bool]]:
    """Inside, SIGINT and SIGTERM make the yielded function true; a second one ends the process."""
    requested = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal requested
        if requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        requested = True

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
