"""Heads of messages: what the host takes from a guest, and that it takes nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.tools._sandbox.limits import Limits
from saccade.tools._sandbox.wire import ASK_BYTES, ERROR_BYTES, HEAD, BreachError, Head, Kind, Verdict, checked, unpack

NONCE = b"12345678"
LIMITS = Limits(pixels=1000)


@pytest.mark.parametrize(
    "head",
    [
        Head(Kind.DONE, Verdict.FINE),
        Head(Kind.DONE, Verdict.RAISED, size=ERROR_BYTES),
        Head(Kind.SHOWN, 100, 10, size=3000),
        Head(Kind.ASK, 1),
        Head(Kind.ASK, 0, size=4 * 4096),
        Head(Kind.ASK, 0, 640, 480, size=4 * (ASK_BYTES // (640 * 480 * 3))),
        Head(Kind.ASK, 0, 9000, 9000, size=4),
    ],
)
def test_honest_heads_are_taken(head):
    assert checked(head.packed(NONCE), NONCE, LIMITS, videos=2) == head


@pytest.mark.parametrize(
    "head",
    [
        Head(0),
        Head(255),
        Head(Kind.RUN),
        Head(Kind.FRAMES),
        Head(Kind.DONE, 4),
        Head(Kind.DONE, Verdict.RAISED, size=ERROR_BYTES + 1),
        Head(Kind.SHOWN, 0, 0, size=0),
        Head(Kind.SHOWN, 101, 10, size=3030),
        Head(Kind.SHOWN, 10, 10, size=299),
        Head(Kind.SHOWN, 2**31, 2**31, size=0),
        Head(Kind.ASK, 2),
        Head(Kind.ASK, 0, size=6),
        Head(Kind.ASK, 0, 640, 0, size=4),
        Head(Kind.ASK, 0, size=4 * 4097),
        Head(Kind.ASK, 0, 640, 480, size=4 * (ASK_BYTES // (640 * 480 * 3) + 1)),
    ],
)
def test_others_are_breaches(head):
    with pytest.raises(BreachError):
        checked(head.packed(NONCE), NONCE, LIMITS, videos=2)


def test_another_nonce_is_a_breach():
    with pytest.raises(BreachError, match="nonce"):
        checked(Head(Kind.DONE).packed(b"87654321"), NONCE, LIMITS, videos=0)


@given(st.binary(min_size=HEAD.size, max_size=HEAD.size))
def test_noise_is_a_head_within_bounds_or_a_breach(noise):
    try:
        head = checked(NONCE + noise[8:], NONCE, LIMITS, videos=1)
    except BreachError:
        return
    assert head.size <= max(ERROR_BYTES, 3 * LIMITS.pixels, 4 * 4096)


@given(st.integers(0, 255), *[st.integers(0, 2**32 - 1)] * 4)
def test_heads_come_back_as_they_were(kind, a, b, c, size):
    head = Head(kind, a, b, c, size)
    assert unpack(head.packed(NONCE)) == (NONCE, head)
