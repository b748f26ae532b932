import subprocess
from pathlib import Path

import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image

from vlarl.errors import ConfigError, RunFailed
from vlarl.video import Clip, grid_frames, write_grid, write_strip, write_video

RED, GREEN, BLUE = (200, 30, 30), (30, 180, 30), (30, 30, 220)


def decode(path: Path) -> np.ndarray:
    """[F, H, W, 3] uint8, by the real decoder; the size comes from the stream itself."""
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["source_size"]
    return np.stack([np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in reader])


def clip(color, length, *, success=True, episode=0, size=(40, 200), reward=None):
    frames = np.broadcast_to(np.array(color, np.uint8), (length, *size, 3))
    return Clip(
        frames=frames, caption="task #1", success=success, episode=episode, total_reward=reward
    )


@pytest.mark.parametrize(("height", "width"), [(64, 64), (63, 65), (1, 1), (17, 32)])
def test_any_size_decodes_to_the_same_number_of_frames_padded_to_even(tmp_path, height, width):
    frames = [np.full((height, width, 3), 20 * i, np.uint8) for i in range(7)]
    path = write_video(frames, tmp_path / "a.mp4", fps=10)
    shown = decode(path)
    assert shown.shape == (7, height + height % 2, width + width % 2, 3)
    levels = shown[:, 0, 0, 0].astype(int)
    assert np.abs(levels - 20 * np.arange(7)).max() <= 4


def test_the_stream_is_h264_yuv420p_with_the_asked_rate(tmp_path):
    path = write_video([np.zeros((16, 16, 3), np.uint8)] * 4, tmp_path / "a.mp4", fps=12.5)
    words = subprocess.run(
        [get_ffmpeg_exe(), "-hide_banner", "-i", str(path)], capture_output=True, text=True
    ).stderr
    assert "h264" in words
    assert "yuv420p" in words
    assert "12.50 fps" in words


def test_an_exception_mid_episode_leaves_no_file_at_all(tmp_path):
    def broken():
        for _ in range(30):
            yield np.zeros((64, 64, 3), np.uint8)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_video(broken(), tmp_path / "a.mp4", fps=10)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_mid_episode_keeps_the_old_file(tmp_path):
    path = write_video([np.zeros((16, 16, 3), np.uint8)] * 3, tmp_path / "a.mp4", fps=10)
    before = path.read_bytes()

    def broken():
        yield np.zeros((64, 64, 3), np.uint8)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_video(broken(), path, fps=10, overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_overwritten_unless_asked(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.mp4 exists"):
        write_grid([clip(RED, 2)], path, fps=10)
    assert path.read_text() == "mine"
    write_grid([clip(RED, 2)], path, fps=10, overwrite=True)
    assert len(decode(path)) == 2 + 10


def test_a_failing_encoder_is_a_run_failure_with_its_words(tmp_path):
    with pytest.raises(RunFailed, match=r"encoder failed: .*No such container"):
        write_video([np.zeros((16, 16, 3), np.uint8)] * 3, tmp_path / "a.No such container", fps=10)
    assert list(tmp_path.iterdir()) == []


def test_cells_lie_row_by_row_and_the_rest_is_background():
    clips = [clip(c, 1, episode=i) for i, c in enumerate((RED, GREEN, BLUE))]
    (picture,) = grid_frames(clips, columns=2)
    height, width = picture.shape[0] // 2, picture.shape[1] // 2
    assert (picture.shape[0] % 2, picture.shape[1] % 2) == (0, 0)
    assert tuple(picture[5, 5]) == RED
    assert tuple(picture[5, width + 5]) == GREEN
    assert tuple(picture[height + 5, 5]) == BLUE
    assert picture[height:, width:].max() <= 20


def test_a_finished_episode_freezes_dimmed_while_the_longer_one_plays():
    moving = np.stack([np.full((40, 200, 3), 10 * t, np.uint8) for t in range(5)])
    long = Clip(frames=moving, caption="b", success=True, episode=1)
    pictures = list(grid_frames([clip(RED, 2), long], columns=2, hold=2))
    assert len(pictures) == 7
    half = pictures[0].shape[1] // 2
    assert [tuple(p[5, 5]) for p in pictures[:2]] == [RED, RED]
    dimmed = tuple(int(0.45 * c) for c in RED)
    assert {tuple(p[5, 5]) for p in pictures[2:]} == {dimmed}
    assert [int(p[5, half + 5, 0]) for p in pictures] == [0, 10, 20, 30, 40, 18, 18]


def test_success_and_failure_are_marked_only_when_the_episode_has_ended():
    def coloured(picture, channel):
        label = picture[40:].astype(int)
        others = [c for c in range(3) if c != channel]
        return int((label[..., channel] > 60 + label[..., others].max(axis=-1)).sum())

    for success, channel in ((True, 1), (False, 0)):
        first, last, after = grid_frames([clip(BLUE, 2, success=success)], hold=1)
        assert coloured(first, channel) == 0
        assert coloured(last, channel) > 10
        assert coloured(after, channel) == coloured(last, channel)
        assert coloured(last, 1 - channel) == 0


def test_the_label_changes_with_step_caption_and_return():
    def label(c, t):
        return list(grid_frames([c]))[t][40:]

    plain = clip(BLUE, 3)
    assert not np.array_equal(label(plain, 0), label(plain, 1))
    paid = clip(BLUE, 3, reward=2.5)
    assert np.array_equal(label(plain, 1), label(paid, 1)), "the return is known at the end only"
    assert not np.array_equal(label(plain, 2), label(paid, 2))
    other = Clip(frames=plain.frames, caption="else", success=True, episode=0)
    assert not np.array_equal(label(plain, 0), label(other, 0))


def test_small_frames_are_enlarged_by_a_whole_factor():
    frames = np.zeros((1, 2, 3, 3), np.uint8)
    frames[0, 1, 2] = 255
    (picture,) = grid_frames([Clip(frames=frames, caption="", success=True, episode=0)])
    factor = 54  # the smallest that makes 3 pixels at least 160 wide
    assert picture.shape[1] >= 3 * factor
    assert picture[factor : 2 * factor, 2 * factor : 3 * factor].min() == 255
    assert picture[:factor].max() <= 20


def test_clips_of_different_sizes_share_one_grid():
    (picture,) = grid_frames([clip(RED, 1, size=(40, 200)), clip(GREEN, 1, size=(20, 100))])
    half = picture.shape[1] // 2
    assert tuple(picture[0, half]) != GREEN
    assert tuple(picture[20, half + 100]) == GREEN


def test_a_long_caption_stays_in_its_cell():
    text = "a very long name of a task that is wider than the cell by a good deal #123"
    one = Clip(frames=clip(RED, 1).frames, caption=text, success=True, episode=0)
    (alone,) = grid_frames([one])
    (pair,) = grid_frames([one, clip(BLUE, 1)], columns=2)
    (right,) = grid_frames([clip(BLUE, 1)])
    half = pair.shape[1] // 2
    assert np.array_equal(pair[:, :half], alone)
    assert np.array_equal(pair[:, half:], right)


def test_a_strip_shows_first_to_last_frame_in_rows(tmp_path):
    frames = np.stack([np.full((40, 200, 3), 10 * t, np.uint8) for t in range(11)])
    moving = Clip(frames=frames, caption="before", success=False, episode=0)
    path = write_strip([moving, clip(GREEN, 1)], tmp_path / "s.png", moments=3)
    picture = np.asarray(Image.open(path))
    height, width = picture.shape[0] // 2, picture.shape[1] // 3
    assert [int(picture[5, 5 + i * width, 0]) for i in range(3)] == [0, 50, 100]
    assert all(tuple(picture[height + 5, 5 + i * width]) == GREEN for i in range(3))
    with pytest.raises(ConfigError, match="exists"):
        write_strip([moving], path)


def test_no_clips_and_empty_clips_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no episodes to show"):
        write_grid([], tmp_path / "a.mp4", fps=10)
    empty = Clip(frames=np.zeros((0, 4, 4, 3), np.uint8), caption="x #3", success=True, episode=7)
    with pytest.raises(ConfigError, match=r"episode 7 \(x #3\) has no recorded frames"):
        write_grid([empty], tmp_path / "a.mp4", fps=10)
    assert list(tmp_path.iterdir()) == []
