"""Updates in a background thread: result, exception, and how long a cancelled run waits."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from signal_handlers import handle_signal

from saccade.training.background import (
    STOPPED_BY_TORCHRUN,
    Abandoned,
    Cancelled,
    RankLostError,
    defer_interrupt,
    run_in_thread,
)
from saccade.utils.async_utils import run_in_daemon_thread


def test_run_in_thread_returns_the_result():
    assert asyncio.run(run_in_thread(lambda check: threading.current_thread().daemon, "the update")) is True


def test_run_in_thread_raises_the_exception():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(lambda check: 1 / 0, "the update"))


def cancel_while_running(function, error=asyncio.CancelledError, message=None):
    """Cancel a task that awaits the function in a thread, once it runs, and wait until the task raises an error."""
    has_started = threading.Event()

    def run(check_cancelled):
        has_started.set()
        function(check_cancelled)

    async def cancel():
        task = asyncio.create_task(run_in_thread(run, "the update"))
        while not has_started.is_set():
            await asyncio.sleep(0.001)
        task.cancel(message)
        with pytest.raises(error):
            await task

    asyncio.run(cancel())


@pytest.mark.parametrize(("message", "logged"), [(None, [("the update",)]), (STOPPED_BY_TORCHRUN, [])])
def test_a_rank_lost_while_a_run_is_cancelled_ends_it_with_the_reason(caplog, message, logged):
    """Its training can't save a checkpoint, so it isn't one more line in the log."""

    def update(check_cancelled):
        try:
            while True:
                time.sleep(0.01)
                check_cancelled()
        except Cancelled:
            raise RankLostError("rank 1 failed") from None

    cancel_while_running(update, RankLostError, message)
    assert [record.args for record in caplog.records] == logged


def test_a_cancelled_run_waits_for_the_next_micro_batch(caplog):
    was_cancelled = []

    def update(check_cancelled):
        try:
            while True:
                time.sleep(0.01)
                check_cancelled()
        except Cancelled:
            was_cancelled.append(True)
            raise

    cancel_while_running(update)
    assert was_cancelled == [True]
    assert [record.args for record in caplog.records] == [("the update",)]


def test_the_result_of_an_update_that_ends_nevertheless_is_returned():
    """The caller records the update, and is cancelled at its next await; a Ctrl-C stays a Ctrl-C."""
    has_started, results = threading.Event(), []

    def update(check_cancelled):
        has_started.set()
        time.sleep(0.1)
        return "weights"

    def press_ctrl_c():
        has_started.wait(600)
        os.kill(os.getpid(), signal.SIGINT)

    async def run():
        pressed = run_in_daemon_thread(press_ctrl_c, "ctrl-c")
        results.append(await run_in_thread(update, "the update"))
        await asyncio.sleep(60)
        await pressed
        pytest.fail("the cancellation was lost")

    with handle_signal(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert results == ["weights"]


def test_a_stop_by_torchrun_is_not_logged_as_an_interrupt_by_the_work_after_the_one_it_came_in(caplog):
    """An update ends, and the checkpoint in progress is waited for: torchrun's reason is the one sentence."""
    has_started, may_end, results = threading.Event(), threading.Event(), []

    def update(check_cancelled):
        has_started.set()
        assert may_end.wait(600)

    async def run():
        results.append(await run_in_thread(update, "the update"))
        await run_in_thread(lambda check_cancelled: time.sleep(0.1), "the checkpoint")

    async def cancel():
        task = asyncio.create_task(run())
        while not has_started.is_set():
            await asyncio.sleep(0.001)
        task.cancel(STOPPED_BY_TORCHRUN)
        may_end.set()
        with pytest.raises(asyncio.CancelledError, match=STOPPED_BY_TORCHRUN):
            await task

    asyncio.run(cancel())
    assert (results, caplog.records) == ([None], [])


def test_a_second_cancellation_abandons_the_update():
    """It is no plain cancellation, after which the weights would be known."""
    may_finish = threading.Event()

    async def run():
        task = asyncio.create_task(run_in_thread(lambda check: may_finish.wait(600), "the update"))
        for _ in range(2):
            await asyncio.sleep(0.01)
            task.cancel()
        with pytest.raises(Abandoned):
            await task
        may_finish.set()

    asyncio.run(run())


BLOCKED = """
import asyncio, signal, time
from saccade.training.background import run_in_thread

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell

def update(check_cancelled):
    print("started", flush=True)
    time.sleep(600)

async def main():
    # With a handler of the loop, every signal wakes it: also one that arrives just before it waits.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    await run_in_thread(update, "the update")

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        warning = process.stderr.readline()  # from here on the first signal is handled
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert "the update" in warning
    assert "KeyboardInterrupt" in stderr


@pytest.fixture
def default_interrupt():
    with handle_signal(signal.SIGINT, signal.default_int_handler):
        yield


@pytest.mark.usefixtures("default_interrupt")
def test_defer_interrupt_finishes_the_block_and_logs(caplog):
    finished = []

    async def run():
        with defer_interrupt("the update"):
            os.kill(os.getpid(), signal.SIGINT)
            finished.append(True)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert finished == [True]
    assert [record.args for record in caplog.records] == [("the update",)]


@pytest.mark.usefixtures("default_interrupt")
def test_a_second_interrupt_stops_the_deferred_block():
    async def run():
        with defer_interrupt("the update"):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second interrupt was ignored")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
