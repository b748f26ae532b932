"""Weights and optimizer moments to and from a torch.distributed.checkpoint folder, by name.

Keys: "model/NAME" for every entry of the module's state dict and "optim/NAME/SLOT" for every moment
of parameter NAME. Only what exists is written: a parameter that was never stepped has no moments,
and has none after loading, so that bias correction starts where it would have.

torch's own helpers for optimizer state (get_optimizer_state_dict) are not used: they invent moments
and a step count for parameters that have none, and the resumed run then differs from an unbroken
one.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.optim import Optimizer

from vlarl.distributed.world import World
from vlarl.errors import ConfigError, CorruptFile

_METADATA = ".metadata"

# All that the metadata of a folder of tensors consists of.
_ADMITTED = {
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16"}
    | {"int8", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}


class _TensorsOnly(pickle.Unpickler):
    """Builds checkpoint metadata and refuses every other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in it")


class _Reader(dcp.FileSystemReader):
    """torch's reader, with the metadata read through `_TensorsOnly`."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / _METADATA
        try:
            with open(path, "rb") as file:
                metadata = _TensorsOnly(file).load()
            assert isinstance(metadata, Metadata)
        except (pickle.UnpicklingError, EOFError, AssertionError, AttributeError) as error:
            raise CorruptFile(f"{path}: not the metadata of a checkpoint: {error}") from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's state dict under its keys; the tensors share memory with the module."""
    return {f"model/{name}": tensor for name, tensor in module.state_dict().items()}


def optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All moments that exist, under their keys."""
    return {
        f"optim/{name}/{slot}": tensor
        for name, param in _named(module, optimizer).items()
        for slot, tensor in optimizer.state.get(param, {}).items()
    }


def optimizer_settings(module: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON: every setting, and the names of the parameters."""
    names = {param: name for name, param in _named(module, optimizer).items()}
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def _named(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by their name in the module."""
    names = {param: name for name, param in module.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {names[param]: param for param in params}


def write(tensors: dict[str, Tensor], folder: Path, world: World) -> None:
    """Write tensors, sharded or replicated, into a new folder; all ranks must call it.

    Raises OSError with the first failure on every rank when any rank fails.
    """
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    try:
        with _quiet():
            dcp.save(tensors, storage_writer=writer, no_dist=world.size == 1)
    # It derives from BaseException, so no other handler would see it.
    except CheckpointException as error:
        raise OSError(_first_failure(error)) from error


def read(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    settings: list[dict[str, Any]],
    world: World,
) -> None:
    """Fill module and optimizer from a folder that `write` made, however many ranks wrote it.

    settings: what `optimizer_settings` gave then. Raises ConfigError when module or optimizer have
    other tensors than the folder, CorruptFile when a file in it is damaged.
    """
    reader = _Reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    target = model_tensors(module)
    _check_names(folder, target, entries, module, optimizer, settings)
    params = _named(module, optimizer)
    for key, entry in entries.items():
        if key.startswith("optim/"):
            target[key] = _room_for(entry, params[key.split("/")[1]], folder)
    try:
        with _quiet():
            dcp.load(target, storage_reader=reader, no_dist=world.size == 1)
    except CheckpointException as error:
        raise CorruptFile(f"{folder}: {_first_failure(error)}") from error
    _restore(optimizer, params, settings, target)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Without torch's remark that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _room_for(entry: object, param: nn.Parameter, folder: Path) -> Tensor:
    """Room for a moment: spread over ranks like its parameter, or a scalar on the CPU."""
    if not isinstance(entry, TensorStorageMetadata):
        raise CorruptFile(f"{folder / _METADATA}: holds something that is not a tensor")
    if entry.size == param.shape:
        return torch.zeros_like(param, dtype=entry.properties.dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _check_names(
    folder: Path,
    target: dict[str, Tensor],
    entries: dict[str, Any],
    module: nn.Module,
    optimizer: Optimizer,
    settings: list[dict[str, Any]],
) -> None:
    here = set(target)
    there = {key for key in entries if key.startswith("model/")}
    shapes = {key for key in here & there if entries[key].size != target[key].shape}
    problems = [
        f"{what}: {', '.join(sorted(key.removeprefix('model/') for key in keys)[:8])}"
        + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        for what, keys in (
            ("missing in the checkpoint", here - there),
            ("unknown to the policy", there - here),
            ("of another shape", shapes),
        )
        if keys
    ]
    trained = [group["params"] for group in optimizer_settings(module, optimizer)]
    if trained != [group["params"] for group in settings]:
        problems.append("the optimizer trains other parameters than in the run that wrote it")
    if problems:
        raise ConfigError(
            f"cannot resume from {folder.parent}: {'; '.join(problems)}. "
            "Resume with the configuration the run was started with"
        )


def _restore(
    optimizer: Optimizer,
    params: dict[str, nn.Parameter],
    settings: list[dict[str, Any]],
    tensors: dict[str, Tensor],
) -> None:
    numbers = {name: number for number, name in enumerate(params)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optim/"):
            _, name, slot = key.split("/")
            state.setdefault(numbers[name], {})[slot] = tensor
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        | {"params": [numbers[name] for name in group["params"]]}
        for group in settings
    ]
    # The optimizer's own loader puts each moment on the right device.
    optimizer.load_state_dict({"state": state, "param_groups": groups})
