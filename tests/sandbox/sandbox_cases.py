"""Helpers of the sandbox tests: run cells, and make a clip whose frames encode their number as a shade of gray."""

import asyncio
from fractions import Fraction

import av
import numpy as np

from saccade.sandbox import Limits, Sandbox
from saccade.tools.served_media import ServedVideo

LONG_LIMITS = Limits(timeout=60)  # for tests that don't measure time, since the machine may be busy
SHADE = 4  # gray levels per frame


def run_cells(server, *cells, images=(), videos=(), limits=LONG_LIMITS, **options):
    """Run cells one after the other in one sandbox with these images and video files; return their results."""
    videos = [ServedVideo(str(path), f"video_clue_{number}") for number, path in enumerate(videos)]

    async def body():
        async with Sandbox.open(limits, images=images, videos=videos, fork_server=server, **options) as sandbox:
            return [await sandbox.run(cell) for cell in cells]

    return asyncio.run(body())


def run_and_get_text(server, *cells, **options):
    """Run cells, assert that none fails, and return the text of the last one."""
    results = run_cells(server, *cells, **options)
    assert [result.error for result in results] == [None] * len(cells)
    return results[-1].text


def to_pixels(shown):
    """Convert a shown image to uint8 [height, width, 3]."""
    return np.frombuffer(shown.rgb_bytes, np.uint8).reshape(shown.height, shown.width, 3)


def decode_frame_number(frame):
    """Return the number of a frame of `make_clip`."""
    return round(float(frame.mean()) / SHADE)


def make_clip(path, *, frames=60, size=(96, 64), gop=12):
    """Write an H.264 video of 25 frames per second; return its path."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(25), options={"preset": "veryfast", "crf": "10"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        for number in range(frames):
            frame = np.full((size[1], size[0], 3), number * SHADE % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return str(path)
