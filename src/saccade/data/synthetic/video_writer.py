"""Clips as files: frames into H.264 mp4, the same bytes for the same frames (one encoder thread, no dates)."""

import itertools
import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av

from saccade.data.world.paint import Frames
from saccade.errors import MediaError, boundary

# An 8 s group of pictures costs few bits and lets a reader jump close to any time.
GROUP_SECONDS = 8  # between key frames


def write_clip(path: Path, frames: Iterable[Frames], fps: float) -> None:
    """Encode frames, uint8 RGB [height, width, 3] each, as they come; the file appears complete or not at all."""
    rest = iter(frames)
    first = next(rest)
    rate = Fraction(fps).limit_denominator(1001)
    # One thread, so that the bytes depend on the frames alone; "fastdecode" because a clip is read far more often.
    options = {"preset": "veryfast", "tune": "fastdecode", "crf": "20", "bf": "0", "threads": "1"}
    partial = path.with_name(path.name + ".part")
    with boundary(MediaError, f"{path} can't be written"), av.open(str(partial), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = max(1, round(GROUP_SECONDS * rate))
        for array in itertools.chain([first], rest):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    os.replace(partial, path)
