"""How an evaluation is going, on stderr: a moving line on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys

from .output import print_stderr, talk


class Progress:
    """Counts episodes and successes.

    quiet: says nothing. Elsewhere than on a terminal a line is printed at every tenth.
    """

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total = total
        self._quiet = quiet
        self._moves = sys.stderr.isatty()
        self._tenth = 0
        self.done = 0
        self.wins = 0

    def add(self, success: bool) -> None:
        """One more episode has ended."""
        self.set(self.done + 1, self.wins + int(success))

    def set(self, done: int, wins: int) -> None:
        """So many episodes have ended, so many of them in success."""
        if done == self.done:
            return
        self.done, self.wins = done, wins
        if self._quiet:
            return
        text = f"{done}/{self._total} episodes, {wins}/{done} successes ({wins / done:.1%})"
        if self._moves:
            end = "\n" if done == self._total else ""
            talk(f"\r\033[K{text}{end}")
        elif done * 10 // self._total > self._tenth:
            self._tenth = done * 10 // self._total
            print_stderr(text)

    def break_line(self) -> None:
        """Leave the moving line as it is and go on below it."""
        if self._moves and not self._quiet and 0 < self.done < self._total:
            talk("\n")
