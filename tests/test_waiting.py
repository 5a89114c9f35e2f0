"""Waiting: until something is set, and by a clock that can stand still."""

import asyncio

import pytest

from saccade.waiting import PausableClock, until


async def sleeping(seconds, result="done"):
    await asyncio.sleep(seconds)
    return result


def test_work_that_is_cut_short_gives_none():
    async def body():
        enough = asyncio.Event()
        assert await until(enough, sleeping(0)) == "done"
        asyncio.get_running_loop().call_later(0.01, enough.set)
        assert await until(enough, sleeping(60)) is None

    asyncio.run(body())


def test_a_limit_is_not_charged_for_pauses():
    """Two pauses that are each longer than the limit, one of them in another, and the limit passes afterwards."""

    async def body():
        clock, begun = PausableClock(), asyncio.get_running_loop().time()

        async def limited():
            async with clock.timeout_at(clock.time() + 0.05) as limit:
                for _ in range(2):
                    with clock.paused(), clock.paused():
                        at = clock.time()
                        await asyncio.sleep(0.08)
                        assert clock.time() == at
                assert not limit.expired()
                await asyncio.sleep(60)

        with pytest.raises(TimeoutError):
            await limited()
        return asyncio.get_running_loop().time() - begun

    assert 0.2 < asyncio.run(body()) < 10


def test_a_limit_of_a_pause_begins_when_it_ends():
    async def body():
        clock = PausableClock()

        async def limited():
            async with clock.timeout_at(clock.time() + 0.05):
                await asyncio.sleep(60)

        with clock.paused():
            task = asyncio.create_task(limited())
            await asyncio.sleep(0.1)
            assert not task.done()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 10)

    asyncio.run(body())


def test_work_that_blocks_the_loop_in_a_pause_costs_no_time():
    import time

    async def body():
        clock = PausableClock()
        async with clock.timeout_at(clock.time() + 0.05):
            with clock.paused():
                time.sleep(0.1)
            await asyncio.sleep(0.01)
        async with clock.timeout_at(None) as limit:
            await asyncio.sleep(0)
        assert limit.when() is None

    asyncio.run(body())


def test_a_limit_that_has_passed_stays_so():
    """The clock is paused when the limit has passed, but whoever it bounds has not noticed yet."""

    async def body():
        clock = PausableClock()

        async def limited():
            async with clock.timeout_at(clock.time() + 0.01):
                try:
                    await asyncio.sleep(60)
                finally:
                    with clock.paused():
                        await asyncio.sleep(0)

        with pytest.raises(TimeoutError):
            await limited()

    asyncio.run(body())
