"""What a call prints: taken out of its guest's pipe, the first characters kept, the rest counted.

    guest ──pipe──> Printed: listening on the loop while the call runs, emptying the pipe when it is over

Whatever was printed outlives its guest, since it is the pipe's or the host's.
"""

import asyncio
import os

from saccade.tools._sandbox.limits import MIB, bytes_more
from saccade.tools._sandbox.line import pending

_READ, _READS = 1 << 16, 16  # bytes at once, and times in a row
_PAUSE = 0.01  # seconds between draughts of a flood


class Printed:
    """The text of one call; `pipe` is where it comes from, which doesn't block."""

    def __init__(self, pipe: int, characters: int) -> None:
        self._pipe, self._most = pipe, characters
        self._held, self._dropped = bytearray(), 0
        self._loop: asyncio.AbstractEventLoop | None = None  # which listens
        self._pause: asyncio.TimerHandle | None = None

    def listen(self) -> None:
        """Take what comes as soon as it comes, until `hush`."""
        self._loop, self._pause = asyncio.get_running_loop(), None
        self._loop.add_reader(self._pipe, self._hear, self._loop)

    def hush(self) -> None:
        """Listen no longer."""
        if self._loop is not None:
            self._loop.remove_reader(self._pipe)
        if self._pause is not None:
            self._pause.cancel()

    def empty(self) -> None:
        """Take what is in the pipe, as far as that ends."""
        for _ in range(_READS):
            if not pending(self._pipe):
                return
            self._add(os.read(self._pipe, _READ))

    def text(self) -> str:
        """What is kept, with a mark where something was left out."""
        if not self._held:
            return ""
        text = self._held.decode("utf-8", "replace")
        shown = text[: self._most]
        more = self._dropped + len(text[self._most :].encode())
        return f"{shown}\n{bytes_more(more)}" if more else shown

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        if not pending(self._pipe):  # its end
            loop.remove_reader(self._pipe)
        self.empty()
        if self._dropped > MIB:  # nobody will read it: the loop has better things to do
            loop.remove_reader(self._pipe)
            self._pause = loop.call_later(_PAUSE, self.listen)

    def _add(self, data: bytes) -> None:
        room = 4 * self._most - len(self._held)  # a character has four bytes at most
        self._held += data[:room]
        self._dropped += max(0, len(data) - room)
