"""Where a command's words go: data on stdout, talk on stderr; for people, as JSON, or quiet."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from vlarl.errors import ConfigError

_BOLD, _RED, _YELLOW, _CYAN = "1", "31;1", "33", "36"


class Output:
    """The sink of one command.

    json: `result` and `table` print one JSON document and nothing else goes to stdout.
    quiet: they print only the id or path; hints are dropped. Raises ConfigError when both are set.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        if json and quiet:
            raise ConfigError("--json and --quiet exclude each other; choose one")
        self.json = json
        self.quiet = quiet

    def result(self, data: object, *, text: str, ident: object = None) -> None:
        """The command's answer: `data` as JSON, `ident` when quiet, `text` for people.

        Call it once per command, so that `--json` stays one document. ident: one id or path, or a
        list of them, one per line.
        """
        if self.json:
            print_stdout(to_json(data))
        elif self.quiet:
            for one in ident if isinstance(ident, (list, tuple)) else [ident]:
                if one is not None:
                    print_stdout(str(one))
        else:
            print_stdout(text)

    def table(self, rows: Sequence[Mapping[str, object]], *, ident: str) -> None:
        """Rows with the same keys as aligned columns, a JSON list, or column `ident` when quiet."""
        self.result(rows, text=format_table(rows), ident=[row[ident] for row in rows])

    def hint(self, text: str) -> None:
        """Talk on stderr; dropped when quiet."""
        if not self.quiet:
            print_stderr(text)

    def warn(self, text: str) -> None:
        """Something to know, on stderr, also when quiet."""
        print_stderr(paint("warning:", _YELLOW, sys.stderr) + " " + text)


def print_stdout(text: str) -> None:
    """One piece of data."""
    sys.stdout.write(text + "\n")


def print_stderr(text: str) -> None:
    """One line of talk, now."""
    talk(text + "\n")


def talk(text: str) -> None:
    """Write to stderr, now. Dropped when nobody listens any more: after Ctrl-C, `2>&1 | tee log`
    loses its reader, or the terminal is gone, and the run still has a checkpoint to write.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def print_error(message: str, fix: str | None = None) -> None:
    """`error: message` on stderr, and the command that helps on a line of its own."""
    print_stderr(paint("error:", _RED, sys.stderr) + " " + message)
    if fix is not None:
        print_stderr("  run: " + paint(fix, _CYAN, sys.stderr))


def paint(text: str, code: str, stream: TextIO) -> str:
    """Text in colour on a terminal; as it is elsewhere, or when NO_COLOR is set."""
    if os.environ.get("NO_COLOR") or not stream.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Aligned columns under the keys of the first row; numbers to the right."""
    if not rows:
        return "(none)"
    header = list(rows[0])
    cells = [["" if row[key] is None else str(row[key]) for key in header] for row in rows]
    width = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(isinstance(row[key], (int, float)) for row in rows) for key in header]

    def line(values: Sequence[str]) -> str:
        padded = (
            v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, width, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([paint(line(header), _BOLD, sys.stdout), *map(line, cells)])


def to_json(data: object) -> str:
    """An indented JSON document; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(data: Any) -> Any:
    """Built-in types only."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [_plain(value) for value in data]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {f.name: _plain(getattr(data, f.name)) for f in dataclasses.fields(data)}
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Path):
        return str(data)
    return data
