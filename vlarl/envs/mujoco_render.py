"""Off-screen frames of MuJoCo models, from one OpenGL context a process. Torch-free.

Importing this imports mujoco: choose the driver first (vlarl.envs.gl).
"""

from __future__ import annotations

from typing import Literal

import mujoco
import numpy as np

from vlarl.envs import gl

Quality = Literal["full", "fast"]

_MAX_GEOMS = 1000


class ModelView:
    """One model on the graphics side. At most one GL context is shared by all of a process.

    quality "full" is the model's own settings; "fast" turns off shadows, reflections and
    multisampling. Frames of any size up to `max_size` (height, width) come from one buffer, so a
    frame never depends on which other sizes were asked for. hidden_group: geom group that is not
    drawn. max_texture: larger textures of flat images are scaled down to at most so many pixels.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        quality: Quality,
        max_size: tuple[int, int],
        hidden_group: int | None = None,
        max_texture: int | None = None,
    ) -> None:
        self._model = model
        model.vis.global_.offheight, model.vis.global_.offwidth = max_size
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        if quality == "fast":
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._option = mujoco.MjvOption()
        if hidden_group is not None:
            self._option.geomgroup[hidden_group] = 0
        self._perturb = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        if max_texture is not None:
            _shrink_textures(model, max_texture)
        _share_context(max_size)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)

    def frame(self, data: mujoco.MjData, camera: str, size: tuple[int, int]) -> np.ndarray:
        """[H, W, 3] uint8, rows bottom-up as OpenGL gives them."""
        self._camera.fixedcamid = self._model.camera(camera).id
        mujoco.mjv_updateScene(
            self._model,
            data,
            self._option,
            self._perturb,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        height, width = size
        viewport = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjr_render(viewport, self._scene, self._context)
        pixels = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, viewport, self._context)
        return pixels

    @property
    def driver(self) -> str:
        """What draws the frames, in its own words."""
        return gl.driver_name()

    def close(self) -> None:
        """Free what the model holds on the graphics side."""
        self._context.free()


def _shrink_textures(model: mujoco.MjModel, limit: int) -> None:
    """Replace the model's larger flat textures by means of blocks, in place.

    Uploaded, a 4096 px texture takes 90 MB. Cube maps are left alone.
    """
    for i in range(model.ntex):
        height, width = int(model.tex_height[i]), int(model.tex_width[i])
        factor = -(-max(height, width) // limit)
        if factor == 1 or model.tex_type[i] != mujoco.mjtTexture.mjTEXTURE_2D:
            continue
        start, channels = int(model.tex_adr[i]), int(model.tex_nchannel[i])
        image = model.tex_data[start : start + height * width * channels]
        image = image.reshape(height, width, channels)
        height, width = height // factor, width // factor
        blocks = image[: height * factor, : width * factor].reshape(
            height, factor, width, factor, channels
        )
        model.tex_data[start : start + height * width * channels] = (
            blocks.mean((1, 3)).round().astype(np.uint8).reshape(-1)
        )
        model.tex_height[i], model.tex_width[i] = height, width


_context = None


def _share_context(max_size: tuple[int, int]) -> None:
    """Make the process's one GL context, on first use. It lives as long as the process."""
    global _context
    if _context is None:
        _context = gl.context(max_size[1], max_size[0])
