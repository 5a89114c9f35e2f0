import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import MediaError
from saccade.media.picks import stamp, uniform_times, window_times

SECONDS = st.floats(0, 10_000)


@given(st.floats(0.01, 10_000), st.integers(1, 512))
def test_uniform_times_are_the_middles_of_equal_parts(duration, count):
    times = uniform_times(duration, count)
    assert len(times) == count
    assert times == tuple(pytest.approx((index + 0.5) * duration / count) for index in range(count))
    assert 0 < times[0] <= times[-1] < duration


@given(SECONDS, st.floats(0.01, 500), st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.integers(1, 4), st.integers(4, 64))
def test_window_times_lie_inside_in_order_and_within_the_counts(start, length, fps, least, most):
    times = window_times(start, start + length, fps=fps, least=least, most=most)
    assert least <= len(times) <= most
    assert list(times) == sorted(set(times))
    assert start <= times[0] <= times[-1] < start + length
    if least < len(times) < most:
        assert times[1] - times[0] == pytest.approx(1 / fps)


def test_window_times_worked_out_by_hand():
    assert window_times(0, 2.4) == (0.5, 1.5)
    assert window_times(0, 2.6) == (0.5, 1.5, 2.5)
    assert window_times(10, 12, fps=2) == (10.25, 10.75, 11.25, 11.75)
    assert window_times(0, 0.2) == (0.1,)
    assert window_times(0, 32, most=16)[:2] == (1.0, 3.0)
    assert len(window_times(14.0, 30.0)) == 16
    assert window_times(0.1, 0.7, fps=10, most=6) == tuple(pytest.approx(0.15 + index / 10) for index in range(6))


@pytest.mark.parametrize("window", [(5, 5), (6, 5), (math.nan, 5), (0, math.inf)])
def test_an_empty_window_is_an_error_that_names_it(window):
    with pytest.raises(MediaError, match="its end must come after its start"):
        window_times(*window)


def test_settings_that_cannot_be():
    for settings in ({"fps": 0}, {"fps": math.nan}, {"least": 0}, {"least": 9, "most": 8}):
        with pytest.raises(MediaError, match="fps"):
            window_times(0, 9, **settings)
    for duration, count in ((10, 0), (0, 4), (math.inf, 4), (math.nan, 1)):
        with pytest.raises(MediaError, match="can't be picked"):
            uniform_times(duration, count)


def test_stamps():
    assert [stamp(seconds) for seconds in (0, 0.04, 3.25, 12.46, 100)] == [
        "<0.0 seconds>",
        "<0.0 seconds>",
        "<3.2 seconds>",
        "<12.5 seconds>",
        "<100.0 seconds>",
    ]
