"""Whose turn it is: places for short cells and places for long ones, so that runaways don't hold up all others.

    Turn.__aenter__ ──first come, first served──> short place ──lapse──> long place ──lapse──> paused
                                                                 └<──────── the first that was ──┘

Nobody knows beforehand how long a cell will run. Each begins as a short one; having run for a while (`lapse`) it
becomes a long one, and its short place goes to whoever waits for one. Where there are more long cells than places, they
have them in turns and are paused in between. So neither kind waits for the other, and no more run at a time than there
are places.
"""

import asyncio
from collections import deque
from typing import Protocol


class Cell(Protocol):
    """What runs while it is its turn."""

    def pause(self) -> None:
        """Rest until `resume`."""

    def resume(self) -> None:
        """Go on."""


class Turns:
    """So many places for short cells, and so many for long ones; of one event loop."""

    def __init__(self, short: int, long: int) -> None:
        self._free, self._most = short, long
        self._waiting: deque[asyncio.Future[None]] = deque()  # for short places
        self._long: dict[Turn, Cell] = {}
        self._paused: dict[Turn, Cell] = {}

    async def begin(self) -> None:
        """Wait for a short place."""
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given one meanwhile
                self._release()
            raise

    def lapse(self, turn: "Turn", cell: Cell) -> None:
        """The cell has run for a while: it goes on in a long place, at once or when it is its turn again."""
        if turn in self._long and not self._paused:
            return  # nobody else wants the place
        full = bool(self._paused) or len(self._long) == self._most
        if full:
            cell.pause()  # first: should it fail, all places are as they were
        if self._long.pop(turn, None) is None:
            self._release()
        (self._paused if full else self._long)[turn] = cell
        self._fill()

    def end(self, turn: "Turn") -> None:
        """The turn is over, whatever place it had."""
        if self._long.pop(turn, None) is None and self._paused.pop(turn, None) is None:
            self._release()
        self._fill()

    def _release(self) -> None:
        """A short place is the next one's."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # who waited for it may have gone
                place.set_result(None)
                return
        self._free += 1

    def _fill(self) -> None:
        while self._paused and len(self._long) < self._most:
            turn = next(iter(self._paused))
            self._long[turn] = self._paused.pop(turn)
            self._long[turn].resume()


class Turn:
    """A cell's turn: waited for with `async with`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def __aenter__(self) -> "Turn":
        await self._turns.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._turns.end(self)

    def lapse(self, cell: Cell) -> None:
        """The cell has run for a while since it began, went on or lapsed before."""
        self._turns.lapse(self, cell)
