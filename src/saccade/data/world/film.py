"""Clips as files: frames into H.264 mp4, and stretches of a user's own clips as haystack.

Clips are the same bytes for the same frames: one encoder thread, no dates.
"""

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from saccade.data.world.paint import Frames
from saccade.errors import DataError, MediaError, boundary

SUFFIXES = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
GROUP_SECONDS = 8  # between key frames, so that a reader can jump close to any time


def write_clip(path: Path, frames: Frames, fps: float) -> None:
    """Encode uint8 RGB [time, height, width, 3]; the file appears complete or not at all."""
    rate = Fraction(fps).limit_denominator(1001)
    options = {"preset": "veryfast", "tune": "fastdecode", "crf": "20", "bf": "0", "threads": "1"}
    partial = path.with_name(path.name + ".part")
    with boundary(MediaError, f"{path} can't be written"), av.open(str(partial), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = max(1, round(GROUP_SECONDS * rate))
        for array in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    os.replace(partial, path)


def read_clip(path: Path) -> Iterator[tuple[float, Frames]]:
    """Every frame of a clip as (time in seconds, uint8 RGB [height, width, 3])."""
    with boundary(MediaError, f"{path} can't be read"), av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield float(frame.time or 0.0), _rgb(frame)


def hay(folder: str) -> list[Path]:
    """The clips of a haystack folder, by name. Raises DataError where there is none."""
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"world.haystack: there is no folder {folder}")
    found = sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(f"world.haystack: {folder} holds no clip ({', '.join(SUFFIXES)})")
    return found


def stretch(path: Path, share: float, *, count: int, pixels: int, fps: float) -> Frames:
    """`count` frames at `fps` from a clip, cut to a square; begins at `share` of what the clip has more than is
    needed. A clip that is too short is played forwards and backwards in turn.
    """
    with boundary(MediaError, f"{path} can't be used as haystack"), av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        length = float(container.duration or 0) / av.time_base
        start = max(0.0, length - count / fps) * share
        if start:
            container.seek(int(start * av.time_base))
        frames: list[Frames] = []
        for frame in container.decode(stream):
            if frame.time is None or len(frames) >= count:
                break
            while frame.time >= start + len(frames) / fps and len(frames) < count:
                frames.append(_square(frame, pixels))
        if not frames:
            raise MediaError(f"{path} can't be used as haystack: no frame could be decoded")
    there_and_back = frames + frames[-2:0:-1]
    return np.stack([there_and_back[i % len(there_and_back)] for i in range(count)])


def _square(frame: av.VideoFrame, pixels: int) -> Frames:
    """The middle of a frame as [pixels, pixels, 3]."""
    scale = pixels / min(frame.width, frame.height)
    width, height = max(pixels, round(frame.width * scale)), max(pixels, round(frame.height * scale))
    top, left = (height - pixels) // 2, (width - pixels) // 2
    return _rgb(frame.reformat(width=width, height=height))[top : top + pixels, left : left + pixels]


def _rgb(frame: av.VideoFrame) -> Frames:
    return np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
