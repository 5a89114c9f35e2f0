"""Many sandboxes at once, cancellation, failing hosts, cleanup, and the isolation a machine must have."""
# ruff: noqa: E501 (a cell stands on one line)

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest
from error_cases import raises
from PIL import Image
from polling import is_alive
from sandbox_cases import (
    LONG_LIMITS,
    PATIENCE,
    LateClock,
    SignalVideo,
    format_signal,
    run_and_get_text,
    run_cells,
    wait_until,
)

import saccade
from saccade.errors import ConfigError, SandboxError
from saccade.sandbox import (
    FailureReason,
    ForkServerClient,
    IsolationLayers,
    IsolationReport,
    Limits,
    Sandbox,
    descriptors,
    execution,
    probe_isolation,
    seal_images,
)
from saccade.sandbox import forkserver_client as server_module
from saccade.sandbox.memory_pressure import MemoryMonitor
from saccade.sandbox.streams import StdoutCapture


def count_descriptors():
    return len(os.listdir("/proc/self/fd"))


def list_descendants(pid):
    """Return the pids of the living descendants of a process."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(path.name)] = int(fields[1])
    descendants, generation = set(), {pid}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation} - descendants
        descendants |= generation
    return descendants


def list_workers(server):
    """Return the pids of a server's workers, the preforked one included."""
    (zygote,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return list_descendants(int(zygote))


async def run_all(sandboxes, cells):
    return await asyncio.gather(*(sandbox.run(cell) for sandbox, cell in zip(sandboxes, cells, strict=True)))


def test_sandboxes_are_independent(any_server):
    async def body():
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = [
                await stack.enter_async_context(Sandbox.open(LONG_LIMITS, fork_server=any_server)) for _ in range(8)
            ]
            await run_all(sandboxes, [f"x = {n}; open('x', 'w').write(str(x))" for n in range(8)])
            return await run_all(sandboxes, ["import os; print(x, open('x').read(), len(os.listdir()))"] * 8)

    assert [result.text for result in asyncio.run(body())] == [f"{n} {n} 1\n" for n in range(8)]


def test_workers_have_different_user_ids_where_supported(any_server):
    async def body():
        async with Sandbox.open(fork_server=any_server) as first, Sandbox.open(fork_server=any_server) as second:
            return await run_all([first, second], ["import os; print(os.getuid())"] * 2)

    first, second = (int(result.text) for result in asyncio.run(body()))
    isolation = any_server.report.isolation
    assert (first != second) == (isolation.per_worker_user and isolation.namespaces != "user")
    if first != second:
        assert min(first, second) > 1_000_000


def test_workers_have_low_priority(any_server):
    async def body():
        async with Sandbox.open(fork_server=any_server):
            return [
                (Path(f"/proc/{pid}/oom_score_adj").read_text(), os.getpriority(os.PRIO_PROCESS, pid))
                for pid in list_workers(any_server)
            ]

    own_priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert ("1000\n", min(19, own_priority + 5)) in asyncio.run(body())


def test_calls_of_one_sandbox_run_one_after_the_other(server):
    async def body():
        async with Sandbox.open(fork_server=server) as sandbox:
            await sandbox.run("import time; n = 0")
            await asyncio.gather(*(sandbox.run("m = n; time.sleep(0.02); n = m + 1") for _ in range(5)))
            return await sandbox.run("print(n)")

    assert asyncio.run(body()).text == "5\n"


def test_a_cancelled_call_replaces_only_its_interpreter(server):
    video = SignalVideo()

    async def body():
        async with Sandbox.open(LONG_LIMITS, videos=[video], fork_server=server) as sandbox:
            await sandbox.run("x = 1")
            call = asyncio.ensure_future(sandbox.run(f"{format_signal()}\nwhile True: pass"))
            await video.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await sandbox.run("print('x' in globals())")

    assert asyncio.run(body()).text == "False\n"


def test_a_preforked_worker_may_be_killed(any_server):
    async def body():
        for _ in range(3):
            deadline = time.monotonic() + PATIENCE
            while not (preforked := list_workers(any_server)) and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            for pid in preforked:
                with contextlib.suppress(ProcessLookupError):  # killed in the round before
                    os.kill(pid, signal.SIGKILL)
            while any(map(is_alive, preforked)) and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            async with Sandbox.open(LONG_LIMITS, fork_server=any_server) as sandbox:
                assert (await sandbox.run("print(1)")).text == "1\n"

    asyncio.run(body())


@types.coroutine
def cancel_at(number, coroutine):
    """Await a coroutine; cancel the task when the coroutine waits for the `number`-th time."""
    try:
        awaited = coroutine.send(None)
        while True:
            number -= 1
            if not number:
                asyncio.current_task().cancel()
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001 (raised where the coroutine waits)
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(value)
    except StopIteration as stop:
        return stop.value


def test_opening_can_be_cancelled(server):
    """Each opening is cancelled one await later than the one before, until one is complete."""

    async def open_and_close():
        async with Sandbox.open(LONG_LIMITS, fork_server=server):
            pass

    async def body():
        num_cancelled = 0
        while True:
            opening = asyncio.ensure_future(cancel_at(num_cancelled + 1, open_and_close()))
            await asyncio.wait([opening])
            if not opening.cancelled():
                break
            num_cancelled += 1
        await opening
        return num_cancelled

    run_cells(server, "print(1)")
    before = count_descriptors()
    assert asyncio.run(body()) >= 2  # for the images, for the worker
    assert count_descriptors() == before
    assert run_cells(server, "print(1)")[0].text == "1\n"


@pytest.mark.slow
def test_processes_and_descriptors_are_released(server):
    run_cells(server, "print(1)")
    before = count_descriptors()
    hostile = ["import os; os._exit(1)", "while True: pass", "import os; os.close(3)", "b = bytes(10**12)"]
    for code in ["plt.plot([1]); plt.show()", *hostile]:
        run_cells(server, code, limits=Limits(timeout=0.3, grace_seconds=0.3))
    deadline = time.monotonic() + PATIENCE
    while len(list_descendants(server.process.pid)) != 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(list_descendants(server.process.pid)) == 2  # the zygote, and its preforked worker
    assert count_descriptors() == before


def test_working_folders_are_removed(servers):
    server = servers("namespaces")

    async def body():
        async with Sandbox.open(fork_server=server) as sandbox:
            result = await sandbox.run("import os; print(os.getcwd()); os.makedirs('a/b'); os.mkdir('c', 0)")
            path = Path(result.text.strip())
            assert path.is_dir()
            return path

    path = asyncio.run(body())
    deadline = time.monotonic() + PATIENCE
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not path.exists()


HOST = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from sandbox_cases import LONG_LIMITS, SignalVideo, format_signal
from saccade.sandbox import ForkServerClient, Sandbox
async def main():
    server, videos = ForkServerClient.start(disabled_layers=tuple(sys.argv[2:])), [SignalVideo() for _ in range(3)]
    sandboxes = [Sandbox.open(LONG_LIMITS, videos=[video], fork_server=server) for video in videos]
    opened = [await sandbox.__aenter__() for sandbox in sandboxes]
    cell = f"{format_signal()}\\nwhile True: pass"
    running = [asyncio.ensure_future(sandbox.run(cell)) for sandbox in opened[1:]]
    for video in videos[1:]:
        await video.wait()
    print(server.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


# With all layers for each signal; without namespaces for the one that lets no handler run.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "disabled_layers"),
    [
        *((number, ()) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
        (signal.SIGKILL, ("namespaces",)),
        *(pytest.param(n, ("namespaces",), marks=pytest.mark.soak) for n in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_all_processes_exit_with_the_host(disabled_layers, signal_number):
    command = [sys.executable, "-c", HOST, str(Path(__file__).parent), *disabled_layers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as host:
        try:
            assert host.stdout.readline()
            deadline = time.monotonic() + PATIENCE
            while len(pids := list_descendants(host.pid)) != 2 + 3 + 1 and time.monotonic() < deadline:
                time.sleep(0.005)
            assert len(pids) == 2 + 3 + 1  # supervisor, zygote, workers, a preforked worker
            host.send_signal(signal_number)
            deadline = time.monotonic() + PATIENCE  # 0.1 s on an idle machine: benchmarks/sandbox.py measures it
            while any(map(is_alive, pids)) and time.monotonic() < deadline:
                time.sleep(0.005)
            assert not [pid for pid in pids if is_alive(pid)]
        finally:
            host.kill()


# ---- host stalls -----------------------------------------------------------------------------------------------------

STALL_SECONDS = 10_000
WAIT_FOR_SIGNAL = """
import signal, time
received = []
signal.signal(signal.SIGUSR2, lambda *_: received.append(True))
def wait_for_signal():
    while not received: time.sleep(0.01)
"""


@pytest.fixture
def stall_host(monkeypatch):
    """A function that stops this process for hours, as Ctrl-Z does, but at once: its clock jumps.

    If it receives a sandbox, its cell's `wait_for_signal` returns, and the cell ends before the stall does.
    """
    monotonic, stalls = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(stalls))
    monkeypatch.setattr(server_module, "MEMORY_MONITOR", MemoryMonitor())  # it remembers a time of its clock

    def stall(sandbox=None):
        if sandbox is not None:
            sandbox._worker.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + PATIENCE
            while sandbox._worker.connection.is_idle():
                assert time.monotonic() < deadline, "the cell does not end"
                time.sleep(0.005)
        stalls.append(STALL_SECONDS)

    return stall


@pytest.fixture
def wait_until_printed(monkeypatch):
    """A coroutine function that waits until the running cell has printed a text."""
    captures = []

    def make_capture(*arguments):
        captures.append(StdoutCapture(*arguments))
        return captures[-1]

    monkeypatch.setattr(execution, "StdoutCapture", make_capture)
    return lambda text: wait_until(lambda: captures and text in captures[-1].decode_text())


@pytest.mark.parametrize("ends_meanwhile", [True, False])
def test_host_stalls_are_not_charged(server, stall_host, wait_until_printed, ends_meanwhile):
    cell = f"{WAIT_FOR_SIGNAL}print('started', flush=True); wait_for_signal(); print('fine')"

    async def body():
        async with Sandbox.open(LONG_LIMITS, fork_server=server) as sandbox:
            call = asyncio.ensure_future(sandbox.run(cell))
            await wait_until_printed("started")
            stall_host(sandbox if ends_meanwhile else None)
            await asyncio.sleep(0)  # the timers that are due by now
            sandbox._worker.send_signal(signal.SIGUSR2)
            return await call, await sandbox.run("print(time.__name__)")

    finished, after = asyncio.run(body())
    assert (finished.error, finished.text, after.text) == (None, "started\nfine\n", "time\n")
    assert finished.seconds < STALL_SECONDS


@pytest.mark.slow
def test_an_endless_cell_times_out_after_a_host_stall(server, stall_host, monkeypatch):
    monkeypatch.setattr(execution, "CellClock", LateClock)
    video = SignalVideo()

    async def body():
        limits = Limits(timeout=1, grace_seconds=PATIENCE)
        async with Sandbox.open(limits, videos=[video], fork_server=server) as sandbox:
            call = asyncio.ensure_future(sandbox.run(f"x = 5\n{format_signal()}\nwhile True: pass"))
            await video.wait()
            stall_host()
            return await call, await sandbox.run("print(x)")

    timed_out, after = asyncio.run(body())
    assert timed_out.failure_reason is FailureReason.TIMEOUT
    assert (timed_out.variables_kept, after.text) == (True, "5\n")
    assert 1 <= timed_out.seconds < STALL_SECONDS


@pytest.mark.slow
def test_a_cell_that_stops_during_a_host_stall_is_not_killed(server, stall_host, wait_until_printed, monkeypatch):
    """It is interrupted before the stall and ends in it; its grace period would end in the stall, too."""
    monkeypatch.setattr(execution, "CellClock", LateClock)
    monkeypatch.setattr(execution, "INTERRUPT_INTERVAL", PATIENCE)  # a second interrupt could precede the end
    cell = f"{WAIT_FOR_SIGNAL}x = 5\ntry:\n    {format_signal()}\n    while True: pass\n"
    cell += "except BaseException:\n    print('interrupted', flush=True)\n    wait_for_signal()\n    raise"

    async def body():
        limits = Limits(timeout=1, grace_seconds=3 * PATIENCE)
        async with Sandbox.open(limits, videos=[SignalVideo()], fork_server=server) as sandbox:
            call = asyncio.ensure_future(sandbox.run(cell))
            await wait_until_printed("interrupted")
            stall_host(sandbox)
            return await call, await sandbox.run("print(x)")

    timed_out, after = asyncio.run(body())
    assert (timed_out.failure_reason, timed_out.variables_kept, after.text) == (FailureReason.TIMEOUT, True, "5\n")


# ---- servers that exit -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_zygote_raises_sandbox_error():
    async def body():
        server, video = ForkServerClient.start(), SignalVideo()
        async with Sandbox.open(LONG_LIMITS, videos=[video], fork_server=server) as sandbox:
            call = asyncio.ensure_future(sandbox.run(f"{format_signal()}\nwhile True: pass"))
            await video.wait()
            supervisor = server.process.pid
            (zygote,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            os.kill(int(zygote), signal.SIGKILL)
            with raises(SandboxError):
                await call
            with raises(SandboxError):
                await sandbox.run("print(1)")
        server.process.wait(PATIENCE)
        server.close()

    asyncio.run(body())


@pytest.mark.slow
def test_the_shared_server_is_restarted_after_it_exited():
    async def body():
        async with Sandbox.open() as sandbox:
            return (await sandbox.run("print(1)")).text

    try:
        assert asyncio.run(body()) == "1\n"
        first = server_module.get_shared_server("best_effort")
        assert server_module.get_shared_server("best_effort") is first
        first.process.kill()
        first.process.wait()
        assert asyncio.run(body()) == "1\n"
        assert server_module.get_shared_server("best_effort") is not first
    finally:
        server_module.close_shared_servers()


def test_many_images_leave_descriptors_for_files(any_server):
    """PIL images share one memory, others have their own; images beyond the descriptors of a message are copied."""
    sealed = [seal_images([Image.new("RGB", (3, 2), (number, 0, 0))])[0] for number in range(210)]
    frames = [Image.new("L", (2, 3), number) for number in range(40)]
    cell = "print([globals()[f'image_clue_{n}'].getpixel((0, 0))[0] for n in range(250)]); held = [open(str(n), 'w') for n in range(100)]"
    before = count_descriptors()
    (result,) = run_cells(any_server, cell, images=[*frames, *sealed])
    assert (result.error, result.text) == (None, f"{[*range(40), *range(210)]}\n")
    assert count_descriptors() <= before + 2


def test_workers_have_separate_offsets_and_flags_for_an_image(server):
    """Seeking in an image's descriptor, or setting its flags, affects no other worker."""
    images = seal_images([Image.linear_gradient("L")])
    hostile = (
        "import os, fcntl\nfor _ in range(20_000): os.lseek(4, 12345, 0)\nfcntl.fcntl(4, fcntl.F_SETFL, os.O_NONBLOCK)"
    )
    cell = "import os, fcntl; print([os.lseek(4, 0, 1), fcntl.fcntl(4, fcntl.F_GETFL) & os.O_NONBLOCK]); "
    cell += "print(bytes(np.asarray(image_clue_0)) == bytes(np.asarray(Image.linear_gradient('L').convert('RGB'))))"

    async def body():
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = [
                await stack.enter_async_context(Sandbox.open(LONG_LIMITS, images=images, fork_server=server))
                for _ in range(4)
            ]
            return await run_all(sandboxes, [hostile, cell, hostile, cell])

    assert [result.text for result in asyncio.run(body())][1::2] == ["[0, 0]\nTrue\n"] * 2


def test_workers_cannot_signal_each_other_by_locks_or_flags(any_server):
    """Locks on shared files and flags of shared descriptors could carry answers from one episode to another."""
    mark = "import fcntl, os; f = open(np.__file__); fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_SH); os.set_blocking(0, False)"
    look = "import fcntl, os, struct; f = open(np.__file__); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); asked = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)\n"
    look += "print(fcntl.fcntl(f, fcntl.F_GETLK, asked) == asked, fcntl.fcntl(0, fcntl.F_GETFL) & os.O_NONBLOCK)"

    async def body():
        async with (
            Sandbox.open(LONG_LIMITS, fork_server=any_server) as first,
            Sandbox.open(LONG_LIMITS, fork_server=any_server) as second,
        ):
            return [await first.run(mark), await second.run(look)]

    marked, seen = asyncio.run(body())
    assert (marked.error, seen.error, seen.text) == (None, None, "True 0\n")


def test_sqlite_works_without_file_locks(server):
    cell = "import sqlite3\nwith sqlite3.connect('a.db') as d: d.execute('create table t (x)'); d.execute('insert into t values (7)')\nwith sqlite3.connect('a.db') as d: print(d.execute('select x from t').fetchall())"
    assert run_cells(server, cell)[0].text == "[(7,)]\n"


def test_threads_read_images_concurrently(server):
    images = [Image.new("RGB", (400, 400), (number, 0, 0)) for number in range(16)]
    cell = "from concurrent.futures import ThreadPoolExecutor as T\nwith T(8) as t: "
    cell += "print([bool(a.min() == a.max() == n) for n, a in enumerate(t.map(lambda n: np.asarray(globals()[f'image_clue_{n}'])[..., 0], range(16)))])"
    assert run_cells(server, cell, images=images)[0].text == f"{[True] * 16}\n"


def test_large_images_are_transferred(server):
    images = [Image.linear_gradient("L").resize((2000, 2000))]
    result, after = run_cells(server, "image_clue_0.rotate(180).show()", "print(image_clue_1.size)", images=images)
    (shown,) = result.images
    assert shown.rgb_bytes[:3] == bytes([255] * 3)
    assert shown.rgb_bytes[-3:] == bytes(3)
    assert after.text == "(2000, 2000)\n"


# ---- what a machine must have --------------------------------------------------------------------------------------


def make_layers(**changes):
    return IsolationLayers(**{"namespaces": "user", "landlock": 6, "seccomp": True, "per_worker_user": True, **changes})


def list_missing_layers(report):
    return [layer.name for layer in report.layers if not layer.is_active and layer.name != "worker user"]


def test_strict_requires_every_layer():
    IsolationReport(make_layers(), {}).check("strict")
    cause = "unshare: Operation not permitted"
    weaker = IsolationReport(make_layers(namespaces=""), {"namespaces": cause})
    weaker.check("best_effort")
    assert list_missing_layers(weaker) == ["namespaces"]
    with raises(ConfigError, key="isolation", value="strict") as caught:
        weaker.check("strict")
    assert cause in str(caught.value)
    weaker = IsolationReport(make_layers(landlock=0), {"Landlock": "the kernel has none"})
    assert list_missing_layers(weaker) == ["Landlock"]
    with raises(ConfigError, key="isolation", value="strict"):
        weaker.check("strict")


@pytest.mark.parametrize("isolation", ["strict", "best_effort"])
def test_insufficient_isolation_is_always_refused(isolation):
    for layers in (make_layers(namespaces="", landlock=0), make_layers(seccomp=False)):
        with raises(ConfigError, key="isolation", value=isolation):
            IsolationReport(layers, {}).check(isolation)
    leaking = IsolationReport(make_layers(), {}, (breach := "can read /etc/passwd",))
    with raises(ConfigError, key="isolation", value=isolation) as caught:
        leaking.check(isolation)
    assert breach in str(caught.value)


@pytest.mark.slow
def test_disabled_layers_are_reported(servers):
    weaker = servers("namespaces").report
    assert list_missing_layers(weaker) == ["namespaces"]
    assert not weaker.isolation.is_complete
    assert "namespaces" in weaker.summary
    with raises(ConfigError, key="isolation", value="strict"):
        ForkServerClient.start("strict", disabled_layers=("namespaces",))
    with raises(ConfigError, key="isolation", value="best_effort"):
        ForkServerClient.start(disabled_layers=("namespaces", "Landlock"))
    with raises(ConfigError, key="isolation", value="best_effort"):
        ForkServerClient.start(disabled_layers=("seccomp",))


@pytest.mark.slow
def test_isolation_of_a_weak_machine_can_be_probed():
    report = probe_isolation(disabled_layers=("namespaces", "Landlock"))
    assert not report.isolation.is_sufficient
    assert list_missing_layers(report) == ["namespaces", "Landlock"]
    assert not probe_isolation().escapes


def run_script(script, *arguments):
    """Run a script in a separate process; return what it printed."""
    command = [sys.executable, "-c", script, str(Path(__file__).parent), *arguments]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


FEW_DESCRIPTORS = """
import asyncio, contextlib, resource, sys
sys.path.insert(0, sys.argv[1])
from saccade.errors import SandboxError
from saccade.sandbox import ForkServerClient, Sandbox
async def main():
    server, sandboxes = ForkServerClient.start(), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    async with contextlib.AsyncExitStack() as stack:
        try:
            for _ in range(99):
                sandboxes.append(await stack.enter_async_context(Sandbox.open(fork_server=server)))
        except SandboxError as error:
            print(len(sandboxes) > 5, error.key, error.value)
        print([(await sandbox.run("print(42)")).text for sandbox in sandboxes] == ["42\\n"] * len(sandboxes))
    server.close()
asyncio.run(main())
"""


@pytest.mark.slow
def test_the_descriptor_limit_raises_sandbox_error_and_existing_sandboxes_work():
    assert run_script(FEW_DESCRIPTORS).splitlines() == ["True RLIMIT_NOFILE 64", "True"]


ROOM = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (768, 768))
from PIL import Image
from saccade.errors import SandboxError
from saccade.sandbox import ForkServerClient, Sandbox
async def episode(server, number, opened):
    async with Sandbox.open(fork_server=server, images=[Image.new("RGB", (8, 8))]) as sandbox:
        opened.append(number)
        first = await sandbox.run(f"a = {number}; print(image_clue_0.size)")
        return (first.text, (await sandbox.run("print(a)")).text) == ("(8, 8)\\n", f"{number}\\n")
async def main():
    server, opened = ForkServerClient.start(), []
    print(all(await asyncio.gather(*(episode(server, number, opened) for number in range(64)))), len(opened))
    server.close()
asyncio.run(main())
"""

FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
from saccade.errors import SandboxError
from saccade.sandbox.forkserver_client import probe_isolation
try:
    print(probe_isolation())
except SandboxError as error:
    print(error.key, error.value)
"""


@pytest.mark.slow
def test_sandboxes_wait_for_descriptors_that_others_hold():
    """64 episodes where 56 have room: none breaks."""
    assert run_script(ROOM).split() == ["True", "64"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["64", "256"])
def test_a_low_limit_of_open_files_is_named(limit):
    assert run_script(FEW, limit).split() == ["RLIMIT_NOFILE", limit]


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from sandbox_cases import run_cells
from saccade.sandbox import ForkServerClient, forkserver_client
forkserver_client.STOP_TIMEOUT = 120
server = ForkServerClient.start()
(closed, write_closed), (read_end, write_end) = os.pipe(), os.pipe()
child = os.fork()
if not child:
    server.close()  # as at the end of a forked worker
    os.write(write_closed, b"x")
    os.read(read_end, 1)
    os._exit(0)
os.read(closed, 1)
print(run_cells(server, "print(42)")[0].text.strip())
server.close()
print(server.process.returncode, os.waitpid(child, os.WNOHANG)[0])
os.write(write_end, b"x")
os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_a_fork_of_the_host_neither_stops_the_server_nor_keeps_it_alive():
    assert run_script(FORKED).split() == ["42", "0", "0"]


@pytest.mark.slow
def test_a_host_may_have_thousands_of_files_open():
    descriptors.raise_fd_limit()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        server = ForkServerClient.start()
        assert run_cells(server, "print(1)")[0].text == "1\n"
        server.close()
    finally:
        for fd in fds:
            os.close(fd)


REAL_TIME = """
import os, sys
sys.path.insert(0, sys.argv[1])
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
from sandbox_cases import run_cells
from saccade.sandbox import ForkServerClient
server = ForkServerClient.start()
print(run_cells(server, "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))")[0].text)
server.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run in real time")
def test_workers_of_a_real_time_host_are_not_real_time():
    command = [sys.executable, "-c", REAL_TIME, str(Path(__file__).parent)]
    completed = subprocess.run(command, capture_output=True, text=True)
    if "PermissionError" in completed.stderr:
        pytest.skip("this machine doesn't permit real-time scheduling")
    policy, nice = completed.stdout.split()
    assert policy == str(os.SCHED_OTHER)
    assert int(nice) >= 5


LIBRARY_IN_TMP = """
import sys
sys.path.insert(0, sys.argv[1])
from sandbox_cases import run_cells
from saccade.sandbox import ForkServerClient
server = ForkServerClient.start()
print(server.report.isolation == eval(sys.argv[2], vars(sys.modules["saccade.sandbox.isolation"])))
print(run_cells(server, "import special, os; open('x', 'w').write('y'); print(special.x, os.listdir())")[0].text)
server.close()
"""


@pytest.mark.slow
def test_libraries_may_be_in_the_temporary_folder(server):
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as folder:
        site_packages = Path(folder) / "site-packages"
        site_packages.mkdir()
        Path(folder).chmod(0o755)
        (site_packages / "special.py").write_text("x = 7")
        cases = str(Path(__file__).parent)
        command = [sys.executable, "-c", LIBRARY_IN_TMP, cases, repr(server.report.isolation)]
        environment = {**os.environ, "PYTHONPATH": f"{site_packages}:{os.environ.get('PYTHONPATH', '')}"}
        completed = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert completed.stdout.splitlines()[:2] == ["True", "7 ['x']"], completed.stderr


INSTALLED = """
import sys
sys.path.insert(0, sys.argv[1])
import saccade
from sandbox_cases import run_and_get_text
from saccade.sandbox import ForkServerClient
server = ForkServerClient.start(disabled_layers=tuple(sys.argv[2:]))
print(saccade.__file__)
print(run_and_get_text(server, CELL))
server.close()
"""
READ_SOURCES = """
import glob, importlib, os, special
os.makedirs('a/b'); open('a/c', 'w').write('7'); os.rename('a/c', 'a/b/c')
found, folder = [special.x, int(open('a/b/c').read())], os.path.dirname(special.__file__)
for path in (folder, os.path.realpath(folder)):
    for file in glob.glob(path + '/saccade/**/*.*', recursive=True):
        try: found.append(open(file).read())
        except OSError: pass
for name in ('saccade.data.synthetic', 'saccade.cli.app'):
    try: importlib.import_module(name); found.append(name)
    except (ImportError, OSError): pass
print(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("disabled_layers", [(), ("namespaces",), ("Landlock",), ("namespaces", "worker user")])
def test_workers_cannot_read_an_installed_package(disabled_layers):
    """The package may be installed beside readable libraries; with its data generators, code could recompute labels."""
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as folder:
        site_packages = Path(folder) / "real" / "site-packages"
        package = Path(saccade.__file__).parent
        shutil.copytree(package, site_packages / "saccade", ignore=shutil.ignore_patterns("*.pyc"))
        (site_packages / "special.py").write_text("x = 5")
        Path(folder).chmod(0o755)
        (Path(folder) / "link").symlink_to("real")
        path = str(Path(folder) / "link" / "site-packages")
        script = INSTALLED.replace("CELL", repr(READ_SOURCES))
        command = [sys.executable, "-c", script, str(Path(__file__).parent), *disabled_layers]
        environment = {**os.environ, "PYTHONPATH": path}
        completed = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert completed.stdout.splitlines()[:2] == [f"{path}/saccade/__init__.py", "[5, 7]"], completed.stderr


def test_the_report_explains_each_layer(server):
    assert [layer.name for layer in server.report.layers] == ["namespaces", "Landlock", "seccomp", "worker user"]
    assert all(layer.detail and layer.meaning for layer in server.report.layers)


def test_failure_reasons_are_strings():
    assert FailureReason("timeout") is FailureReason.TIMEOUT


def test_reading_a_shared_image_leaves_no_trace_for_other_episodes(server):
    """The time of the last access is in the kernel's common record of the file; code must not clear O_NOATIME either."""
    shared = seal_images([Image.new("RGB", (64, 64), (1, 2, 3))])
    find = "import fcntl, os\ndef find():\n    for fd in range(4, 20):\n        if os.fstat(fd).st_size == 3 * 64 * 64: return fd"
    read = f"{find}\nimage_clue_0.load(); os.pread(find(), 99, 0); print(bool(fcntl.fcntl(find(), 3) & os.O_NOATIME))"
    clear = f"{find}\nfcntl.fcntl(find(), 4, 0)"

    async def body():
        async with (
            Sandbox.open(LONG_LIMITS, images=shared, fork_server=server) as first,
            Sandbox.open(LONG_LIMITS, images=shared, fork_server=server) as second,
        ):
            before = await first.run(f"{find}\nprint(os.fstat(find()).st_atime_ns)")
            results = [await second.run(code) for code in (read, clear, read)]
            return before, results, await first.run("print(os.fstat(find()).st_atime_ns)")

    before, (reading, clearing, again), after = asyncio.run(body())
    assert (before.error, reading.text, again.text) == (None, "True\n", "True\n")
    assert "PermissionError" in clearing.error
    assert after.text == before.text


QUEUE_SIGNALS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))
for _ in range({count}): os.kill(os.getpid(), 40)
"""
RECEIVE_SIGNAL = f"{QUEUE_SIGNALS.format(count=1)}print(signal.sigtimedwait([40], 1).si_pid)"


def test_queued_signals_of_one_episode_do_not_show_in_others(servers):
    """The kernel counts them per user, and without namespaces all workers may have the same one."""

    async def body():
        server = servers("namespaces")
        async with (
            Sandbox.open(LONG_LIMITS, fork_server=server) as first,
            Sandbox.open(LONG_LIMITS, fork_server=server) as second,
        ):
            before = await first.run(RECEIVE_SIGNAL)
            await second.run(QUEUE_SIGNALS.format(count=400))
            return before, await first.run(RECEIVE_SIGNAL)

    before, after = asyncio.run(body())
    assert (before.error, after.error) == (None, None)
    assert after.text == before.text


WAIT_AND_WAKE = """
import ctypes, mmap, os, time
word = np.frombuffer(mmap.mmap(os.open(np.__file__, os.O_RDONLY), 4096, prot=mmap.PROT_READ), np.uint8)
address, value = ctypes.c_void_p(word.ctypes.data), int.from_bytes(word[:4].tobytes(), "little")
syscall = ctypes.CDLL(None, use_errno=True).syscall
"""
FUTEX = {"x86_64": 202, "aarch64": 98}


@pytest.mark.slow  # both wait five seconds
def test_episodes_cannot_wake_each_other(any_server):
    """A futex in a file is the same for all processes that map it, also read-only."""
    wait = f"{WAIT_AND_WAKE}\nprint(syscall({FUTEX[platform.machine()]}, address, 0, value, (ctypes.c_long * 2)(5, 0)))"
    wake = f"""{WAIT_AND_WAKE}
end, woken = time.monotonic() + 5, 0
while not woken and time.monotonic() < end: woken = syscall({FUTEX[platform.machine()]}, address, 1, 1)
print(woken)"""

    async def body():
        async with (
            Sandbox.open(LONG_LIMITS, fork_server=any_server) as first,
            Sandbox.open(LONG_LIMITS, fork_server=any_server) as second,
        ):
            return await asyncio.gather(first.run(wait), second.run(wake))

    waiting, waking = asyncio.run(body())
    assert (waiting.text, waking.text) == ("-1\n", "0\n")


def test_native_threads_can_be_joined(any_server):
    code = """
import ctypes
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
sleep, microseconds = ctypes.cast(libc.usleep, ctypes.c_void_p), ctypes.c_void_p(50_000)
print(libc.pthread_create(ctypes.byref(thread), None, sleep, microseconds))
print(libc.pthread_join(thread, None))"""
    assert run_and_get_text(any_server, code) == "0\n0\n"
