"""Every limit ends in a sentence that the model can read, and says whether its variables are still there."""
# ruff: noqa: E501 (a cell stands on one line)

import asyncio
import contextlib
import platform
import threading
import time

import numpy as np
import pytest
from sandbox_cases import PATIENT, SHADE, make_clip, pixels, play

from saccade.tools._sandbox import call, films
from saccade.tools._sandbox import limits as limits_module
from saccade.tools._sandbox import server as server_module
from saccade.tools._sandbox.client import Sandbox
from saccade.tools._sandbox.limits import AGAIN, Fault, Limits, bytes_more
from saccade.tools._sandbox.turns import Turns
from saccade.types import Media

SHORT = Limits(seconds=2, grace=1.5)
KEPT = "Execution timeout: stopped after 2 s. Variables are kept."
LOST = f"Execution timeout: stopped after 2 s and the interpreter was restarted. {AGAIN}"


def ended(server, code, limits=SHORT, **options):
    """The outcome of code after `x = 5`, and what `print(x)` says afterwards."""
    _, outcome, after = play(server, "x = 5", code, "print(x)", limits=limits, **options)
    assert outcome.kept == (after.text == "5\n"), after
    return outcome


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
def test_a_runaway_is_stopped_and_its_state_is_kept(server, code):
    outcome = ended(server, code)
    assert (outcome.fault, outcome.error, outcome.kept) == (Fault.TIMEOUT, KEPT, True)
    assert outcome.seconds >= 2  # and hardly more, says benchmarks/sandbox.py


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nwhile True: pass",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "a = np.ones((8000, 8000)); a @ a",
        "class A:\n    def __del__(self):\n        while True: pass\nA()\nwhile True: A()",
    ],
)
def test_what_cannot_be_stopped_is_killed_and_the_model_is_told(server, code):
    outcome = ended(server, f"print('so far')\n{code}")
    assert (outcome.fault, outcome.error, outcome.kept) == (Fault.TIMEOUT, LOST, False)
    assert outcome.text == "so far\n"
    assert outcome.seconds >= 3.5  # and hardly more, says benchmarks/sandbox.py


@pytest.mark.slow
def test_a_late_answer_is_never_taken_for_the_next_one(server):
    cells = ["import time\ntry:\n    while True: pass\nfinally:\n    print('late')", "print('next')", "print('last')"]
    stopped, *outcomes = play(server, *cells, limits=SHORT)
    assert stopped.error == KEPT
    assert [outcome.text for outcome in outcomes] == ["next\n", "last\n"]


@pytest.mark.slow
@pytest.mark.parametrize("clause", ["except BaseException: pass", "finally: continue"])
def test_code_that_catches_everything_is_stopped_one_way_or_the_other(server, clause):
    outcome = ended(server, f"while True:\n    try:\n        while True: pass\n    {clause}")
    assert outcome.fault is Fault.TIMEOUT
    assert outcome.error in (KEPT, LOST)


@pytest.mark.slow
def test_who_ends_well_after_the_limit_was_late(server):
    outcome = ended(server, "import time\ntry: time.sleep(99)\nexcept BaseException: print('done')")
    assert (outcome.text, outcome.fault, outcome.error) == ("done\n", Fault.TIMEOUT, KEPT)


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), 10)", "raise guest.Stopped"])
def test_code_that_stops_itself_was_not_late(server, code):
    outcome = ended(server, f"import os; from saccade.tools._sandbox import guest\n{code}", Limits(seconds=60))
    assert (outcome.fault, outcome.error) == (Fault.RAISED, "The code interrupted itself. Variables are kept.")


@pytest.mark.parametrize("code", ["os.close(1)", "os.dup2(os.open('f', os.O_CREAT | os.O_RDWR), 1)", "os.close(3)"])
def test_an_interpreter_that_is_cut_off_is_replaced(server, code):
    outcome = ended(server, f"import os; {code}", Limits(seconds=60))
    said = "The code closed or changed what the interpreter needs and it was restarted."
    assert (outcome.fault, outcome.error) == (Fault.BROKEN, f"{said} {AGAIN}")


@pytest.mark.slow
def test_an_exception_whose_text_never_ends_is_stopped(server):
    outcome = ended(server, "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E")
    assert outcome.fault in (Fault.TIMEOUT, Fault.RAISED)  # the standard library catches everything there
    assert outcome.kept


def test_errors_in_threads_and_finalizers_are_told(server):
    cell = "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()"
    cell += "\nclass A:\n    def __del__(self): {}['gone']\nA(); print('on')"
    (outcome,) = play(server, cell)
    assert outcome.error is None
    assert [line for line in outcome.text.splitlines() if not line.startswith(" ")] == [
        "Traceback (most recent call last):",
        "ZeroDivisionError: division by zero",
        "Traceback (most recent call last):",
        "KeyError: 'gone'",
        "on",
    ]


@pytest.mark.slow
def test_threads_rest_between_calls(server):
    cells = [
        "import threading, time\nn = 0\ndef f():\n    global n\n    while True: n += 1; time.sleep(0.001)",
        "threading.Thread(target=f, daemon=True).start(); time.sleep(0.05)",
        "a = n",
        "print(n - a)",
    ]

    async def body():
        async with Sandbox.open(host=server) as box:
            for cell in cells[:3]:
                await box.run(cell)
            await asyncio.sleep(1.0)
            return await box.run(cells[3])

    assert int(asyncio.run(body()).text) < 500  # of the thousand that a second has


@pytest.mark.slow
def test_waiting_for_ones_turn_is_not_charged(server):
    async def body():
        boxes = [Sandbox.open(Limits(seconds=20), host=server) for _ in range(12)]
        opened = [await box.__aenter__() for box in boxes]
        try:
            return await asyncio.gather(*(box.run("import time; time.sleep(0.3)") for box in opened))
        finally:
            for box in boxes:
                await box.__aexit__(None, None, None)

    started = time.monotonic()
    outcomes = asyncio.run(body())
    assert all(outcome.ok for outcome in outcomes)
    assert sum(outcome.seconds for outcome in outcomes) < 8 * (time.monotonic() - started)


@pytest.mark.slow
def test_runaways_share_places_and_hold_up_nobody_else(server, monkeypatch):
    monkeypatch.setattr(server_module, "Turns", lambda short, long: Turns(1, 1))
    ended = []

    async def play(cell, limits, times=1):
        async with Sandbox.open(limits, host=server) as box:
            await box.run("x = 5")
            outcomes = [await box.run(cell) for _ in range(times)]
            ended.append(times)
            return [*outcomes, await box.run("print(x)")]

    async def body():
        hasty = [play("while True: pass", Limits(seconds=0.8, grace=30)) for _ in range(3)]
        return await asyncio.gather(*hasty, play("s = sum(range(1000))", PATIENT, 20))

    started = time.monotonic()
    *runaways, others = asyncio.run(body())
    assert all(outcome.ok for outcome in others)
    assert ended[-1] == 1  # a runaway was the last to end
    for outcome, after in runaways:
        assert (outcome.fault, outcome.kept, after.text) == (Fault.TIMEOUT, True, "5\n")
        assert outcome.seconds >= 0.8
    # One at a time, whereas the clock of whoever rests stands still.
    assert sum(outcome.seconds for outcome, _ in runaways) < 2 * (time.monotonic() - started)


@pytest.mark.slow
def test_what_rests_can_sleep_on_be_cancelled_and_be_closed(server, monkeypatch):
    monkeypatch.setattr(server_module, "Turns", lambda short, long: Turns(1, 1))

    async def body():
        async with contextlib.AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(Sandbox.open(PATIENT, host=server)) for _ in range(4)]
            first = asyncio.ensure_future(boxes[0].run("while True: pass"))
            await asyncio.sleep(0.3)
            cell = "import time; time.sleep(2); print('slept')"
            gone, asleep, _ = [asyncio.ensure_future(box.run(cell)) for box in boxes[1:]]
            await asyncio.sleep(1)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            again = await boxes[1].run("print('time' in globals())")
            first.cancel()
            return again, await asleep  # the last one is closed while it rests

    again, asleep = asyncio.run(body())
    assert again.text == "False\n"
    assert asleep.text == "slept\n"
    assert asleep.seconds < 2  # it rested for a part of its sleep


NAMES = [b"\xff\xfe", b") R 1 1 1 1", b"a\nThreads:\t1\nb"]  # a guest may call itself anything


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_name_that_a_cell_gives_itself_frees_it_of_its_limit(server, monkeypatch, name):
    monkeypatch.setattr(server_module, "Turns", lambda short, long: Turns(1, 1))
    hostile = (
        f"import ctypes, time\nfor _ in range(10**6): ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); time.sleep(0.001)"
    )

    async def body():
        async with contextlib.AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(Sandbox.open(SHORT, host=server)) for _ in range(2)]
            cells = [hostile, "import time; time.sleep(1); print('fine')"]
            async with asyncio.timeout(30):
                return await asyncio.gather(*(box.run(cell) for box, cell in zip(boxes, cells, strict=True)))

    bad, good = asyncio.run(body())
    assert (bad.fault, bad.kept, bad.error) == (Fault.TIMEOUT, True, KEPT)
    assert (good.error, good.text) == (None, "fine\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_threads_are_counted_under_any_name(servers, name):
    code = f"import ctypes, threading, time; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"
    code += "for _ in range(60): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ntime.sleep(9)"
    outcome = ended(servers("namespaces", "own user"), code, Limits(seconds=20, threads=32))
    assert (outcome.fault, outcome.kept) == (Fault.THREADS, False)


WAKER = """
import ctypes, signal
signal.signal(signal.SIGCONT, lambda *_: None)
call, number = ctypes.CDLL(None).syscall, (lambda *parts: b"".join(part.to_bytes(size, "little") for part, size in parts))
for n in range(1, 80):
    event, timer = ctypes.create_string_buffer(number((0, 8), (18, 4), (0, 52))), ctypes.create_string_buffer(8)  # SIGCONT
    call(222, 1, event, timer)
    once = ctypes.create_string_buffer(number((0, 16), (n // 10, 8), (n % 10 * 10**8, 8)))
    call(223, int.from_bytes(timer.raw[:4], "little"), 0, once, None)
import time
try:
    while True: sum(())
finally: print(time.process_time())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the cell calls the kernel by x86-64's numbers")
def test_a_cell_that_wakes_itself_is_charged_for_its_rest(server, monkeypatch):
    monkeypatch.setattr(server_module, "Turns", lambda short, long: Turns(1, 1))

    async def body():
        async with Sandbox.open(PATIENT, host=server) as other, Sandbox.open(SHORT, host=server) as box:
            await box.run("x = 5")
            running = asyncio.ensure_future(other.run("import time; time.sleep(60)"))
            await asyncio.sleep(0.3)
            started = time.monotonic()
            outcome = await box.run(WAKER)
            elapsed = time.monotonic() - started
            running.cancel()
            return outcome, elapsed

    outcome, elapsed = asyncio.run(body())
    assert outcome.fault is Fault.TIMEOUT
    # With less of a processor some pauses pass with less than AWAKE_SECONDS on it, which aren't charged.
    if not outcome.text or float(outcome.text) < 0.15 * outcome.seconds:  # or was killed before it could say
        pytest.skip("others leave it hardly any processor to wake up on")
    assert outcome.seconds > 0.85 * elapsed  # an honest one would have rested for half of the time


@pytest.mark.slow
def test_cpu_time_is_bounded_over_all_calls(server):
    limits = Limits(seconds=300, cpu_seconds=1)
    outcome = ended(server, "while True: pass", limits)
    assert (outcome.fault, outcome.kept) == (Fault.CPU, False)
    assert outcome.error.startswith("Out of CPU time (limit 1 s for all calls together) and it was restarted.")


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
def test_too_much_memory_is_an_error_to_read(server, code):
    outcome = ended(server, code, Limits(seconds=300, memory_mib=256))
    assert outcome.kept
    assert outcome.fault in (Fault.MEMORY, Fault.RAISED)
    assert "MemoryError" in outcome.error or "Cannot allocate memory" in outcome.error


def test_memory_comes_back(server):
    cells = ["b = bytes(200 * 2**20)", "c = bytes(200 * 2**20)", "del b", "c = bytes(200 * 2**20); print(len(c))"]
    first, second, _, last = play(server, *cells, limits=Limits(seconds=300, memory_mib=300))
    assert (first.fault, second.fault, last.text) == (None, Fault.MEMORY, "209715200\n")


def test_threads_take_little_memory(server):
    cell = "from concurrent.futures import ThreadPoolExecutor as T\nimport threading; wait = threading.Barrier(16)\nwith T(16) as t: print(sum(t.map(lambda n: wait.wait() * 0 + len(bytes(n)), range(16))))"
    assert play(server, cell, limits=Limits(seconds=60, memory_mib=256))[0].text == "120\n"


def test_a_guest_stays_on_its_processors(any_server):
    cell = "import os, threading; found = set()\ndef f(): found.add(len(os.sched_getaffinity(0)))\nf(); t = threading.Thread(target=f); t.start(); t.join(); print(found)"
    assert play(any_server, cell, limits=Limits(processors=1))[0].text == "{1}\n"


@pytest.mark.slow
def test_who_ignores_the_end_of_cpu_time_is_told_of_it_all_the_same(server):
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert ended(server, code, Limits(seconds=300, cpu_seconds=1)).fault is Fault.CPU


def test_threads_are_counted(any_server):
    code = "import threading, time\nfor _ in range(300): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ntime.sleep(9)"
    outcome = ended(any_server, code, Limits(seconds=20, threads=32))
    if outcome.kept:
        assert "can't start new thread" in outcome.error
    else:
        assert outcome.error.startswith("Too many threads (limit 32) and it was restarted.")


@pytest.mark.slow
def test_where_the_kernel_does_not_count_threads_the_host_does(servers):
    code = "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ntime.sleep(9)"
    outcome = ended(servers("namespaces", "own user"), code, Limits(seconds=20, threads=32))
    assert (outcome.fault, outcome.kept) == (Fault.THREADS, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "for n in range(20): open(f'f{n}', 'wb').write(bytes(10**6))",
        "for n in range(999): open(f'f{n}', 'w').close()",
        "import os\nfor n in range(9999): os.mkdir('d'); os.chdir('d')",
        "import os\nos.mkdir('d', 0); os.chmod('d', 0)\nfor n in range(20): open(f'f{n}', 'wb').write(bytes(10**6))",
        "import os\nf = open('f', 'wb'); os.unlink('f')\nfor n in range(20): f.write(bytes(10**6)); f.flush()",
    ],
)
def test_disk_is_bounded(any_server, code):
    outcome = ended(any_server, code, Limits(seconds=20, disk_mib=8, file_mib=8, files=512))
    said = ("No space left", "File too large", "File name too long", "Too many or too large files")
    assert any(text in outcome.error for text in said), outcome


def test_one_file_is_bounded(any_server):
    outcome = ended(any_server, "open('f', 'wb').write(bytes(3 * 2**20))", Limits(file_mib=2))
    assert "File too large" in outcome.error
    assert outcome.kept


# ---- text and pictures ---------------------------------------------------------------------------------------------


def test_text_is_cut_with_a_mark(server):
    (outcome,) = play(server, "print('x' * 300_000)", limits=Limits(characters=1000))
    assert outcome.text == "x" * 1000 + "\n[… 292 KiB more not shown]"
    (outcome,) = play(server, "print('日' * 1000, end='')", limits=Limits(characters=1000))
    assert outcome.text == "日" * 1000
    (outcome,) = play(server, "print('日' * 1001, end='')", limits=Limits(characters=1000))
    assert outcome.text == "日" * 1000 + "\n[… 3 bytes more not shown]"


@pytest.mark.slow
def test_a_flood_of_text_is_swallowed(server):
    outcome = ended(server, "import os\nwhile True: os.write(1, b'y' * 65536)")
    assert outcome.error == KEPT
    assert outcome.text.startswith("yyyy")
    assert outcome.text.endswith("more not shown]")
    assert len(outcome.text) < 20_100


def test_bytes_that_are_no_text_are_replaced(server):
    assert play(server, "import os; os.write(1, b'a\\xff\\xf0\\n')")[0].text == "a\ufffd\ufffd\n"


def test_pictures_are_counted_over_the_episode(server):
    cells = ["for n in range(3): Image.new('L', (n + 1, 1)).show()", "print(image_clue_3)"]
    first, second, third = play(server, *[cells[0]] * 2, cells[1], limits=Limits(pictures=4))
    assert [shown.name for shown in first.pictures] == ["image_clue_0", "image_clue_1", "image_clue_2"]
    assert [shown.name for shown in second.pictures] == ["image_clue_3"]
    assert second.text == "[2 further images not shown, limit 4]\n"
    assert third.text.startswith("<PIL.Image.Image")


def test_large_pictures_are_reduced(server):
    (outcome,) = play(server, "Image.new('L', (3000, 2000), 7).show()", limits=Limits(pixels=60_000))
    (shown,) = outcome.pictures
    assert shown.width * shown.height <= 60_000
    assert abs(shown.width / shown.height - 1.5) < 0.02
    assert outcome.text == f"[image reduced from 3000x2000 to {shown.width}x{shown.height}]\n"
    assert np.unique(pixels(shown)).tolist() == [7]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["(10_000, 10_000)", "(1e9, 1e9)", "(1e5, 6.0)"])
def test_huge_figures_are_drawn_smaller(server, size):
    outcome = ended(server, f"plt.figure(figsize={size}); plt.plot([1]); plt.show()", Limits(seconds=60))
    assert outcome.kept
    for shown in outcome.pictures:
        assert shown.width * shown.height <= 4_000_000
    assert outcome.pictures or outcome.error or "not shown" in outcome.text


def test_pictures_that_are_too_narrow_are_not_shown(server):
    (outcome,) = play(server, "Image.new('L', (2000, 10)).show(); Image.new('L', (1990, 10)).show()")
    assert [(shown.width, shown.height) for shown in outcome.pictures] == [(1990, 10)]
    assert outcome.text == "[image of 2000x10 not shown: too narrow]\n"


def test_pictures_of_no_size_are_not_shown(server):
    cell = "Image.new('RGB', (9, 9)).crop((2, 3, 2, 8)).show(); plt.figure(figsize=(0, 3)); plt.show(); x = 1"
    (outcome,) = play(server, cell)
    assert (outcome.error, outcome.kept, outcome.pictures) == (None, True, ())
    lines = outcome.text.splitlines()
    assert lines[0] == "[image of 0x5 not shown: it is empty]"
    assert lines[1].endswith("not shown: it is empty]")


def test_a_lost_interpreter_comes_back_with_media_and_pictures(server, tmp_path):
    media = (Media(path=make_clip(tmp_path / "clip.mp4")),)
    cells = [
        "Image.new('RGB', (3, 2), (1, 2, 3)).show(); x = 1",
        "import os; print('printed'); os.kill(os.getpid(), 11)",
        "print(image_clue_0.size, image_clue_0.getpixel((0, 0)), len(video_clue_0)); Image.new('L', (9, 9)).show()",
        "print(image_clue_1.size, 'x' in globals())",
    ]
    _, crash, after, last = play(server, *cells, media=media)
    assert crash.text == "printed\n"
    assert crash.error == f"The interpreter crashed (segmentation fault) and it was restarted. {AGAIN}"
    assert (crash.fault, crash.kept) == (Fault.CRASHED, False)
    assert after.text == "(3, 2) (1, 2, 3) 60\n"
    assert [shown.name for shown in after.pictures] == ["image_clue_1"]
    assert last.text == "(9, 9) False\n"


def test_pictures_survive_the_loss_of_their_interpreter(server):
    _, after = play(server, "Image.new('L', (3, 2)).show(); import os; os._exit(7)", "print(image_clue_0.size)")
    assert after.text == "(3, 2)\n"


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("os._exit(7)", "exit code 7"),
        ("os.abort()", "abort"),
        ("os.kill(os.getpid(), 14)", "signal SIGALRM"),
        ("os.kill(os.getpid(), 40)", "signal 40"),
        ("os.kill(os.getpid(), 9)", "was killed, by its own code or because the machine had no memory left,"),
    ],
)
def test_ends_are_told_apart(server, code, detail):
    outcome = ended(server, f"import os; {code}")
    assert detail in outcome.error
    assert outcome.error.endswith(f"and it was restarted. {AGAIN}")


@pytest.mark.slow
def test_threads_that_read_frames_when_a_cell_ends_go_on_in_the_next(server, tmp_path):
    media = (Media(path=make_clip(tmp_path / "clip.mp4")),)
    begin = "from concurrent.futures import ThreadPoolExecutor as T\nt = T(8); asked = []"
    ask = "asked += [t.submit(video_clue_0.__getitem__, n) for n in range(60)]"
    last = f"print([round(f.result().mean() / {SHADE}) for f in asked] == list(range(60)) * 20)"
    outcomes = play(server, begin, *[ask] * 20, last, media=media)
    assert [outcome.error for outcome in outcomes] == [None] * 22
    assert outcomes[-1].text == "True\n"


def test_threads_show_no_more_pictures_than_are_left(server):
    code = "import threading\npicture, wait = Image.new('RGB', (300, 300)), threading.Barrier(16)\ndef f():\n    wait.wait()\n    for _ in range(5): picture.show()\n"
    code += (
        "t = [threading.Thread(target=f) for _ in range(16)]\nfor each in t: each.start()\nfor each in t: each.join()"
    )
    (outcome,) = play(server, code, limits=Limits(seconds=60, pictures=30))
    assert (outcome.error, len(outcome.pictures)) == (None, 30)
    assert outcome.text == "[50 further images not shown, limit 30]\n"


@pytest.mark.slow
def test_a_runaway_whose_threads_read_frames_is_stopped(server, tmp_path):
    media = (Media(path=make_clip(tmp_path / "clip.mp4")),)
    code = "import threading\ndef f():\n    while True:\n        try: video_clue_0.get_batch(range(60))\n        except RuntimeError: pass\n"
    code += "for _ in range(8): threading.Thread(target=f, daemon=True).start()\nwhile True: pass"
    outcome = ended(server, code, media=media)
    assert (outcome.fault, outcome.error, outcome.kept) == (Fault.TIMEOUT, KEPT, True)


BROKEN_FIGURES = [
    "plt.title(r'$\\frac{1$'); plt.show()",
    "f = plt.figure(); f.text(0, 0, r'$\\frac{1$'); f.show()",
    "class F(type(plt.figure())):\n    def draw(self, renderer):\n        while True: pass\nplt.close(); plt.figure(FigureClass=F); plt.show()",
]


@pytest.mark.parametrize(
    "code", [BROKEN_FIGURES[0], BROKEN_FIGURES[1], pytest.param(BROKEN_FIGURES[2], marks=pytest.mark.slow)]
)
def test_a_figure_that_cannot_be_drawn_is_not_in_the_way_of_others(server, code):
    bad, good = play(server, code, "plt.figure(figsize=(3, 2)); plt.plot([1]); plt.show()", limits=SHORT)
    assert (bad.fault in (Fault.RAISED, Fault.TIMEOUT), bad.kept) == (True, True)
    assert (good.error, [(shown.width, shown.height) for shown in good.pictures]) == (None, [(300, 200)])


def without_decoders(server, folder, *cells, limits, seconds=60):
    """The outcomes of cells, the first of them run while nobody's request for frames is attended to, at most so long."""
    done, media = threading.Event(), (Media(path=make_clip(folder / "clip.mp4")),)

    async def body():
        async with Sandbox.open(limits, media=media, host=server) as box:
            for _ in range(films.pool()._max_workers):
                films.pool().submit(done.wait, seconds)
            first = await box.run(cells[0])
            queued = films.pool()._work_queue.qsize()
            done.set()
            return queued, [first, *[await box.run(cell) for cell in cells[1:]]]

    try:
        return asyncio.run(body())
    finally:
        done.set()


@pytest.mark.parametrize("number", range(1, 65))
def test_every_signal_is_told(number):
    fault, detail = call.ended(number)
    assert fault in (Fault.CRASHED, Fault.CPU, Fault.KILLED)
    assert bool(detail) == (fault is Fault.CRASHED)
    assert limits_module.restarted(fault, SHORT, detail).endswith(f"and it was restarted. {AGAIN}")


@pytest.mark.slow
def test_requests_after_the_limit_are_not_even_queued(server, tmp_path):
    code = "n = 0\nwhile True:\n    try: video_clue_0[0]\n    except: n += 1; print(n)"
    queued, (outcome,) = without_decoders(server, tmp_path, code, limits=Limits(seconds=0.2, grace=1))
    assert outcome.fault is Fault.TIMEOUT
    assert outcome.text.startswith("1\n2\n3\n")
    assert queued <= 1


@pytest.mark.slow
def test_waiting_for_a_decoder_is_not_charged(server, tmp_path):
    cells = ["len(video_clue_0)", "print(len(video_clue_0))"]
    _, (first, second) = without_decoders(server, tmp_path, *cells, limits=SHORT, seconds=4)
    assert (first.error, second.text) == (None, "60\n")
    assert first.seconds < 2


@pytest.mark.slow
def test_nobody_waits_for_a_decoder_for_ever(server, tmp_path):
    cells = ["x = 5; video_clue_0[0]", "print(x)"]
    queued, (outcome, after) = without_decoders(server, tmp_path, *cells, limits=Limits(seconds=0.5))
    assert (outcome.fault, outcome.kept, after.text) == (Fault.TIMEOUT, True, "5\n")
    assert queued <= 1


@pytest.mark.slow
def test_a_time_out_while_frames_are_decoded_keeps_the_state(server, tmp_path):
    media = (Media(path=make_clip(tmp_path / "clip.mp4", frames=300, size=(640, 360), gop=300)),)
    outcome = ended(
        server, "while True: video_clue_0.get_batch(range(0, 300, 7))", Limits(seconds=2, grace=10), media=media
    )
    assert (outcome.fault, outcome.kept) == (Fault.TIMEOUT, True)


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (5 * 2**20, "5 MiB")]
)
def test_sizes_are_told_in_round_numbers(count, text):
    assert bytes_more(count) == f"[… {text} more not shown]"
