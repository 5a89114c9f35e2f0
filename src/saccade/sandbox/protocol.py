"""What host and guest say to each other: a fixed head, then as many raw bytes as it announces. No pickle, no JSON.

The host checks kind, nonce, sizes and sums before it takes a byte of what follows; whatever doesn't fit is a breach,
and the guest is replaced. A guest believes its host.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from saccade.tools._sandbox.limits import Limits

HEAD = struct.Struct("<8sBIIII")  # nonce, kind, three numbers, bytes that follow
NONCE_BYTES = 8
NO_NONCE = bytes(NONCE_BYTES)
FACTS = struct.Struct("<ddIIII")  # of a video: frames per second, seconds, width, height, frames, keyframes
ASK_BYTES = 64 * 2**20  # pixels that one request for frames may bring
ASK_FRAMES = 4096
ERROR_BYTES = 64 * 1024
PART = struct.Struct("<IQ")  # of what a guest is given to read: which descriptor, where in it
BROKEN = 70  # the exit code of a guest that can't go on


class Kind(IntEnum):
    """What a message is."""

    # guest to host
    DONE = 1  # a: Verdict; the error's text
    SHOWN = 2  # a, b: width, height; RGB
    ASK = 3  # a: video, b, c: width, height (0: its own); frame numbers, 4 bytes each; none: asks for the facts
    # host to guest
    RUN = 16  # a: number of the next picture, b: pictures left; the source
    STILL = 17  # a, b: width, height, c: its number; RGB
    FILM = 18  # a: its number
    MAPPED = 22  # a, b, c as STILL; a PART, from which on its RGB lies
    FRAMES = 19  # a, b: width, height; RGB of all frames
    TOLD = 20  # a, b, c as asked; the facts, times (8 bytes each), numbers of keyframes (4 bytes each)
    REFUSED = 21  # why there are no frames


class Verdict(IntEnum):
    """How a call ended, by the guest's own word."""

    FINE = 0
    RAISED = 1
    INTERRUPTED = 2
    MEMORY = 3


class BreachError(Exception):
    """A guest said what no honest guest says."""


class Head(NamedTuple):
    """The head of a message."""

    kind: int
    a: int = 0
    b: int = 0
    c: int = 0
    size: int = 0

    def packed(self, nonce: bytes) -> bytes:
        """As bytes."""
        return HEAD.pack(nonce, self.kind, self.a, self.b, self.c, self.size)


def unpack(data: bytes | bytearray) -> tuple[bytes, Head]:
    """(nonce, head) of HEAD.size bytes; believes them.

    >>> unpack(Head(Kind.SHOWN, 2, 1, 0, 6).packed(b"12345678"))
    (b'12345678', Head(kind=2, a=2, b=1, c=0, size=6))
    """
    nonce, *numbers = HEAD.unpack(data)
    return nonce, Head(*numbers)


def checked(data: bytes | bytearray, nonce: bytes, limits: Limits, videos: int) -> Head:
    """The head of a guest's message, if an honest guest could have sent it. Raises BreachError."""
    said, head = unpack(data)
    if said != nonce:
        raise BreachError("a message bears another nonce")
    if not _plausible(head, limits, videos):
        raise BreachError(f"a message of kind {head.kind} with the numbers {head.a}, {head.b}, {head.c}, {head.size}")
    return head


def _plausible(head: Head, limits: Limits, videos: int) -> bool:
    if head.kind == Kind.DONE:
        return head.a <= max(Verdict) and head.size <= ERROR_BYTES
    if head.kind == Kind.SHOWN:
        return 0 < head.a * head.b <= limits.pixels and head.size == 3 * head.a * head.b
    return head.kind == Kind.ASK and head.a < videos and head.size % 4 == 0 and _frames_fit(head)


def _frames_fit(head: Head) -> bool:
    count, area = head.size // 4, max(1, head.b * head.c)
    return count <= ASK_FRAMES and (head.b > 0) == (head.c > 0) and (count <= 1 or 3 * area * count <= ASK_BYTES)
