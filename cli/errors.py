"""What a person reads when something is wrong: a message and the command that helps."""

from __future__ import annotations

from vlarl.errors import ConfigError, MissingError, VlarlError

from .output import print_error


def report(error: VlarlError) -> int:
    """Print the error and return its exit code."""
    lines = str(error).splitlines() or [type(error).__name__]
    if len(lines) > 1 and isinstance(error, ConfigError):  # others quote a log after their first
        lines = [f"{len(lines)} problems:", *lines]
    print_error("\n  ".join(lines), error.fix if isinstance(error, MissingError) else None)
    return error.exit_code
