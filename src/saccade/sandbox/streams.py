"""The host's ends of a worker's socket and of its stdout pipe, read from the event loop without threads.

    worker ──socket──> WorkerConnection: registered with the event loop from the first call to the last
           ──pipe────> StdoutCapture: keeps the first characters that a call prints, counts the rest

Registering the socket at each call would take longer than a short call. Bytes that no read waits for stay in the
socket, and the connection unregisters until the next read, so that a worker that sends out of turn doesn't keep the
event loop busy. Printed text survives the worker, since it is in the pipe or on the host.
"""

import asyncio
import fcntl
import os
import socket
import sys
import termios

from saccade.sandbox.limits import MIB, format_omitted_bytes

_READ_BYTES, _MAX_READS = 1 << 16, 16  # of stdout: per read, and reads in a row
_FLOOD_PAUSE_SECONDS = 0.01  # between reads once a call prints more than will be shown


def count_readable_bytes(fd: int) -> int:
    """Return how many bytes a socket or pipe has ready to read; 0 at end of file too."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


async def wait_readable(fd: int) -> None:
    """Wait until a descriptor is readable."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


class WorkerConnection:
    """A socket to a worker, made non-blocking; one task at a time may send and one may read."""

    def __init__(self, host_socket: socket.socket) -> None:
        host_socket.setblocking(False)
        self._socket, self._fd = host_socket, host_socket.fileno()
        self._loop: asyncio.AbstractEventLoop | None = None  # where the socket is registered
        self._waiter: asyncio.Future[None] | None = None
        self._unfilled = memoryview(b"")  # the part of the reader's buffer that is still empty

    def is_idle(self) -> bool:
        """Return whether there are no unread bytes."""
        return not count_readable_bytes(self._fd) and (self._waiter is None or not self._waiter.done())

    def send_nowait(self, data: bytes) -> memoryview:
        """Send as much as fits into the socket's buffer; return the rest. Raises ConnectionError."""
        try:
            return memoryview(data)[self._socket.send(data) :]
        except BlockingIOError:
            return memoryview(data)

    async def send(self, data: bytes | memoryview) -> None:
        """Send all bytes. Raises ConnectionError."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read_exactly(self, size: int) -> bytearray:
        """Read the next `size` bytes. Raises EOFError if the worker closes its end before, ConnectionError."""
        data = bytearray(size)
        self._unfilled = memoryview(data)
        if not self._fill():
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._fd, self._handle_readable)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return data

    def close(self) -> None:
        """Unregister and close the socket."""
        self._unregister()
        self._socket.close()

    def _fill(self) -> bool:
        """Read available bytes into the buffer; return whether it is full. Raises EOFError, ConnectionError."""
        try:
            while self._unfilled.nbytes:
                count = self._socket.recv_into(self._unfilled)
                if not count:
                    raise EOFError
                self._unfilled = self._unfilled[count:]
        except BlockingIOError:
            return False
        return True

    def _handle_readable(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._unregister()
            return
        try:
            if self._fill():
                self._waiter.set_result(None)
        except (EOFError, ConnectionError) as error:
            self._waiter.set_exception(error)

    def _unregister(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None


class StdoutCapture:
    """The printed text of one call; `pipe` is the non-blocking reading end of the worker's stdout pipe."""

    def __init__(self, pipe: int, max_chars: int) -> None:
        self._pipe, self._max_chars = pipe, max_chars
        self._buffer, self._dropped_bytes = bytearray(), 0
        self._loop: asyncio.AbstractEventLoop | None = None  # where the pipe is registered
        self._pause_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Read from the event loop whenever there is output, until `stop`."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe, self._handle_readable, self._loop)

    def stop(self) -> None:
        """Stop reading from the event loop."""
        if self._loop is not None:
            self._loop.remove_reader(self._pipe)
        if self._pause_timer is not None:
            self._pause_timer.cancel()

    def drain(self) -> None:
        """Read what is in the pipe, up to a bound."""
        for _ in range(_MAX_READS):
            if not count_readable_bytes(self._pipe):
                return
            data = os.read(self._pipe, _READ_BYTES)
            capacity = 4 * self._max_chars - len(self._buffer)  # a character has at most four bytes
            self._buffer += data[:capacity]
            self._dropped_bytes += max(0, len(data) - capacity)

    def decode_text(self) -> str:
        """Return the first `max_chars` characters, with a mark if there were more."""
        text = self._buffer.decode("utf-8", "replace")
        start = text[: self._max_chars]
        omitted = self._dropped_bytes + len(text[self._max_chars :].encode())
        return f"{start}\n{format_omitted_bytes(omitted)}" if omitted else start

    def _handle_readable(self, loop: asyncio.AbstractEventLoop) -> None:
        if not count_readable_bytes(self._pipe):  # end of file
            loop.remove_reader(self._pipe)
        self.drain()
        if self._dropped_bytes > MIB:  # the rest is dropped anyway: don't let it occupy the event loop
            loop.remove_reader(self._pipe)
            self._pause_timer = loop.call_later(_FLOOD_PAUSE_SECONDS, self.start)
