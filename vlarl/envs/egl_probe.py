"""Asks libEGL whether it can render off screen: run as a script, it prints the problem, if any.

Standard library only. Importing mujoco to find out would fix the choice of driver for the process.
"""

from __future__ import annotations

import ctypes
import sys

_EGL_PLATFORM_DEVICE_EXT = 0x313F
_MAX_DEVICES = 32


def problem() -> str | None:
    """Why no EGL device initialises, None when one does."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return "libEGL.so.1 is not installed"
    if not (_loads("libOpenGL.so.0") or _loads("libGL.so.1")):
        return "neither libOpenGL.so.0 nor libGL.so.1 is installed"
    lookup = egl.eglGetProcAddress
    lookup.restype, lookup.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    query_at, display_at = lookup(b"eglQueryDevicesEXT"), lookup(b"eglGetPlatformDisplayEXT")
    if not query_at or not display_at:
        return "libEGL lacks the device extension"
    pointer = ctypes.c_void_p
    query = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_int, ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_int)
    )(query_at)
    display_of = ctypes.CFUNCTYPE(pointer, ctypes.c_uint, pointer, pointer)(display_at)
    initialize = egl.eglInitialize
    initialize.restype, initialize.argtypes = ctypes.c_uint, [pointer, pointer, pointer]
    devices, count = (pointer * _MAX_DEVICES)(), ctypes.c_int()
    if not query(_MAX_DEVICES, devices, ctypes.byref(count)) or not count.value:
        return "EGL finds no device (is its Mesa vendor library installed?)"
    for device in devices[: count.value]:
        display = display_of(_EGL_PLATFORM_DEVICE_EXT, device, None)
        if display and initialize(display, None, None):
            return None
    return f"none of {count.value} EGL devices initialises"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.stdout.write(problem() or "")
