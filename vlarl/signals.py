"""Stopping on request: Ctrl-C or SIGTERM once to finish early, twice to end at once. Torch-free."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code of a process that stopped because it was asked to."""


class Requests:
    """Counts, inside its block, the signals that ask to stop, in place of their usual effect.

    A closed terminal (SIGHUP) counts as the first one only, since several processes tell of it, and
    for nothing where it was ignored before (nohup).
    """

    def __init__(self, on_more: Callable[[int], None] = lambda _: None) -> None:
        """on_more: called with the signal's number at the second one and at each after it."""
        self.count = 0
        self._on_more = on_more

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self.count:
            return
        self.count += 1
        if self.count > 1:
            self._on_more(number)

    def __enter__(self) -> Requests:
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            caught.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Generator[Callable[[], bool]]:
    """Inside, a request to stop makes the yielded function true; a second one is a
    KeyboardInterrupt, and a third one ends the process where it stands.
    """

    def at_once(number: int) -> None:
        if requests.count > 2:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        raise KeyboardInterrupt

    with Requests(at_once) as requests:
        yield lambda: requests.count > 0
