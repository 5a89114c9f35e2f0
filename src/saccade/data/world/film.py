"""Clips as files: frames into H.264 mp4, and stretches of a user's own clips as haystack.

Clips are the same bytes for the same frames: one encoder thread, no dates. Reading is `saccade.media`'s.
"""

import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from saccade.data.world.paint import Frames
from saccade.errors import DataError, MediaError, boundary
from saccade.media import video

SUFFIXES = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
# An 8 s group of pictures costs few bits and lets a reader jump close to any time.
GROUP_SECONDS = 8  # between key frames


def write_clip(path: Path, frames: Frames, fps: float) -> None:
    """Encode uint8 RGB [time, height, width, 3]; the file appears complete or not at all."""
    rate = Fraction(fps).limit_denominator(1001)
    # One thread, so that the bytes depend on the frames alone; "fastdecode" because a clip is read far more often.
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
    """`count` frames at `fps` from a clip, its middle cut to a square: uint8 RGB [count, pixels, pixels, 3].

    Begins at `share` of what the clip has more than is needed; one that is too short is played forwards and backwards
    in turn. Raises MediaError for a clip that can't be decoded.
    """
    reel = video.survey(str(path))
    clip = reel.clip
    start = max(0.0, clip.duration - count / fps) * share
    times = [_folded(start + i / fps, clip.duration) for i in range(count)]
    scale = pixels / min(clip.width, clip.height)
    width, height = max(pixels, round(clip.width * scale)), max(pixels, round(clip.height * scale))
    top, left = (height - pixels) // 2, (width - pixels) // 2
    frames = video.decode(reel, times, size=(width, height), threads=2)
    return np.stack([frame.pixels[top : top + pixels, left : left + pixels] for frame in frames])


def _folded(time: float, duration: float) -> float:
    """A time beyond the end, folded back into the clip."""
    around = time % (2 * duration)
    return min(around, 2 * duration - around)
