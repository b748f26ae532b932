"""Reads `.npy` object arrays without running anybody's code. Torch-free.

A pickle names functions and calls them; an unrestricted load of a stranger's file runs whatever it
names. Here five names are known, and none of them is the function itself: stand-ins rebuild arrays
and scalars of plain types and check every size and type on the way. numpy's own would be unsafe
even alone: a forged dtype makes it take bytes for object pointers.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from vlarl.errors import AssetMissing, CorruptFile

_CODE = re.compile(r"([biufcSU])(\d{1,9})|O8|O4")


_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,  # includes a bad header and wrong text encoding
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
)
"""What a damaged pickle can end in."""


class _ForbiddenGlobal(pickle.UnpicklingError):
    """The file asks for a function or class outside the list."""


def load_object_array(path: Path) -> list[Any]:
    """The items of a 1-D object array: numpy arrays, scalars, and plain containers of them.

    Plain means None, bool, int, float, str, bytes, list, tuple, dict, set.

    Raises:
        AssetMissing: when there is no such file.
        CorruptFile: when the file is truncated, has something after its end, is of another kind, or
            names anything but numpy arrays and scalars (the message names it).
    """
    try:
        with path.open("rb") as file:
            shape = _read_header(file)
            items = _Unpickler(file).load()
            if file.read(1):
                raise ValueError("there are bytes after the end of the array")
        if not isinstance(items, _Array) or not items.dtype.hasobject or items.shape != shape:
            raise ValueError(f"the header promises {shape} objects")
        return [_plain(item) for item in items]
    except FileNotFoundError:
        raise AssetMissing(
            f"there is no file {path}", fix=f"ls {path.parent}  # or collect it: vlarl collect"
        ) from None
    except _ForbiddenGlobal as error:
        raise CorruptFile(
            f"{path} asks to load '{error}'; a trajectory holds numpy arrays and plain containers "
            f"only, so this file is damaged or hostile; nothing of it was run. Delete it"
        ) from None
    except EOFError:
        raise CorruptFile(f"{path} is truncated; collect or download it again") from None
    except _DAMAGED as error:
        raise CorruptFile(
            f"{path} is not a readable object array ({error}); collect or download it again"
        ) from None


def load_saved_array(path: Path) -> np.ndarray:
    """The one numeric array in a file that `torch.save` wrote from a numpy array; without torch.

    Raises:
        AssetMissing: when there is no such file.
        CorruptFile: when the file is damaged, holds something else, or names anything but numpy's
            arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = (n for n in archive.namelist() if n.rpartition("/")[2] == "data.pkl")
            with archive.open(member) as file:
                array = _Unpickler(file).load()
        if not isinstance(array, _Array) or array.dtype.hasobject:
            raise ValueError(f"a numeric array was expected, got {type(array).__name__}")
        return array.view(np.ndarray)
    except FileNotFoundError:
        raise AssetMissing(f"there is no file {path}", fix=f"ls {path.parent}") from None
    # RuntimeError: zipfile's word for an encrypted member, or one in a compression it lacks.
    except (*_DAMAGED, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise CorruptFile(f"{path} is not a saved array ({error})") from None


def _read_header(file: Any) -> tuple[int, ...]:
    """Shape of the array; leaves the file at the start of the pickle."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"npy version {version} is not known")
    shape, _, dtype = read(file)
    if not dtype.hasobject or len(shape) != 1:
        raise ValueError(f"expected a list of frames, got an array of {dtype} with shape {shape}")
    return shape


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for an admitted name."""
        # numpy 2 moved its internals and writes the new place; both are in use.
        known = _STAND_INS.get((module.replace("numpy._core.", "numpy.core."), name))
        if known is None:
            raise _ForbiddenGlobal(f"{module}.{name}")
        return known

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse references to things outside the file."""
        raise _ForbiddenGlobal(f"persistent object {pid!r}")


class _StandIn:
    """A function for the unpickler to call. It has no attributes to overwrite."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("a state for a function")


class _Dtype:
    """A dtype as the pickle describes it: a code such as "f4", later the byte order."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise ValueError(f"dtype {code!r} is not a plain one")
        self._code = code
        self._order: Literal["<", ">", "=", "|"] = "="

    def __setstate__(self, state: Any) -> None:
        order, subarray, names, fields = state[1:5]
        if order not in ("<", ">", "=", "|") or (subarray, names, fields) != (None, None, None):
            raise ValueError("dtype is not a plain one")
        self._order = order

    def real(self) -> np.dtype[Any]:
        if self._code[0] == "O":
            return np.dtype(object)
        return np.dtype(self._code).newbyteorder(self._order)


class _Array(np.ndarray):
    """An array under construction."""

    def __setstate__(self, state: Any) -> None:
        _, shape, described, fortran, data = state
        dtype = _real(described)
        if any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError("shape is not made of counts")
        if dtype.hasobject:
            if not isinstance(data, list) or len(data) != math.prod(shape):
                raise ValueError("number of objects does not match the shape")
        elif not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError("number of bytes does not match shape and dtype")
        whole: Any = (
            1,
            shape,
            dtype,
            bool(fortran),
            data,
        )  # the stub asks for np.bool, numpy for int
        super().__setstate__(whole)


def _real(described: object) -> np.dtype[Any]:
    if not isinstance(described, _Dtype):
        raise ValueError("a dtype was expected")
    return described.real()


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    """An empty array, filled by its __setstate__."""
    if kind is not _STAND_INS["numpy", "ndarray"]:
        raise ValueError("only plain arrays are rebuilt")
    return np.ndarray.__new__(_Array, (0,), np.int8)


def _scalar(described: object, data: object) -> np.generic:
    dtype = _real(described)
    if dtype.hasobject or not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise ValueError("scalar does not match its dtype")
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()


def _encode(text: object, encoding: object) -> bytes:
    """How pickles of protocol 2, such as `torch.save`'s, spell bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are spelled in latin1")
    return text.encode("latin1")


def _refuse(*args: object) -> NoReturn:
    raise ValueError("arrays are not built by their constructor")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _StandIn(_reconstruct),
    ("numpy.core.multiarray", "scalar"): _StandIn(_scalar),
    ("numpy", "ndarray"): _StandIn(_refuse),
    ("numpy", "dtype"): _StandIn(_Dtype),
    ("_codecs", "encode"): _StandIn(_encode),
}


def _plain(item: Any) -> Any:
    """The same with numpy's own array type, all the way down."""
    if isinstance(item, _Array):
        if item.dtype.hasobject:
            out = np.empty(item.shape, object)
            out.reshape(-1)[:] = [_plain(one) for one in item.reshape(-1)]
            return out
        return item.view(np.ndarray)
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(_plain(value) for value in item)
    if isinstance(item, (_StandIn, _Dtype)):
        raise ValueError("a function or dtype among the values")
    return item
