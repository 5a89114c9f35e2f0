"""The clock of a cell, without a cell: which seconds are charged, and when the limit is reached."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sandbox import time_limit as module
from saccade.sandbox.time_limit import HOST_STALL_SECONDS, MAX_WALL_FACTOR, MIN_RUN_FRACTION, CellClock


class FakeTime:
    """Stands in for the module `time`; `now` changes only when a test sets it."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def fake_time(monkeypatch):
    fake_time = FakeTime()
    monkeypatch.setattr(module, "time", fake_time)
    return fake_time


def test_pauses_are_charged_only_on_request(fake_time):
    clock = CellClock(10)
    fake_time.now += 1
    clock.pause()
    fake_time.now += 5
    assert (clock.elapsed, clock.is_paused) == (1, True)
    clock.resume(is_charged=False)
    fake_time.now += 1
    assert (clock.elapsed, clock.is_paused) == (2, False)
    clock.pause()
    fake_time.now += 3
    clock.resume(is_charged=True)
    assert (clock.elapsed, clock.remaining) == (5, 5)


def test_host_stalls_are_excluded_exactly_once(fake_time):
    clock = CellClock(10)
    clock.start(0, 50, 7)
    for number in range(1, 6):
        fake_time.now += 1 + 20  # 20 seconds of host stall
        assert clock.update(20, 50 + 20 * number, 7) == 20
        assert (clock.elapsed, clock.remaining) == (number, 10 - number)
    fake_time.now += 6
    assert clock.update(HOST_STALL_SECONDS, 150, 7) == 0  # a busy machine, no stall
    assert clock.elapsed == 11
    assert clock.remaining <= 0  # queue seconds during a stall give no extra time


def test_only_other_processes_extend_the_limit(fake_time):
    """A main thread that waited in the run queue nine tenths of its time, behind others or behind its own threads."""
    clock = CellClock(10)
    clock.start(0, 0, 7)
    fake_time.now += 10
    clock.update(0, 9.5, 7 + 0.5)
    assert clock.remaining == pytest.approx(10 * MIN_RUN_FRACTION - 0.5)
    clock.update(0, 9.5, 7 + 20)
    assert clock.remaining <= 0


def test_seconds_before_the_clock_are_charged(fake_time):
    clock = CellClock(10)
    clock.charge(4)
    fake_time.now += 1
    assert (clock.elapsed, clock.remaining) == (5, 5)


def test_cpu_time_during_a_host_stall_is_charged(fake_time):
    clock = CellClock(10)
    clock.start(0, 0, 3)
    fake_time.now += 20
    assert clock.update(20, 0, 3 + 15) == 5
    assert clock.elapsed == 15
    assert clock.remaining <= 0


@pytest.mark.parametrize("served_at", [3.0, None])
def test_a_host_stall_during_a_decode_wait_is_excluded_once(fake_time, served_at):
    clock = CellClock(10)
    clock.start(0, 0, 0)
    clock.begin_decode_wait()
    fake_time.now += served_at or 100
    if served_at:
        clock.end_decode_wait()
        fake_time.now += 97
    clock.update(99.5, 0, 0)
    assert 0 <= clock.elapsed <= 0.5
    fake_time.now += 1
    clock.end_decode_wait()
    fake_time.now += 2
    assert 2 <= clock.elapsed <= 3.5


def test_waiting_for_a_decoder_is_not_charged_and_decoding_is(fake_time):
    clock = CellClock(10)
    fake_time.now += 1
    clock.begin_decode_wait()
    fake_time.now += 4
    assert clock.elapsed == 1
    clock.end_decode_wait()
    fake_time.now += 2
    clock.end_decode_wait()  # the reply has arrived
    fake_time.now += 1
    assert clock.elapsed == 4


def test_a_pause_during_a_decode_wait_is_excluded_once(fake_time):
    clock = CellClock(10)
    clock.begin_decode_wait()
    fake_time.now += 1
    clock.pause()
    fake_time.now += 2
    clock.end_decode_wait()
    fake_time.now += 3
    clock.resume(is_charged=False)
    fake_time.now += 1
    assert clock.elapsed == 1


@given(steps=st.lists(st.tuples(st.sampled_from(["request", "decode", "run", "pause"]), st.floats(0, 20)), max_size=60))
def test_uncharged_decode_waits_are_bounded(steps):
    fake_time, limit = FakeTime(), 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", fake_time)
        clock, paused_seconds = CellClock(limit), 0.0
        for step, seconds in steps:
            if step == "pause":
                clock.pause()
                fake_time.now += seconds
                clock.resume(is_charged=False)
                paused_seconds += seconds
            else:
                {"request": clock.begin_decode_wait, "decode": clock.end_decode_wait, "run": bool}[step]()
                fake_time.now += seconds
            wall_seconds = fake_time.now - 100 - paused_seconds
            assert -1e-6 <= clock.elapsed <= wall_seconds + 1e-6
            assert clock.elapsed >= wall_seconds - (MAX_WALL_FACTOR - 1) * limit - 1e-6
