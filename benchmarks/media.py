"""64 uniform frames of a long video: saccade's media loader beside decord and OpenCV, and what others share of it.

    python benchmarks/media.py [--clip FILE] [--baselines .venv-decord/bin/python]

Without a file a clip of ten minutes of 1280x720 at 25 frames per second is made (H.264, key frames 250 apart): a minute
is encoded and repeated. `--b-frames` chooses its references: "pyramid" is x264's default. All sides open the file each
time, return the same frames at the same size (checked), and begin with the file in the page cache. decord and OpenCV
run in a process of their own, with as many threads; its interpreter is made by the line in README.md.

The second table is of saccade alone: eight episodes of a group ask for the same frames; a later run reads them from the
store; five crops of one turn look at windows of 16 seconds.
"""

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from _common import build_comparison_row, describe_machine, parser, show

from saccade.config.schema import MediaConfig
from saccade.ledger import ImageRef
from saccade.media.cache import CachingMediaLoader
from saccade.media.frame_sampling import sample_uniform_times
from saccade.protocols import PixelBudget

BUDGET = PixelBudget(min_pixels=784, max_pixels=50176)
RATE, WIDTH, HEIGHT = 25, 1280, 720
REFERENCES = {"pyramid": "bframes=3:b-pyramid=normal", "flat": "bframes=3:b-pyramid=none", "none": "bframes=0"}
Seconds = tuple[float, float]  # by the clock, of CPU time


def make_clip(path: Path, seconds: int, repeats: int, b_frames: str) -> None:
    """A scene that moves everywhere, with some noise, as cameras make them."""
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 200, ((HEIGHT + 480) // 16, (WIDTH + 720) // 16, 3), dtype=np.uint8)
    wide = wide.repeat(16, axis=0).repeat(16, axis=1)
    noise = rng.integers(0, 12, (16, HEIGHT, WIDTH, 3), dtype=np.uint8)
    part = path.with_suffix(".part.mp4")
    with av.open(str(part), "w") as container:
        options = {"preset": "medium", "crf": "23", "x264-params": REFERENCES[b_frames]}
        stream = container.add_stream("libx264", rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.thread_count = 250, 2
        for index in range(RATE * seconds):
            top, left = index % 400, (index * 3) % 640
            picture = wide[top : top + HEIGHT, left : left + WIDTH] // 2 + noise[index % 16]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(part)) as source, av.open(str(path), "w") as target:
        video = source.streams.video[0]
        stream, unit = target.add_stream_from_template(video), Fraction(video.time_base or 1)
        packets = [packet for packet in source.demux(video) if packet.size]
        for repeat in range(repeats):
            for packet in packets:
                copy = av.Packet(bytes(packet))
                offset = int(repeat * seconds / unit)
                copy.pts, copy.dts = (packet.pts or 0) + offset, (packet.dts or 0) + offset
                copy.duration, copy.is_keyframe = packet.duration, packet.is_keyframe
                copy.stream, copy.time_base = stream, unit
                target.mux(copy)


def build_loader(threads: int, store: str = "") -> CachingMediaLoader:
    """A new loader, as a process that starts has it."""
    return CachingMediaLoader.from_config(MediaConfig(folder=store, decode_threads=threads))


def load(
    loader: CachingMediaLoader, path: str, *requests: Sequence[float]
) -> tuple[list[ImageRef], dict[str, np.ndarray]]:
    """Load the frames of requests that arrive together, and their pixels."""

    async def main() -> list[list[ImageRef]]:
        return await asyncio.gather(*(loader.load_frames(path, times, factor=32, budget=BUDGET) for times in requests))

    images = [image for part in asyncio.run(main()) for image in part]
    return images, loader.load_all_pixels(images)


def measure(function: Callable[[], Any]) -> Seconds:
    """Seconds by the clock and of this process's CPU time."""
    begun = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


class Baselines:
    """decord and OpenCV in a process of their own."""

    def __init__(self, interpreter: str, request: dict[str, Any]) -> None:
        script = str(Path(__file__).with_name("_media_baselines.py"))
        self._process = subprocess.Popen(
            [interpreter, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._request = request

    def measure(self, side: str, save_to: str = "") -> Seconds:
        """Pick the frames once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**self._request, "side": side, "save_to": save_to}) + "\n")
        self._process.stdin.flush()
        wall, cpu = json.loads(self._process.stdout.readline())
        return wall, cpu

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def alternate_sides(sides: dict[str, Callable[[], Seconds]], rounds: int) -> dict[str, list[Seconds]]:
    """Measure all sides in turn; the first round warms up and is not counted."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            values = side()
            if number:
                seconds[name].append(values)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one clip."""
    options = parser(__doc__)
    options.add_argument("--clip", help="a video to read instead")
    options.add_argument("--seconds", type=int, default=60, help="of the part of the clip that is encoded")
    options.add_argument("--repeats", type=int, default=10, help="of this part")
    options.add_argument("--b-frames", choices=[*REFERENCES], default="pyramid", help="of the clip that is made")
    options.add_argument("--frames", type=int, default=64)
    options.add_argument("--baselines", default="", help="interpreter with decord and OpenCV; none: only saccade")
    chosen = options.parse_args(arguments)
    threads = chosen.threads
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.clip or str(Path(folder, "clip.mp4"))
        if not chosen.clip:
            make_clip(Path(path), chosen.seconds, chosen.repeats, chosen.b_frames)
        duration = asyncio.run(build_loader(threads).probe(path)).duration
        times = sample_uniform_times(duration, chosen.frames)
        images, pixels = load(build_loader(threads), path, times)
        width, height = images[0].width, images[0].height
        name = chosen.clip or f"{chosen.seconds * chosen.repeats} s of 720p, B-frames: {chosen.b_frames}"
        rows = []
        if chosen.baselines:
            request = {"path": path, "times": [image.time for image in images], "threads": threads}
            baselines = Baselines(chosen.baselines, {**request, "width": width, "height": height})
            for side in ("decord", "OpenCV"):
                frames = str(Path(folder, f"{side}.npy"))
                baselines.measure(side, frames)
                apart = max(
                    float(np.abs(pixels[image.key].astype(int) - frame).mean())
                    for image, frame in zip(images, np.load(frames), strict=True)
                )
                assert apart < 6, f"{side} has other frames: {apart:.1f} of 255 apart"
            seconds = alternate_sides(
                {
                    "saccade": lambda: measure(lambda: load(build_loader(threads), path, times)),
                    "decord": lambda: baselines.measure("decord"),
                    "OpenCV": lambda: baselines.measure("OpenCV"),
                },
                chosen.rounds,
            )
            baselines.close()
            for side in ("decord", "OpenCV"):
                pair = {"saccade": seconds["saccade"], side: seconds[side]}
                row = build_comparison_row(f"{len(times)} frames of {name}, to {width}x{height}", pair)
                rows.append({**row, "case": f"{row['case']}, against {side}"})
                show("Frames of a long video", rows[-1:], describe_machine(), None)
        store = str(Path(folder, "store"))
        load(build_loader(threads, store), path, times)  # an earlier epoch
        start = duration / 2
        windows = {
            "five crops, one window": [start] * 5,
            "five crops, windows 2 s apart": [start + 2 * index for index in range(5)],
            "five crops all over the video": [duration * (index + 0.5) / 6 for index in range(5)],
        }

        def crop(starts: Sequence[float]) -> Seconds:
            requests = [[begin + second for second in range(16)] for begin in starts]
            return measure(lambda: load(build_loader(threads), path, *requests))

        sides = {
            "one episode": lambda: measure(lambda: load(build_loader(threads), path, times)),
            "a group of 8": lambda: measure(lambda: load(build_loader(threads), path, *[times] * 8)),
            "a second epoch, from the disk": lambda: measure(lambda: load(build_loader(threads, store), path, times)),
            "one crop": lambda: crop([start]),
            **{label: lambda starts=starts: crop(starts) for label, starts in windows.items()},
        }
        seconds = alternate_sides(sides, chosen.rounds)
        for label in sides:
            base = "one crop" if "crop" in label else "one episode"
            pair = {"saccade": seconds[label], "of one": seconds[base]}
            values = build_comparison_row(label, pair)
            wall, cpu = (values[f"saccade{unit}"] / values[f"of one{unit}"] for unit in (" s", " CPU s"))
            shown = {key: values[key] for key in ("case", "saccade s", "saccade CPU s", "rounds")}
            rows.append({**shown, f"of {base}, by the clock": wall, "in CPU s": cpu})
            show("Shared frames", rows[-1:], describe_machine(), None)
    if chosen.out:
        chosen.out.write_text(
            json.dumps({"title": "Frames of a long video", "machine": describe_machine(), "rows": rows}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
