"""Places for short and for long cells: who runs, who waits, who is paused; without a guest and without a clock."""

import asyncio
import random

import pytest

from saccade.tools._sandbox.turns import Turn, Turns


class Recorded:
    """A cell that only writes down what is asked of it."""

    def __init__(self):
        self.said = []

    def pause(self):
        self.said.append("pause")

    def resume(self):
        self.said.append("resume")

    @property
    def paused(self):
        return self.said[-1:] == ["pause"]


async def begun(turns):
    turn = await Turn(turns).__aenter__()
    return turn, Recorded()


async def ended(turn):
    await turn.__aexit__(None, None, None)


async def settled(*tasks):
    """Whether tasks are done when everything that could happen has happened."""
    for _ in range(10):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


def test_short_cells_come_one_after_the_other():
    async def body():
        turns = Turns(2, 1)
        first, _ = await begun(turns)
        second, _ = await begun(turns)
        later = [asyncio.ensure_future(begun(turns)) for _ in range(3)]
        assert await settled(*later) == [False] * 3
        await ended(second)
        assert await settled(*later) == [True, False, False]
        await ended(first)
        assert await settled(*later) == [True, True, False]
        for task in later:
            await ended((await task)[0])

    asyncio.run(body())


def test_a_long_cell_leaves_its_place_to_the_next():
    async def body():
        turns = Turns(1, 1)
        turn, cell = await begun(turns)
        later = asyncio.ensure_future(begun(turns))
        assert await settled(later) == [False]
        turn.lapse(cell)
        assert await settled(later) == [True]
        turn.lapse(cell)
        assert cell.said == []  # nobody else wants its long place
        await ended(turn)
        await ended((await later)[0])

    asyncio.run(body())


def test_long_cells_share_their_places_in_turns():
    async def body():
        turns = Turns(1, 1)
        pairs = []
        for _ in range(3):
            turn, cell = await begun(turns)
            turn.lapse(cell)
            pairs.append((turn, cell))
        assert [cell.paused for _, cell in pairs] == [False, True, True]
        order = []
        for _ in range(6):
            (running,) = [number for number, (_, cell) in enumerate(pairs) if not cell.paused]
            order.append(running)
            pairs[running][0].lapse(pairs[running][1])
        assert order == [0, 1, 2, 0, 1, 2]

    asyncio.run(body())


def test_the_end_of_a_long_cell_lets_the_next_go_on():
    async def body():
        turns = Turns(1, 1)
        (one, first), (two, second), (three, third) = [await lapsed(turns) for _ in range(3)]
        await ended(two)  # while it is paused
        await ended(one)
        assert (first.said, second.said, third.said) == ([], ["pause"], ["pause", "resume"])
        await ended(three)
        _, fourth = await lapsed(turns)
        assert fourth.said == []

    async def lapsed(turns):
        turn, cell = await begun(turns)
        turn.lapse(cell)
        return turn, cell

    asyncio.run(body())


def test_who_gives_up_waiting_takes_no_place():
    async def body():
        turns = Turns(1, 1)
        turn, _ = await begun(turns)
        gone, there = (asyncio.ensure_future(begun(turns)) for _ in range(2))
        await settled()
        gone.cancel()
        await settled()
        await ended(turn)
        assert await settled(there) == [True]
        last = asyncio.ensure_future(begun(turns))
        await settled()
        await ended((await there)[0])
        last.cancel()  # in the moment in which it is given the place
        assert await settled(last) == [True]
        assert last.cancelled()
        assert await settled(asyncio.ensure_future(begun(turns))) == [True]

    asyncio.run(body())


def test_a_cell_that_cannot_be_paused_keeps_its_place_and_no_other():
    class Stubborn(Recorded):
        def pause(self):
            raise ValueError("no")

    async def body():
        turns = Turns(1, 1)
        first, cell = await begun(turns)
        first.lapse(cell)
        second, stubborn = (await begun(turns))[0], Stubborn()
        with pytest.raises(ValueError, match="no"):
            second.lapse(stubborn)
        later = [asyncio.ensure_future(begun(turns)) for _ in range(2)]
        assert await settled(*later) == [False, False]
        await ended(second)
        await ended(first)
        assert await settled(*later) == [True, False]
        await ended((await later[0])[0])
        await ended((await later[1])[0])

    asyncio.run(body())


def test_whatever_happens_nobody_starves_and_no_more_run_than_there_are_places():
    async def body(seed):
        draw = random.Random(seed)
        short, long = draw.randint(1, 3), draw.randint(1, 3)
        turns, waiting, held, lapsed = Turns(short, long), [], {}, set()
        for _ in range(300):
            running = [turn for turn, cell in held.items() if not cell.paused]
            what = draw.choice(["begin", "lapse", "end", "cancel"])
            if what == "begin":
                waiting.append(asyncio.ensure_future(begun(turns)))
            elif what == "cancel" and waiting:
                waiting.pop(draw.randrange(len(waiting))).cancel()
            elif what == "lapse" and running:
                turn = draw.choice(running)
                lapsed.add(turn)
                turn.lapse(held[turn])
            elif what == "end" and held:
                turn = draw.choice(list(held))
                del held[turn]
                lapsed.discard(turn)
                await ended(turn)
            await settled()
            for task in [task for task in waiting if task.done()]:
                waiting.remove(task)
                turn, cell = task.result()
                held[turn] = cell
            longs = [held[turn].paused for turn in held if turn in lapsed]
            shorts = len(held) - len(longs)
            assert shorts <= short
            assert shorts == short or not waiting
            assert longs.count(False) == min(long, len(longs))
        for task in waiting:
            task.cancel()

    for seed in range(20):
        asyncio.run(body(seed))
