"""The sandbox beside a fork of the trainer per episode and beside a fresh interpreter per call; its bars; a soak.

    python benchmarks/sandbox.py [--alive 300] [--boxes 64] [--soak 2000]

A *fork* is what published code does: multiprocessing forks the trainer for each episode, `exec` runs the cell, figures
come back as base64 PNG through a queue that is waited on for 30 s at most. It jails nothing. Whoever has many episodes
waits for such a queue in a thread (`fork` here), for it blocks all others; `blocking` is the same without one. A fresh
interpreter (`fresh`) imports its libraries at every call. Of a runaway a fork only stops waiting: the worker runs on.
Every figure is in milliseconds unless it says otherwise.
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
from _common import machine, parser, show
from PIL import Image

from saccade.data.world.film import write_clip
from saccade.tools._sandbox.client import Sandbox
from saccade.tools._sandbox.limits import Fault, Limits, Outcome
from saccade.tools._sandbox.server import Server
from saccade.types import Media, MediaKind

matplotlib.use("agg")
from matplotlib import pyplot as plt  # before the fork, which so has it already

Row = dict[str, Any]
PLOT = "plt.figure(figsize=(6.4, 4.8)); plt.plot([1, 2, 3]); plt.title('a'); plt.show()"
SHOW = "image_clue_0.show()"
FRAME = "Image.fromarray(video_clue_0[7]).show()"
CELL, LIMIT = "s = sum(range(1000))", 1.0  # of a crowd: what is called, and seconds for it
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


# ---- the other ways ------------------------------------------------------------------------------------------------


def worker(asked: Any, answers: Any, picture: np.ndarray) -> None:
    """A forked worker: `exec` in one namespace, figures as base64 PNG, until it is told None."""
    space = {"np": np, "plt": plt, "Image": Image, "image_clue_0": Image.fromarray(picture)}
    answers.put("ready")
    while (source := asked.get()) is not None:
        text, shown = io.StringIO(), []
        with contextlib.redirect_stdout(text):
            exec(source.replace("plt.show()", "").replace(".show()", ""), space)
        for number in plt.get_fignums():
            held = io.BytesIO()
            plt.figure(number).savefig(held, format="png")
            shown.append(base64.b64encode(held.getvalue()).decode())
        plt.close("all")
        answers.put((text.getvalue(), shown))


class Forked:
    """One episode's worker, forked from this process."""

    def __init__(self, picture: np.ndarray) -> None:
        fork = multiprocessing.get_context("fork")
        self.asked, self.answers = fork.Queue(), fork.Queue()
        self.process = fork.Process(target=worker, args=(self.asked, self.answers, picture), daemon=True)
        self.process.start()
        self.answers.get()

    def run(self, source: str, seconds: float = 30) -> Any:
        """What the cell printed and showed; who asks can do nothing else meanwhile. Raises queue.Empty when late."""
        self.asked.put(source)
        return self.answers.get(timeout=seconds)

    async def ask(self, source: str) -> Any:
        """The same for whoever has other episodes to play."""
        return await asyncio.to_thread(self.run, source)

    def close(self) -> None:
        """End it."""
        self.asked.put(None)
        self.process.join()

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()


def fresh(source: str, seconds: float = 30) -> None:
    """A new interpreter for one cell. Raises subprocess.TimeoutExpired when late, and has ended it then."""
    head = "import numpy as np, matplotlib; matplotlib.use('agg'); from matplotlib import pyplot as plt\n"
    tail = "\nplt.savefig('/dev/null', format='png')" if "plt" in source else ""
    subprocess.run([sys.executable, "-c", head + source + tail], check=True, capture_output=True, timeout=seconds)


def forked_crowd(count: int, calls: int, runaway: int) -> float:
    """Calls per second of many workers, each of which somebody waits for in a thread of his own."""
    workers = [Forked(np.zeros((8, 8, 3), np.uint8)) for _ in range(count)]

    def play(number: int) -> int:
        try:
            if runaway and number % runaway == 0:
                return bool(workers[number].run("while True: pass", LIMIT)) - 1
            return sum(bool(workers[number].run(CELL)) for _ in range(calls))
        except queue.Empty:
            return 0

    with ThreadPoolExecutor(count) as pool:
        begun = time.perf_counter()
        good = sum(pool.map(play, range(count)))
        seconds = time.perf_counter() - begun
    for each in workers:
        each.kill()
    return good / seconds


def fresh_crowd(calls: int, runaway: int) -> float:
    """Calls per second of new interpreters, as many at a time as there are processors."""

    def play(number: int) -> int:
        try:
            if runaway and number % runaway == 0:
                fresh("while True: pass", LIMIT)
            fresh(CELL)
        except subprocess.TimeoutExpired:
            return 0
        return 1

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = time.perf_counter()
        good = sum(pool.map(play, range(calls)))
        return good / (time.perf_counter() - begun)


# ---- measuring -----------------------------------------------------------------------------------------------------


def times(action: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of `count` actions, after one that isn't counted."""
    action()
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        action()
        found.append(1e3 * (time.perf_counter() - begun))
    return found


async def in_turns(actions: Sequence[Callable[[], Awaitable[Any]]], count: int) -> list[list[float]]:
    """Milliseconds of `count` runs of each action, one of each after the other, the first round not counted."""
    found: list[list[float]] = [[] for _ in actions]
    for number in range(count + 1):
        for action, own in zip(actions, found, strict=True):
            begun = time.perf_counter()
            await action()
            own += [1e3 * (time.perf_counter() - begun)] if number else []
    return found


def row(
    figure: str,
    ours: Sequence[float],
    *,
    bar: str = "",
    fork: Sequence[float] = (),
    blocking: Sequence[float] = (),
    new: Sequence[float] = (),
) -> Row:
    """One line: medians of all sides, the 99th percentile of ours."""
    others = (("fork", fork), ("blocking", blocking), ("fresh", new))
    middle = {name: float(np.median(values)) if len(values) else "" for name, values in others}
    ours_too = {"p50": float(np.median(ours)), "p99": float(np.percentile(ours, 99))}
    return {"figure": figure, **ours_too, **middle, "bar": bar, "n": len(ours)}


@contextlib.asynccontextmanager
async def opened(
    server: Server, count: int, limits: Limits, media: Sequence[Media] = ()
) -> AsyncIterator[list[Sandbox]]:
    """That many sandboxes, opened one after the other."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Sandbox.open(limits, media=media, host=server)) for _ in range(count)]


def guests(server: Server) -> list[int]:
    """The processes of a server's guests, the one that it forked ahead among them."""
    [zygote] = children(server.process.pid)
    return children(zygote)


def children(pid: int) -> list[int]:
    """The children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    """Whether a process still runs; one that nobody has buried yet doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def private_mb(pid: int) -> float:
    """Megabytes of a process that no other shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e3


def resident_mb(pid: int) -> float:
    """Megabytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---- the figures ---------------------------------------------------------------------------------------------------


async def latencies(server: Server, rounds: int, media: Sequence[Media], picture: np.ndarray) -> list[Row]:
    """Getting ready and calling, beside the other ways."""
    ready, forked_ready = [], []
    for number in range(rounds + 1):
        begun = time.perf_counter()
        async with Sandbox.open(media=media, host=server):
            ready += [1e3 * (time.perf_counter() - begun)] if number else []
        begun = time.perf_counter()
        forked = Forked(picture)
        forked_ready += [1e3 * (time.perf_counter() - begun)] if number else []
        forked.close()
    new_ready = times(lambda: fresh("x = 1"), min(3, rounds))
    rows = [row("ready, with a picture of 1000x1000", ready, bar="p50 <= 12", fork=forked_ready, new=new_ready)]
    forked = Forked(picture)
    async with Sandbox.open(Limits(pictures=10**6), media=media, host=server) as box:
        for name, cell, bar, count in [
            ("call of `x = 1`", "x = 1", "p50 <= 0.5, p99 <= 5", 20 * rounds),
            ("a plot of 640x480", PLOT, "", rounds),
            ("a picture of 1000x1000", SHOW, "", rounds),
        ]:
            # Published code loses what a picture's own show() shows.
            shown = "image" in cell
            found, theirs, alone = await called(box, cell, count, None if shown else forked)
            new = [] if shown else times(lambda cell=cell: fresh(cell), min(3, rounds))
            rows.append(row(name, found, bar=bar, fork=theirs, blocking=alone, new=new))
    forked.close()
    return rows


async def called(box: Sandbox, cell: str, count: int, forked: Forked | None) -> list[list[float]]:
    """Milliseconds of calls: of the sandbox, of a worker that is waited for in a thread, and without one."""
    outcomes = []

    async def call() -> None:
        outcomes.append(await box.run(cell))

    async def alone() -> None:
        forked.run(cell)

    found = await in_turns([call] if forked is None else [call, lambda: forked.ask(cell), alone], count)
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [*found, [], []][:3]


async def many(server: Server, count: int) -> list[Row]:
    """Hundreds alive at once: opening, answering, memory of each while idle."""
    begun = time.perf_counter()
    async with opened(server, count, Limits()) as boxes:
        each = 1e3 * (time.perf_counter() - begun) / count
        outcomes = await asyncio.gather(*(box.run(f"print({number})") for number, box in enumerate(boxes)))
        assert [outcome.text for outcome in outcomes] == [f"{number}\n" for number in range(count)]
        memory = []
        for pid in filter(lives, guests(server)[:64]):
            with contextlib.suppress(PermissionError, ProcessLookupError):  # hidden from us; of an earlier row, dying
                memory.append(private_mb(pid))
    begun = time.perf_counter()
    workers = [Forked(np.zeros((8, 8, 3), np.uint8)) for _ in range(count)]
    forked_each = 1e3 * (time.perf_counter() - begun) / count
    forked_memory = [private_mb(worker.process.pid) for worker in workers[:64] if worker.process.pid]
    for worker in workers:
        worker.kill()
    rows = [row(f"opening one of {count} alive at once", [each], fork=[forked_each])]
    return [*rows, row("MB of an idle one, unshared", memory, bar="<= 10", fork=forked_memory)] if memory else rows


async def crowd(server: Server, rounds: int, count: int, calls: int) -> list[Row]:
    """Calls per second of many sandboxes at once, and of forks, in turns; then with every tenth a runaway."""
    limits = Limits(seconds=LIMIT)
    rows = []
    async with opened(server, count, limits) as boxes:
        for name, runaway in (("all well", 0), ("one in ten runs away", 10)):
            kinds = [runaway and number % runaway == 0 for number in range(count)]

            async def play(box: Sandbox, bad: bool) -> list[Outcome]:
                cells = ["while True: pass"] if bad else [CELL] * calls
                return [await box.run(cell) for cell in cells]

            ours, forked = list[float](), list[float]()
            for _ in range(rounds):
                begun = time.perf_counter()
                played = await asyncio.gather(*(play(box, bool(bad)) for box, bad in zip(boxes, kinds, strict=True)))
                seconds = time.perf_counter() - begun
                good = [outcome for outcomes, bad in zip(played, kinds, strict=True) if not bad for outcome in outcomes]
                assert all(outcome.ok for outcome in good)
                ours.append(len(good) / seconds)
                forked.append(forked_crowd(count, calls, runaway))
            new = fresh_crowd(min(20, count), runaway)
            rows.append(row(f"calls per second of {count}, {name}", ours, fork=forked, new=[new]))
    return rows


async def runaways(server: Server, rounds: int) -> list[Row]:
    """How long after its limit a cell is over, stopped or killed."""
    rows = []
    for name, cell, kept, bar in [
        ("stopped after its limit, state kept", "while True: pass", True, "<= 250"),
        ("killed after its limit", HOSTILE[1], False, "<= 2500"),
    ]:
        async with Sandbox.open(Limits(seconds=0.3), host=server) as box:
            outcomes = [await box.run(cell) for _ in range(rounds)]
        assert all((outcome.fault, outcome.kept) == (Fault.TIMEOUT, kept) for outcome in outcomes), outcomes
        new = [] if kept else [late_end(cell) for _ in range(min(3, rounds))]
        rows.append(row(name, [1e3 * (outcome.seconds - 0.3) for outcome in outcomes], bar=bar, new=new))
    return rows


def late_end(cell: str) -> float:
    """How long after its limit a new interpreter is gone."""
    begun = time.perf_counter()
    with contextlib.suppress(subprocess.TimeoutExpired):
        fresh(cell, LIMIT)
    return 1e3 * (time.perf_counter() - begun - LIMIT)


HOST = """
import asyncio, contextlib
from saccade.tools._sandbox.client import Sandbox
from saccade.tools._sandbox.server import Server
async def main():
    server, kept = Server.start(), contextlib.AsyncExitStack()
    boxes = [await kept.enter_async_context(Sandbox.open(host=server)) for _ in range(8)]
    running = [asyncio.ensure_future(box.run("while True: pass")) for box in boxes[4:]]
    await asyncio.sleep(0.2)
    print(server.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def host_death(rounds: int) -> Row:
    """From the host's SIGKILL until none of its processes is left: four idle guests, four running ones."""
    found = []
    for _ in range(rounds):
        with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
            assert host.stdout is not None
            [keeper] = [int(host.stdout.readline())]
            [zygote] = children(keeper)
            everybody = [keeper, zygote, *children(zygote)]
            begun = time.perf_counter()
            host.send_signal(signal.SIGKILL)
            while any(map(lives, everybody)):
                time.sleep(0.001)
            found.append(1e3 * (time.perf_counter() - begun))
    return row("the host killed, until all are gone", found, bar="<= 100")


# ---- the soak ------------------------------------------------------------------------------------------------------


async def soak(server: Server, episodes: int, *, seed: int = 0, at_once: int = 8) -> dict[str, float]:
    """Episodes of five calls, one call in ten hostile: what has grown from the first tenth to the end.

    `calls` are counted from the beginning, and `frames` of their video that they showed. Each episode has a picture of
    its own, and a file with a picture and a video in common with all.
    """
    with tempfile.TemporaryDirectory() as folder:
        picture, clip = Path(folder) / "picture.png", Path(folder) / "clip.mp4"
        Image.new("RGB", (64, 48)).save(picture)
        write_clip(clip, (np.full((48, 64, 3), 8 * number, np.uint8) for number in range(16)), 4)
        media = [Media(path=str(picture), kind=MediaKind.IMAGE), Media(path=str(clip), kind=MediaKind.VIDEO)]
        return await _soaked(server, episodes, media, random.Random(seed), asyncio.Semaphore(at_once))


async def _soaked(
    server: Server, episodes: int, media: Sequence[Media], draw: random.Random, places: asyncio.Semaphore
) -> dict[str, float]:
    limits = Limits(seconds=0.5, grace=0.5, memory_mib=256, pictures=8)
    harmless = (PLOT, SHOW, FRAME)
    plans = [[draw.choice(HOSTILE if draw.random() < 0.1 else harmless) for _ in range(5)] for _ in range(episodes)]

    async def episode(cells: Sequence[str]) -> np.ndarray:
        own = Image.new("RGB", (48, 64))
        async with places, Sandbox.open(limits, media=[own, *media], host=server) as box:
            outcomes = [await box.run(cell) for cell in cells]
        shown = [bool(outcome.pictures) for outcome, cell in zip(outcomes, cells, strict=True) if cell == FRAME]
        return np.array([len(outcomes), sum(shown)])

    [zygote] = children(server.process.pid)

    async def state() -> dict[str, float]:
        for _ in range(500):  # the last ones may still be dying
            if len(guests(server)) <= 1:
                break
            await asyncio.sleep(0.02)
        gc.collect()
        places = (os.getpid(), zygote)
        return {
            "guests": len(guests(server)),
            "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in places),
            "host MB": resident_mb(os.getpid()),
            "zygote MB": resident_mb(zygote),
            "folders": len(list(Path(tempfile.gettempdir()).glob("saccade-sandbox-*/[0-9]*"))),
        }

    first = max(1, episodes // 10)
    done = await asyncio.gather(*(episode(plan) for plan in plans[:first]))
    before = await state()
    done += await asyncio.gather(*(episode(plan) for plan in plans[first:]))
    after = await state()
    calls, frames = (int(count) for count in np.sum(done, axis=0))
    return {"calls": calls, "frames": frames, **{name: after[name] - before[name] for name in after}}


async def measure(chosen: Any, media: Sequence[Media], picture: np.ndarray) -> list[Row]:
    """Everything, one after the other."""
    begun = time.perf_counter()
    server = Server.start()
    rows = [row("start of the server, once", [1e3 * (time.perf_counter() - begun)])]
    try:
        rows += await latencies(server, chosen.rounds, media, picture)
        rows += await runaways(server, max(1, chosen.rounds // 5))
        rows += await crowd(server, max(1, chosen.rounds // 10), chosen.boxes, chosen.calls)
        rows += await many(server, chosen.alive)
        rows.append(host_death(max(1, chosen.rounds // 10)))
        if chosen.soak:
            grown = await soak(server, chosen.soak)
            rows += [row(f"soak of {chosen.soak} episodes: {name}", [value]) for name, value in grown.items()]
    finally:
        server.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the sandbox and the other ways."""
    options = parser(__doc__, rounds=50)
    options.add_argument("--alive", type=int, default=300, help="sandboxes that live at once")
    options.add_argument("--boxes", type=int, default=64, help="sandboxes that are called at once")
    options.add_argument("--calls", type=int, default=50, help="calls of each of those")
    options.add_argument("--soak", type=int, default=0, help="episodes of five calls, a tenth of them hostile")
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        picture = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
        path = Path(folder) / "picture.png"
        Image.fromarray(picture).save(path)
        media = [Media(path=str(path), kind=MediaKind.IMAGE)]
        rows = asyncio.run(measure(chosen, media, picture))
    show("The sandbox: ms unless said otherwise", rows, machine(), chosen.out)


if __name__ == "__main__":
    main()
