"""Work in a thread: its result, its failure, and how long whoever is stopped waits for it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from saccade.training import aside as module
from saccade.training.aside import Halted, announced, aside


def test_it_gives_what_the_work_gives():
    assert asyncio.run(aside(lambda going: threading.current_thread().daemon, "it")) is True


def test_it_raises_what_the_work_raises():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(aside(lambda going: 1 / 0, "it"))


def stopped(work):
    """Cancel somebody who waits for the work as soon as it has begun; the seconds that they took to go."""
    begun = threading.Event()

    def told(going):
        begun.set()
        work(going)

    async def body():
        task = asyncio.create_task(aside(told, "the update"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        at = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - at

    return asyncio.run(body())


def test_whoever_is_stopped_waits_for_the_next_micro_batch(caplog):
    ends = []

    def work(going):
        try:
            while True:
                time.sleep(0.01)
                going()
        except Halted:
            ends.append("halted")
            raise

    assert stopped(work) < 5
    assert ends == ["halted"]
    assert "Stopping: waiting at most 30 seconds for the update to end with its micro-batch" in caplog.text


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    stuck = threading.Event()
    assert stopped(lambda going: stuck.wait(20)) < 5
    stuck.set()


STUCK = """
import asyncio, time
from saccade.training.aside import aside

def work(going):
    print("begun", flush=True)
    time.sleep(120)

asyncio.run(aside(work, "the update"))
"""


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_nothing():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=10)
    finally:
        process.kill()
    assert "seconds for the update to end" in said
    assert "KeyboardInterrupt" in said


def test_work_in_the_runs_own_thread_ends_first_and_says_so(caplog):
    done = []

    async def body():
        with announced("the update"):
            os.kill(os.getpid(), signal.SIGINT)
            done.append("worked")
        await asyncio.sleep(60)

    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(body())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, kept)
    assert done == ["worked"]
    assert caplog.text.count("Stopping: waiting for the update to end; Ctrl-C again doesn't wait") == 1


def test_a_second_ctrl_c_ends_it_at_once():
    async def body():
        with announced("the update"):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it went on")

    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(body())
    finally:
        signal.signal(signal.SIGINT, kept)
