"""Message headers: the host accepts valid ones and rejects everything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sandbox.limits import Limits
from saccade.sandbox.protocol import (
    HEADER,
    MAX_BYTES_PER_REQUEST,
    MAX_ERROR_BYTES,
    CompletionStatus,
    Header,
    MessageKind,
    ProtocolError,
    parse_checked_header,
    unpack_header,
)

NONCE = b"12345678"
LIMITS = Limits(max_image_pixels=1000)


@pytest.mark.parametrize(
    "header",
    [
        Header(MessageKind.DONE, CompletionStatus.OK),
        Header(MessageKind.DONE, CompletionStatus.RAISED, payload_size=MAX_ERROR_BYTES),
        Header(MessageKind.IMAGE_SHOWN, 100, 10, payload_size=3000),
        Header(MessageKind.VIDEO_REQUEST, 1),
        Header(MessageKind.VIDEO_REQUEST, 0, payload_size=4 * 4096),
        Header(MessageKind.VIDEO_REQUEST, 0, 640, 480, payload_size=4 * (MAX_BYTES_PER_REQUEST // (640 * 480 * 3))),
        Header(MessageKind.VIDEO_REQUEST, 0, 9000, 9000, payload_size=4),
    ],
)
def test_valid_headers_are_accepted(header):
    assert parse_checked_header(header.pack(NONCE), NONCE, LIMITS, num_videos=2) == header


@pytest.mark.parametrize(
    "header",
    [
        Header(0),
        Header(255),
        Header(MessageKind.RUN),
        Header(MessageKind.VIDEO_REPLY),
        Header(MessageKind.DONE, 4),
        Header(MessageKind.DONE, CompletionStatus.RAISED, payload_size=MAX_ERROR_BYTES + 1),
        Header(MessageKind.IMAGE_SHOWN, 0, 0, payload_size=0),
        Header(MessageKind.IMAGE_SHOWN, 101, 10, payload_size=3030),
        Header(MessageKind.IMAGE_SHOWN, 10, 10, payload_size=299),
        Header(MessageKind.IMAGE_SHOWN, 2**31, 2**31, payload_size=0),
        Header(MessageKind.VIDEO_REQUEST, 2),
        Header(MessageKind.VIDEO_REQUEST, 0, payload_size=6),
        Header(MessageKind.VIDEO_REQUEST, 0, 640, 0, payload_size=4),
        Header(MessageKind.VIDEO_REQUEST, 0, payload_size=4 * 4097),
        Header(MessageKind.VIDEO_REQUEST, 0, 640, 480, payload_size=4 * (MAX_BYTES_PER_REQUEST // (640 * 480 * 3) + 1)),
    ],
)
def test_invalid_headers_raise_protocol_error(header):
    with pytest.raises(ProtocolError):
        parse_checked_header(header.pack(NONCE), NONCE, LIMITS, num_videos=2)


def test_a_wrong_nonce_raises_protocol_error():
    header = Header(MessageKind.DONE)
    assert parse_checked_header(header.pack(NONCE), NONCE, LIMITS, num_videos=0) == header
    with pytest.raises(ProtocolError):
        parse_checked_header(header.pack(b"87654321"), NONCE, LIMITS, num_videos=0)


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_noise_is_a_valid_header_or_raises_protocol_error(noise):
    try:
        header = parse_checked_header(NONCE + noise[8:], NONCE, LIMITS, num_videos=1)
    except ProtocolError:
        return
    assert header.payload_size <= max(MAX_ERROR_BYTES, 3 * LIMITS.max_image_pixels, 4 * 4096)


@pytest.mark.slow
@given(st.integers(0, 255), *[st.integers(0, 2**32 - 1)] * 4)
def test_headers_round_trip(kind, a, b, c, size):
    header = Header(kind, a, b, c, size)
    assert unpack_header(header.pack(NONCE)) == (NONCE, header)
