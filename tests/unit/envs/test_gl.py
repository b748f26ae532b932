import subprocess
import types

import pytest

from vlarl.envs import gl
from vlarl.errors import DeviceMissing


@pytest.fixture(autouse=True)
def _no_choice_yet(monkeypatch):
    """The choice is kept in the environment and the module; let none leak in or out."""
    monkeypatch.setenv("MUJOCO_GL", "x")
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(gl, "_chosen", {})
    monkeypatch.setattr(gl.sys, "platform", "linux")


def drivers(monkeypatch, *, egl, osmesa):
    monkeypatch.setattr(gl, "_egl_problem", lambda: None if egl else "libEGL is not there")
    monkeypatch.setattr(
        gl.ctypes.util, "find_library", lambda name: "libOSMesa.so.8" if osmesa else None
    )


@pytest.mark.parametrize("osmesa", [True, False])
def test_egl_comes_first(monkeypatch, osmesa):
    drivers(monkeypatch, egl=True, osmesa=osmesa)
    assert gl.choose_backend()[0] == "egl"
    assert gl.os.environ["MUJOCO_GL"] == "egl"


@pytest.mark.parametrize("egl", [True, False])
def test_the_reason_of_a_choice_is_remembered(monkeypatch, egl):
    drivers(monkeypatch, egl=egl, osmesa=True)
    first = gl.choose_backend()
    assert "MUJOCO_GL" not in first[1]
    assert gl.choose_backend() == first


def test_osmesa_comes_second_and_says_why(monkeypatch):
    drivers(monkeypatch, egl=False, osmesa=True)
    backend, reason = gl.choose_backend()
    assert backend == gl.os.environ["MUJOCO_GL"] == "osmesa"
    assert "libEGL is not there" in reason


def test_without_a_driver_the_error_names_the_packages(monkeypatch):
    drivers(monkeypatch, egl=False, osmesa=False)
    with pytest.raises(DeviceMissing, match="libEGL is not there") as caught:
        gl.choose_backend()
    assert caught.value.fix.startswith("apt-get install")
    assert "libegl-mesa0" in caught.value.fix


def test_the_users_choice_is_kept(monkeypatch):
    drivers(monkeypatch, egl=True, osmesa=True)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert gl.choose_backend() == ("osmesa", "set by MUJOCO_GL")


def test_rendering_turned_off_is_an_error(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    with pytest.raises(DeviceMissing, match="MUJOCO_GL=disabled") as caught:
        gl.choose_backend()
    assert caught.value.fix == "unset MUJOCO_GL"


def test_other_platforms_use_their_own_driver(monkeypatch):
    monkeypatch.setattr(gl.sys, "platform", "darwin")
    assert gl.choose_backend()[0] == ""
    assert "MUJOCO_GL" not in gl.os.environ


def test_a_crash_of_the_selftest_is_reported(monkeypatch):
    crashed = types.SimpleNamespace(returncode=-11, stdout="", stderr="boom\nSegmentation fault\n")
    monkeypatch.setattr(gl.subprocess, "run", lambda *args, **kwargs: crashed)
    with pytest.raises(DeviceMissing, match=r"exit status -11.: Segmentation fault"):
        gl.selftest()


def test_a_selftest_that_never_ends_is_reported(monkeypatch):
    def run(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired("selftest", timeout)

    monkeypatch.setattr(gl.subprocess, "run", run)
    with pytest.raises(DeviceMissing, match="more than 120 s"):
        gl.selftest()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("foo", "MUJOCO_GL=foo is no OpenGL backend"),
        ("osmesa", "OSMesa is not installed"),
        ("glfw", "DISPLAY is not set"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_at_once(monkeypatch, given, reason):
    drivers(monkeypatch, egl=True, osmesa=False)
    monkeypatch.setenv("MUJOCO_GL", given)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(DeviceMissing, match=reason) as caught:
        gl.choose_backend()
    assert caught.value.fix == "unset MUJOCO_GL"


@pytest.mark.parametrize("device", ["abc", "99"])
def test_a_bad_device_number_is_the_reason_and_the_fix(monkeypatch, device):
    def start(width, height):
        raise ValueError(f"invalid literal: {int(device)}")

    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", device)
    monkeypatch.setattr(gl, "import_mujoco", lambda: types.SimpleNamespace(GLContext=start))
    with pytest.raises(DeviceMissing, match="invalid literal") as caught:
        gl.context(8, 8)
    assert caught.value.fix == "unset MUJOCO_EGL_DEVICE_ID"
