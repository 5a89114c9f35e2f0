"""A guest's line as its host's loop hears it: a socket that is listened to from the first call to the last.

    loop ──can be read──> Line._hear, into the bytes that `exactly` waits for

To begin and end listening at each call would take longer than a short call. What nobody waits for isn't read, and the
second time that it is heard, listening ends until somebody waits: a guest that talks out of turn keeps nobody busy.
"""

import asyncio
import fcntl
import socket
import sys
import termios


def pending(place: int) -> int:
    """How many bytes can be read from a socket or a pipe at once; none at its end either."""
    return int.from_bytes(fcntl.ioctl(place, termios.FIONREAD, bytes(4)), sys.byteorder)


class Line:
    """The host's end, which doesn't block; bytes are sent and awaited by one task at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._place = end, end.fileno()
        self._loop: asyncio.AbstractEventLoop | None = None  # which listens
        self._waiting: asyncio.Future[None] | None = None
        self._rest = memoryview(b"")  # what is to be filled
        self._ignored = 0

    def silent(self) -> bool:
        """Whether nothing was said that nobody has taken."""
        return not pending(self._place) and (self._waiting is None or not self._waiting.done())

    def post(self, data: bytes) -> memoryview:
        """Send as much as there is room for at once; what is left. Raises ConnectionError."""
        try:
            return memoryview(data)[self._end.send(data) :]
        except BlockingIOError:
            return memoryview(data)

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of it. Raises ConnectionError."""
        await asyncio.get_running_loop().sock_sendall(self._end, data)

    async def exactly(self, size: int) -> bytearray:
        """The next so many bytes. Raises EOFError where the line ends before, ConnectionError."""
        data = bytearray(size)
        self._rest = memoryview(data)
        if not pending(self._place) or not self._filled():
            self._listen()
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return data

    def close(self) -> None:
        """Hang up."""
        self._ignore()
        self._end.close()

    def _filled(self) -> bool:
        """Take what was said as far as it is wanted; whether that is all. Raises EOFError, ConnectionError."""
        try:
            while self._rest.nbytes:
                count = self._end.recv_into(self._rest)
                if not count:
                    raise EOFError
                self._rest = self._rest[count:]
        except BlockingIOError:
            return False
        return True

    def _hear(self) -> None:
        if self._waiting is None or self._waiting.done():
            self._ignored += 1
            if self._ignored > 1:
                self._ignore()
            return
        try:
            if self._filled():
                self._waiting.set_result(None)
        except (EOFError, ConnectionError) as error:
            self._waiting.set_exception(error)

    def _listen(self) -> None:
        self._ignored = 0
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._place, self._hear)

    def _ignore(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._place)
            self._loop = None
