"""What the sandbox's tests share: running cells, and a clip whose frames show their own number as a shade."""

import asyncio
from fractions import Fraction

import av
import numpy as np

from saccade.tools._sandbox.client import Sandbox
from saccade.tools._sandbox.limits import Limits

PATIENT = Limits(seconds=60)  # the machine may be busy; what must be quick says so itself
SHADE = 4  # of grey per frame


def play(server, *cells, media=(), limits=PATIENT, **options):
    """The outcomes of cells, run one after the other in one sandbox."""

    async def body():
        async with Sandbox.open(limits, media=media, host=server, **options) as box:
            return [await box.run(cell) for cell in cells]

    return asyncio.run(body())


def said(server, *cells, **options):
    """The text of the last cell; none may end in an error."""
    outcomes = play(server, *cells, **options)
    assert [outcome.error for outcome in outcomes] == [None] * len(cells)
    return outcomes[-1].text


def pixels(shown):
    return np.frombuffer(shown.rgb, np.uint8).reshape(shown.height, shown.width, 3)


def number_of(frame):
    return round(float(frame.mean()) / SHADE)


def make_clip(path, *, frames=60, size=(96, 64), gop=12):
    """H.264, 25 frames per second."""
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
