"""Measure the event loop's lag, CPU time and traffic with many concurrent episodes with images on scripted servers.

    python benchmarks/wire.py [--episodes 512] [--servers 4] [--seconds 20]

Episodes come in groups of 8 that share a prompt of 32 frames; each turn adds 4 frames of its own. Servers run in other
processes of this machine. The lag is how much later than due a timer fires, sampled every 10 ms; a lag counts for all
the samples that it swallowed. `idle` is the lag of a process that does nothing else, at the same time. `loop CPU` is
the CPU time that the loop used from one sample to the next: a bound of the lag on a machine without other load. `all
images` sends every image with every request, as an API without uuids needs.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import describe_machine, parser, show

from saccade.chat.renderer import load_renderer
from saccade.engines.remote import vllm_api
from saccade.engines.vllm import Vllm
from saccade.ledger import ImageRef, Ledger, Origin
from saccade.models.tiny import make_tiny_model
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams
from saccade.utils.async_utils import keep_collections_short, yield_to_loop

GROUP, PROMPT_FRAMES, TURN_FRAMES, TURNS, TOKENS = 8, 32, 4, 4, 256
TICK = 0.01


@contextlib.contextmanager
def scripted_servers(model: Path, count: int, *settings: float) -> Iterator[tuple[list[str], list[dict[str, float]]]]:
    """Start servers in one process; yield their addresses, and a list of what each received, filled at the end."""
    script = str(Path(__file__).with_name("_scripted_server.py"))
    command = [sys.executable, script, str(model), str(count), *map(str, settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    received: list[dict[str, float]] = []
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), received
    finally:
        received += json.loads(process.communicate()[0])


class NoiseLoader(FakeMediaLoader):
    """Frames of noise, which compress as little as film grain: about 190 KiB each."""

    def __init__(self) -> None:
        self._noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)

    def load_pixels(self, image: ImageRef) -> Any:
        """Return a part of the noise."""
        offset = int(image.digest[1:]) % 700
        return np.ascontiguousarray(self._noise[offset : offset + image.height, offset : offset + image.width])


class AllImages:
    """The API of vLLM without its memory for images."""

    KEEPS_IMAGES = False

    def __getattr__(self, name: str) -> Any:
        return getattr(vllm_api, name)


class Plain(Vllm):
    """Sends all images with every request."""

    api = AllImages()  # type: ignore[assignment]


IDLE = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from wire import compute_lags, measure_lag
async def main():
    sampler = asyncio.create_task(measure_lag(lags := []))
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(compute_lags(lags)))
asyncio.run(main())
"""


async def measure_lag(lags: list[tuple[float, float]]) -> None:
    """Record the lag of a timer, and the CPU time of the loop's thread until it fired, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due, cpu = loop.time() + TICK, time.thread_time()
        await asyncio.sleep(TICK)
        lags.append((loop.time() - due, time.thread_time() - cpu))


def compute_lags(lags: list[tuple[float, float]]) -> dict[str, float]:
    """Return percentiles in milliseconds; a tick that a lag swallowed would have waited for the rest of it."""
    figures = {}
    for name, values in zip(("lag", "loop CPU"), zip(*(lags or [(0.0, 0.0)]), strict=True), strict=True):
        weighted = sorted(
            value - TICK * missed for value in values for missed in range(1 + int(max(value, 0.0) / TICK))
        )
        figures[f"{name} p99 ms"] = 1e3 * weighted[int(len(weighted) * 0.99)]
        figures[f"{name} max ms"] = 1e3 * weighted[-1]
    return figures


@contextlib.contextmanager
def idle_process() -> Iterator[dict[str, float]]:
    """Measure the lag of a process that does nothing else, inside the block; yield its figures, filled at the end."""
    command = [sys.executable, "-c", IDLE, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = {}
    try:
        yield figures
    finally:
        figures.update(json.loads(process.communicate()[0]))


def frame(renderer: Any, number: int) -> ImageRef:
    return ImageRef(path="v.mp4", digest=f"v{number}", time=0.0, width=8 * renderer.factor, height=8 * renderer.factor)


async def run_episode(engine: Vllm, renderer: Any, group: int, member: int) -> None:
    shared = [frame(renderer, group * 1000 + number) for number in range(PROMPT_FRAMES)]
    await yield_to_loop()  # prompts become ready one by one, as their media are decoded
    message = Message(role="user", parts=(*shared, f"What happens in {group}?"))
    ledger = Ledger(segments=(renderer.render(Ledger(), (message,)),))
    for turn in range(TURNS):
        sampling = SamplingParams(max_tokens=TOKENS, seed=2 + member * TURNS + turn)
        reply = await engine.generate(GenerationRequest(ledger, sampling))
        ledger = ledger.append_completion(reply.tokens, logprobs=reply.logprobs, version=reply.version)
        number = 10**6 * (group + 1) + member * 1000 + turn * TURN_FRAMES
        frames = [frame(renderer, number + index) for index in range(TURN_FRAMES)]
        segment = renderer.render(ledger, (Message(role="tool", parts=("Look:", *frames)),))
        ledger = ledger.observe(segment.tokens, slots=segment.slots, origin=Origin.OBSERVATION)


async def run(engine_class: type[Vllm], urls: Sequence[str], renderer: Any, episodes: int) -> dict[str, Any]:
    engine = engine_class(renderer, NoiseLoader(), servers=tuple(urls), verify_weights=False)
    await engine.generate(
        GenerationRequest(
            Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=("warm",)),)),)),
            SamplingParams(max_tokens=1, seed=1),
        )
    )
    lags: list[tuple[float, float]] = []
    sampler = asyncio.create_task(measure_lag(lags))
    begun = time.perf_counter(), time.process_time()
    await asyncio.gather(*(run_episode(engine, renderer, n // GROUP, n % GROUP) for n in range(episodes)))
    wall, cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
    sampler.cancel()
    await engine.close()
    return {
        **compute_lags(lags),
        "CPU ms a request": 1e3 * cpu / (episodes * TURNS),
        "busy %": 100 * cpu / wall,
        "s": wall,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--episodes", type=int, nargs="+", default=[64, 512, 1024, 2048], help="concurrent ones")
    options.add_argument("--servers", type=int, default=4)
    options.add_argument("--seconds", type=float, default=20.0, help="median time of a reply (log-normal, sigma 0.5)")
    options.add_argument("--all-images", type=int, nargs="*", default=[64], help="sizes that send all images, too")
    given = options.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), tie_word_embeddings=False)
        renderer = load_renderer(folder)
        cases = [("images once", Vllm, n) for n in given.episodes] + [
            ("all images", Plain, n) for n in given.all_images
        ]
        for name, engine_class, episodes in cases:
            for _ in range(given.rounds):
                servers = scripted_servers(Path(folder), given.servers, 0.0, given.seconds, 0.5)
                with servers as (urls, received), idle_process() as idle, keep_collections_short():
                    row = asyncio.run(run(engine_class, urls, renderer, episodes))
                totals = {key: sum(one[key] for one in received) for key in received[0]}
                rows.append({"case": name, "episodes": episodes, **row, "idle p99 ms": idle["lag p99 ms"], **totals})
                print(rows[-1], file=sys.stderr, flush=True)
    show("Requests with images on scripted servers", rows, describe_machine(), given.out)


if __name__ == "__main__":
    main()
