"""64 uniform frames of a long video: saccade's media loader beside decord and OpenCV, and what others share of it.

    python benchmarks/media.py [--clip FILE]

Without a file a clip of ten minutes of 1280x720 at 25 frames per second is made (H.264, key frames 250 apart): a minute
is encoded and repeated. `--b-frames` chooses its references: "pyramid" is x264's default. All sides open the file each
time, return the same frames at the same size (checked), and begin with the file in the page cache. decord and OpenCV
run in a process of their own, with as many threads, in .venv-decord, which `scripts/bootstrap --decord` makes from
pinned packages; without it only the second table is measured.

The second table is of saccade alone: eight episodes of a group ask for the same frames; a later run reads them from the
store; five crops of one turn look at windows of 16 seconds.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from _common import (
    BaselineProcess,
    Seconds,
    alternate_sides,
    build_comparison_row,
    describe_machine,
    find_environment,
    measure,
    parser,
    show,
    write_figures,
)

from saccade.config.schema import MediaConfig
from saccade.ledger import ImageRef
from saccade.media.cache import CachingMediaLoader
from saccade.media.frame_sampling import sample_uniform_times
from saccade.protocols import PixelBudget

BUDGET = PixelBudget(min_pixels=784, max_pixels=50176)
RATE, WIDTH, HEIGHT = 25, 1280, 720
REFERENCES = {"pyramid": "bframes=3:b-pyramid=normal", "flat": "bframes=3:b-pyramid=none", "none": "bframes=0"}


def make_clip(path: Path, seconds: int, repeats: int, b_frames: str, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
    """A scene that moves everywhere, with some noise, as cameras make them; `size` is its width and height."""
    (width, height), rng = size, np.random.default_rng(0)
    wide = rng.integers(0, 200, ((height + 480) // 16, (width + 720) // 16, 3), dtype=np.uint8)
    wide = wide.repeat(16, axis=0).repeat(16, axis=1)
    noise = rng.integers(0, 12, (16, height, width, 3), dtype=np.uint8)
    part = path.with_suffix(".part.mp4")
    with av.open(str(part), "w") as container:
        options = {"preset": "medium", "crf": "23", "x264-params": REFERENCES[b_frames]}
        stream = container.add_stream("libx264", rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.thread_count = 250, 2
        for index in range(RATE * seconds):
            top, left = index % 400, (index * 3) % 640
            picture = wide[top : top + height, left : left + width] // 2 + noise[index % 16]
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one clip."""
    options = parser(__doc__)
    options.add_argument("--clip", help="a video to read instead")
    options.add_argument("--seconds", type=int, default=60, help="of the part of the clip that is encoded")
    options.add_argument("--repeats", type=int, default=10, help="of this part")
    options.add_argument("--b-frames", choices=[*REFERENCES], default="pyramid", help="of the clip that is made")
    options.add_argument("--frames", type=int, default=64)
    chosen = options.parse_args(arguments)
    threads = chosen.threads
    torch.set_num_threads(threads)
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
        if find_environment("decord") is None:
            print("decord and OpenCV aren't measured: .venv-decord is missing; make it with scripts/bootstrap --decord")
        else:
            baselines = BaselineProcess("decord", "_media_baselines.py")
            given = {"path": path, "times": [image.time for image in images], "threads": threads}
            given |= {"width": width, "height": height}
            for side in ("decord", "OpenCV"):
                apart = []
                for shift in (0, -1 / RATE, 1 / RATE):
                    shifted = [time + shift for time in given["times"]]
                    frames = str(Path(folder, f"{side}.npy"))
                    baselines.request({**given, "times": shifted, "side": side, "save_to": frames})
                    pairs = zip((pixels[image.key] for image in images), np.load(frames), strict=True)
                    apart.append(max(float(np.abs(own.astype(int) - frame).mean()) for own, frame in pairs))
                # Filters of scaling differ, so that the same frames aren't equal, but nearer than their neighbors.
                assert apart[0] == min(apart), f"{side} has other frames: {apart} of 255 apart"
            seconds = alternate_sides(
                {
                    "saccade": lambda: measure(lambda: load(build_loader(threads), path, times)),
                    "decord": lambda: baselines.request({**given, "side": "decord"}),
                    "OpenCV": lambda: baselines.request({**given, "side": "OpenCV"}),
                },
                chosen.rounds,
            )
            baselines.close()
            for side in ("decord", "OpenCV"):
                pair = {"saccade": seconds["saccade"], side: seconds[side]}
                case = f"{len(times)} frames of {name}, to {width}x{height}, against {side}"
                rows.append(build_comparison_row(case, pair))
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
    write_figures("Frames of a long video", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
