"""Write H.264 mp4 files; the same frames give the same bytes (one encoder thread, no dates)."""

import itertools
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av

from saccade.data.synthetic.render import Frames
from saccade.errors import MediaError, convert_errors
from saccade.utils.files import convert_file_errors, write_atomically

_MIN_ASSEMBLY_SIDE = 64  # pixels; for smaller frames libx264's assembly code reads memory that it hasn't written
KEYFRAME_INTERVAL_SECONDS = 8  # costs few bits, and readers can still seek close to any time


def write_video(path: Path, frames: Iterable[Frames], fps: float) -> None:
    """Encode frames, uint8 RGB [height, width, 3] each, and write a file atomically. Raises MediaError, RunError."""
    remaining = iter(frames)
    first = next(remaining)
    rate = Fraction(fps).limit_denominator(1001)
    # One thread, so that the bytes depend on the frames alone; "fastdecode" because a clip is decoded many times.
    options = {"preset": "veryfast", "tune": "fastdecode", "crf": "20", "bf": "0", "threads": "1"}
    if min(first.shape[:2]) < _MIN_ASSEMBLY_SIDE:
        options["x264-params"] = "asm=0"
    with (
        convert_errors(MediaError, f"{path} can't be written"),
        convert_file_errors(path),
        write_atomically(path) as partial,
        av.open(str(partial), "w", format="mp4") as container,
    ):
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = max(1, round(KEYFRAME_INTERVAL_SECONDS * rate))
        for array in itertools.chain([first], remaining):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
