"""Episodes as moving and still pictures: MP4 grids and PNG strips. Torch-free.

A cell is the frame, enlarged by a whole factor when small, above a label with the caption and the
step. A finished episode freezes on its last frame, dimmed, with its return and a check or a cross.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image, ImageDraw, ImageFont

from vlarl.atomic import new_file, refuse_existing
from vlarl.errors import ConfigError, RunFailed

if TYPE_CHECKING:  # outcomes hold tensors
    from vlarl.rollout.play import Outcome
    from vlarl.specs import EnvSpec

_MIN_WIDTH = 160
_LABEL_HEIGHT = 34
_FONT_SIZE = 12
_MARGIN = 4
_GAP = 4
_DIM = 0.45
_BACKGROUND = (18, 18, 20)
_TEXT = (235, 235, 235)
_GREEN, _RED = (64, 200, 100), (235, 80, 70)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The recorded frames of one episode and what to write under them.

    frames: [F, H, W, 3] uint8. episode: its index in the plan. caption: e.g. task and trial.
    total_reward: the episode's return, when known. steps_per_frame: actions between two frames.
    num_steps: actions of the whole episode, when the last frame came off the beat.
    """

    frames: np.ndarray
    caption: str
    success: bool
    episode: int
    total_reward: float | None = None
    steps_per_frame: int = 1
    num_steps: int | None = None

    @classmethod
    def of(cls, outcome: Outcome, spec: EnvSpec) -> Clip:
        """A recorded episode, captioned with its trial and task, which is long and may be cut."""
        assert outcome.frames is not None, "the episode was not recorded"
        episode = outcome.episode
        return cls(
            frames=outcome.frames.numpy(),
            caption=f"#{episode.trial} {episode.task}",
            success=outcome.success,
            episode=episode.index,
            total_reward=outcome.total_reward,
            steps_per_frame=spec.video_every,
            num_steps=outcome.num_steps,
        )

    def step(self, t: int) -> int:
        """How many actions came before frame t."""
        last = len(self.frames) - 1
        return self.num_steps if t == last and self.num_steps else t * self.steps_per_frame


def write_video(
    frames: Iterable[np.ndarray], path: Path, *, fps: float, overwrite: bool = False
) -> Path:
    """Encode frames, each [H, W, 3] uint8 of one size, as H.264 MP4 (yuv420p, plays everywhere).

    An odd height or width is padded by one black row or column, since yuv420p needs even sizes.
    The file appears when it is complete; an exception from `frames` leaves none.

    Raises:
        ConfigError: when the file exists and overwrite is False, or there are no frames.
        RunFailed: when the encoder fails (disk full, for one), with its last words.
    """
    if not overwrite:
        refuse_existing(path)
    stream = iter(frames)
    first = next(stream, None)
    if first is None:
        raise ConfigError(f"{path}: there are no frames to write")
    with new_file(path, overwrite=overwrite) as temporary:
        _encode(first, stream, temporary, fps)
    return path


def _encode(first: np.ndarray, rest: Iterator[np.ndarray], path: Path, fps: float) -> None:
    height, width = first.shape[0], first.shape[1]
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-y"]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}"]
    command += ["-i", "-", "-an", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]
    command += ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "18", "-movflags", "+faststart"]
    command += [str(path)]
    # The encoder's messages go to a file: a pipe that nobody reads could fill up and stall it.
    with tempfile.TemporaryFile() as words:
        encoder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=words
        )
        assert encoder.stdin is not None
        try:
            _feed(encoder.stdin.write, chain((first,), rest), first.shape)
            encoder.stdin.close()
        except BrokenPipeError:
            encoder.wait()
        except BaseException:
            encoder.kill()
            encoder.wait()
            raise
        if encoder.wait() != 0:
            words.seek(0)
            last = words.read().decode(errors="replace").strip()
            raise RunFailed(f"{path}: the video encoder failed: {last or 'no message'}")


def _feed(write: Callable[[bytes], object], frames: Iterator[np.ndarray], shape: tuple) -> None:
    for frame in frames:
        assert (frame.shape, frame.dtype) == (shape, np.uint8), (frame.shape, frame.dtype, shape)
        write(np.ascontiguousarray(frame).tobytes())


def write_grid(
    clips: Sequence[Clip],
    path: Path,
    *,
    fps: float,
    columns: int | None = None,
    overwrite: bool = False,
    hold_s: float = 1.0,
) -> Path:
    """Play the clips side by side, row by row, as MP4.

    columns: cells per row; none makes the grid about square. hold_s: seconds for which the final
    picture stays. The video has max(F) + round(hold_s * fps) frames.

    Raises:
        ConfigError: without clips, for a clip without frames, or when the file exists.
    """
    frames = grid_frames(clips, columns=columns, hold=round(hold_s * fps))
    return write_video(frames, path, fps=fps, overwrite=overwrite)


def grid_frames(
    clips: Sequence[Clip], *, columns: int | None = None, hold: int = 0
) -> Iterator[np.ndarray]:
    """The pictures of `write_grid`, each [rows * cell height, columns * cell width, 3] uint8.

    hold: how many more pictures after the last frame of the longest clip.
    """
    _check(clips)
    columns = columns or math.ceil(math.sqrt(len(clips)))
    height, width, factor = _cell_size(clips)
    canvas = _canvas(math.ceil(len(clips) / columns), columns, height, width)
    for t in range(max(len(clip.frames) for clip in clips) + hold):
        for i, clip in enumerate(clips):
            if t <= len(clip.frames):  # afterwards the cell stays as it is
                _put(canvas, _cell(clip, t, (height, width), factor), divmod(i, columns))
        yield canvas.copy()


def write_strip(
    clips: Sequence[Clip], path: Path, *, moments: int = 6, overwrite: bool = False
) -> Path:
    """A still picture (PNG): one row per clip, `moments` frames of it from the first to the last.

    Good for a contact sheet of many episodes, or for one episode before and after training.

    Raises:
        ConfigError: without clips, for a clip without frames, or when the file exists.
    """
    _check(clips)
    height, width, factor = _cell_size(clips)
    canvas = _canvas(len(clips), moments, height, width)
    for row, clip in enumerate(clips):
        for column, t in enumerate(np.linspace(0, len(clip.frames) - 1, moments).round()):
            _put(canvas, _cell(clip, int(t), (height, width), factor), (row, column))
    with new_file(path, overwrite=overwrite) as temporary:
        Image.fromarray(canvas).save(temporary, format="PNG", optimize=True)
    return path


def _check(clips: Sequence[Clip]) -> None:
    if not clips:
        raise ConfigError("there are no episodes to show")
    for clip in clips:
        if len(clip.frames) == 0:
            raise ConfigError(f"episode {clip.episode} ({clip.caption}) has no recorded frames")
        shape, dtype = clip.frames.shape, clip.frames.dtype
        assert (len(shape), shape[-1], dtype) == (4, 3, np.uint8), (shape, dtype)


def _cell_size(clips: Sequence[Clip]) -> tuple[int, int, int]:
    """Height and width of the enlarged frame, label not counted, and the factor."""
    height = max(clip.frames.shape[1] for clip in clips)
    width = max(clip.frames.shape[2] for clip in clips)
    factor = max(1, math.ceil(_MIN_WIDTH / width))
    return height * factor, width * factor, factor


def _canvas(rows: int, columns: int, height: int, width: int) -> np.ndarray:
    shape = (rows * (height + _LABEL_HEIGHT), columns * (width + _GAP), 3)
    return np.broadcast_to(np.array(_BACKGROUND, np.uint8), shape).copy()


def _put(canvas: np.ndarray, cell: np.ndarray, place: tuple[int, int]) -> None:
    top, left = place[0] * cell.shape[0], place[1] * cell.shape[1]
    canvas[top : top + cell.shape[0], left : left + cell.shape[1]] = cell


def _cell(clip: Clip, t: int, size: tuple[int, int], factor: int) -> np.ndarray:
    """The clip at frame t with its label; dimmed from t = F on."""
    last = len(clip.frames) - 1
    frame = clip.frames[min(t, last)].repeat(factor, axis=0).repeat(factor, axis=1)
    if t > last:
        frame = (frame * _DIM).astype(np.uint8)
    height, width = size
    cell = _canvas(1, 1, height, width)
    top, left = (height - frame.shape[0]) // 2, (width - frame.shape[1]) // 2
    cell[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    cell[height:, :width] = _label(clip, min(t, last), width, ended=t >= last)
    return cell


def _label(clip: Clip, t: int, width: int, *, ended: bool) -> np.ndarray:
    """[_LABEL_HEIGHT, width, 3]: caption; step and, once ended, return and mark."""
    picture = Image.new("RGB", (width, _LABEL_HEIGHT), _BACKGROUND)
    draw = ImageDraw.Draw(picture)
    second = f"step {clip.step(t)}/{clip.step(len(clip.frames) - 1)}"
    if ended and clip.total_reward is not None:
        second += f"  return {clip.total_reward:.3g}"
    room = width - 2 * _MARGIN
    draw.text((_MARGIN, 2), _shorten(clip.caption, room), fill=_TEXT, font=_font())
    draw.text((_MARGIN, 17), _shorten(second, room - 16), fill=_TEXT, font=_font())
    if ended:
        x, y = width - _MARGIN - 12, 18
        if clip.success:
            draw.line([(x, y + 6), (x + 4, y + 11), (x + 12, y + 1)], fill=_GREEN, width=3)
        else:
            draw.line([(x + 1, y + 1), (x + 11, y + 11)], fill=_RED, width=3)
            draw.line([(x + 11, y + 1), (x + 1, y + 11)], fill=_RED, width=3)
    return np.asarray(picture)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)


def _shorten(text: str, room: int) -> str:
    """The text, cut with two dots when it is wider than `room` pixels."""
    if _font().getlength(text) <= room:
        return text
    while text and _font().getlength(text + "..") > room:
        text = text[:-1]
    return text + ".."
