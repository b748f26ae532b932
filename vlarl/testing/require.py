"""How a contract check fails."""

from __future__ import annotations


class ContractBroken(AssertionError):
    """A plug-in does not do what its protocol says. For its author, hence no VlarlError."""


def require(condition: bool, message: str) -> None:
    """Raise ContractBroken(message) unless the condition holds; unlike assert, also under -O."""
    if not condition:
        raise ContractBroken(message)
