"""The non-tensor part of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class TrainState:
    """Where a run is. Everything random is keyed by these numbers, so nothing else is needed.

    step: finished iterations. num_updates: optimizer steps taken. barren: iterations in a row
    without a learning signal. pending: metrics of the last finished iteration while its line is not
    written, which is so when the run was stopped in the evaluation that belongs to it.
    """

    step: int = 0
    num_updates: int = 0
    barren: int = 0
    pending: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return asdict(self)
