"""The messages between host and worker: a fixed header, then as many raw bytes as it announces. No pickle, no JSON.

The host checks nonce, kind, sizes and totals before it reads a byte of the payload; anything invalid is a protocol
violation, and the worker is replaced. A worker doesn't check the host's messages. The host and the zygote, which
runs no model-written code, exchange JSON messages with descriptors instead (`send_json`, `receive_json`).
"""

import json
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.sandbox.limits import Limits

HEADER = struct.Struct("<8sBIIII")  # nonce, kind, three numbers, payload size
NONCE_BYTES = 8
NO_NONCE = bytes(NONCE_BYTES)
MAX_BYTES_PER_REQUEST = 64 * 2**20  # of the frames in one reply
MAX_FRAMES_PER_REQUEST = 4096
MAX_ERROR_BYTES = 64 * 1024
IMAGE_LOCATION = struct.Struct("<IQ")  # of a mapped image: index of the shared descriptor, offset
BROKEN_EXIT_CODE = 70  # of a worker that can't continue
_VIDEO_METADATA = struct.Struct("<ddIIII")  # frames per second, seconds, width, height, frames, keyframes
_MAX_JSON_BYTES, _MAX_FDS = 65536, 253  # of one message; the kernel's limit of descriptors


class MessageKind(IntEnum):
    """The kind of a message; comments give the header's numbers a, b, c, and the payload after the semicolon."""

    # worker to host
    DONE = 1  # a: CompletionStatus; the error text
    IMAGE_SHOWN = 2  # a, b: width, height; RGB
    VIDEO_REQUEST = 3  # a: video, b, c: width, height (0: its own); frame numbers, 4 bytes each (none: metadata)
    # host to worker
    RUN = 16  # a: number of the next image, b, c: images left, their bytes; the code
    IMAGE = 17  # a, b: width, height, c: its number; RGB
    MAPPED_IMAGE = 18  # a, b, c as IMAGE; an IMAGE_LOCATION
    VIDEO = 19  # a: its number
    VIDEO_REPLY = 20  # the VideoMetadata, or RGB of all frames
    REFUSED = 21  # the reason


class CompletionStatus(IntEnum):
    """How a call ended, as the worker reports it."""

    OK = 0
    RAISED = 1
    INTERRUPTED = 2
    OUT_OF_MEMORY = 3


class ProtocolError(Exception):
    """A worker sent a message that no intact worker sends."""


class Header(NamedTuple):
    """The header of a message."""

    kind: int
    a: int = 0
    b: int = 0
    c: int = 0
    payload_size: int = 0

    def pack(self, nonce: bytes = NO_NONCE) -> bytes:
        """Pack to HEADER.size bytes."""
        return HEADER.pack(nonce, *self)


def unpack_header(data: bytes | bytearray) -> tuple[bytes, Header]:
    """Unpack HEADER.size bytes to (nonce, header), without checks."""
    nonce, *numbers = HEADER.unpack(data)
    return nonce, Header(*numbers)


def parse_checked_header(data: bytes | bytearray, nonce: bytes, limits: Limits, num_videos: int) -> Header:
    """Unpack the header of a worker's message and check it. Raises ProtocolError."""
    sent_nonce, header = unpack_header(data)
    if sent_nonce != nonce:
        raise ProtocolError("a message has the wrong nonce")
    if not _is_valid_header(header, limits, num_videos):
        raise ProtocolError(f"a message has the invalid header {header}")
    return header


def _is_valid_header(header: Header, limits: Limits, num_videos: int) -> bool:
    kind, a, b, c, size = header
    if kind == MessageKind.DONE:
        return a <= max(CompletionStatus) and size <= MAX_ERROR_BYTES
    if kind == MessageKind.IMAGE_SHOWN:
        return 0 < a * b <= limits.max_image_pixels and size == 3 * a * b
    return (
        kind == MessageKind.VIDEO_REQUEST
        and a < num_videos
        and (b > 0) == (c > 0)
        and size % 4 == 0
        and size // 4 <= MAX_FRAMES_PER_REQUEST
        and (size <= 4 or 3 * max(1, b * c) * (size // 4) <= MAX_BYTES_PER_REQUEST)
    )


class VideoMetadata(NamedTuple):
    """The metadata of a video: its size in pixels, the times of its frames and its duration in seconds."""

    fps: float
    duration: float
    width: int
    height: int
    times: NDArray[np.float64]  # [frames]
    keyframes: NDArray[np.uint32]  # their numbers, in order

    def pack(self) -> bytes:
        """Pack for a worker."""
        numbers = _VIDEO_METADATA.pack(*self[:4], len(self.times), len(self.keyframes))
        return numbers + self.times.astype("<f8").tobytes() + self.keyframes.astype("<u4").tobytes()

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> "VideoMetadata":
        """Unpack what `pack` packed."""
        fps, duration, width, height, num_frames, num_keyframes = _VIDEO_METADATA.unpack_from(data)
        times = np.frombuffer(data, "<f8", num_frames, _VIDEO_METADATA.size)
        keyframes = np.frombuffer(data, "<u4", num_keyframes, _VIDEO_METADATA.size + times.nbytes)
        return cls(fps, duration, width, height, times, keyframes)


def send_json(to: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message and descriptors over a SEQPACKET socket. Raises OSError."""
    data = json.dumps(message).encode()
    if fds:
        socket.send_fds(to, [data], list(fds))
    else:  # a jailed process may call send, but not sendmsg
        to.send(data)


def receive_json(source: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive a message, None at end of file, and its descriptors. Raises OSError."""
    data, fds, _, _ = socket.recv_fds(source, _MAX_JSON_BYTES, _MAX_FDS)
    return json.loads(data) if data else None, fds
