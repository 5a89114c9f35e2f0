"""A cell's clock, without a cell: what is charged, what isn't, and when it is enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.tools._sandbox import clock as module
from saccade.tools._sandbox.clock import MOST, STILL_SECONDS, Clock


class Times:
    """The time, which passes only when it is told to."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def times(monkeypatch):
    passing = Times()
    monkeypatch.setattr(module, "time", passing)
    return passing


def test_pauses_are_not_charged_unless_they_shall_be(times):
    clock = Clock(10)
    times.now += 1
    clock.pause()
    times.now += 5
    assert (clock.seconds, clock.paused) == (1, True)
    clock.resume(charged=False)
    times.now += 1
    assert (clock.seconds, clock.paused) == (2, False)
    clock.pause()
    times.now += 3
    clock.resume(charged=True)
    assert (clock.seconds, clock.lacking) == (5, 5)


def test_time_in_which_the_host_stood_still_is_left_out_each_time_and_no_more_than_that(times):
    clock = Clock(10)
    clock.begin(0, 50, 7)
    for number in range(1, 6):
        times.now += 1 + 20  # of which 20 are too many
        assert clock.beat(20, 50 + 20 * number, 7) == 20
        assert (clock.seconds, clock.lacking) == (number, 10 - number)
    times.now += 6
    assert clock.beat(STILL_SECONDS, 150, 7) == 0  # a busy machine
    assert clock.seconds == 11
    assert clock.lacking <= 0  # the seconds for a processor while it stood still are no reason to go on


def test_what_a_cell_spends_while_its_host_stands_still_is_charged(times):
    clock = Clock(10)
    clock.begin(0, 0, 3)
    times.now += 20
    assert clock.beat(20, 0, 3 + 15) == 5
    assert clock.seconds == 15
    assert clock.lacking <= 0


@pytest.mark.parametrize("served_at", [3.0, None])
def test_a_host_that_stands_still_while_a_decoder_is_awaited_is_left_out_once(times, served_at):
    clock = Clock(10)
    clock.begin(0, 0, 0)
    clock.ask()
    times.now += served_at or 100
    if served_at:
        clock.serve()
        times.now += 97
    clock.beat(99.5, 0, 0)
    assert 0 <= clock.seconds <= 0.5
    times.now += 1
    clock.serve()
    times.now += 2
    assert 2 <= clock.seconds <= 3.5


def test_waiting_for_a_decoder_is_not_charged_and_decoding_is(times):
    clock = Clock(10)
    times.now += 1
    clock.ask()
    times.now += 4
    assert clock.seconds == 1
    clock.serve()
    times.now += 2
    clock.serve()  # it has its answer
    times.now += 1
    assert clock.seconds == 4


def test_a_pause_in_line_is_left_out_once(times):
    clock = Clock(10)
    clock.ask()
    times.now += 1
    clock.pause()
    times.now += 2
    clock.serve()
    times.now += 3
    clock.resume(charged=False)
    times.now += 1
    assert clock.seconds == 1


@given(steps=st.lists(st.tuples(st.sampled_from(["ask", "serve", "run", "pause"]), st.floats(0, 20)), max_size=60))
def test_a_cell_that_is_never_paused_cannot_wait_for_ever(steps):
    times, limit = Times(), 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", times)
        clock, rested = Clock(limit), 0.0
        for what, seconds in steps:
            if what == "pause":
                clock.pause()
                times.now += seconds
                clock.resume(charged=False)
                rested += seconds
            else:
                {"ask": clock.ask, "serve": clock.serve, "run": bool}[what]()
                times.now += seconds
            by_the_clock = times.now - 100 - rested
            assert -1e-6 <= clock.seconds <= by_the_clock + 1e-6
            assert clock.seconds >= by_the_clock - (MOST - 1) * limit - 1e-6
