"""64 uniform frames of a long video: saccade's Library beside decoding everything with PyAV.

    python benchmarks/media.py [--clip FILE]

Without a file a five-minute clip of 640x360 at 25 frames per second is made (H.264, key frames 250 frames apart), which
takes a minute. Both sides open the file each time, return the same frames at the same size (checked), and begin
with the file in the page cache.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from _common import alternate, build_comparison_row, describe_machine, parser, show

from saccade.ledger import ImageRef
from saccade.media.cache import CachingMediaLoader
from saccade.media.frame_sampling import sample_uniform_times
from saccade.protocols import PixelBudget

BUDGET = PixelBudget(min_pixels=784, max_pixels=50176)


def make_clip(path: Path, seconds: int) -> None:
    """A scene that moves everywhere, with some noise, as cameras make them."""
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 256, (48, 80, 3), dtype=np.uint8).repeat(16, axis=0).repeat(16, axis=1)
    noise = rng.integers(0, 12, (16, 360, 640, 3), dtype=np.uint8)
    options = {"preset": "ultrafast", "crf": "23", "threads": "1", "x264-params": "bframes=2"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(25), options=options)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        stream.codec_context.gop_size = 250
        for index in range(25 * seconds):
            top, left = index % 400, (index * 3) % 640
            picture = wide[top : top + 360, left : left + 640] // 2 + noise[index % 16]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())


def ours(path: str, count: int) -> tuple[list[ImageRef], list[np.ndarray]]:
    """Frames through a new library."""

    async def main() -> list[ImageRef]:
        clip = await library.probe(path)
        return await library.load_frames(path, sample_uniform_times(clip.duration, count), factor=32, budget=BUDGET)

    library = CachingMediaLoader()
    pictures = asyncio.run(main())
    return pictures, [library.load_pixels(picture) for picture in pictures]


def theirs(path: str, times: Sequence[float], width: int, height: int) -> list[np.ndarray]:
    """Decode every frame; keep and scale the last one at or before each time."""
    remaining, found, last = list(times), [], None
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        start = stream.start_time or 0
        for frame in container.decode(stream):
            now = float((frame.pts - start) * stream.time_base)
            while remaining and now > remaining[0] + 1e-6:
                found.append(last.to_ndarray(format="rgb24", width=width, height=height))
                remaining.pop(0)
            last = frame
        found += [last.to_ndarray(format="rgb24", width=width, height=height) for _ in remaining]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one clip."""
    options = parser(__doc__)
    options.add_argument("--clip", help="a video to read instead")
    options.add_argument("--seconds", type=int, default=300, help="of the clip that is made")
    options.add_argument("--frames", type=int, default=64)
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.clip or str(Path(folder) / "clip.mp4")
        if not chosen.clip:
            make_clip(Path(path), chosen.seconds)
        pictures, pixels = ours(path, chosen.frames)
        times, size = [picture.time for picture in pictures], (pictures[0].width, pictures[0].height)
        apart = [
            float(np.abs(one.astype(int) - two).mean())
            for one, two in zip(pixels, theirs(path, times, *size), strict=True)
        ]
        assert max(apart) < 3, f"other frames: {max(apart):.1f} of 255 apart"
        sides = {"saccade": lambda: ours(path, chosen.frames), "everything": lambda: theirs(path, times, *size)}
        seconds = alternate(sides, chosen.rounds)
    name = chosen.clip or f"{chosen.seconds} s of 640x360"
    row = build_comparison_row(f"{chosen.frames} frames of {name}, to {size[0]}x{size[1]}", seconds)
    show("Frames of a long video", [row], describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
