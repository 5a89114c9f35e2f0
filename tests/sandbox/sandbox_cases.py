"""Helpers of the sandbox tests: run cells, make a clip whose frames encode their number as a shade of gray, and let a
cell report where it is, so that no test guesses how long a cell takes.
"""

import asyncio
import threading
import time
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np

from saccade.sandbox import Limits, Sandbox
from saccade.sandbox.protocol import VideoMetadata
from saccade.sandbox.time_limit import CellClock
from saccade.tools.served_media import ServedVideo

PATIENCE = 120  # seconds, for everything that takes little time unless the machine is busy
LONG_LIMITS = Limits(timeout=PATIENCE)
HARMLESS_TIMEOUT = 30  # seconds, of cells after an attack; some attacks let the next cell hang that long
SHADE = 4  # gray levels per frame


def run_cells(server, *cells, images=(), videos=(), limits=LONG_LIMITS, **options):
    """Run cells one after the other in one sandbox with these images and videos; return their results."""
    videos = [
        video if isinstance(video, SignalVideo) else ServedVideo(str(video), f"video_clue_{number}")
        for number, video in enumerate(videos)
    ]

    async def body():
        async with Sandbox.open(limits, images=images, videos=videos, fork_server=server, **options) as sandbox:
            return [await sandbox.run(cell) for cell in cells]

    return asyncio.run(body())


async def run_attack(sandbox, code):
    """Run an attack, then four harmless cells, with a time limit that a busy machine keeps; return their results."""
    first = await sandbox.run(code)
    sandbox._limits = replace(sandbox._limits, timeout=HARMLESS_TIMEOUT)
    return [first, *[await sandbox.run("print(6 * 7)") for _ in range(4)]]


def run_and_get_text(server, *cells, **options):
    """Run cells, assert that none fails, and return the text of the last one."""
    results = run_cells(server, *cells, **options)
    assert [result.error for result in results] == [None] * len(cells)
    return results[-1].text


class SignalVideo:
    """A video of one pixel, served like any other; a cell requests its frame (`format_signal`) to report to the test.

    The pixel is gray of the shade `value`, 0 unless the test sets another.
    """

    def __init__(self):
        self._requested, self.value = threading.Event(), 0

    def read_metadata(self):
        return VideoMetadata(1.0, 1.0, 1, 1, np.zeros(1), np.zeros(1, np.uint32))

    def load_frames(self, numbers, size, is_cancelled):
        self._requested.set()
        return [np.full((size[1], size[0], 3), self.value, np.uint8) for _ in numbers]

    async def wait(self):
        """Wait until a cell has requested the frame."""
        assert await asyncio.to_thread(self._requested.wait, PATIENCE), "no cell requested the frame"


def format_signal(video=0):
    """Return code that requests the frame of a `SignalVideo`, the episode's video number `video`, each time anew."""
    return f"video_clue_{video}._source.request_frames({video}, (1, 1), [0])"


class LateClock(CellClock):
    """A clock whose time limit counts only from its cell's first request to a decoder, or from `begin`.

    A slow machine can't exhaust the limit before the cell has reached the place that the test is about.
    """

    def __init__(self, limit):
        super().__init__(limit)
        self._has_begun = False

    def begin(self):
        if not self._has_begun:
            self._started_at, self._has_begun = self._paused_at or time.monotonic(), True

    def begin_decode_wait(self):
        self.begin()
        super().begin_decode_wait()

    @property
    def remaining(self):
        return super().remaining if self._has_begun else PATIENCE - self.elapsed


async def wait_until(is_true):
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.005)


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
