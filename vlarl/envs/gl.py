"""Which OpenGL driver MuJoCo renders with, decided before mujoco is imported. Torch-free.

EGL first: without a GPU it runs on Mesa's software driver; OSMesa second. A value the user gave to
MUJOCO_GL is kept. The EGL device is left to the driver (or to the user's MUJOCO_EGL_DEVICE_ID): its
numbering has nothing to do with ranks or CUDA ordinals.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from vlarl.envs import egl_probe
from vlarl.errors import DeviceMissing

FIX = "apt-get install -y libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"
"""Debian and Ubuntu packages that give MuJoCo an EGL software driver."""

_OFF = ("disable", "disabled", "off", "false", "0")
_ON = ("egl", "osmesa", "glfw", "glx", "enable", "enabled", "on", "true", "1")
_PROBE_S = 60
_SELFTEST_S = 120

_SELFTEST_XML = """
<mujoco>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <camera name="eye" pos="0 0 2"/>
    <geom type="box" size="5 5 .01" pos=" 5 0 0" rgba="1 0 0 1"/>
    <geom type="box" size="5 5 .01" pos="-5 0 0" rgba="0 0 1 1"/>
  </worldbody>
</mujoco>
"""


_chosen: dict[str, str] = {}
"""Backend that this process has put into MUJOCO_GL -> why."""


def choose_backend() -> tuple[str, str]:
    """Set MUJOCO_GL if it is not set, and return (backend, reason); the same ones when asked again.

    Call before the first `import mujoco` of the process; processes it starts inherit the choice.
    Raises DeviceMissing, with the command that installs a driver, when there is none.
    """
    given = os.environ.get("MUJOCO_GL", "").strip().lower()
    if given in _chosen:
        return given, _chosen[given]
    if given in _OFF:
        raise DeviceMissing(
            f"MUJOCO_GL={given} turns rendering off, and policies need frames",
            fix="unset MUJOCO_GL",
        )
    if given:
        if sys.platform == "linux":
            _check_given(given)
        return given, "set by MUJOCO_GL"
    if sys.platform != "linux":
        return "", f"the platform's own driver on {sys.platform}"
    egl_problem = _egl_problem()
    if egl_problem is None:
        return _set("egl", "an EGL device initialises")
    if ctypes.util.find_library("OSMesa") is not None:
        return _set("osmesa", f"{egl_problem}; OSMesa is installed")
    raise DeviceMissing(
        f"no OpenGL driver to render with: {egl_problem}; OSMesa is not installed", fix=FIX
    )


def _set(backend: str, reason: str) -> tuple[str, str]:
    os.environ["MUJOCO_GL"] = backend
    _chosen[backend] = reason
    return backend, reason


def _check_given(given: str) -> None:
    """Raise DeviceMissing when the user's MUJOCO_GL cannot work, before mujoco trips over it.

    Cheap, since every simulator process asks again: a driver that is there and fails shows later.
    """
    if given not in _ON:
        raise DeviceMissing(
            f"MUJOCO_GL={given} is no OpenGL backend of MuJoCo; expected egl, osmesa or glfw",
            fix="unset MUJOCO_GL",
        )
    if given == "osmesa" and ctypes.util.find_library("OSMesa") is None:
        raise DeviceMissing(
            "MUJOCO_GL=osmesa, but OSMesa is not installed; apt-get install -y libosmesa6 does it",
            fix="unset MUJOCO_GL",
        )
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if given not in ("egl", "osmesa") and not screen:
        raise DeviceMissing(
            f"MUJOCO_GL={given} renders on a screen, and DISPLAY is not set", fix="unset MUJOCO_GL"
        )


def import_mujoco() -> Any:
    """The module; needs `choose_backend` first. Raises DeviceMissing when its driver is missing."""
    # The drivers fail in their own ways, and a failed import here is a missing library.
    try:
        import mujoco  # noqa: PLC0415
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise _does_not_start(error) from error
    return mujoco


def keep_quiet(mujoco: Any) -> None:
    """Stop MuJoCo's default handler, which writes MUJOCO_LOG.TXT into the working directory."""
    mujoco.set_mju_user_warning(lambda message: None)


def blew_up(mujoco: Any, data: Any) -> bool:
    """Whether MuJoCo met non-finite or huge numbers since the last reset of `data`."""
    kinds = mujoco.mjtWarning
    bad = (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC)
    return any(data.warning[int(kind)].number for kind in bad)


def _does_not_start(error: Exception) -> DeviceMissing:
    chosen = "MUJOCO_EGL_DEVICE_ID" in os.environ
    return DeviceMissing(
        f"the OpenGL backend '{os.environ.get('MUJOCO_GL', '')}' does not start: {error}",
        fix="unset MUJOCO_EGL_DEVICE_ID" if chosen else FIX,
    )


def context(width: int, height: int) -> Any:
    """A current OpenGL context for off-screen rendering; needs `choose_backend` first.

    Make one per process and keep it: a second one returns garbage frames on some drivers.
    """
    mujoco = import_mujoco()
    # ValueError: MUJOCO_EGL_DEVICE_ID is no number.
    try:
        made = mujoco.GLContext(width, height)
        made.make_current()
    except (ImportError, RuntimeError, AttributeError, OSError, ValueError) as error:
        raise _does_not_start(error) from error
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """Outcome of rendering one frame. driver: the OpenGL renderer string."""

    backend: str
    reason: str
    driver: str


def selftest() -> SelfTest:
    """Render a small frame in a process of its own and check its colours.

    Raises DeviceMissing when there is no driver, when it crashes, or when the frame is wrong.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vlarl.envs.gl"],
            capture_output=True,
            text=True,
            timeout=_SELFTEST_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceMissing(
            f"rendering a test frame took more than {_SELFTEST_S} s", fix=FIX
        ) from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DeviceMissing(
            f"rendering a test frame failed (exit status {done.returncode}): {words[0]}", fix=FIX
        )
    answer = json.loads(done.stdout)
    if "problem" in answer:
        raise DeviceMissing(answer["problem"], fix=answer["fix"])
    return SelfTest(**answer)


def _egl_problem() -> str | None:
    """Why EGL cannot render off screen, None when it can.

    Asked in a process of its own: it may crash, and a trainer has no use for a loaded GL driver.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", egl_probe.__file__],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
    except subprocess.TimeoutExpired:
        return f"asking EGL for a device took more than {_PROBE_S} s"
    if done.returncode != 0:
        return f"asking EGL for a device crashed (exit status {done.returncode})"
    return done.stdout.strip() or None


def _render_test_frame() -> SelfTest:
    backend, reason = choose_backend()
    mujoco = import_mujoco()
    held = context(64, 64)
    model = mujoco.MjModel.from_xml_string(_SELFTEST_XML)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 64, 64) as renderer:
        renderer.update_scene(data, camera="eye")
        frame = renderer.render()
        driver = driver_name()
    del held
    left, right = frame[32, 16].astype(int), frame[32, 48].astype(int)
    if not (left[2] > 100 > left[0] and right[0] > 100 > right[2]):
        raise DeviceMissing(
            f"the OpenGL backend '{backend}' renders wrong colours: expected blue and red, got "
            f"{left.tolist()} and {right.tolist()}",
            fix=FIX,
        )
    return SelfTest(backend=backend, reason=reason, driver=driver)


def driver_name() -> str:
    """The renderer of the current OpenGL context, in its own words."""
    from OpenGL import GL  # noqa: PLC0415

    return GL.glGetString(GL.GL_RENDERER).decode()


def main() -> None:
    """The other end of `selftest`: one JSON document on stdout."""
    try:
        answer = asdict(_render_test_frame())
    except DeviceMissing as error:
        answer = {"problem": str(error), "fix": error.fix}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
