"""Find the cuts of a video from its frames, and divide it into scenes.

    frames at `fps` ── compare neighbors ──> differences ── threshold ──> cuts ── decode between ──> times ──> scenes

The difference of two frames, in [0, 1], is the mean of two measures: how much the histograms of their color channels
differ, and how much their pixels do (three times the mean absolute difference, at most 1). A hard cut changes both, a
pan mostly pixels, a change of light mostly histograms. A cut lies where the difference reaches the threshold and is
twice the mean of its neighbors', so that constant motion has none, and where frames on both sides of each of the two
differ as well, so that a flash of one frame has none. A dissolve lies between steady frames 1.5 seconds apart that
differ by 1.2 times the threshold, with no cut between them; its middle is the cut.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.config.schema import ScenesConfig
from saccade.media.video import VideoIndex, decode_frames, index_video
from saccade.protocols import VideoInfo

_COMPARED_SIZE = (64, 36)  # width and height of the compared frames, pixels
_NUM_BINS = 16  # of a histogram
_PIXEL_FACTOR = 3.0  # the mean absolute difference of unrelated frames is about a third
_NUM_NEIGHBORS = 2  # differences before and after one, to which it is compared
_NEIGHBOR_RATIO = 2.0
_DISSOLVE_SECONDS = 1.5  # longest dissolve
_DISSOLVE_RATIO = 1.2  # slow motion may change as much as a cut's threshold in that time
_STEADY_RATIO = 1 / 3
_CHUNK = 512  # frames decoded at a time: 3.5 MB
_MAX_REFINED_FRAMES = 64  # frames between two compared ones that are decoded to find the exact cut


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of a video, in seconds."""

    start: float
    end: float


def find_scenes(path: str, settings: ScenesConfig) -> tuple[VideoInfo, tuple[Scene, ...]]:
    """Return a video's metadata and its scenes, which cover it in order. Raises MediaError, which names the file."""
    video_index = index_video(path)
    duration = video_index.info.duration
    requested = np.arange(0.0, duration, 1 / settings.fps)
    times = sorted({video_index.snap_to_frame_time(float(time)) for time in requested})
    frames = _decode_small(video_index, times)
    cuts = [
        _refine_cut(video_index, times[index], times[index + 1])
        for index in find_cuts(frames, threshold=settings.threshold, lag=round(settings.fps * _DISSOLVE_SECONDS))
    ]
    return video_index.info, divide_scenes(
        cuts, duration, min_seconds=settings.min_seconds, max_seconds=settings.max_seconds
    )


def measure_difference(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """Return how much two frames differ, in [0, 1]; both uint8 RGB [height, width, 3].

    >>> black, white = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)
    >>> measure_difference(black, white), measure_difference(black, black)
    (1.0, 0.0)
    """
    histograms = np.abs(_compute_histograms(first) - _compute_histograms(second)).sum(axis=1).mean() / 2
    pixels = np.abs(first.astype(np.int16) - second).mean() / 255
    return float((histograms + min(1.0, _PIXEL_FACTOR * pixels)) / 2)


def find_cuts(frames: Sequence[NDArray[np.uint8]], *, threshold: float, lag: int = 6) -> list[int]:
    """Return the indices of the last frame before each cut; a dissolve takes at most `lag` frames."""
    differences = [measure_difference(*pair) for pair in itertools.pairwise(frames)]
    cuts: list[int] = []
    for index, difference in enumerate(differences):
        before = differences[max(0, index - _NUM_NEIGHBORS) : index]
        neighbors = before + differences[index + 1 : index + 1 + _NUM_NEIGHBORS]
        if difference < threshold or (neighbors and difference < _NEIGHBOR_RATIO * float(np.mean(neighbors))):
            continue
        around = [(index, index + 2), (index - 1, index + 1)]  # before and after a flash, seen from both of its edges
        inside = [(first, last) for first, last in around if first >= 0 and last < len(frames)]
        if any(measure_difference(frames[first], frames[last]) < threshold for first, last in inside):
            continue
        if cuts and cuts[-1] == index - 1:  # one transition across two compared frames
            continue
        cuts.append(index)
    return sorted(cuts + _find_dissolves(frames, differences, cuts, threshold=threshold, lag=lag))


def _find_dissolves(
    frames: Sequence[NDArray[np.uint8]],
    differences: Sequence[float],
    cuts: Sequence[int],
    *,
    threshold: float,
    lag: int,
) -> list[int]:
    """Return the index of the middle frame of each dissolve."""
    steady = [True, *(difference < _STEADY_RATIO * threshold for difference in differences), True]
    starts = [
        index
        for index in range(len(frames) - lag)
        if steady[index]
        and steady[index + lag + 1]
        and not any(index <= cut < index + lag for cut in cuts)
        and measure_difference(frames[index], frames[index + lag]) >= _DISSOLVE_RATIO * threshold
    ]
    # A short dissolve lies between several pairs of steady frames: take the middle pair.
    runs: list[list[int]] = []
    for start in starts:
        if runs and start == runs[-1][-1] + 1:
            runs[-1].append(start)
        else:
            runs.append([start])
    return [(run[0] + run[-1] + lag) // 2 for run in runs]


def divide_scenes(
    cuts: Sequence[float], duration: float, *, min_seconds: float, max_seconds: float
) -> tuple[Scene, ...]:
    """Return the scenes between cuts (seconds, sorted), without short ones; long ones are divided evenly.

    >>> divide_scenes([2.0, 2.5], 12.0, min_seconds=1.0, max_seconds=6.0)
    (Scene(start=0.0, end=2.0), Scene(start=2.0, end=7.0), Scene(start=7.0, end=12.0))
    """
    starts = [0.0]
    for cut in cuts:
        if cut - starts[-1] >= min_seconds and duration - cut >= min_seconds:
            starts.append(cut)
    scenes = []
    for start, end in zip(starts, [*starts[1:], duration], strict=True):
        num_parts = int(np.ceil((end - start) / max_seconds - 1e-9)) or 1
        bounds = [start + (end - start) * part / num_parts for part in range(num_parts)] + [end]
        scenes += [Scene(round(low, 3), round(high, 3)) for low, high in itertools.pairwise(bounds)]
    return tuple(scenes)


def _decode_small(video_index: VideoIndex, times: Sequence[float]) -> list[NDArray[np.uint8]]:
    chunks = (times[start : start + _CHUNK] for start in range(0, len(times), _CHUNK))
    return [frame.pixels for chunk in chunks for frame in decode_frames(video_index, chunk, size=_COMPARED_SIZE)]


def _refine_cut(video_index: VideoIndex, before: float, after: float) -> float:
    """Return the time, in seconds, of the first frame after the cut between two compared frames."""
    inside = video_index.times[(video_index.times >= before) & (video_index.times <= after)]
    if not 2 < len(inside) <= _MAX_REFINED_FRAMES:
        return after
    frames = _decode_small(video_index, inside.tolist())
    differences = [measure_difference(*pair) for pair in itertools.pairwise(frames)]
    return float(inside[int(np.argmax(differences)) + 1])


def _compute_histograms(frame: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the histogram of each color channel, [3, bins], each with the sum 1.

    A value counts for its two nearest bins by its distance, so that noise near the edge of a bin moves little.
    """
    position = frame.reshape(-1, 3) / 255 * (_NUM_BINS - 1)
    low = np.minimum(position.astype(np.int64), _NUM_BINS - 2)
    weight = position - low
    return np.stack(
        [
            np.bincount(low[:, channel], 1 - weight[:, channel], _NUM_BINS)
            + np.bincount(low[:, channel] + 1, weight[:, channel], _NUM_BINS)
            for channel in range(3)
        ]
    ) / len(position)
