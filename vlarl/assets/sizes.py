"""Bytes as people read them."""

from __future__ import annotations


def readable(size: int | None) -> str:
    """Bytes in decimal units, as the hub shows them: `14.2 GB`; `unknown` for None."""
    if size is None:
        return "unknown"
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
