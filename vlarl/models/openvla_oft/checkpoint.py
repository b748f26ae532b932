"""Reading and writing the released checkpoint layout: sharded safetensors, an index, and small
files beside them.

Layout: moojink/openvla-oft@213c5ff. Nothing from the checkpoint is executed and nothing is
unpickled except plain tensors. Every stored tensor is accounted for: owned by the network, known to
be dead, or an error.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vlarl.errors import AssetMissing, ConfigError, CorruptFile, RunFailed
from vlarl.models.openvla_oft.config import NUM_BINS, NetConfig, download, read_json
from vlarl.models.openvla_oft.layout import ACTION_ROWS, LM_HEAD, Shapes, stored_tensors

if TYPE_CHECKING:  # its libraries take seconds to import, and headers are read without it
    from vlarl.models.openvla_oft.net import OftNet

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
VALUE_HEAD = "value_head.safetensors"
_NO_STATE = (
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    UnpicklingError,
)
"""What `torch.load` ends in when a file is no state dict."""
_FLOATS = ("F16", "BF16", "F32", "F64")
_LEGACY = "rotary_emb.inv_freq"
_COPIED = ("*.json", "*.model", "*.py", "*.txt", "action_head--*.pt")
_SHOWN = 12


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the header of a single file."""
    index = folder / INDEX
    if index.exists():
        found = read_json(index).get("weight_map")
        if not isinstance(found, dict) or not found or not all(map(_is_file_name, found.values())):
            raise CorruptFile(f"{index} has no weight_map of file names; run: {download(folder)}")
        missing = sorted({name for name in found.values() if not (folder / name).exists()})
        if missing:
            raise AssetMissing(
                f"{index} names files that are not in {folder}: {_some(missing)}",
                fix=download(folder),
            )
        return found
    path = folder / SINGLE
    if not path.exists():
        raise AssetMissing(f"no {INDEX} and no {SINGLE} in {folder}", fix=download(folder))
    with open_safetensors(path) as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value


def open_safetensors(path: Path, device: str = "cpu"):
    """`safe_open` whose errors name the file. Raises CorruptFile."""
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as err:
        size = path.stat().st_size if path.exists() else 0
        raise CorruptFile(
            f"{path} ({size} bytes) is truncated or no safetensors file ({err}); download it again"
        ) from None


def check_names(expected: Mapping[str, Any], found: Mapping[str, Any], folder: Path) -> None:
    """Raises CorruptFile listing what is missing and what nobody knows."""
    missing = sorted(set(expected) - set(found))
    extra = sorted(name for name in set(found) - set(expected) if not name.endswith(_LEGACY))
    parts = [f"{len(missing)} missing: {_some(missing)}"] if missing else []
    parts += [f"{len(extra)} unknown: {_some(extra)}"] if extra else []
    if parts:
        raise CorruptFile(
            f"tensors in {folder} do not fit its config.json; {'; '.join(parts)}. "
            f"Expected {len(expected)} tensors; check text_config and timm_model_ids, or download "
            "the checkpoint again"
        )


def header(path: Path) -> Shapes:
    """Name -> shape of all tensors of a safetensors file; reads none.

    Raises CorruptFile, also when one does not hold floating-point numbers.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            stored = file.get_slice(name)
            if stored.get_dtype() not in _FLOATS:
                raise CorruptFile(
                    f"{path}: {name} holds {stored.get_dtype()} numbers, expected one of "
                    f"{', '.join(_FLOATS)}"
                )
            shapes[name] = tuple(stored.get_shape())
    return shapes


def check_weights(config: NetConfig, folder: Path) -> dict[str, str]:
    """Compare the names and shapes in all files with what config.json asks for; the weight map.

    Reads headers only, which also finds truncated files. Raises CorruptFile.
    """
    expected, files = stored_tensors(config), weight_map(folder)
    check_names(expected, files, folder)
    wrong: list[str] = []
    for file_name in sorted(set(files.values())):
        stored = header(folder / file_name)
        for name in (n for n, f in files.items() if f == file_name and n in expected):
            if name not in stored:
                raise CorruptFile(
                    f"{folder / file_name}: no tensor '{name}', though {INDEX} says so"
                )
            if stored[name] != expected[name]:
                wrong.append(f"{name} {list(stored[name])}, expected {list(expected[name])}")
    if wrong:
        raise CorruptFile(f"wrong shapes in {folder}: {_some(wrong)}")
    return files


def load_weights(net: OftNet, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
    """Fill a network that was built on the meta device from the shards, one file at a time.

    Dead tensors are checked for name and shape but not read. The heads outside the released files
    (value, state, L1) are left alone. Raises CorruptFile.
    """
    files = check_weights(net.config, folder)
    owned = {name for name, _ in net.named_parameters()}
    first = net.config.first_action_id
    for file_name in sorted(set(files.values())):
        with open_safetensors(folder / file_name, str(device)) as file:
            for name in (n for n, f in files.items() if f == file_name):
                if name == LM_HEAD:
                    rows = file.get_slice(name)[first : first + NUM_BINS]
                    _require_finite(rows, name, folder / file_name)
                    _assign(net, ACTION_ROWS, rows.to(dtype))
                elif name in owned:
                    tensor = file.get_tensor(name)
                    _require_finite(tensor, name, folder / file_name)
                    _assign(net, name, tensor.to(dtype))
    net.language_model.rebuild_rotary(device)


def _require_finite(tensor: Tensor, name: str, path: Path) -> None:
    # A sum is finite only if all are, and makes no copy.
    if not tensor.sum(dtype=torch.float32).isfinite():
        raise CorruptFile(f"{path}: {name} holds NaN or infinite numbers; download it again")


def _assign(net: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = net.get_submodule(owner)
    setattr(
        module, leaf, nn.Parameter(tensor, requires_grad=module.get_parameter(leaf).requires_grad)
    )


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """Name -> shape."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_head(want: Shapes, got: Shapes, path: Path) -> None:
    """Raises CorruptFile when names or shapes in a file are not those of a small head."""
    if want != got:
        diff = [
            f"{n}: {got.get(n, 'missing')}, expected {want.get(n, 'none')}"
            for n in sorted({*want, *got})
            if want.get(n) != got.get(n)
        ]
        raise CorruptFile(f"{path} does not fit this policy; {_some(diff)}")


def load_head(module: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Fill a small head; raises CorruptFile when names or shapes do not fit, or for NaN."""
    check_head(shapes_of(module.state_dict()), shapes_of(state), path)
    for name, tensor in state.items():
        _require_finite(tensor, name, path)
    module.load_state_dict({name: t.float() for name, t in state.items()})


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small file."""
    with open_safetensors(path):
        return load_file(path)


def component(folder: Path, name: str) -> Path | None:
    """The one `NAME--<step>_checkpoint.pt` of a checkpoint, or None.

    Raises ConfigError when there are several.
    """
    found = sorted(folder.glob(f"{name}--*.pt"))
    if len(found) > 1:
        raise ConfigError(
            f"{folder} has several {name} files ({', '.join(p.name for p in found)}); keep one"
        )
    return found[0] if found else None


def read_component(path: Path) -> dict[str, Tensor]:
    """The tensors of a component file, without the prefix DistributedDataParallel leaves; read
    when they are used, where the file's format allows. Raises CorruptFile.
    """
    try:
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except _NO_STATE:
        # torch's own words advise to load the file without its safeguard.
        raise CorruptFile(
            f"{path} ({path.stat().st_size} bytes) is truncated, or holds something else than "
            f"tensors, which is not loaded; run: {download(path.parent)}"
        ) from None
    named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not named or not all(isinstance(t, Tensor) for t in state.values()):
        raise CorruptFile(
            f"{path} holds something else than tensors by name; run: {download(path.parent)}"
        )
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def merge_adapters(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A state dict with LoRA adapters -> one without: weight + scale * B @ A, computed in
    float32.
    """
    merged: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        lora = name.removesuffix("base_layer.weight")
        if f"{lora}lora_A.default.weight" in state:
            a, b = (state[f"{lora}lora_{x}.default.weight"].float() for x in "AB")
            tensor = (tensor.float() + scale * (b @ a).to(tensor.device)).to(tensor.dtype)
        merged[plain] = tensor
    return merged


def save_weights(
    state: Mapping[str, Tensor], first_action_id: int, source: Path, folder: Path
) -> None:
    """Write the shards of `source` anew into `folder`, one at a time, with the network's tensors in
    place.

    state: merged weights by network name. The action rows are put back into the full head; tensors
    the network does not own are copied through.
    """
    files = {n: f for n, f in weight_map(source).items() if not n.endswith(_LEGACY)}
    total = 0
    for file_name in sorted(set(files.values())):
        tensors: dict[str, Tensor] = {}
        with open_safetensors(source / file_name) as file:
            for name in (n for n, f in files.items() if f == file_name):
                if name == LM_HEAD:
                    rows = state[ACTION_ROWS].cpu()
                    head = file.get_tensor(name).to(rows.dtype)
                    head[first_action_id : first_action_id + NUM_BINS] = rows
                    tensors[name] = head
                elif name in state:
                    tensors[name] = state[name].detach().cpu().contiguous()
                else:
                    tensors[name] = file.get_tensor(name)
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if set(files.values()) != {SINGLE}:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def save_heads(state: Mapping[str, Tensor], source: Path, folder: Path) -> None:
    """Write the value head and the state projector, where there is one, into files of their own."""
    heads = {n: t.detach().cpu().contiguous() for n, t in state.items()}
    value = {n: t for n, t in heads.items() if n.startswith("value_head.")}
    if value:
        save_file(value, folder / VALUE_HEAD)
    proprio = {
        n.removeprefix("proprio_projector."): t.clone()
        for n, t in heads.items()
        if n.startswith("proprio_projector.")
    }
    if proprio:
        # The reference's loader wants this name and a plain torch file.
        path = component(source, "proprio_projector")
        torch.save(proprio, folder / (path.name if path else "proprio_projector--0_checkpoint.pt"))


def write_sharded(tensors: Mapping[str, Tensor], folder: Path, *, max_shard_bytes: int) -> None:
    """Write tensors as numbered shards with an index, in name order."""
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
        if shards[-1] and size > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensors[name].contiguous()
        room -= size
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file_name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file_name)
    total = sum(math.prod(t.shape) * t.element_size() for t in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy configuration and tokenizer; not the weights, their index, stale adapters, or a
    description, which is of other weights.
    """
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.name != INDEX:
                shutil.copyfile(path, folder / path.name)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create `folder` in one step: `fill` writes into a sibling that is renamed when complete.

    Raises ConfigError when the folder exists, RunFailed when the disk is full or not writable
    (nothing is left behind).
    """
    if folder.exists():
        raise ConfigError(
            f"{folder} exists; checkpoints are never overwritten, choose another folder"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fill(partial)
        for path in partial.iterdir():  # safetensors makes files that only their owner can read
            path.chmod(partial.stat().st_mode & 0o666)
        os.replace(partial, folder)
    except (OSError, SafetensorError) as err:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunFailed(f"cannot write the checkpoint {folder}: {err}") from err


def _some(names: list[str]) -> str:
    """The first few names and how many more."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
