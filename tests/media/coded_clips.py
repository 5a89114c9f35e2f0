"""Clips in which each frame shows its number in blocks, so that tests can identify decoded frames."""

import io
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

COLUMNS, ROWS, BLOCK = 6, 4, 16  # 8 blocks for the number, 8 for its complement, 8 for the orientation
ORIENTATION = (1, 0, 0, 1, 1, 0, 1, 0)
OPTIONS = {
    "libx265": {"x265-params": "log-level=none"},
    "libsvtav1": {"svtav1-params": "lp=1", "preset": "6", "crf": "10"},
    "libvpx-vp9": {"cpu-used": "8", "deadline": "realtime"},
    "libx264": {"preset": "veryfast"},
}


def draw_number(number):
    bits = [number >> shift & 1 for shift in range(8)]
    grid = np.array([*bits, *(1 - bit for bit in bits), *ORIENTATION], np.uint8).reshape(ROWS, COLUMNS)
    return np.repeat(np.kron(grid * 180 + 40, np.ones((BLOCK, BLOCK), np.uint8))[:, :, None], 3, axis=2)


def read_number(pixels):
    """Return the number that a frame of any size shows; fail unless it is complete and upright."""
    height, width, _ = pixels.shape
    rows = ((np.arange(ROWS) + 0.5) * height / ROWS).astype(int)
    columns = ((np.arange(COLUMNS) + 0.5) * width / COLUMNS).astype(int)
    bits = (pixels[np.ix_(rows, columns)].mean(axis=2) > 128).astype(int).reshape(-1)
    assert tuple(bits[16:]) == ORIENTATION, f"not upright: {bits}"
    assert (bits[:8] + bits[8:16] == 1).all(), f"not complete: {bits}"
    return int(sum(bit << shift for shift, bit in enumerate(bits[:8])))


def make(target, **settings):
    """Write a clip in a new thread: SVT-AV1 gives the calling thread real-time priority if it can."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_make, target, **settings).result()


def _make(
    target, *, codec="libx264", count=60, rate=25, stamps=None, draw=draw_number, matrix=None, form=None, **options
):
    """Write a clip; `stamps` are the frames' times in ms (default: i / rate), `matrix` is a display matrix."""
    muxer = {name[4:]: options.pop(name) for name in list(options) if name.startswith("mux_")}
    with av.open(target, "w", format=form, options=muxer) as container:
        options = {key: str(value) for key, value in options.items()}
        stream = container.add_stream(codec, rate=rate, options={**OPTIONS.get(codec, {}), **options})
        stream.height, stream.width = draw(0).shape[:2]
        stream.pix_fmt = {"mjpeg": "yuvj420p", "gif": "rgb8"}.get(codec, "yuv420p")
        stream.codec_context.thread_count = 1
        unit = Fraction(1, rate) if stamps is None else Fraction(1, 1000)
        stream.codec_context.time_base = unit
        if matrix is not None:
            stream.set_display_matrix(matrix)
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(draw(index), format="rgb24")
            frame.pts, frame.time_base = index if stamps is None else stamps[index], unit
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return str(target)


def copy_shifted(source, target, seconds, form=None):
    """Copy a clip's packets, shifted by `seconds`; in MP4 an edit list hides frames before 0."""
    with av.open(source) as old, av.open(str(target), "w", format=form) as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(old.streams.video[0]):
            if packet.size:
                shift = round(seconds / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                new.mux(packet)
    return str(target)


class Pipe(io.RawIOBase):
    """A file that can't seek, like a pipe, so that a container can't complete its header at the end."""

    def __init__(self, path):
        super().__init__()
        self.file = Path(path).open("wb")  # noqa: SIM115 (closed with the pipe)

    def writable(self):
        return True

    def write(self, data):
        return self.file.write(data)

    def close(self):
        self.file.close()
        super().close()
