import math

import pytest
from error_cases import raises
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import MediaError
from saccade.media.frame_sampling import format_timestamp, sample_uniform_times, sample_window_times

SECONDS = st.floats(0, 10_000)


@given(st.floats(0.01, 10_000), st.integers(1, 512))
def test_uniform_times_are_the_middles_of_equal_parts(duration, count):
    times = sample_uniform_times(duration, count)
    assert len(times) == count
    assert times == tuple(pytest.approx((index + 0.5) * duration / count) for index in range(count))
    assert 0 < times[0] <= times[-1] < duration


@given(SECONDS, st.floats(0.01, 500), st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.integers(1, 4), st.integers(4, 64))
def test_window_times_are_inside_sorted_and_within_limits(start, length, fps, min_frames, max_frames):
    times = sample_window_times(start, start + length, fps=fps, min_frames=min_frames, max_frames=max_frames)
    assert min_frames <= len(times) <= max_frames
    assert list(times) == sorted(set(times))
    assert start <= times[0] <= times[-1] < start + length
    if min_frames < len(times) < max_frames:
        assert times[1] - times[0] == pytest.approx(1 / fps)


def test_window_times_worked_out_by_hand():
    assert sample_window_times(0, 2.4) == (0.5, 1.5)
    assert sample_window_times(0, 2.6) == (0.5, 1.5, 2.5)
    assert sample_window_times(10, 12, fps=2) == (10.25, 10.75, 11.25, 11.75)
    assert sample_window_times(0, 0.2) == (0.1,)
    assert sample_window_times(0, 32, max_frames=16)[:2] == (1.0, 3.0)
    assert len(sample_window_times(14.0, 30.0)) == 16
    assert sample_window_times(0.1, 0.7, fps=10, max_frames=6) == tuple(
        pytest.approx(0.15 + index / 10) for index in range(6)
    )


@pytest.mark.parametrize("window", [(5, 5), (6, 5), (math.nan, 5), (0, math.inf)])
def test_an_empty_window_raises(window):
    with raises(MediaError, key="end", value=window):
        sample_window_times(*window)


def test_arguments_out_of_range_raise():
    for settings in ({"fps": 0}, {"fps": math.nan}, {"min_frames": 0}, {"min_frames": 9, "max_frames": 8}):
        with raises(MediaError, key="fps"):
            sample_window_times(0, 9, **settings)
    for duration, count in ((10, 0), (0, 4), (math.inf, 4), (math.nan, 1)):
        with raises(MediaError, key="count"):
            sample_uniform_times(duration, count)


def test_timestamps_are_formatted():
    assert [format_timestamp(seconds) for seconds in (0, 0.04, 3.25, 12.46, 100)] == [
        "<0.0 seconds>",
        "<0.0 seconds>",
        "<3.2 seconds>",
        "<12.5 seconds>",
        "<100.0 seconds>",
    ]
