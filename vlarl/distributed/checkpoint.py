"""Checkpoints that are whole or not there, and resume a run bit for bit.

step_000100/
├── manifest.json    format, step, ranks, sizes of all other files, hashes of small ones; last
├── state.json       what the trainer wants back, and the optimizer's settings
├── rng/rank_N.pt    random states of rank N
├── dcp/             weights and optimizer moments (vlarl.distributed.dcp_io)
└── policy/          the policy in its public layout; all that `eval` and `video` read

Everything is written into `step_000100.tmp`; when all ranks are done, rank 0 renames the folder. A
crash, a full disk or a kill at any moment leaves the previous checkpoint as it was. Any number of
ranks, sharded or not, resumes from what any other number wrote; with the same number the resumed
run equals the unbroken one bit for bit.

Trust: `policy/` holds safetensors and JSON and may come from anywhere. `dcp/.metadata` is a pickle
by torch's design; it is read on resume only, through an unpickler that admits torch's checkpoint
classes and nothing that could run code.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from vlarl import checkpoint_manifest
from vlarl.atomic import write_atomic
from vlarl.distributed import dcp_io
from vlarl.distributed.shard import full_state_dict
from vlarl.distributed.world import World
from vlarl.errors import CorruptFile, RunFailed
from vlarl.run_dir import (
    RunDir,
    checkpoint_step,
    checkpoints,
    read_json,
    remove_checkpoint,
)

log = logging.getLogger(__name__)

PolicySaver = Callable[[Path, Mapping[str, Tensor] | None], None]
"""Policy.save: writes the policy into a folder, from the given full state dict or from itself."""


def save(
    folder: Path,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    world: World,
    policy_saver: PolicySaver,
) -> None:
    """Write the checkpoint `folder`; when this returns it is complete and on disk.

    state: JSON values, which `load` gives back. policy_saver runs on rank 0. All ranks must call
    it. A checkpoint of that name is replaced. Raises RunFailed on every rank when any rank fails,
    with the bytes needed and free; nothing of the attempt stays behind then.
    """
    draft = folder.with_name(folder.name + ".tmp")
    needed = _bytes_needed(module, optimizer)
    try:
        _together(world, lambda: _prepare(draft, needed) if world.is_main else None)
        full = full_state_dict(module, world) if isinstance(module, FSDPModule) else None
        tensors = dcp_io.model_tensors(module) | dcp_io.optimizer_tensors(module, optimizer)
        _together(world, lambda: _save_rng(draft / "rng", world))
        dcp_io.write(tensors, draft / "dcp", world)
        content = {
            "trainer": dict(state),
            "optimizer": dcp_io.optimizer_settings(module, optimizer),
        }

        def finish() -> None:
            if world.is_main:
                write_atomic(draft / "state.json", json.dumps(content, indent=1))
                policy_saver(draft / "policy", full)
                _seal(draft, folder, world)

        _together(world, finish)
    # Whatever a writer raises ends in the same answer: the attempt is void, the last one stands.
    except Exception as error:
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise RunFailed(_why_not_saved(folder, needed, error)) from error
    log.info("saved checkpoint %s", folder)


def load(folder: Path, *, module: nn.Module, optimizer: Optimizer, world: World) -> dict[str, Any]:
    """Fill module, optimizer and random states from a checkpoint; returns the trainer's state.

    All ranks must call it, with module and optimizer made as in the run that wrote it. With another
    number of ranks the random states of torch, numpy and Python stay as they are: they belong to
    ranks that no longer exist. Raises CorruptFile naming the damaged file, ConfigError when the
    policy or the trained parameters are not those of the checkpoint.
    """
    _together(world, lambda: checkpoint_manifest.verify(folder))
    content = read_json(folder / "state.json")
    dcp_io.read(folder / "dcp", module, optimizer, content["optimizer"], world)
    ranks = checkpoint_manifest.read(folder).ranks
    if ranks == world.size:
        _together(world, lambda: _load_rng(folder / "rng", world))
    else:
        log.info("%s was written by %d ranks, this run has %d", folder, ranks, world.size)
    log.info("resumed from %s", folder)
    return content["trainer"]


def prune(run: RunDir, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints, and what a killed save left. Rank 0 only.

    Call after a save has returned, so that the new one is complete before an old one goes.
    """
    assert keep >= 1
    for folder in checkpoints(run)[:-keep]:
        remove_checkpoint(folder)
    for leftover in run.ckpt.glob("*.tmp"):
        shutil.rmtree(leftover)


def _together(world: World, action: Callable[[], object]) -> None:
    """Run a local action on every rank and raise on all of them if it failed on any.

    Otherwise the ranks that succeeded would wait in the next collective for one that never comes.
    """
    problem: Exception | None = None
    try:
        action()
    except Exception as error:  # raised again below
        problem = error
    notes = world.all_gather_object(f"{type(problem).__name__}: {problem}" if problem else "")
    if problem is not None:
        raise problem
    for rank, note in enumerate(notes):
        if note:
            raise RunFailed(f"rank {rank}: {note}")


def _bytes_needed(module: nn.Module, optimizer: Optimizer) -> int:
    """About what a checkpoint takes: weights, moments, and the weights once more for the policy."""
    tensors = dcp_io.model_tensors(module)
    moments = dcp_io.optimizer_tensors(module, optimizer)
    weights = sum(t.numel() * t.element_size() for t in tensors.values())
    return 2 * weights + sum(t.numel() * t.element_size() for t in moments.values())


def _prepare(draft: Path, needed: int) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(draft.parent).free
    if free < needed:
        raise OSError("not enough room on the disk")
    (draft / "rng").mkdir(parents=True)


def _why_not_saved(folder: Path, needed: int, error: Exception) -> str:
    try:
        free = f"{shutil.disk_usage(folder.parent).free:,} bytes are free"
    except OSError:
        free = "the folder cannot be reached"
    return (
        f"checkpoint {folder} could not be written: {error}. It needs more than {needed:,} bytes, "
        f"{free}. Earlier checkpoints are untouched; make room and continue with --resume"
    )


def _seal(draft: Path, folder: Path, world: World) -> None:
    """Flush every file, write the manifest, and give the folder its final name."""
    step = checkpoint_step(folder)
    assert step is not None, folder
    for path in (p for p in draft.rglob("*") if p.is_file()):
        _fsync(path)
    checkpoint_manifest.write(draft, step=step, ranks=world.size)
    for path in (draft, *(p for p in draft.rglob("*") if p.is_dir())):
        _fsync(path)
    old = folder.with_name(folder.name + ".old.tmp")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    draft.rename(folder)
    _fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save_rng(folder: Path, world: World) -> None:
    _, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - the global one
    version, words, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, gauss),
        "python": (version, list(words), gauss_next),
    }
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    torch.save(states, folder / f"rank_{world.rank}.pt")


def _load_rng(folder: Path, world: World) -> None:
    path = folder / f"rank_{world.rank}.pt"
    try:
        states = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CorruptFile(f"{path}: cannot be read: {error}") from error
    torch.set_rng_state(states["torch"])
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy(), *rest))  # noqa: NPY002 - the global one
    version, words, gauss_next = states["python"]
    random.setstate((version, tuple(words), gauss_next))
    if world.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], world.device)
