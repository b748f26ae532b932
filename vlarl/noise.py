"""Noise that belongs to a decision, not to a batch.

Counter-based, vectorised, the same on every device.

A key is one int64 per row. The k-th draw of a row is splitmix64(key + k * golden), so a row's noise
depends neither on the other rows of the batch nor on rank, slot or arrival order. Source of the
mixer: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the
finaliser with constants by D. Stafford, mix 13).
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def stream(*path: object) -> int:
    """A 63-bit seed for a named stream, e.g. that of (run.seed, "act", step, episode, decision)."""
    digest = hashlib.blake2b("\x1f".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's >> on int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[n, *shape] float32 in the open interval (0, 1), a function of keys ([n] int64) alone."""
    count = math.prod(shape)
    counter = torch.arange(1, count + 1, device=keys.device, dtype=torch.int64)
    z = keys[:, None] + counter[None, :] * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    # 23 bits and half a step fit a float32 exactly, so neither 0 nor 1 can come out.
    return ((_shift_right(z, 41).to(torch.float32) + 0.5) * 2.0**-23).view(len(keys), *shape)


def gumbel(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[n, *shape] float32 standard Gumbel.

    argmax(logits / T + gumbel) is a sample from softmax(logits / T).
    """
    return -torch.log(-torch.log(uniform(keys, shape)))


def normal(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[n, *shape] float32 standard normal, by the inverse error function."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform(keys, shape) - 1.0)
