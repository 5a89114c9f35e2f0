"""Find the cuts of a video from its frames, and divide it into scenes.

    frames at `fps` ── compare neighbors ──> differences ── threshold ──> cuts ── decode between ──> times ──> scenes

The difference of two frames, in [0, 1], is the mean of two measures: how much the histograms of their color channels
differ, and how much their pixels do (three times the mean absolute difference, at most 1). A hard cut changes both, a
pan mostly pixels, a change of light mostly histograms. A cut is where the difference reaches the threshold and is
twice the mean of its neighbors', so that constant motion has none, and where frames on both sides of each of the two
differ as well, so that a flash of one frame has none. A dissolve is between steady frames 1.5 seconds apart that
differ by 1.2 times the threshold, with no cut between them; its middle is the cut.
"""

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.config.schema import ScenesConfig
from saccade.media.video import VideoIndex, decode_frames, index_video, round_to_milliseconds
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
    times = select_compared_times(video_index.times, duration, settings.fps).tolist()
    cuts = find_cuts(
        _decode_small(video_index, times), threshold=settings.threshold, lag=round(settings.fps * _DISSOLVE_SECONDS)
    )
    return video_index.info, divide_scenes(
        _refine_cuts(video_index, [(times[index], times[index + 1]) for index in cuts]),
        video_index.times,
        duration,
        min_seconds=settings.min_seconds,
        max_seconds=settings.max_seconds,
    )


def select_compared_times(times: NDArray[np.float64], duration: float, fps: float) -> NDArray[np.float64]:
    """Return the times of the frames that are shown at 0, 1/fps, 2/fps, ... seconds, each once.

    >>> select_compared_times(np.array([0.0, 0.2, 0.4, 0.6, 1e9]), 1e9 + 0.2, 2)
    array([0.e+00, 4.e-01, 6.e-01, 1.e+09])
    """
    # As `VideoIndex.find_frame_number` has it: a time rounded to the millisecond finds the frame.
    starts = np.minimum(times, [round_to_milliseconds(time) for time in times]) - 1e-6
    is_shown = np.ceil(starts * fps) < np.append(starts[1:], duration) * fps
    return times[is_shown]


class _ComparedFrame:
    """A frame as `measure_difference` needs it, computed once for all comparisons."""

    __slots__ = ("histograms", "pixels")

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels, self.histograms = pixels.astype(np.int16), _compute_histograms(pixels)

    def measure_difference(self, other: "_ComparedFrame") -> float:
        histograms = np.abs(self.histograms - other.histograms).sum(axis=1).mean() / 2
        pixels = np.abs(self.pixels - other.pixels).mean() / 255
        return float((histograms + min(1.0, _PIXEL_FACTOR * pixels)) / 2)


def measure_difference(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """Return how much two frames differ, in [0, 1]; both uint8 RGB [height, width, 3].

    >>> black, white = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)
    >>> measure_difference(black, white), measure_difference(black, black)
    (1.0, 0.0)
    """
    return _ComparedFrame(first).measure_difference(_ComparedFrame(second))


def find_cuts(frames: Iterable[NDArray[np.uint8]], *, threshold: float, lag: int = 6) -> list[int]:
    """Return the indices of the last frame before each cut; a dissolve takes at most `lag` frames.

    Only `lag` frames are held at a time.
    """
    # differences[k][i] is that of the frames i and i + k.
    differences: dict[int, list[float]] = {1: [], 2: [], lag: []}
    recent: deque[_ComparedFrame] = deque(maxlen=max(differences))
    for pixels in frames:
        frame = _ComparedFrame(pixels)
        for offset, values in differences.items():
            if 0 < offset <= len(recent):
                values.append(frame.measure_difference(recent[-offset]))
        recent.append(frame)
    cuts: list[int] = []
    for index, difference in enumerate(differences[1]):
        before = differences[1][max(0, index - _NUM_NEIGHBORS) : index]
        neighbors = before + differences[1][index + 1 : index + 1 + _NUM_NEIGHBORS]
        if difference < threshold or (neighbors and difference < _NEIGHBOR_RATIO * sum(neighbors) / len(neighbors)):
            continue
        # Before and after a flash, seen from both of its edges.
        if any(value < threshold for value in differences[2][max(0, index - 1) : index + 1]):
            continue
        if cuts and cuts[-1] == index - 1:  # one transition across two compared frames
            continue
        cuts.append(index)
    return sorted(cuts + _find_dissolves(differences[1], differences[lag], cuts, threshold=threshold, lag=lag))


def _find_dissolves(
    differences: Sequence[float],
    lagged_differences: Sequence[float],
    cuts: Sequence[int],
    *,
    threshold: float,
    lag: int,
) -> list[int]:
    """Return the index of the middle frame of each dissolve; the differences are those of frames 1 and `lag` apart."""
    steady = [True, *(difference < _STEADY_RATIO * threshold for difference in differences), True]
    starts = [
        index
        for index, difference in enumerate(lagged_differences)
        if difference >= _DISSOLVE_RATIO * threshold
        and steady[index]
        and steady[index + lag + 1]
        and bisect_left(cuts, index) == bisect_left(cuts, index + lag)
    ]
    # A short dissolve is between several pairs of steady frames: take the middle pair.
    runs: list[list[int]] = []
    for start in starts:
        if runs and start == runs[-1][-1] + 1:
            runs[-1].append(start)
        else:
            runs.append([start])
    return [(run[0] + run[-1] + lag) // 2 for run in runs]


def divide_scenes(
    cuts: Sequence[float],
    times: NDArray[np.float64],
    duration: float,
    *,
    min_seconds: float,
    max_seconds: float,
) -> tuple[Scene, ...]:
    """Return the scenes between cuts (seconds, sorted), without short ones; long ones are divided evenly.

    A part in which none of the frames at `times` (seconds, sorted) begins belongs to the part before it, whose last
    frame it shows: a gap in the timestamps, or a still picture, is one scene however long it is.

    >>> divide_scenes([2.0, 2.5], np.arange(12.0), 12.0, min_seconds=1.0, max_seconds=6.0)
    (Scene(start=0.0, end=2.0), Scene(start=2.0, end=7.0), Scene(start=7.0, end=12.0))
    """
    starts = [0.0]
    for cut in cuts:
        if cut - starts[-1] >= min_seconds and duration - cut >= min_seconds:
            starts.append(cut)
    scenes = []
    for start, end in zip(starts, [*starts[1:], duration], strict=True):
        num_parts = int(np.ceil((end - start) / max_seconds - 1e-9)) or 1
        inside = times[np.searchsorted(times, start) : np.searchsorted(times, end)]
        parts = np.unique(((inside - start) / (end - start) * num_parts).astype(np.int64)).tolist()
        bounds = [start, *(start + (end - start) * part / num_parts for part in parts if part), end]
        scenes += [Scene(round(low, 3), round(high, 3)) for low, high in itertools.pairwise(bounds)]
    return tuple(scenes)


def _decode_small(video_index: VideoIndex, times: Sequence[float]) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(times), _CHUNK):
        for frame in decode_frames(video_index, times[start : start + _CHUNK], size=_COMPARED_SIZE):
            yield frame.pixels


def _refine_cuts(video_index: VideoIndex, cuts: Sequence[tuple[float, float]]) -> list[float]:
    """Return the time, in seconds, of the first frame after each cut, given the compared frames around it."""
    all_times = video_index.times
    between = [
        all_times[np.searchsorted(all_times, before) : np.searchsorted(all_times, after, side="right")].tolist()
        for before, after in cuts
    ]
    between = [times if 2 < len(times) <= _MAX_REFINED_FRAMES else times[-1:] for times in between]
    # In one pass: many cuts may follow the same keyframe.
    frames = _decode_small(video_index, [time for times in between if len(times) > 1 for time in times])
    refined = []
    for times in between:
        compared = map(_ComparedFrame, itertools.islice(frames, len(times) if len(times) > 1 else 0))
        differences = [first.measure_difference(second) for first, second in itertools.pairwise(compared)]
        refined.append(times[int(np.argmax(differences)) + 1 if differences else -1])
    return refined


def _compute_histograms(frame: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the histogram of each color channel, [3, bins], each with the sum 1.

    A value counts for its two nearest bins by its distance, so that noise near the edge of a bin moves little.
    """
    counts = np.bincount((frame.reshape(-1, 3) + _CHANNEL_OFFSETS).ravel(), minlength=3 * 256).reshape(3, 256)
    return counts @ _BIN_WEIGHTS / (frame.size // 3)


def _compute_bin_weights() -> NDArray[np.float64]:
    """Return how much each value of a channel counts for each bin, [256, bins]."""
    position = np.arange(256) / 255 * (_NUM_BINS - 1)
    return np.maximum(0.0, 1 - np.abs(position[:, None] - np.arange(_NUM_BINS)))


_CHANNEL_OFFSETS = np.arange(3) * 256
_BIN_WEIGHTS = _compute_bin_weights()
