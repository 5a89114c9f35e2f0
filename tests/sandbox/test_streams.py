"""The host's end of a worker's socket: bytes that a read waits for, and unexpected ones."""

import asyncio
import contextlib
import socket

import pytest

from saccade.sandbox.streams import WorkerConnection, count_readable_bytes


@contextlib.contextmanager
def open_connection():
    """Yield a connection and the worker's socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = WorkerConnection(ours)
    with theirs:
        yield connection, theirs
        connection.close()


def test_bytes_are_read_in_order_in_any_chunks():
    async def body():
        with open_connection() as (connection, theirs):
            loop = asyncio.get_running_loop()
            theirs.sendall(b"abc")
            assert await connection.read_exactly(2) == b"ab"
            loop.call_soon(theirs.sendall, b"d")
            loop.call_later(0.01, theirs.sendall, b"efgh")
            assert await connection.read_exactly(5) == b"cdefg"
            assert await connection.read_exactly(0) == b""
            assert not connection.is_idle()
            assert await connection.read_exactly(1) == b"h"
            assert connection.is_idle()

    asyncio.run(body())


@pytest.mark.parametrize("last", [b"", b"ab"])
def test_end_of_file_ends_reading(last):
    async def body():
        with open_connection() as (connection, theirs):
            waiting = asyncio.ensure_future(connection.read_exactly(3))
            await asyncio.sleep(0)
            theirs.sendall(last)
            theirs.close()
            with pytest.raises(EOFError):
                await waiting
            with pytest.raises(EOFError):
                await connection.read_exactly(1)
            with pytest.raises(ConnectionError):
                connection.send_nowait(b"x")

    asyncio.run(body())


@pytest.mark.parametrize("close_socket", [False, True])
def test_unexpected_bytes_do_not_keep_the_loop_busy(close_socket):
    async def body():
        with open_connection() as (connection, theirs):
            theirs.sendall(b"a")
            asyncio.get_running_loop().call_later(0.01, theirs.sendall, b"b")
            assert await connection.read_exactly(2) == b"ab"
            theirs.close() if close_socket else theirs.sendall(b"out of turn")
            await asyncio.sleep(0.05)
            assert not asyncio.get_running_loop().remove_reader(connection._fd)  # it is no longer registered
            if not close_socket:
                assert await connection.read_exactly(11) == b"out of turn"

    asyncio.run(body())


def test_reading_can_be_cancelled_and_resumed():
    async def body():
        with open_connection() as (connection, theirs):
            waiting = asyncio.ensure_future(connection.read_exactly(4))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            asyncio.get_running_loop().call_later(0.01, theirs.sendall, b"late")
            assert await connection.read_exactly(4) == b"late"

    asyncio.run(body())


def test_bytes_beyond_the_buffer_are_sent_later():
    async def body():
        with open_connection() as (connection, theirs):
            data = bytes(range(256)) * 8192
            rest = connection.send_nowait(data)
            assert 0 < len(rest) < len(data)
            assert connection.send_nowait(b"more") == b"more"
            reading = asyncio.ensure_future(asyncio.to_thread(receive, theirs, len(data)))
            await connection.send(rest)
            assert await reading == data

    asyncio.run(body())


def receive(connection, size):
    data = b""
    while len(data) < size:
        data += connection.recv(1 << 20)
    return data


def test_readable_bytes_are_counted():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert count_readable_bytes(ours.fileno()) == 0
        theirs.sendall(bytes(300))
        assert count_readable_bytes(ours.fileno()) == 300
        theirs.close()
        assert count_readable_bytes(ours.fileno()) == 300
        ours.recv(300)
        assert count_readable_bytes(ours.fileno()) == 0
