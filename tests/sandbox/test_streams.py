"""The host's end of a line: what is heard when somebody waits, and when nobody does."""

import asyncio
import contextlib
import socket

import pytest

from saccade.tools._sandbox.line import Line, pending


@contextlib.contextmanager
def lines():
    """A line, and the end that a guest has."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    line = Line(ours)
    with theirs:
        yield line, theirs
        line.close()


def test_bytes_are_heard_in_their_order_however_they_come():
    async def body():
        with lines() as (line, theirs):
            loop = asyncio.get_running_loop()
            theirs.sendall(b"abc")
            assert await line.exactly(2) == b"ab"
            loop.call_soon(theirs.sendall, b"d")
            loop.call_later(0.01, theirs.sendall, b"efgh")
            assert await line.exactly(5) == b"cdefg"
            assert await line.exactly(0) == b""
            assert not line.silent()
            assert await line.exactly(1) == b"h"
            assert line.silent()

    asyncio.run(body())


@pytest.mark.parametrize("last", [b"", b"ab"])
def test_the_end_of_a_line_ends_waiting(last):
    async def body():
        with lines() as (line, theirs):
            waiting = asyncio.ensure_future(line.exactly(3))
            await asyncio.sleep(0)
            theirs.sendall(last)
            theirs.close()
            with pytest.raises(EOFError):
                await waiting
            with pytest.raises(EOFError):
                await line.exactly(1)
            with pytest.raises(ConnectionError):
                line.post(b"x")

    asyncio.run(body())


@pytest.mark.parametrize("hang_up", [False, True])
def test_what_nobody_waits_for_keeps_nobody_busy(hang_up):
    async def body():
        with lines() as (line, theirs):
            theirs.sendall(b"a")
            asyncio.get_running_loop().call_later(0.01, theirs.sendall, b"b")
            assert await line.exactly(2) == b"ab"
            theirs.close() if hang_up else theirs.sendall(b"out of turn")
            await asyncio.sleep(0.05)
            assert line._ignored == 2  # and not as often as the loop went round
            if not hang_up:
                assert await line.exactly(11) == b"out of turn"

    asyncio.run(body())


def test_waiting_can_be_given_up_and_taken_up_again():
    async def body():
        with lines() as (line, theirs):
            waiting = asyncio.ensure_future(line.exactly(4))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            asyncio.get_running_loop().call_later(0.01, theirs.sendall, b"late")
            assert await line.exactly(4) == b"late"

    asyncio.run(body())


def test_what_there_is_no_room_for_is_sent_later():
    async def body():
        with lines() as (line, theirs):
            data = bytes(range(256)) * 8192
            rest = line.post(data)
            assert 0 < len(rest) < len(data)
            assert line.post(b"more") == b"more"
            reading = asyncio.ensure_future(asyncio.to_thread(received, theirs, len(data)))
            await line.send(rest)
            assert await reading == data

    asyncio.run(body())


def received(end, size):
    data = b""
    while len(data) < size:
        data += end.recv(1 << 20)
    return data


def test_pending_bytes_are_counted():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert pending(ours.fileno()) == 0
        theirs.sendall(bytes(300))
        assert pending(ours.fileno()) == 300
        theirs.close()
        assert pending(ours.fileno()) == 300
        ours.recv(300)
        assert pending(ours.fileno()) == 0
