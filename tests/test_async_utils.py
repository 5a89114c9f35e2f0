"""Async helpers: `run_until` and timeouts on a clock that can be paused."""

import asyncio
import gc
import subprocess
import sys

import pytest
from virtual_time import run_in_virtual_time

from saccade.utils.async_utils import (
    PausableClock,
    gather_or_cancel,
    hide_interrupted_tasks,
    keep_collections_short,
    pause_active_timeouts,
    run_until,
)


async def sleep_and_return(seconds, result="done"):
    await asyncio.sleep(seconds)
    return result


def test_run_until_returns_none_when_stopped():
    async def body():
        stop_event = asyncio.Event()
        assert await run_until(stop_event, sleep_and_return(0)) == "done"
        asyncio.get_running_loop().call_later(0.01, stop_event.set)
        assert await run_until(stop_event, sleep_and_return(60)) is None

    run_in_virtual_time(body())


def test_pauses_do_not_count_toward_a_timeout():
    """Two nested pauses, each longer than the timeout; the timeout expires only after them."""

    async def body():
        clock, start_time = PausableClock(), asyncio.get_running_loop().time()

        async def sleep_with_timeout():
            async with clock.timeout_at(clock.time() + 0.05) as limit:
                for _ in range(2):
                    with clock.pause(), clock.pause():
                        paused_at = clock.time()
                        await asyncio.sleep(0.08)
                        assert clock.time() == paused_at
                assert not limit.expired()
                await asyncio.sleep(60)

        with pytest.raises(TimeoutError):
            await sleep_with_timeout()
        return asyncio.get_running_loop().time() - start_time

    assert run_in_virtual_time(body()) == pytest.approx(0.21)


def test_a_timeout_set_in_a_pause_starts_at_its_end():
    async def body():
        clock = PausableClock()

        async def sleep_with_timeout():
            async with clock.timeout_at(clock.time() + 0.05):
                await asyncio.sleep(60)

        with clock.pause():
            task = asyncio.create_task(sleep_with_timeout())
            await asyncio.sleep(0.1)
            assert not task.done()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 10)

    run_in_virtual_time(body())


def test_blocking_the_loop_in_a_pause_costs_no_time():
    async def body():
        clock = PausableClock()
        async with clock.timeout_at(clock.time() + 0.05):
            with clock.pause():
                asyncio.get_running_loop()._selector.now += 60  # the loop is blocked for a minute
            await asyncio.sleep(0.01)
        async with clock.timeout_at(None) as limit:
            await asyncio.sleep(0)
        assert limit.when() is None

    run_in_virtual_time(body())


def test_an_expired_timeout_stays_expired():
    """The clock is paused after the timeout has expired, but before TimeoutError is raised in the task."""

    async def body():
        clock = PausableClock()

        async def sleep_with_timeout():
            async with clock.timeout_at(clock.time() + 0.01):
                try:
                    await asyncio.sleep(60)
                finally:
                    with clock.pause():
                        await asyncio.sleep(0)

        with pytest.raises(TimeoutError):
            await sleep_with_timeout()

    run_in_virtual_time(body())


def test_a_wait_of_one_task_pauses_no_timeout_of_another():
    async def body():
        clock, loop = PausableClock(), asyncio.get_running_loop()
        ended = {}

        async def run(name, *, waits):
            try:
                async with clock.timeout_at(clock.time() + 1.0):
                    if waits:
                        with pause_active_timeouts(), pause_active_timeouts():
                            await asyncio.sleep(5)
                            with clock.pause():
                                await asyncio.sleep(5)
                    await asyncio.sleep(60)
            except TimeoutError:
                ended[name] = loop.time() - start_time

        start_time = loop.time()
        await asyncio.gather(run("waits", waits=True), run("works", waits=False))
        assert ended == pytest.approx({"works": 1.0, "waits": 11.0})

    run_in_virtual_time(body())


def test_a_wait_pauses_all_timeouts_around_it():
    """A tool's wait counts neither toward the tool's timeout nor toward its episode's."""

    async def body():
        episode_clock, tool_clock = PausableClock(), PausableClock()
        async with episode_clock.timeout_at(episode_clock.time() + 1.0) as episode_limit:
            async with tool_clock.timeout_at(tool_clock.time() + 1.0) as tool_limit, episode_clock.timeout_at(None):
                with pause_active_timeouts():
                    assert episode_limit.when() is tool_limit.when() is None
                    await asyncio.sleep(5)
                await asyncio.sleep(0.5)
            late = asyncio.create_task(wait_with_timeouts_paused())  # its context holds the episode's timeout
        await late

    async def wait_with_timeouts_paused():
        with pause_active_timeouts():
            await asyncio.sleep(1)

    run_in_virtual_time(body())


# ---- gather_or_cancel ------------------------------------------------------------------------------------------------


def test_gather_or_cancel_returns_results_in_order():
    assert run_in_virtual_time(gather_or_cancel([asyncio.sleep(0.02, "a"), asyncio.sleep(0.0, "b")])) == ["a", "b"]


def test_gather_or_cancel_raises_when_all_others_have_ended():
    """The cleanup of a cancelled coroutine takes time, and is complete when the failure is raised."""
    events = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            events.append("cleaned up")

    async def fail():
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    async def body():
        with pytest.raises(ZeroDivisionError):
            await gather_or_cancel([slow(), fail(), slow()])
        assert events == ["cleaned up", "cleaned up"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(body())


def test_cancelling_gather_or_cancel_waits_for_all_cleanups():
    events = []

    async def slow(seconds):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(seconds)
            events.append(seconds)

    async def body():
        task = asyncio.create_task(gather_or_cancel([slow(0.01), slow(0.05)]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert events == [0.01, 0.05]

    run_in_virtual_time(body())


def test_collections_skip_what_existed_before_the_block_and_not_after_it():
    before = [[] for _ in range(1000)]
    with keep_collections_short():
        gc.collect()
        assert len(gc.get_objects()) < gc.get_freeze_count()
        assert not any(item is before[0] for item in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(item is before[0] for item in gc.get_objects())


@pytest.mark.slow
def test_a_task_that_ctrl_c_has_ended_is_not_logged(caplog):
    """A second Ctrl-C is raised in whichever task runs, and no code awaits that task."""

    async def fail(error):
        raise error

    async def body(error):
        hide_interrupted_tasks()
        asyncio.ensure_future(fail(error))  # noqa: RUF006
        await asyncio.sleep(0.01)

    asyncio.run(body(ValueError("a bug")))
    gc.collect()
    assert "a bug" in caplog.text
    caplog.clear()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(body(KeyboardInterrupt()))
    gc.collect()
    assert not caplog.text


THREAD_WITH_TENSORS = """
import asyncio, gc, time

import torch

from saccade.utils.async_utils import run_in_daemon_thread

gc.disable()


async def main():
    weight = torch.zeros(1, requires_grad=True)
    held = [weight.sin() for _ in range(50_000)]  # each lets other threads run when it is freed
    future = run_in_daemon_thread(lambda held=held: time.sleep(0.5), "holder")
    del held
    await future


asyncio.run(main())
"""


@pytest.mark.slow
def test_a_thread_frees_its_tensors_before_the_interpreter_may_exit():
    """A thread that frees a tensor during the exit aborts the process (exit code 134)."""
    done = subprocess.run([sys.executable, "-c", THREAD_WITH_TENSORS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
