"""Measure the sandbox against a fork of the trainer per episode and a fresh interpreter per call; a soak test.

    python benchmarks/sandbox.py [--alive 300] [--sandboxes 64] [--soak 2000]

A *fork* is what published code does: multiprocessing forks the trainer for each episode, `exec` runs the cell, and a
queue returns figures as base64 PNG, with a timeout of 30 s. It isolates nothing. With many episodes a thread must wait
for each queue (`fork` here), because waiting blocks all others; `blocking` is the same without a thread. A fresh
interpreter (`fresh`) imports its libraries at every call. At a timeout a fork is only abandoned: its worker keeps
running. All values are in milliseconds unless the row states another unit.
"""

import asyncio
import base64
import contextlib
import gc
import io
import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from _common import describe_machine, parser, show
from PIL import Image

from saccade.data.synthetic.video_writer import write_video
from saccade.sandbox import ExecutionResult, FailureReason, ForkServerClient, Limits, Sandbox
from saccade.tools.served_media import ServedVideo, load_image

matplotlib.use("agg")
from matplotlib import pyplot as plt  # before the fork, so that forked workers have it

Row = dict[str, Any]
PLOT = "plt.figure(figsize=(6.4, 4.8)); plt.plot([1, 2, 3]); plt.title('a'); plt.show()"
SHOW = "image_clue_0.show()"
FRAME = "Image.fromarray(video_clue_0[7]).show()"
CELL, TIMEOUT = "s = sum(range(1000))", 1.0  # of concurrent sandboxes
HOSTILE = (
    "while True: pass",
    "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nwhile True: pass",
    "import os; os._exit(1)",
    "import ctypes; ctypes.string_at(0)",
    "b = []\nwhile True: b.append(bytearray(10**7))",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "import os; os.close(3)",
    "import socket; socket.socket(fileno=os.dup(3)).send(bytes(4096)) if (os := __import__('os')) else 0",
    "import os\nwhile True: os.fork()",
    "import os\nfor n in range(99_999): open(str(n), 'w').write('x' * 4096)",
    "import threading, time\nfor _ in range(999): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "for _ in range(99): Image.new('RGB', (2000, 2000)).show()",
)


# ---- the alternatives ----------------------------------------------------------------------------------------------


def run_forked_worker(requests: Any, replies: Any, image: np.ndarray) -> None:
    """Run cells in a forked worker: `exec` in one namespace, figures as base64 PNG, until a request is None."""
    namespace = {"np": np, "plt": plt, "Image": Image, "image_clue_0": Image.fromarray(image)}
    replies.put("ready")
    while (code := requests.get()) is not None:
        text, figures = io.StringIO(), []
        with contextlib.redirect_stdout(text):
            exec(code.replace("plt.show()", "").replace(".show()", ""), namespace)
        for number in plt.get_fignums():
            buffer = io.BytesIO()
            plt.figure(number).savefig(buffer, format="png")
            figures.append(base64.b64encode(buffer.getvalue()).decode())
        plt.close("all")
        replies.put((text.getvalue(), figures))


class ForkedWorker:
    """One episode's worker, forked from this process."""

    def __init__(self, image: np.ndarray) -> None:
        fork = multiprocessing.get_context("fork")
        self.requests, self.replies = fork.Queue(), fork.Queue()
        self.process = fork.Process(target=run_forked_worker, args=(self.requests, self.replies, image), daemon=True)
        self.process.start()
        self.replies.get()

    def run(self, code: str, timeout: float = 30) -> Any:
        """Run a cell and return its text and figures, blocking the caller. Raises queue.Empty at the timeout."""
        self.requests.put(code)
        return self.replies.get(timeout=timeout)

    async def run_in_thread(self, code: str) -> Any:
        """Run a cell without blocking the event loop."""
        return await asyncio.to_thread(self.run, code)

    def close(self) -> None:
        """Stop the worker after its current cell."""
        self.requests.put(None)
        self.process.join()

    def kill(self) -> None:
        """Kill the worker."""
        self.process.kill()
        self.process.join()


def run_fresh(code: str, timeout: float = 30) -> None:
    """Run a cell in a new interpreter. Raises subprocess.TimeoutExpired after killing it at the timeout."""
    prelude = "import numpy as np, matplotlib; matplotlib.use('agg'); from matplotlib import pyplot as plt\n"
    end = "\nplt.savefig('/dev/null', format='png')" if "plt" in code else ""
    subprocess.run([sys.executable, "-c", prelude + code + end], check=True, capture_output=True, timeout=timeout)


def measure_forked_throughput(count: int, calls: int, runaway_interval: int) -> float:
    """Return calls per second of `count` forked workers, one thread each; every `runaway_interval`-th runs away."""
    workers = [ForkedWorker(np.zeros((8, 8, 3), np.uint8)) for _ in range(count)]

    def run_worker(number: int) -> int:
        try:
            if runaway_interval and number % runaway_interval == 0:
                return bool(workers[number].run("while True: pass", TIMEOUT)) - 1
            return sum(bool(workers[number].run(CELL)) for _ in range(calls))
        except queue.Empty:
            return 0

    with ThreadPoolExecutor(count) as pool:
        started = time.perf_counter()
        finished = sum(pool.map(run_worker, range(count)))
        seconds = time.perf_counter() - started
    for worker in workers:
        worker.kill()
    return finished / seconds


def measure_fresh_throughput(calls: int, runaway_interval: int) -> float:
    """Return calls per second of new interpreters, one per CPU at a time."""

    def run_call(number: int) -> int:
        try:
            if runaway_interval and number % runaway_interval == 0:
                run_fresh("while True: pass", TIMEOUT)
            run_fresh(CELL)
        except subprocess.TimeoutExpired:
            return 0
        return 1

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = time.perf_counter()
        finished = sum(pool.map(run_call, range(calls)))
        return finished / (time.perf_counter() - started)


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure_times(action: Callable[[], Any], count: int) -> list[float]:
    """Return the milliseconds of `count` runs, after one warm-up run."""
    action()
    milliseconds = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        milliseconds.append(1e3 * (time.perf_counter() - started))
    return milliseconds


async def measure_alternating(actions: Sequence[Callable[[], Awaitable[Any]]], count: int) -> list[list[float]]:
    """Return the milliseconds of `count` runs of each action, alternating, after one warm-up round."""
    milliseconds: list[list[float]] = [[] for _ in actions]
    for number in range(count + 1):
        for action, values in zip(actions, milliseconds, strict=True):
            started = time.perf_counter()
            await action()
            values += [1e3 * (time.perf_counter() - started)] if number else []
    return milliseconds


def make_row(
    figure: str,
    ours: Sequence[float],
    *,
    bar: str = "",
    fork: Sequence[float] = (),
    blocking: Sequence[float] = (),
    fresh: Sequence[float] = (),
) -> Row:
    """Build a table row: the medians of all alternatives, and the 99th percentile of the sandbox."""
    alternatives = (("fork", fork), ("blocking", blocking), ("fresh", fresh))
    medians = {name: float(np.median(values)) if len(values) else "" for name, values in alternatives}
    own = {"p50": float(np.median(ours)), "p99": float(np.percentile(ours, 99))}
    return {"figure": figure, **own, **medians, "bar": bar, "n": len(ours)}


@contextlib.asynccontextmanager
async def open_sandboxes(server: ForkServerClient, count: int, limits: Limits) -> AsyncIterator[list[Sandbox]]:
    """Open `count` sandboxes one after the other."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Sandbox.open(limits, fork_server=server)) for _ in range(count)]


def list_workers(server: ForkServerClient) -> list[int]:
    """Return the pids of a server's workers, the preforked one included."""
    [zygote] = list_children(server.process.pid)
    return list_children(zygote)


def list_children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Return whether a process is running, and isn't a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def read_private_mb(pid: int) -> float:
    """Return the megabytes of a process that it shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e3


def read_resident_mb(pid: int) -> float:
    """Return the resident megabytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---- the figures ---------------------------------------------------------------------------------------------------


async def measure_latencies(server: ForkServerClient, rounds: int, path: str, image: np.ndarray) -> list[Row]:
    """Measure opening and calling one sandbox, and the alternatives."""
    ready, forked_ready = [], []
    for number in range(rounds + 1):
        started = time.perf_counter()
        async with Sandbox.open(images=[load_image(path, "image_clue_0")], fork_server=server):
            ready += [1e3 * (time.perf_counter() - started)] if number else []
        started = time.perf_counter()
        forked = ForkedWorker(image)
        forked_ready += [1e3 * (time.perf_counter() - started)] if number else []
        forked.close()
    fresh_ready = measure_times(lambda: run_fresh("x = 1"), min(3, rounds))
    name = "ready, with an image of 1000x1000"
    rows = [make_row(name, ready, bar="p50 <= 12", fork=forked_ready, fresh=fresh_ready)]
    forked = ForkedWorker(image)
    images = [load_image(path, "image_clue_0")]
    async with Sandbox.open(Limits(max_images=10**6), images=images, fork_server=server) as sandbox:
        for name, cell, bar, count in [
            ("call of `x = 1`", "x = 1", "p50 <= 0.5, p99 <= 5", 20 * rounds),
            ("a plot of 640x480", PLOT, "", rounds),
            ("an image of 1000x1000", SHOW, "", rounds),
        ]:
            shows_image = "image" in cell  # which published code loses
            ours, in_thread, blocking = await measure_calls(sandbox, cell, count, None if shows_image else forked)
            fresh = [] if shows_image else measure_times(lambda cell=cell: run_fresh(cell), min(3, rounds))
            rows.append(make_row(name, ours, bar=bar, fork=in_thread, blocking=blocking, fresh=fresh))
    forked.close()
    return rows


async def measure_calls(sandbox: Sandbox, cell: str, count: int, forked: ForkedWorker | None) -> list[list[float]]:
    """Return milliseconds of calls: of the sandbox, of a forked worker with a thread, and of one without."""
    results = []

    async def call() -> None:
        results.append(await sandbox.run(cell))

    async def call_blocking() -> None:
        forked.run(cell)

    actions = [call] if forked is None else [call, lambda: forked.run_in_thread(cell), call_blocking]
    milliseconds = await measure_alternating(actions, count)
    assert all(result.ok for result in results), results
    return [*milliseconds, [], []][:3]


async def measure_many(server: ForkServerClient, count: int) -> list[Row]:
    """Measure hundreds of sandboxes alive at once: opening each, and the memory of each while idle."""
    started = time.perf_counter()
    async with open_sandboxes(server, count, Limits()) as sandboxes:
        open_ms = 1e3 * (time.perf_counter() - started) / count
        results = await asyncio.gather(*(sandbox.run(f"print({i})") for i, sandbox in enumerate(sandboxes)))
        assert [result.text for result in results] == [f"{number}\n" for number in range(count)]
        memory = []
        for pid in filter(is_alive, list_workers(server)[:64]):
            with contextlib.suppress(PermissionError, ProcessLookupError):  # not readable; or exiting
                memory.append(read_private_mb(pid))
    started = time.perf_counter()
    workers = [ForkedWorker(np.zeros((8, 8, 3), np.uint8)) for _ in range(count)]
    forked_open_ms = 1e3 * (time.perf_counter() - started) / count
    forked_memory = [read_private_mb(worker.process.pid) for worker in workers[:64] if worker.process.pid]
    for worker in workers:
        worker.kill()
    rows = [make_row(f"opening one of {count} alive at once", [open_ms], fork=[forked_open_ms])]
    if memory:
        rows.append(make_row("MB of an idle one, unshared", memory, bar="<= 10", fork=forked_memory))
    return rows


async def measure_throughput(server: ForkServerClient, rounds: int, count: int, calls: int) -> list[Row]:
    """Measure calls per second of many sandboxes and of forks, alternating; then with every tenth a runaway."""
    rows = []
    async with open_sandboxes(server, count, Limits(timeout=TIMEOUT)) as sandboxes:
        for name, runaway_interval in (("no runaways", 0), ("one in ten a runaway", 10)):
            is_runaway = [bool(runaway_interval and number % runaway_interval == 0) for number in range(count)]

            async def run_cells(sandbox: Sandbox, runaway: bool) -> list[ExecutionResult]:
                cells = ["while True: pass"] if runaway else [CELL] * calls
                return [await sandbox.run(cell) for cell in cells]

            ours, forked = list[float](), list[float]()
            for _ in range(rounds):
                started = time.perf_counter()
                runs = await asyncio.gather(*map(run_cells, sandboxes, is_runaway))
                seconds = time.perf_counter() - started
                results = [
                    result for run, runaway in zip(runs, is_runaway, strict=True) if not runaway for result in run
                ]
                assert all(result.ok for result in results)
                ours.append(len(results) / seconds)
                forked.append(measure_forked_throughput(count, calls, runaway_interval))
            fresh = measure_fresh_throughput(min(20, count), runaway_interval)
            rows.append(make_row(f"calls per second of {count}, {name}", ours, fork=forked, fresh=[fresh]))
    return rows


async def measure_runaways(server: ForkServerClient, rounds: int) -> list[Row]:
    """Measure how long after its limit a cell ends, interrupted or killed."""
    rows = []
    for name, cell, variables_kept, bar in [
        ("interrupted after its limit, state kept", "while True: pass", True, "<= 250"),
        ("killed after its limit", HOSTILE[1], False, "<= 2500"),
    ]:
        async with Sandbox.open(Limits(timeout=0.3), fork_server=server) as sandbox:
            results = [await sandbox.run(cell) for _ in range(rounds)]
        expected = (FailureReason.TIMEOUT, variables_kept)
        assert all((result.failure_reason, result.variables_kept) == expected for result in results), results
        fresh = [] if variables_kept else [measure_fresh_kill(cell) for _ in range(min(3, rounds))]
        rows.append(make_row(name, [1e3 * (result.seconds - 0.3) for result in results], bar=bar, fresh=fresh))
    return rows


def measure_fresh_kill(cell: str) -> float:
    """Return the milliseconds from its timeout until a new interpreter is gone."""
    started = time.perf_counter()
    with contextlib.suppress(subprocess.TimeoutExpired):
        run_fresh(cell, TIMEOUT)
    return 1e3 * (time.perf_counter() - started - TIMEOUT)


HOST = """
import asyncio, contextlib
from saccade.sandbox import ForkServerClient, Sandbox
async def main():
    server, stack = ForkServerClient.start(), contextlib.AsyncExitStack()
    sandboxes = [await stack.enter_async_context(Sandbox.open(fork_server=server)) for _ in range(8)]
    running = [asyncio.ensure_future(sandbox.run("while True: pass")) for sandbox in sandboxes[4:]]
    await asyncio.sleep(0.2)
    print(server.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def measure_host_death(rounds: int) -> Row:
    """Measure from the host's SIGKILL until all its processes are gone: four idle workers, four running ones."""
    milliseconds = []
    for _ in range(rounds):
        with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
            assert host.stdout is not None
            supervisor = int(host.stdout.readline())
            [zygote] = list_children(supervisor)
            pids = [supervisor, zygote, *list_children(zygote)]
            started = time.perf_counter()
            host.send_signal(signal.SIGKILL)
            while any(map(is_alive, pids)):
                time.sleep(0.001)
            milliseconds.append(1e3 * (time.perf_counter() - started))
    return make_row("the host killed, until all are gone", milliseconds, bar="<= 100")


# ---- the soak ------------------------------------------------------------------------------------------------------


async def soak(server: ForkServerClient, episodes: int, *, seed: int = 0, max_concurrency: int = 8) -> dict[str, float]:
    """Run episodes of five calls, one call in ten hostile; return what has grown since the first tenth of them.

    `calls` counts all calls, and `frames` the shown frames of the video. Each episode has a separate PIL image, and an
    image file and a video in common with all others.
    """
    with tempfile.TemporaryDirectory() as folder:
        image, clip = Path(folder) / "image.png", Path(folder) / "clip.mp4"
        Image.new("RGB", (64, 48)).save(image)
        write_video(clip, (np.full((48, 64, 3), 8 * number, np.uint8) for number in range(16)), 4)
        return await _soak(server, episodes, image, clip, random.Random(seed), asyncio.Semaphore(max_concurrency))


async def _soak(
    server: ForkServerClient,
    episodes: int,
    image: Path,
    clip: Path,
    rng: random.Random,
    semaphore: asyncio.Semaphore,
) -> dict[str, float]:
    limits = Limits(timeout=0.5, grace_seconds=0.5, memory_mib=256, max_images=8)
    harmless = (PLOT, SHOW, FRAME)
    plans = [[rng.choice(HOSTILE if rng.random() < 0.1 else harmless) for _ in range(5)] for _ in range(episodes)]

    async def run_episode(cells: Sequence[str]) -> np.ndarray:
        images = [Image.new("RGB", (48, 64)), load_image(str(image), "image_clue_1")]
        videos = [ServedVideo(str(clip), "video_clue_0")]
        async with semaphore, Sandbox.open(limits, images=images, videos=videos, fork_server=server) as sandbox:
            results = [await sandbox.run(cell) for cell in cells]
        shows_frame = [bool(result.images) for result, cell in zip(results, cells, strict=True) if cell == FRAME]
        return np.array([len(results), sum(shows_frame)])

    [zygote] = list_children(server.process.pid)
    # The folders of this server's workers, if it has any: the zygote holds their root's lock.
    links = map(os.readlink, Path(f"/proc/{zygote}/fd").iterdir())
    work_roots = {Path(link).parent for link in links if Path(link).name == ".lock"}

    async def measure_usage() -> dict[str, float]:
        for _ in range(500):  # the last workers may still be exiting
            if len(list_workers(server)) <= 1:
                break
            await asyncio.sleep(0.02)
        gc.collect()
        return {
            "workers": len(list_workers(server)),
            "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), zygote)),
            "host MB": read_resident_mb(os.getpid()),
            "zygote MB": read_resident_mb(zygote),
            "folders": sum(len(list(root.glob("[0-9]*"))) for root in work_roots),
        }

    num_first = max(1, episodes // 10)
    counts = await asyncio.gather(*(run_episode(plan) for plan in plans[:num_first]))
    before = await measure_usage()
    counts += await asyncio.gather(*(run_episode(plan) for plan in plans[num_first:]))
    after = await measure_usage()
    calls, frames = (int(count) for count in np.sum(counts, axis=0))
    return {"calls": calls, "frames": frames, **{name: after[name] - before[name] for name in after}}


async def measure(options: Any, path: str, image: np.ndarray) -> list[Row]:
    """Measure everything, one after the other."""
    started = time.perf_counter()
    server = ForkServerClient.start()
    rows = [make_row("start of the server, once", [1e3 * (time.perf_counter() - started)])]
    try:
        rows += await measure_latencies(server, options.rounds, path, image)
        rows += await measure_runaways(server, max(1, options.rounds // 5))
        rows += await measure_throughput(server, max(1, options.rounds // 10), options.sandboxes, options.calls)
        rows += await measure_many(server, options.alive)
        rows.append(measure_host_death(max(1, options.rounds // 10)))
        if options.soak:
            growth = await soak(server, options.soak)
            rows += [make_row(f"soak of {options.soak} episodes: {name}", [value]) for name, value in growth.items()]
    finally:
        server.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the sandbox and the alternatives."""
    arguments_parser = parser(__doc__, rounds=50)
    arguments_parser.add_argument("--alive", type=int, default=300, help="sandboxes alive at once")
    arguments_parser.add_argument("--sandboxes", type=int, default=64, help="sandboxes called at once")
    arguments_parser.add_argument("--calls", type=int, default=50, help="calls of each of those")
    arguments_parser.add_argument("--soak", type=int, default=0, help="episodes of five calls, a tenth of them hostile")
    options = arguments_parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        image = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
        path = Path(folder) / "image.png"
        Image.fromarray(image).save(path)
        rows = asyncio.run(measure(options, str(path), image))
    show("The sandbox: ms unless stated otherwise", rows, describe_machine(), options.out)


if __name__ == "__main__":
    main()
