"""Slots for short and long cells: which cells run, wait and are paused; without a worker and without a clock."""

import asyncio
import random

import pytest

from saccade.sandbox.scheduler import CpuSlot, Scheduler


class RecordingCell:
    """A cell that records the scheduler's calls."""

    def __init__(self):
        self.calls = []

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    @property
    def is_paused(self):
        return self.calls[-1:] == ["pause"]


async def begin(scheduler):
    slot = await CpuSlot(scheduler).__aenter__()
    return slot, RecordingCell()


async def end(slot):
    await slot.__aexit__(None, None, None)


async def are_done(*tasks):
    """Let the event loop run until nothing changes; return which tasks are done."""
    for _ in range(10):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


def test_short_cells_run_in_order():
    async def body():
        scheduler = Scheduler(2, 1)
        first, _ = await begin(scheduler)
        second, _ = await begin(scheduler)
        later = [asyncio.ensure_future(begin(scheduler)) for _ in range(3)]
        assert await are_done(*later) == [False] * 3
        await end(second)
        assert await are_done(*later) == [True, False, False]
        await end(first)
        assert await are_done(*later) == [True, True, False]
        for task in later:
            await end((await task)[0])

    asyncio.run(body())


def test_a_long_cell_frees_its_short_slot():
    async def body():
        scheduler = Scheduler(1, 1)
        slot, cell = await begin(scheduler)
        later = asyncio.ensure_future(begin(scheduler))
        assert await are_done(later) == [False]
        slot.end_time_slice(cell)
        assert await are_done(later) == [True]
        slot.end_time_slice(cell)
        assert cell.calls == []  # no other cell waits for the long slot
        await end(slot)
        await end((await later)[0])

    asyncio.run(body())


def test_long_cells_take_turns():
    async def body():
        scheduler = Scheduler(1, 1)
        pairs = []
        for _ in range(3):
            slot, cell = await begin(scheduler)
            slot.end_time_slice(cell)
            pairs.append((slot, cell))
        assert [cell.is_paused for _, cell in pairs] == [False, True, True]
        order = []
        for _ in range(6):
            (running,) = [number for number, (_, cell) in enumerate(pairs) if not cell.is_paused]
            order.append(running)
            pairs[running][0].end_time_slice(pairs[running][1])
        assert order == [0, 1, 2, 0, 1, 2]

    asyncio.run(body())


def test_the_end_of_a_long_cell_resumes_the_next():
    async def body():
        scheduler = Scheduler(1, 1)
        (slot_1, first), (slot_2, second), (slot_3, third) = [await begin_long(scheduler) for _ in range(3)]
        await end(slot_2)  # a paused cell
        await end(slot_1)
        assert (first.calls, second.calls, third.calls) == ([], ["pause"], ["pause", "resume"])
        await end(slot_3)
        _, fourth = await begin_long(scheduler)
        assert fourth.calls == []

    async def begin_long(scheduler):
        slot, cell = await begin(scheduler)
        slot.end_time_slice(cell)
        return slot, cell

    asyncio.run(body())


def test_cancelled_waiters_take_no_slot():
    async def body():
        scheduler = Scheduler(1, 1)
        slot, _ = await begin(scheduler)
        cancelled, waiting = (asyncio.ensure_future(begin(scheduler)) for _ in range(2))
        await are_done()
        cancelled.cancel()
        await are_done()
        await end(slot)
        assert await are_done(waiting) == [True]
        last = asyncio.ensure_future(begin(scheduler))
        await are_done()
        await end((await waiting)[0])
        last.cancel()  # right after it received the slot
        assert await are_done(last) == [True]
        assert last.cancelled()
        assert await are_done(asyncio.ensure_future(begin(scheduler))) == [True]

    asyncio.run(body())


def test_a_cell_that_cannot_be_paused_keeps_its_slot():
    class UnpausableCell(RecordingCell):
        def pause(self):
            raise ProcessLookupError

    async def body():
        scheduler = Scheduler(1, 1)
        first, cell = await begin(scheduler)
        first.end_time_slice(cell)
        second, unpausable = (await begin(scheduler))[0], UnpausableCell()
        with pytest.raises(ProcessLookupError):
            second.end_time_slice(unpausable)
        later = [asyncio.ensure_future(begin(scheduler)) for _ in range(2)]
        assert await are_done(*later) == [False, False]
        await end(second)
        await end(first)
        assert await are_done(*later) == [True, False]
        await end((await later[0])[0])
        await end((await later[1])[0])

    asyncio.run(body())


def test_no_cell_starves_and_slots_are_never_exceeded():
    async def body(seed):
        rng = random.Random(seed)
        short, long = rng.randint(1, 3), rng.randint(1, 3)
        scheduler, waiting, cells, long_slots = Scheduler(short, long), [], {}, set()
        for _ in range(300):
            running = [slot for slot, cell in cells.items() if not cell.is_paused]
            step = rng.choice(["begin", "end_time_slice", "end", "cancel"])
            if step == "begin":
                waiting.append(asyncio.ensure_future(begin(scheduler)))
            elif step == "cancel" and waiting:
                waiting.pop(rng.randrange(len(waiting))).cancel()
            elif step == "end_time_slice" and running:
                slot = rng.choice(running)
                long_slots.add(slot)
                slot.end_time_slice(cells[slot])
            elif step == "end" and cells:
                slot = rng.choice(list(cells))
                del cells[slot]
                long_slots.discard(slot)
                await end(slot)
            await are_done()
            for task in [task for task in waiting if task.done()]:
                waiting.remove(task)
                slot, cell = task.result()
                cells[slot] = cell
            longs = [cells[slot].is_paused for slot in cells if slot in long_slots]
            shorts = len(cells) - len(longs)
            assert shorts <= short
            assert shorts == short or not waiting
            assert longs.count(False) == min(long, len(longs))
        for task in waiting:
            task.cancel()

    for seed in range(20):
        asyncio.run(body(seed))
