"""Lots on their way: rolled out one after the other, some versions ahead of the weights that will learn from them.

    rolling ──lot──> waiting ──take──> trainer: learn, publish ──published(version)──┐
       ▲                                                                             │
       └──── lot n is begun once n − version <= most, and goes on over new weights <──┘

Two tasks: `Ahead` rolls, whoever calls `take` trains. Rolling waits for a version, the trainer for a lot, and neither
for anything else, so one of them can always go on. With `most` 0 they take turns. A trainer that is `patient` takes
nothing until rolling waits for a version: so lateness can be tried out, lot for lot the same in every run. One that
isn't takes what there is while the next lot is rolled out: what that lot's attempts are sampled from then depends on
when new weights came.

At most `most` + 1 lots are held. Where `room` tokens or more of conversations wait already (0: no bound), no other lot
is begun, whatever `most` says; so the memory of what waits is bounded by `room` and one lot.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from saccade.training.lots import Lot
from saccade.training.prompts import Prompts

Roll = Callable[[Prompts, int], Awaitable[tuple[Lot, Prompts]]]


class Ahead:
    """Rolls out lots `version` to `last` − 1 with `roll`, in an `async with`; `lots` of them wait already.

    `tokens` counts what was sampled for the lots that it rolled out.
    """

    def __init__(
        self,
        roll: Roll,
        prompts: Prompts,
        lots: Sequence[Lot],
        *,
        version: int,
        last: int,
        most: int,
        patient: bool,
        room: int = 0,
    ) -> None:
        self.tokens, self._room = 0, room
        self._roll, self._prompts, self._waiting = roll, prompts, deque(lots)
        self._version, self._last, self._most, self._patient = version, last, most, patient
        self._next = version + len(lots)  # the lot to be rolled out next, or being so
        self._news = asyncio.Event()

    async def __aenter__(self) -> "Ahead":
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def state(self) -> tuple[Prompts, tuple[Lot, ...]]:
        """What a checkpoint needs: the prompts after the last lot that is whole, and the lots that wait."""
        return self._prompts, tuple(self._waiting)

    async def take(self) -> Lot:
        """The next lot, in order. Raises what rolling it out raised."""
        await self._until(self._ready)
        if not self._waiting:
            self._task.result()  # it has ended without that lot, and its exception says why
        self._news.set()  # there is room for another
        return self._waiting.popleft()

    def _ready(self) -> bool:
        return self._task.done() or (bool(self._waiting) and not (self._patient and self._due()))

    def published(self, version: int) -> None:
        """There are new weights."""
        self._version = version
        self._news.set()

    async def _run(self) -> None:
        while self._next < self._last:
            await self._until(self._due)
            lot, self._prompts = await self._roll(self._prompts, self._next)
            self._waiting.append(lot)
            self.tokens += lot.tokens
            self._next += 1
            self._news.set()

    def _due(self) -> bool:
        """Whether the next lot may be rolled out: it isn't too far ahead, and there is room for it."""
        full = self._room and self._waiting and sum(lot.held for lot in self._waiting) >= self._room
        return self._next - self._version <= self._most and not full

    async def _until(self, so: Callable[[], bool]) -> None:
        # Both tasks wait here. Setting the event wakes whoever waits now; clearing it puts nobody back to sleep.
        while not so():
            self._news.clear()
            await self._news.wait()
