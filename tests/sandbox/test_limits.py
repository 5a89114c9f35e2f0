"""Every limit produces a sentence for the model that states whether its variables are kept."""
# ruff: noqa: E501 (a cell stands on one line)

import asyncio
import contextlib
import errno
import os
import platform
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_cases import (
    LONG_LIMITS,
    PATIENCE,
    SHADE,
    LateClock,
    SignalVideo,
    format_signal,
    make_clip,
    run_and_get_text,
    run_cells,
    to_pixels,
    wait_until,
)

from saccade.errors import MediaError
from saccade.sandbox import FailureReason, Limits, Sandbox, execution, limit_cpus, scheduler, workdir
from saccade.sandbox import forkserver_client as server_module
from saccade.sandbox import media as media_module
from saccade.sandbox.limits import (
    INTERRUPTED_MESSAGE,
    TOO_NARROW,
    VARIABLES_LOST_NOTE,
    format_image_refusal,
    format_omitted_bytes,
    format_omitted_images,
    format_restart,
    format_timeout,
)
from saccade.sandbox.media import split_frames
from saccade.sandbox.protocol import VideoMetadata
from saccade.sandbox.scheduler import Scheduler
from saccade.sandbox.seccomp_policy import get_architecture
from saccade.tools.served_media import ServedVideo

SHORT = Limits(timeout=1, grace_seconds=PATIENCE)  # for code that can be interrupted, however busy the machine is
KILLED = Limits(timeout=1, grace_seconds=1.5)  # for code that may have to be killed
KEPT = format_timeout(SHORT, SHORT.timeout, variables_kept=True)


@pytest.fixture(autouse=True)
def late_clocks(monkeypatch):
    """Let the time of a cell begin with its first request to a decoder, and lost workers have time to exit."""
    monkeypatch.setattr(execution, "CellClock", LateClock)
    monkeypatch.setattr(execution, "EXIT_TIMEOUT", PATIENCE)


def run_code(server, code, limits=SHORT, videos=(), **options):
    """Run code after `x = 5`; check `variables_kept` by `print(x)` afterwards, and return the code's result.

    The code's time limit counts from its call of `start_clock()`.
    """
    before = f"x = 5\ndef start_clock(): {format_signal(len(videos))}"
    cells = [before, code, "print(x)"]
    _, result, after = run_cells(server, *cells, limits=limits, videos=[*videos, SignalVideo()], **options)
    assert result.variables_kept == (after.text == "5\n"), after
    return result


# ---- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\nwhile True:\n    try: time.sleep(99)\n    except Exception: pass",
        "import threading; threading.Lock().acquire(); l = threading.Lock(); l.acquire(); l.acquire()",
        "import re; re.match('(a+)+b', 'a' * 60)",
        "y = 3 ** (10 ** 9)",
        "import queue; queue.Queue().get()",
        "import itertools; print(sum(1 for _ in itertools.count()))",
        "import threading; t = threading.Thread(target=lambda: __import__('time').sleep(99)); t.start(); t.join()",
    ],
)
def test_a_runaway_is_interrupted_and_keeps_its_state(server, code):
    result = run_code(server, f"start_clock()\n{code}")
    assert (result.failure_reason, result.error, result.variables_kept) == (FailureReason.TIMEOUT, KEPT, True)
    assert result.seconds >= 1  # benchmarks/sandbox.py measures the upper bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); start_clock()\nwhile True: pass",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); start_clock()\nwhile True: pass",
        "import os, signal; start_clock(); os.kill(os.getpid(), signal.SIGSTOP)",
        "a = np.zeros((8000, 8000)); start_clock(); np.einsum('ij,jk', a, a)",  # one call of minutes on any machine
        "begun = []\nclass A:\n    def __del__(self):\n        begun or (begun.append(1), start_clock())\n        while True: pass\nA()\nwhile True: A()",
    ],
)
def test_uninterruptible_code_is_killed_and_reported(server, code):
    result = run_code(server, f"print('so far')\n{code}", KILLED)
    assert (result.failure_reason, result.variables_kept) == (FailureReason.TIMEOUT, False)
    assert result.error == format_timeout(KILLED, result.seconds, variables_kept=False)
    assert result.text == "so far\n"
    assert result.seconds >= 2.5  # benchmarks/sandbox.py measures the upper bound


@pytest.mark.slow
def test_a_late_reply_is_not_mistaken_for_the_next_one(server):
    endless = f"try:\n    {format_signal()}\n    while True: pass\nfinally:\n    print('late')"
    cells = [endless, "print('next')", "print('last')"]
    stopped, *results = run_cells(server, *cells, limits=SHORT, videos=[SignalVideo()])
    assert stopped.error == KEPT
    assert [result.text for result in results] == ["next\n", "last\n"]


@pytest.mark.slow
@pytest.mark.parametrize("clause", ["except BaseException: pass", "finally: continue"])
def test_code_that_catches_everything_is_stopped(server, clause):
    result = run_code(
        server, f"while True:\n    try:\n        start_clock()\n        while True: pass\n    {clause}", KILLED
    )
    assert result.failure_reason is FailureReason.TIMEOUT
    assert result.error == format_timeout(KILLED, result.seconds, variables_kept=result.variables_kept)


@pytest.mark.slow
def test_code_that_catches_the_interrupt_timed_out(server, monkeypatch):
    monkeypatch.setattr(execution, "INTERRUPT_INTERVAL", PATIENCE)  # a second interrupt could precede the print
    result = run_code(server, "import time\ntry: start_clock(); time.sleep(99)\nexcept BaseException: print('done')")
    assert (result.text, result.failure_reason, result.error) == ("done\n", FailureReason.TIMEOUT, KEPT)


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), 10)", "raise worker.TimeLimitExceeded"])
def test_code_that_interrupts_itself_did_not_time_out(server, code):
    result = run_code(server, f"import os; from saccade.sandbox import worker\n{code}")
    assert (result.failure_reason, result.error) == (FailureReason.RAISED, INTERRUPTED_MESSAGE)


@pytest.mark.parametrize("code", ["os.close(1)", "os.dup2(os.open('f', os.O_CREAT | os.O_RDWR), 1)", "os.close(3)"])
def test_an_interpreter_without_stdout_or_socket_is_replaced(server, code):
    result = run_code(server, f"import os; {code}")
    assert (result.failure_reason, result.error) == (FailureReason.BROKEN, format_restart(FailureReason.BROKEN, SHORT))


@pytest.mark.slow
def test_an_endless_exception_text_is_interrupted(server):
    result = run_code(
        server, "class E(Exception):\n    def __str__(self):\n        start_clock()\n        while True: pass\nraise E"
    )
    assert result.failure_reason in (
        FailureReason.TIMEOUT,
        FailureReason.RAISED,  # the standard library catches all exceptions of __str__
    )
    assert result.variables_kept


def test_errors_in_threads_and_finalizers_are_printed(server):
    cell = "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()"
    cell += "\nclass A:\n    def __del__(self): {}['gone']\nA(); print('on')"
    (result,) = run_cells(server, cell)
    assert result.error is None
    assert [line for line in result.text.splitlines() if not line.startswith(" ")] == [
        "Traceback (most recent call last):",
        "ZeroDivisionError: division by zero",
        "Traceback (most recent call last):",
        "KeyError: 'gone'",
        "on",
    ]


def list_thread_states(sandbox):
    """Return the kernel's state letter of each thread of a sandbox's worker."""
    tasks = Path(sandbox._worker.find_proc_dir(), "task").iterdir()
    return [(task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] for task in tasks]


def test_threads_are_stopped_between_calls(server):
    cells = [
        "import threading, time\nn, counting = 0, threading.Event()",
        "def f():\n    global n\n    while True: n += 1; counting.set(); time.sleep(0.001)",
        "threading.Thread(target=f, daemon=True).start(); counting.wait()",
    ]

    async def body():
        async with Sandbox.open(LONG_LIMITS, fork_server=server) as sandbox:
            for cell in cells:
                await sandbox.run(cell)
            await wait_until(lambda: set(list_thread_states(sandbox)) == {"T"})
            assert len(list_thread_states(sandbox)) >= 2
            return await sandbox.run("counting.clear(); counting.wait(); print('counting')")

    assert asyncio.run(body()).text == "counting\n"


def test_waiting_for_a_cpu_slot_is_not_charged(server, monkeypatch):
    monkeypatch.setattr(server_module, "Scheduler", lambda num_short, num_long: Scheduler(1, 1))
    clocks = []
    monkeypatch.setattr(execution, "CellClock", lambda limit: clocks.append(limit) or LateClock(limit))

    async def body():
        async with Sandbox.open(LONG_LIMITS, fork_server=server) as sandbox:
            clocks.clear()
            async with server.request_slot():
                call = asyncio.ensure_future(sandbox.run("print('fine')"))
                await wait_until(lambda: scheduler_of(server)._short_waiters)
                assert not call.done()
                assert clocks == []  # the cell's clock starts with its slot
            return await call

    assert asyncio.run(body()).text == "fine\n"
    assert len(clocks) == 1


def scheduler_of(server):
    """Return the scheduler of a server for the running event loop."""
    server.request_slot()
    return server._schedulers[asyncio.get_running_loop()]


def test_a_process_with_fewer_cpus_runs_fewer_cells(server, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(scheduler, "_cpu_limit", None)
    limit_cpus(3)

    async def body():
        return scheduler_of(server)._num_free_short

    assert asyncio.run(body()) == 3 * server_module.SHORT_SLOTS_PER_CPU


@pytest.mark.slow
def test_runaways_share_slots_and_delay_no_short_cell(server, monkeypatch):
    monkeypatch.setattr(server_module, "Scheduler", lambda num_short, num_long: Scheduler(1, 1))
    clocks = []

    def make_clock(limit):
        clocks.append(LateClock(limit))
        return clocks[-1]

    monkeypatch.setattr(execution, "CellClock", make_clock)

    async def run_runaway():
        async with Sandbox.open(Limits(timeout=0.8, grace_seconds=PATIENCE), fork_server=server) as sandbox:
            await sandbox.run("x = 5")
            return [await sandbox.run("while True: pass"), await sandbox.run("print(x)")]

    async def run_short_cells():
        async with Sandbox.open(LONG_LIMITS, fork_server=server) as sandbox:
            return [await sandbox.run("s = sum(range(1000))") for _ in range(20)]

    async def body():
        runaways = [asyncio.ensure_future(run_runaway()) for _ in range(3)]
        await wait_until(lambda: len(scheduler_of(server)._paused_cells) == 2)
        short_cells = await run_short_cells()
        for clock in clocks:  # only now may the runaways reach their limit
            clock.begin()
        return short_cells, await asyncio.gather(*runaways)

    short_cells, runaways = asyncio.run(body())
    assert all(result.ok for result in short_cells)
    for result, after in runaways:
        assert (result.failure_reason, result.variables_kept, after.text) == (FailureReason.TIMEOUT, True, "5\n")
        assert result.seconds >= 0.8


class RecordingClock(LateClock):
    """Records for each pause of a cell whether it was charged, and the seconds that weren't."""

    def __init__(self, limit):
        super().__init__(limit)
        self.pauses = []

    def resume(self, *, is_charged):
        before = self._started_at
        super().resume(is_charged=is_charged)
        self.pauses.append((is_charged, self._started_at - before))


@pytest.mark.slow
def test_paused_cells_can_sleep_be_cancelled_and_be_closed(server, monkeypatch):
    monkeypatch.setattr(server_module, "Scheduler", lambda num_short, num_long: Scheduler(1, 1))
    monkeypatch.setattr(execution, "CellClock", RecordingClock)
    video = SignalVideo()
    cell = f"import time\nwhile not {format_signal()}.any(): time.sleep(0.05)\nprint('slept')"

    async def body():
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = [
                await stack.enter_async_context(Sandbox.open(LONG_LIMITS, videos=[video], fork_server=server))
                for _ in range(4)
            ]

            def find_paused(number):
                """Return the paused cell of a sandbox, None if it runs or waits."""
                paused = scheduler_of(server)._paused_cells.values()
                return next((cell for cell in paused if cell.worker is sandboxes[number]._worker), None)

            cells = ["while True: pass", cell, cell, "while True: pass"]
            calls = [asyncio.ensure_future(sandbox.run(cell)) for sandbox, cell in zip(sandboxes, cells, strict=True)]
            await wait_until(lambda: find_paused(1))
            calls[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls[1]
            after = await sandboxes[1].run("print('time' in globals())")
            await wait_until(lambda: find_paused(2))
            clock = find_paused(2)._clock
            video.value = 1
            slept = await calls[2]
            await wait_until(lambda: find_paused(3))
            calls[3].cancel()
            await asyncio.wait(calls[3:])
            calls[0].cancel()
            return after, slept, clock

    after, slept, clock = asyncio.run(body())
    assert after.text == "False\n"
    assert slept.text == "slept\n"
    assert clock.pauses
    assert all(not is_charged and seconds > 0 for is_charged, seconds in clock.pauses)


NAMES = [b"\xff\xfe", b") R 1 1 1 1", b"a\nThreads:\t1\nb"]  # code may choose any process name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_time_limit_holds_under_any_process_name(server, monkeypatch, name):
    monkeypatch.setattr(server_module, "Scheduler", lambda num_short, num_long: Scheduler(1, 1))
    hostile = f"import ctypes, time\n{format_signal()}\n"
    hostile += f"for _ in range(10**6): ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); time.sleep(0.001)"

    async def body():
        async with contextlib.AsyncExitStack() as stack:
            sandboxes = [
                await stack.enter_async_context(Sandbox.open(limits, videos=[SignalVideo()], fork_server=server))
                for limits in (SHORT, LONG_LIMITS)
            ]
            cells = [hostile, "import time; time.sleep(0.5); print('fine')"]
            async with asyncio.timeout(2 * PATIENCE):
                return await asyncio.gather(
                    *(sandbox.run(cell) for sandbox, cell in zip(sandboxes, cells, strict=True))
                )

    renamed, other = asyncio.run(body())
    assert (renamed.failure_reason, renamed.variables_kept, renamed.error) == (FailureReason.TIMEOUT, True, KEPT)
    assert (other.error, other.text) == (None, "fine\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_threads_are_counted_under_any_process_name(servers, name):
    code = f"import ctypes, threading, time; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"
    code += "for _ in range(60): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ntime.sleep(9)"
    result = run_code(servers("namespaces", "worker user"), code, Limits(max_threads=32))
    assert (result.failure_reason, result.variables_kept) == (FailureReason.THREADS, False)


# The ways in which a stopped process could be continued from inside; each prints its error.
CONTINUE = """
import ctypes, errno, os, signal, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return errno.errorcode[ctypes.get_errno()] if libc.syscall(number, *arguments) else "done"
timer = b"".join(value.to_bytes(size, "little") for value, size in [(0, 8), (18, 4), (0, 52)])
pid, tid = os.getpid(), threading.get_native_id()
print(call({kill}, pid, 18), call({tgkill}, pid, tid, 18), call({timer_create}, 1, timer, ctypes.create_string_buffer(8)))
"""


def test_a_worker_cannot_continue_itself(any_server):
    numbers = {**get_architecture().syscalls, "timer_create": 222 if platform.machine() == "x86_64" else 107}
    assert run_and_get_text(any_server, CONTINUE.format(**numbers)) == "EPERM EPERM EPERM\n"


COUNTER = "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f, daemon=True).start()"


def test_cpu_time_between_calls_is_charged_to_the_next(server):
    """However a worker is continued: here the test does it, since the worker can't."""

    async def body():
        async with Sandbox.open(LONG_LIMITS, fork_server=server) as sandbox:
            await sandbox.run(COUNTER)
            before = await sandbox.run("pass")
            worker = sandbox._worker
            worker.send_signal(signal.SIGCONT)
            await wait_until(lambda: worker.read_cpu_seconds() - worker.cpu_seconds_at_stop > 0.2)
            worker.send_signal(signal.SIGSTOP)
            charged = worker.read_cpu_seconds() - worker.cpu_seconds_at_stop
            return before.seconds, charged, (await sandbox.run("pass")).seconds

    _, charged, seconds = asyncio.run(body())
    assert seconds >= charged > 0.2


@pytest.mark.slow
def test_a_paused_cell_that_runs_is_charged_for_the_pause(server, monkeypatch):
    monkeypatch.setattr(server_module, "Scheduler", lambda num_short, num_long: Scheduler(1, 1))
    monkeypatch.setattr(execution, "LONG_SLICE_SECONDS", 3.0)  # even a busy machine leaves it MAX_STOPPED_CPU_SECONDS
    clocks = []

    def make_clock(limit):
        clocks.append(RecordingClock(limit))
        return clocks[-1]

    monkeypatch.setattr(execution, "CellClock", make_clock)

    async def body():
        async with (
            Sandbox.open(LONG_LIMITS, fork_server=server) as other,
            Sandbox.open(Limits(timeout=2), fork_server=server) as sandbox,
        ):
            clocks.clear()
            asleep = asyncio.ensure_future(other.run("import time; time.sleep(600)"))
            await wait_until(lambda: scheduler_of(server)._long_cells)
            running = asyncio.ensure_future(sandbox.run("while True: pass"))
            while not (len(clocks) == 2 and any(is_charged for is_charged, _ in clocks[1].pauses)):
                if sandbox._worker is not None:
                    sandbox._worker.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.01)
            clocks[1].begin()
            result = await running
            asleep.cancel()
            return result, clocks[0].pauses

    result, pauses_asleep = asyncio.run(body())
    assert result.failure_reason is FailureReason.TIMEOUT
    assert not any(is_charged for is_charged, _ in pauses_asleep)  # it was not continued


@pytest.mark.slow
def test_cpu_time_is_bounded_over_all_calls(server):
    limits = Limits(timeout=300, cpu_seconds=1)
    result = run_code(server, "while True: pass", limits)
    assert (result.failure_reason, result.variables_kept) == (FailureReason.CPU, False)
    assert result.error == format_restart(FailureReason.CPU, limits)
    assert "1 s" in result.error


# ---- memory, threads, files ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "b = bytes(10**12)",
        "b = np.ones(10**9)",
        "b = []\nwhile True: b.append(bytes(10**6))",
        "s = 'x'\nwhile True: s += s",
        "import mmap; b = [mmap.mmap(-1, 10**8) for _ in range(99)]",
        "b = Image.new('RGB', (60_000, 60_000))",
        "plt.figure(figsize=(1, 1)); b = [bytearray(10**7) for _ in range(999)]; plt.show()",
    ],
)
def test_too_much_memory_raises_a_readable_error(server, code):
    result = run_code(server, code, Limits(timeout=300, memory_mib=256))
    assert result.variables_kept
    assert result.failure_reason in (FailureReason.MEMORY, FailureReason.RAISED)
    assert "MemoryError" in result.error or os.strerror(errno.ENOMEM) in result.error


def test_freed_memory_is_available_again(server):
    cells = ["b = bytes(200 * 2**20)", "c = bytes(200 * 2**20)", "del b", "c = bytes(200 * 2**20); print(len(c))"]
    first, second, _, last = run_cells(server, *cells, limits=Limits(timeout=300, memory_mib=300))
    assert (first.failure_reason, second.failure_reason, last.text) == (None, FailureReason.MEMORY, "209715200\n")


def test_threads_take_little_memory(server):
    cell = "from concurrent.futures import ThreadPoolExecutor as T\nimport threading; wait = threading.Barrier(16)\nwith T(16) as t: print(sum(t.map(lambda n: wait.wait() * 0 + len(bytes(n)), range(16))))"
    assert run_cells(server, cell, limits=Limits(timeout=PATIENCE, memory_mib=256))[0].text == "120\n"


def test_a_worker_stays_on_its_cpus(any_server):
    cell = "import os, threading; found = set()\ndef f(): found.add(len(os.sched_getaffinity(0)))\nf(); t = threading.Thread(target=f); t.start(); t.join(); print(found)"
    assert run_cells(any_server, cell, limits=Limits(timeout=PATIENCE, num_cpus=1))[0].text == "{1}\n"


@pytest.mark.slow
def test_ignoring_sigxcpu_is_still_reported_as_cpu_limit(server):
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run_code(server, code, Limits(timeout=300, cpu_seconds=1)).failure_reason is FailureReason.CPU


def test_threads_are_counted(any_server):
    code = "import threading, time\nfor _ in range(300): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ntime.sleep(9)"
    limits = Limits(max_threads=32)
    result = run_code(any_server, code, limits)
    if result.variables_kept:
        assert "RuntimeError" in result.error
    else:
        assert result.error == format_restart(FailureReason.THREADS, limits)
        assert "32" in result.error


@pytest.mark.slow
def test_where_the_kernel_does_not_count_threads_the_host_does(servers):
    code = "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ntime.sleep(9)"
    result = run_code(servers("namespaces", "worker user"), code, Limits(max_threads=32))
    assert (result.failure_reason, result.variables_kept) == (FailureReason.THREADS, False)


UNLINK = """
import mmap, os, time
held = [os.open(f"f{n}", os.O_CREAT | os.O_RDWR) for n in range(4)]
for n, fd in enumerate(held): os.write(fd, bytes(7 * 10**6)); os.unlink(f"f{n}")"""


def test_space_for_a_file_is_reserved_by_writing(any_server):
    cell = "import os\nfd = os.open('f', os.O_CREAT | os.O_RDWR); os.posix_fallocate(fd, 0, 10**5); print(os.fstat(fd).st_size)"
    assert run_and_get_text(any_server, cell) == "100000\n"


def test_files_are_counted_outside_the_event_loop(servers, monkeypatch):
    threads = []

    def measure_usage(*arguments):
        threads.append(threading.current_thread())
        return workdir.measure_usage(*arguments)

    monkeypatch.setattr(execution, "workdir", SimpleNamespace(measure_usage=measure_usage))
    assert run_and_get_text(servers("namespaces"), "open('f', 'w').close(); print(1)") == "1\n"
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "for n in range(20): open(f'f{n}', 'wb').write(bytes(10**6))",
        "for n in range(999): open(f'f{n}', 'w').close()",
        "import os\nfor n in range(9999): os.mkdir('d'); os.chdir('d')",
        "import os\nos.mkdir('d', 0); os.chmod('d', 0)\nfor n in range(20): open(f'f{n}', 'wb').write(bytes(10**6))",
        "import os\nf = open('f', 'wb'); os.unlink('f')\nfor n in range(20): f.write(bytes(10**6)); f.flush()",
        f"{UNLINK}\ntime.sleep(99)",
        f"{UNLINK}\nheld = [(mmap.mmap(fd, 4096), os.close(fd)) for fd in held]; time.sleep(99)",
    ],
)
def test_disk_is_bounded(any_server, code):
    limits = Limits(disk_mib=8, file_mib=8, max_files=512)
    result = run_code(any_server, code, limits)
    errors = [os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG, errno.ENAMETOOLONG)]
    assert any(text in result.error for text in [*errors, format_restart(FailureReason.DISK, limits)]), result


def test_one_file_is_bounded(any_server):
    result = run_code(any_server, "open('f', 'wb').write(bytes(3 * 2**20))", Limits(file_mib=2))
    assert os.strerror(errno.EFBIG) in result.error
    assert result.variables_kept


# ---- text and images -----------------------------------------------------------------------------------------------


def test_text_is_truncated_with_a_mark(server):
    (result,) = run_cells(server, "print('x' * 300_000)", limits=Limits(max_chars=1000))
    assert result.text.startswith("x" * 1000 + "\n[")
    assert "292 KiB" in result.text
    (result,) = run_cells(server, "print('日' * 1000, end='')", limits=Limits(max_chars=1000))
    assert result.text == "日" * 1000
    (result,) = run_cells(server, "print('日' * 1001, end='')", limits=Limits(max_chars=1000))
    assert result.text == "日" * 1000 + f"\n{format_omitted_bytes(3)}"


@pytest.mark.slow
def test_endless_output_is_discarded(server):
    result = run_code(
        server, "import os\nos.write(1, b'y' * 65536); start_clock()\nwhile True: os.write(1, b'y' * 65536)"
    )
    assert result.error == KEPT
    assert result.text.startswith("yyyy")
    assert len(result.text) < 20_100


def test_invalid_utf8_is_replaced(server):
    assert run_cells(server, "import os; os.write(1, b'a\\xff\\xf0\\n')")[0].text == "a\ufffd\ufffd\n"


def test_shown_images_are_counted_per_episode(server):
    cells = ["for n in range(3): Image.new('L', (n + 1, 1)).show()", "print(image_clue_3)"]
    first, second, third = run_cells(server, *[cells[0]] * 2, cells[1], limits=Limits(max_images=4))
    assert [shown.name for shown in first.images] == ["image_clue_0", "image_clue_1", "image_clue_2"]
    assert [shown.name for shown in second.images] == ["image_clue_3"]
    assert re.findall(r"\d+", second.text) == ["2", "4"]
    assert third.text.startswith("<PIL.Image.Image")


def test_the_bytes_of_shown_images_are_bounded_per_episode(server):
    limits = Limits(timeout=PATIENCE, images_mib=2)
    cell = "for side in (600, 600, 600, 100): Image.new('L', (side, side)).show()"  # three bytes per pixel are kept
    first, second, third = run_cells(server, cell, "Image.new('L', (600, 600)).show()", "print(1)", limits=limits)
    assert [(shown.name, shown.width) for shown in first.images] == [("image_clue_0", 600), ("image_clue_1", 100)]
    assert (first.text, first.error) == (format_omitted_images(2, "2 MiB"), None)
    assert (second.images, second.text) == ((), format_omitted_images(1, "2 MiB"))
    assert third.text == "1\n"


def test_a_worker_that_exceeds_the_bytes_of_shown_images_is_replaced(server):
    code = "import gc\n(worker,) = [o for o in gc.get_objects() if type(o).__name__ == 'SandboxWorker']\n"
    code += "print('so far'); worker._image_bytes_left = 10**9\nfor _ in range(2): Image.new('L', (600, 600)).show()"
    result = run_code(server, code, Limits(timeout=PATIENCE, images_mib=2))
    assert (result.failure_reason, result.text, len(result.images)) == (FailureReason.PROTOCOL, "so far\n", 1)


def test_large_images_are_reduced(server):
    (result,) = run_cells(server, "Image.new('L', (3000, 2000), 7).show()", limits=Limits(max_image_pixels=60_000))
    (shown,) = result.images
    assert shown.width * shown.height <= 60_000
    assert abs(shown.width / shown.height - 1.5) < 0.02
    assert re.findall(r"\d+x\d+", result.text) == ["3000x2000", f"{shown.width}x{shown.height}"]
    assert np.unique(to_pixels(shown)).tolist() == [7]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["(10_000, 10_000)", "(1e9, 1e9)", "(1e5, 6.0)"])
def test_huge_figures_are_drawn_smaller(server, size):
    result = run_code(server, f"plt.figure(figsize={size}); plt.plot([1]); plt.show()")
    assert result.variables_kept
    for shown in result.images:
        assert shown.width * shown.height <= 4_000_000
    assert result.images or result.error or result.text.startswith("[")


def test_too_narrow_images_are_not_shown(server):
    (result,) = run_cells(server, "Image.new('L', (2000, 10)).show(); Image.new('L', (1990, 10)).show()")
    assert [(shown.width, shown.height) for shown in result.images] == [(1990, 10)]
    assert re.findall(r"\d+x\d+", result.text) == ["2000x10"]


def test_the_host_refuses_a_narrow_image_that_a_worker_sends(server):
    """Code may remove the worker's check; the text and the image's number are kept."""
    code = "from saccade.sandbox import figure_capture\nfigure_capture.is_too_narrow = lambda *size: False\n"
    cells = [f"{code}print('so far', end='')\nImage.new('L', (100_000, 1)).show()", "Image.new('L', (9, 9)).show()"]
    first, second = run_cells(server, *cells)
    assert (first.error, first.images, first.variables_kept) == (None, (), True)
    assert first.text == f"so far\n{format_image_refusal(100_000, 1, TOO_NARROW)}"
    assert [(shown.name, shown.width) for shown in second.images] == [("image_clue_0", 9)]


def test_empty_images_are_not_shown(server):
    cell = "Image.new('RGB', (9, 9)).crop((2, 3, 2, 8)).show(); plt.figure(figsize=(0, 3)); plt.show(); x = 1"
    (result,) = run_cells(server, cell)
    assert (result.error, result.variables_kept, result.images) == (None, True, ())
    lines = result.text.splitlines()
    assert re.findall(r"\d+x\d+", lines[0]) == ["0x5"]
    assert len(lines) == 2


def test_a_replaced_interpreter_has_media_and_shown_images(server, tmp_path):
    videos = [make_clip(tmp_path / "clip.mp4")]
    cells = [
        "Image.new('RGB', (3, 2), (1, 2, 3)).show(); x = 1",
        "import os; print('printed'); os.kill(os.getpid(), 11)",
        "print(image_clue_0.size, image_clue_0.getpixel((0, 0)), len(video_clue_0)); Image.new('L', (9, 9)).show()",
        "print(image_clue_1.size, 'x' in globals())",
    ]
    _, crash, after, last = run_cells(server, *cells, videos=videos)
    assert crash.text == "printed\n"
    assert crash.error == format_restart(FailureReason.CRASHED, SHORT, "segmentation fault")
    assert (crash.failure_reason, crash.variables_kept) == (FailureReason.CRASHED, False)
    assert after.text == "(3, 2) (1, 2, 3) 60\n"
    assert [shown.name for shown in after.images] == ["image_clue_1"]
    assert last.text == "(9, 9) False\n"


def test_shown_images_survive_the_loss_of_their_interpreter(server):
    _, after = run_cells(server, "Image.new('L', (3, 2)).show(); import os; os._exit(7)", "print(image_clue_0.size)")
    assert after.text == "(3, 2)\n"


@pytest.mark.slow
def test_an_interpreter_is_replaced_although_the_shown_images_exceed_its_memory(server):
    """Code could otherwise break its sandbox on purpose, which would end the episode without a score."""
    code = "for n in range(6): Image.new('RGB', (2000, 2000), (n, 2, 3)).show(); del globals()[f'image_clue_{n}']"
    cells = [f"{code}\nimport os; os._exit(7)", "print(image_clue_5.getpixel((0, 0)))"]
    shown, after = run_cells(server, *cells, limits=Limits(timeout=PATIENCE, memory_mib=64))
    assert (len(shown.images), shown.failure_reason) == (6, FailureReason.EXITED)
    assert (after.text, after.error) == ("(5, 2, 3)\n", None)


@pytest.mark.parametrize(
    ("code", "reason", "detail"),
    [
        ("os._exit(7)", FailureReason.EXITED, "exit code 7"),
        ("os.abort()", FailureReason.CRASHED, "abort"),
        ("os.kill(os.getpid(), 14)", FailureReason.CRASHED, "signal SIGALRM"),
        ("os.kill(os.getpid(), 40)", FailureReason.CRASHED, "signal 40"),
        ("os.kill(os.getpid(), 9)", FailureReason.KILLED, ""),
    ],
)
def test_exit_reasons_are_distinguished(server, code, reason, detail):
    result = run_code(server, f"import os; {code}")
    assert (result.failure_reason, result.error) == (reason, format_restart(reason, SHORT, detail))
    assert result.error.endswith(VARIABLES_LOST_NOTE)


def test_a_crash_is_reported_although_the_host_gives_up_on_the_exit(server, monkeypatch):
    """As on a machine that is so busy that the worker exits only when the host is about to kill it."""
    wait_readable = execution.wait_readable

    async def wait_too_long(fd):
        await wait_readable(fd)
        raise TimeoutError

    monkeypatch.setattr(execution, "wait_readable", wait_too_long)
    result = run_code(server, "import os; os.kill(os.getpid(), 11)")
    assert result.failure_reason is FailureReason.CRASHED
    assert result.error == format_restart(FailureReason.CRASHED, SHORT, "segmentation fault")


@pytest.mark.slow
def test_threads_that_read_frames_continue_in_the_next_cell(server, tmp_path):
    videos = [make_clip(tmp_path / "clip.mp4")]
    begin = "from concurrent.futures import ThreadPoolExecutor as T\nt = T(8); asked = []"
    ask = "asked += [t.submit(video_clue_0.__getitem__, n) for n in range(60)]"
    last = f"print([round(f.result().mean() / {SHADE}) for f in asked] == list(range(60)) * 20)"
    results = run_cells(server, begin, *[ask] * 20, last, videos=videos)
    assert [result.error for result in results] == [None] * 22
    assert results[-1].text == "True\n"


def test_threads_cannot_exceed_the_image_limit(server):
    code = "import threading\nimage, wait = Image.new('RGB', (300, 300)), threading.Barrier(16)\ndef f():\n    wait.wait()\n    for _ in range(5): image.show()\n"
    code += (
        "t = [threading.Thread(target=f) for _ in range(16)]\nfor each in t: each.start()\nfor each in t: each.join()"
    )
    (result,) = run_cells(server, code, limits=Limits(timeout=PATIENCE, max_images=30))
    assert (result.error, len(result.images)) == (None, 30)
    assert re.findall(r"\d+", result.text) == ["50", "30"]


@pytest.mark.slow
def test_a_runaway_whose_threads_read_frames_is_interrupted(server, tmp_path):
    videos = [make_clip(tmp_path / "clip.mp4")]
    code = "import threading\ndef f():\n    while True:\n        try: video_clue_0.get_batch(range(60))\n        except RuntimeError: pass\n"
    code += "for _ in range(8): threading.Thread(target=f, daemon=True).start()\nstart_clock()\nwhile True: pass"
    result = run_code(server, code, videos=videos)
    assert (result.failure_reason, result.error, result.variables_kept) == (FailureReason.TIMEOUT, KEPT, True)


BROKEN_FIGURES = [
    "plt.title(r'$\\frac{1$'); plt.show()",
    "f = plt.figure(); f.text(0, 0, r'$\\frac{1$'); f.show()",
    "class F(type(plt.figure())):\n    def draw(self, renderer):\n        start_clock()\n        while True: pass\nplt.close(); plt.figure(FigureClass=F); plt.show()",
]


@pytest.mark.parametrize(
    "code", [BROKEN_FIGURES[0], BROKEN_FIGURES[1], pytest.param(BROKEN_FIGURES[2], marks=pytest.mark.slow)]
)
def test_a_figure_that_cannot_be_drawn_is_closed(server, code):
    cells = [f"def start_clock(): {format_signal()}\n{code}", "plt.figure(figsize=(3, 2)); plt.plot([1]); plt.show()"]
    broken, other = run_cells(server, *cells, limits=SHORT, videos=[SignalVideo()])
    assert broken.failure_reason in (FailureReason.RAISED, FailureReason.TIMEOUT)
    assert broken.variables_kept
    assert (other.error, [(shown.width, shown.height) for shown in other.images]) == (None, [(300, 200)])


def run_without_decoders(server, folder, *cells, limits, release=False):
    """Run the first cell while all decoders are blocked, then the others with free decoders.

    With `release`, free the decoders once the cell waits for one. Return the number of queued decoder requests at the
    end of the first cell, and the results.
    """
    done, videos = threading.Event(), [ServedVideo(make_clip(folder / "clip.mp4"), "video_clue_0")]

    async def body():
        async with Sandbox.open(limits, videos=videos, fork_server=server) as sandbox:
            pool = media_module.get_decoder_pool()
            for _ in range(pool._max_workers):
                pool.submit(done.wait)
            await wait_until(lambda: not pool._work_queue.qsize())
            call = asyncio.ensure_future(sandbox.run(cells[0]))
            if release:
                await wait_until(pool._work_queue.qsize)
                done.set()
            first = await call
            queued = pool._work_queue.qsize()
            done.set()
            return queued, [first, *[await sandbox.run(cell) for cell in cells[1:]]]

    try:
        return asyncio.run(body())
    finally:
        done.set()


@pytest.mark.parametrize("number", range(1, 65))
def test_every_signal_is_explained(number):
    fault, detail = execution.explain_exit(number)
    assert fault in (FailureReason.CRASHED, FailureReason.CPU, FailureReason.KILLED)
    assert bool(detail) == (fault is FailureReason.CRASHED)
    assert format_restart(fault, SHORT, detail).endswith(VARIABLES_LOST_NOTE)


@pytest.mark.slow
def test_requests_after_the_limit_are_not_queued(server, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "INTERRUPT_INTERVAL", PATIENCE)  # a second interrupt could end the loop
    code = "n = 0\nwhile n < 100:\n    try: video_clue_0[0]\n    except BaseException: n += 1; print(n)"
    limits = Limits(timeout=0.2, grace_seconds=PATIENCE)
    queued, (result,) = run_without_decoders(server, tmp_path, code, limits=limits)
    assert result.failure_reason is FailureReason.TIMEOUT
    assert result.text.splitlines() == [str(n) for n in range(1, 101)]
    assert queued <= 1


def test_waiting_for_a_decoder_is_not_charged(server, tmp_path, monkeypatch):
    events = []

    class WaitRecordingClock(LateClock):
        def begin_decode_wait(self):
            events.append("begin")
            super().begin_decode_wait()

        def end_decode_wait(self):
            if events[-1] == "begin":
                events.append("end")
            super().end_decode_wait()

    monkeypatch.setattr(execution, "CellClock", WaitRecordingClock)
    cells = ["len(video_clue_0)", "print(len(video_clue_0))"]
    _, (first, second) = run_without_decoders(server, tmp_path, *cells, limits=LONG_LIMITS, release=True)
    assert (first.error, second.text) == (None, "60\n")
    assert events == ["begin", "end"]


@pytest.mark.slow
def test_waiting_for_a_decoder_times_out(server, tmp_path):
    cells = ["x = 5; video_clue_0[0]", "print(x)"]
    limits = Limits(timeout=0.5, grace_seconds=PATIENCE)
    queued, (result, after) = run_without_decoders(server, tmp_path, *cells, limits=limits)
    assert (result.failure_reason, result.variables_kept, after.text) == (FailureReason.TIMEOUT, True, "5\n")
    assert queued <= 1


@pytest.mark.slow
def test_a_timeout_during_decoding_keeps_the_state(server, tmp_path):
    videos = [make_clip(tmp_path / "clip.mp4", frames=300, size=(640, 360), gop=300)]
    result = run_code(
        server,
        "while True: video_clue_0.get_batch(range(0, 300, 7))",
        Limits(timeout=2, grace_seconds=PATIENCE),
        videos=videos,
    )
    assert (result.failure_reason, result.variables_kept) == (FailureReason.TIMEOUT, True)


class SlicedVideo(SignalVideo):
    """A video of 64 large frames, which are requested tiny; it records each slice and runs `on_slice` in it."""

    def __init__(self, on_slice):
        super().__init__()
        self.slices, self.on_slice = [], on_slice

    async def wait_for_slice(self):
        await wait_until(lambda: self.slices)

    def read_metadata(self):
        return VideoMetadata(1.0, 64.0, 4096, 4096, np.arange(64.0), np.zeros(1, np.uint32))

    def load_frames(self, numbers, size, is_cancelled):
        self.slices.append(list(numbers))
        self.on_slice(is_cancelled)
        return super().load_frames(numbers, size, is_cancelled)


READ_ALL = "print(len(video_clue_0._source.request_frames(0, (1, 1), list(range(64)))))"


def wait_in_thread(is_true):
    """Wait until a condition holds, in a decoder's thread."""
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def test_a_large_request_lets_other_episodes_decode_in_between(server, monkeypatch):
    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(execution, "get_decoder_pool", lambda: pool)
    large = SlicedVideo(lambda is_cancelled: len(large.slices) > 1 or wait_in_thread(pool._work_queue.qsize))
    num_before = []
    small = SlicedVideo(lambda is_cancelled: num_before.append(len(large.slices)))

    async def body():
        async with (
            Sandbox.open(LONG_LIMITS, videos=[large], fork_server=server) as first,
            Sandbox.open(LONG_LIMITS, videos=[small], fork_server=server) as second,
        ):
            reading = asyncio.ensure_future(first.run(READ_ALL))
            await large.wait_for_slice()
            other = await second.run("video_clue_0._source.request_frames(0, (1, 1), [0])")
            return await reading, other

    reading, other = asyncio.run(body())
    assert (reading.text, other.error) == ("64\n", None)
    assert list(chain.from_iterable(large.slices)) == list(range(64))
    assert (num_before, len(large.slices) > 1) == ([1], True)


@pytest.mark.parametrize("reason", ["exit", "cancellation"])
def test_decoding_ends_with_its_worker(server, reason):
    ends = []

    def wait_for_end(is_cancelled):
        wait_in_thread(is_cancelled)
        ends.append(reason)
        raise MediaError("cancelled")

    video = SlicedVideo(wait_for_end)

    async def body():
        async with Sandbox.open(LONG_LIMITS, videos=[video], fork_server=server) as sandbox:
            reading = asyncio.ensure_future(sandbox.run(READ_ALL))
            await video.wait_for_slice()
            if reason == "exit":
                sandbox._worker.send_signal(signal.SIGKILL)
                assert (await reading).failure_reason is FailureReason.KILLED
            else:
                reading.cancel()
                await asyncio.wait([reading])
            await wait_until(lambda: ends)

    asyncio.run(body())
    assert len(video.slices) == 1


@given(
    numbers=st.lists(st.integers(0, 300), min_size=1, max_size=300),
    keyframes=st.sets(st.integers(1, 300), max_size=20),
    max_decoded=st.integers(1, 50),
    is_sorted=st.booleans(),
)
def test_slices_cover_a_request_at_bounded_cost(numbers, keyframes, max_decoded, is_sorted):
    keyframes = sorted({0, *keyframes})
    numbers = sorted(set(numbers)) if is_sorted else numbers
    slices = split_frames(numbers, keyframes, max_decoded)
    assert list(chain.from_iterable(slices)) == numbers

    def count_decoded(part):
        last = {}  # by keyframe
        for number in part:
            key = max(keyframe for keyframe in keyframes if keyframe <= number)
            last[key] = max(number, last.get(key, 0))
        return sum(number - key + 1 for key, number in last.items())

    longest = max(stop - start for start, stop in zip(keyframes, [*keyframes[1:], 301], strict=True))
    assert all(count_decoded(part) < max_decoded + 2 * longest for part in slices)
    if is_sorted:
        assert sum(map(count_decoded, slices)) <= 4 * count_decoded(numbers)


def test_slices_of_a_file_are_the_frames_of_the_whole(server, tmp_path, monkeypatch):
    monkeypatch.setattr(media_module, "MAX_SLICE_PIXELS", 5 * media_module.MIN_DECODED_PIXELS)
    videos = [make_clip(tmp_path / "clip.mp4")]
    cell = f"print([round(frame.mean() / {SHADE}) for frame in video_clue_0.get_batch(range(60))] == list(range(60)))"
    assert run_and_get_text(server, cell, videos=videos) == "True\n"


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (5 * 2**20, "5 MiB")]
)
def test_omitted_sizes_are_rounded(count, text):
    assert format_omitted_bytes(count) == f"[… {text} more not shown]"
