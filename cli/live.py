"""Shows a running training: a panel on a terminal, one line per iteration elsewhere.

A reader of metrics.jsonl and status.json; the ranks know nothing of it. Everything goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from vlarl import run_dir
from vlarl.run_dir import RunDir, Status

from .output import print_stderr

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT = 5
_REDRAW_S = 0.5
_SILENCE_S = 30.0
_PHASES = {
    "generate_rollouts": "rollout",
    "actor_training": "update",
}


class View(Protocol):
    """Something that shows a run while it lasts."""

    def update(self) -> None:
        """Look again; cheap enough to call several times a second."""
        ...

    def say(self, text: str) -> None:
        """Show a message without disturbing the picture."""
        ...

    def close(self) -> None:
        """Leave the last picture and give the terminal back."""
        ...


def open_view(run: RunDir, *, live: bool = True, quiet: bool = False) -> View:
    """The right view: none when quiet (and for --json), a panel on a terminal, else lines."""
    if quiet:
        return SilentView()
    if live and sys.stderr.isatty():
        return PanelView(run)
    return LineView(run)


class Feed:
    """The metrics of a run as they appear. Survives a resume, which replaces the file."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.metrics
        self._inode = self._offset = 0
        self.lines: list[dict[str, Any]] = []
        self.poll()

    def poll(self) -> list[dict[str, Any]]:
        """Whole lines that are new since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            replaced = inode != self._inode
            self._inode = inode
            file.seek(0 if replaced else self._offset)
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offset = file.tell() - len(content) + len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        if not replaced:
            self.lines += new
            return new
        # What was kept of the old file has been seen already.
        pairs = zip(self.lines, new, strict=False)
        seen = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.lines = new
        return new[seen:]


class SilentView:
    """Shows nothing but what is said."""

    def update(self) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Print it."""
        print_stderr(text)

    def close(self) -> None:
        """Nothing."""


class LineView:
    """One line per iteration, and now and then what is going on; for logs, pipes and people who
    like scrolling.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._feed = Feed(run)
        self._opened = time.time()  # what an earlier start left behind is older
        self.say(f"training in {run.path}")

    def update(self) -> None:
        """Print the new iterations, or after a silence what the run is doing."""
        status = run_dir.read_status(self._run)
        for line in self._feed.poll():
            self.say(summary(line, status.max_steps if status else None, self._feed.lines))
        is_new = status is not None and status.updated >= self._opened
        if is_new and time.monotonic() - self._said > _SILENCE_S:
            self.say(f"step {status.step}/{status.max_steps}  {_doing(status)}")

    def say(self, text: str) -> None:
        """Print it."""
        self._said = time.monotonic()
        print_stderr(text)

    def close(self) -> None:
        """Print what came last."""
        self.update()


def summary(
    line: dict[str, Any], max_steps: int | None, lines: Sequence[dict[str, Any]] = ()
) -> str:
    """An iteration in a line, e.g. `step 12/100  success 53.1%  loss 0.0123  kl 0.0021  26 s`."""
    of = f"/{max_steps}" if max_steps else ""
    parts = [f"step {line['step']}{of}"]
    for label, name, form in (
        ("success", "env/success_once", ".1%"),
        ("held-out", "eval/success_once", ".1%"),
        ("loss", "train/loss", ".4g"),
        ("kl", "train/actor/approx_kl", ".2g"),
    ):
        if line.get(name) is not None:
            parts.append(f"{label} {line[name]:{form}}")
    if line.get("time/step") is not None:
        parts.append(duration(line["time/step"]))
    left = eta_s(lines, line["step"], max_steps)
    if left:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def eta_s(lines: Sequence[dict[str, Any]], step: int, max_steps: int | None) -> float | None:
    """Seconds to the end at the mean pace of the last iterations; None when unknown."""
    paces = [line["time/step"] for line in lines[-_RECENT:] if line.get("time/step") is not None]
    if not paces or max_steps is None:
        return None
    return max(0, max_steps - step) * sum(paces) / len(paces)


def duration(seconds: float) -> str:
    """`26 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """The last values between 0 and 1 as blocks; a gap for one that is missing."""
    return "".join(
        " " if v is None else _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(v * len(_BLOCKS))))]
        for v in values[-width:]
    )


class PanelView:
    """A picture of the run that stays in place."""

    def __init__(self, run: RunDir, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._run = run
        self._feed = Feed(run)
        self._drawn = 0.0
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def update(self) -> None:
        """Draw again, at most twice a second."""
        if time.monotonic() - self._drawn < _REDRAW_S:
            return
        self._drawn = time.monotonic()
        self._feed.poll()
        self._live.update(self.picture(run_dir.read_status(self._run)), refresh=True)

    def say(self, text: str) -> None:
        """Print above the picture."""
        self._console.print(text, highlight=False)

    def close(self) -> None:
        """Draw a last time and leave it."""
        self._drawn = 0.0
        self.update()
        self._live.stop()

    def picture(self, status: Status | None) -> Table:
        """All there is to know, as a grid of names and values."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        lines = self._feed.lines
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        step, total = (status.step, status.max_steps) if status else (0, 0)
        grid.add_row(self._run.path.name, f"step {step}/{total or '?'}  {_doing(status)}")
        if total:
            grid.add_row("", ProgressBar(total=total, completed=step, width=40))
        for label, name in (("success", "env/success_once"), ("held-out", "eval/success_once")):
            series = [line[name] for line in lines if name in line]
            if series and series[-1] is not None:
                grid.add_row(label, f"{series[-1]:6.1%}  {sparkline(series)}")
        numbers = _latest(lines, {"loss": "train/loss", "kl": "train/actor/approx_kl"})
        if numbers:
            grid.add_row("update", numbers)
        split = _time_split(lines)
        if split:
            left = eta_s(lines, step, total or None)
            grid.add_row("time", split + (f"  {duration(left)} left" if left else ""))
        return grid


def _doing(status: Status | None) -> str:
    if status is None:
        return "starting"
    count = f" {status.done}/{status.total}" if status.total else ""
    return f"{status.phase}{count}{': ' + status.message if status.message else ''}"


def _latest(lines: Sequence[dict[str, Any]], names: dict[str, str]) -> str:
    found = {}
    for label, name in names.items():
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            found[label] = f"{label} {values[-1]:.3g}"
    return "  ".join(found.values())


def _time_split(lines: Sequence[dict[str, Any]]) -> str:
    """Seconds per iteration and where they go, over the last ones."""
    recent = [line for line in lines[-_RECENT:] if line.get("time/step")]
    if not recent:
        return ""
    whole = sum(line["time/step"] for line in recent)
    parts = [
        f"{label} {spent / whole:.0%}"
        for key, label in _PHASES.items()
        if (spent := sum(line.get(f"time/{key}") or 0.0 for line in recent))
    ]
    text = f"{whole / len(recent):.1f} s per step: {', '.join(parts)}"
    evaluation = [line["time/eval"] for line in lines if line.get("time/eval")]
    return text + (f"; {duration(evaluation[-1])} per evaluation" if evaluation else "")
