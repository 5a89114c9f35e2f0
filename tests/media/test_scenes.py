import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from error_cases import raises

from saccade.config.schema import ScenesConfig
from saccade.data.synthetic.video_writer import write_video
from saccade.errors import MediaError
from saccade.media.scenes import (
    Scene,
    divide_scenes,
    find_cuts,
    find_scenes,
    measure_difference,
    select_compared_times,
)
from saccade.media.video import index_video

REAL = Path(__file__).parents[3] / "shared" / "media"
SIZE = (48, 64, 3)


def fill(color):
    return np.full(SIZE, color, np.uint8)


def make_texture(seed, brightness=128):
    """An image with large shapes, as frames of different places have."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 8, 3))
    pixels = np.kron(blocks, np.ones((8, 8, 1)))
    return np.clip(0.8 * (pixels - 128) + brightness, 0, 255).astype(np.uint8)


def shift(pixels, columns):
    return np.roll(pixels, columns, axis=1)


def test_noise_and_light_differ_less_than_another_place():
    base, rng = make_texture(0), np.random.default_rng(1)
    noisy = np.clip(base + rng.integers(-6, 7, SIZE), 0, 255).astype(np.uint8)
    lighter = np.clip(base.astype(int) + 12, 0, 255).astype(np.uint8)
    threshold = ScenesConfig().threshold
    assert measure_difference(base, base) == 0
    assert max(measure_difference(base, noisy), measure_difference(base, lighter)) < threshold
    assert min(measure_difference(base, make_texture(seed)) for seed in range(1, 20)) > threshold


def test_a_cut_is_found_and_a_flash_and_constant_motion_are_not():
    first, second = make_texture(0), make_texture(1)
    assert find_cuts([first] * 5 + [second] * 5, threshold=0.3) == [4]
    assert find_cuts([first] * 5 + [fill(255)] + [first] * 5, threshold=0.3) == []
    assert find_cuts([shift(first, 8 * index) for index in range(12)], threshold=0.1) == []
    assert find_cuts([first], threshold=0.3) == []
    assert find_cuts([first, second], threshold=0.3) == [0]


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_a_dissolve_is_one_cut_in_its_middle(num_steps):
    first, second = make_texture(0), make_texture(1)
    weights = [*[0.0] * 8, *(step / num_steps for step in range(1, num_steps)), *[1.0] * 8]
    frames = [((1 - weight) * first + weight * second).astype(np.uint8) for weight in weights]
    (cut,) = find_cuts(frames, threshold=0.3)
    assert abs(cut - (7 + num_steps / 2)) <= 1


def test_slow_motion_is_no_dissolve():
    scenery = np.kron(np.random.default_rng(0).integers(0, 256, (3, 40, 3)), np.ones((16, 8, 1))).astype(np.uint8)
    pan = [scenery[:, 2 * index : 2 * index + 64] for index in range(100)]
    assert find_cuts(pan, threshold=0.3) == []


@pytest.mark.parametrize("duration", [0.04, 0.9, 5.0, 61.0])
def test_scenes_cover_the_video_without_gaps(duration):
    cuts = [duration * part for part in (0.1, 0.11, 0.5, 0.99)]
    times = np.arange(0, duration, 0.02)
    scenes = divide_scenes(cuts, times, duration, min_seconds=1.0, max_seconds=7.0)
    assert scenes[0].start == 0
    assert scenes[-1].end == pytest.approx(duration, abs=1e-3)
    assert all(before.end == after.start for before, after in itertools.pairwise(scenes))
    lengths = [scene.end - scene.start for scene in scenes]
    assert max(lengths) <= 7.0 + 2e-3
    assert min(lengths) >= min(1.0, duration) - 2e-3


def test_cuts_of_a_file_are_exact_to_the_frame(tmp_path):
    textures = [make_texture(seed) for seed in range(4)]
    lengths = (31, 50, 20, 40)  # frames at 25 fps: no cut falls on a compared frame
    write_video(tmp_path / "a.mp4", [t for t, count in zip(textures, lengths, strict=True) for _ in range(count)], 25)
    info, scenes = find_scenes(str(tmp_path / "a.mp4"), ScenesConfig(min_seconds=0.5))
    starts = [0.0, *(frames / 25 for frames in itertools.accumulate(lengths[:-1]))]
    assert [scene.start for scene in scenes] == pytest.approx(starts, abs=1e-3)
    assert scenes[-1].end == pytest.approx(info.duration, abs=1e-3)


def test_a_static_video_is_one_scene_or_equal_parts(tmp_path):
    write_video(tmp_path / "a.mp4", [make_texture(0)] * 80, 8)
    assert find_scenes(str(tmp_path / "a.mp4"), ScenesConfig())[1] == (Scene(0.0, 10.0),)
    parts = find_scenes(str(tmp_path / "a.mp4"), ScenesConfig(max_seconds=4.0))[1]
    assert [part.end for part in parts] == pytest.approx([10 / 3, 20 / 3, 10], abs=1e-3)


@pytest.mark.parametrize("gap", [60.0, 1e9])
def test_a_gap_between_frames_is_no_scene_of_its_own(gap):
    """A part without a frame shows the last frame of the part before it."""
    times = np.concatenate([np.arange(0, 10, 0.1), gap + np.arange(10, 20, 0.1)])
    scenes = divide_scenes([], times, gap + 20, min_seconds=1.0, max_seconds=5.0)
    assert scenes[0].start == 0
    assert scenes[-1].end == gap + 20
    assert all(before.end == after.start for before, after in itertools.pairwise(scenes))
    assert len(scenes) <= 20 / 5 + 2
    assert all(np.any((times >= scene.start - 1e-3) & (times < scene.end + 1e-3)) for scene in scenes)
    assert len(select_compared_times(times, gap + 20, 4.0)) <= 20 * 4 + 1


def test_the_scenes_of_a_file_with_a_gap_cover_it(tmp_path):
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = SIZE[1], SIZE[0], "yuv420p"
        for number in range(80):
            frame = av.VideoFrame.from_ndarray(make_texture(number // 40))
            frame.pts, frame.time_base = number + (800_000 if number >= 60 else 0), Fraction(1, 8)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    info, scenes = find_scenes(str(tmp_path / "a.mkv"), ScenesConfig())
    assert info.duration > 100_000
    assert [scenes[0], scenes[-1].end] == [Scene(0.0, 5.0), pytest.approx(info.duration, abs=1e-3)]
    assert len(scenes) <= 4


@pytest.mark.parametrize("fps", [0.1, 1.0, 3.3, 4.0, 30.0])
def test_the_compared_frames_are_those_shown_at_regular_times(tmp_path, fps):
    write_video(tmp_path / "a.mp4", [make_texture(0)] * 50, 12)
    index = index_video(str(tmp_path / "a.mp4"))
    irregular = np.unique(np.round([0, *np.random.default_rng(0).uniform(0, 20, 50)], 4))
    for video in (index, replace(index, times=irregular, info=replace(index.info, duration=20.0))):
        shown = {video.snap_to_frame_time(float(time)) for time in np.arange(0, video.info.duration, 1 / fps)}
        assert select_compared_times(video.times, video.info.duration, fps).tolist() == sorted(shown)


def test_a_video_of_one_frame_is_one_scene(tmp_path):
    write_video(tmp_path / "a.mp4", [make_texture(0)], 25)
    assert find_scenes(str(tmp_path / "a.mp4"), ScenesConfig())[1] == (Scene(0.0, 0.04),)


@pytest.mark.parametrize("name", ["flipping_a_pancake.mkv", "nasa_13013.mp4", "unordered.mov", "video_90.mov"])
@pytest.mark.slow
def test_real_clips_have_scenes_that_cover_them(name):
    if not (REAL / name).exists():
        pytest.skip("the real clips are not part of the repository")
    info, scenes = find_scenes(str(REAL / name), ScenesConfig())
    assert (scenes[0].start, scenes[-1].end) == (0.0, round(info.duration, 3))


def test_a_truncated_file_is_named(tmp_path):
    write_video(tmp_path / "a.mp4", [make_texture(seed % 7) for seed in range(80)], 8)
    content = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "b.mp4").write_bytes(content[: len(content) // 2])
    with raises(MediaError, key=str(tmp_path / "b.mp4")):
        find_scenes(str(tmp_path / "b.mp4"), ScenesConfig())
