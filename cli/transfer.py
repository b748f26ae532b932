"""How a download is going, on stderr: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from vlarl.assets.sizes import readable

from .output import print_stderr


class Transfer:
    """Counts bytes, from any thread; a context manager.

    quiet: says nothing. Elsewhere than on a terminal a line is printed at every tenth.
    """

    def __init__(self, name: str, total: int, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._name = name
        self._total = total
        self._done = 0
        self._tenth = 0
        self._lock = threading.Lock()
        moves = sys.stderr.isatty() and not quiet
        self._says_lines = not moves and not quiet and total > 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not moves,
        )
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> Transfer:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, num_bytes: int) -> None:
        """So many bytes more; negative when some have to come again."""
        with self._lock:
            self._done += num_bytes
            self._bar.update(self._task, completed=self._done)
            tenth = self._done * 10 // self._total if self._total else 0
            if self._says_lines and tenth > self._tenth:
                self._tenth = tenth
                print_stderr(f"{self._name}: {readable(self._done)} of {readable(self._total)}")
