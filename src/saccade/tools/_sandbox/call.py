"""One call on one guest: the conversation, its clock, and what is left when it is over.

    Call.make ──RUN──> guest ──SHOWN, ASK, DONE──> _converse, which alone reads the line
       │                 └──text──> _drain, on the loop, all the time: what was printed outlives its guest
       ├─ _stop   at the limit: SIGUSR1, again and again; after the grace SIGKILL, whereupon the line ends
       └─ _look   every quarter of a second: threads and files, where the kernel doesn't count them

Between calls a guest is stopped (SIGSTOP): its threads can't run, print or write while the model thinks.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import MediaError, SandboxError
from saccade.tools._sandbox import films, limits, scratch
from saccade.tools._sandbox.films import Film
from saccade.tools._sandbox.limits import Fault, Limits, Outcome, Shown
from saccade.tools._sandbox.server import Guest, heard, ready
from saccade.tools._sandbox.wire import BROKEN, HEAD, NO_NONCE, NONCE_BYTES, BreachError, Head, Kind, Verdict, checked

AGAIN_SECONDS, LOOK_SECONDS, CLOSING_SECONDS = 0.5, 0.25, 0.2
_READ, _READS = 1 << 16, 16  # bytes at once, and times in a row
_PAUSE = 0.01  # seconds between draughts of a flood
_FAULTS = {
    Verdict.FINE: None,
    Verdict.RAISED: Fault.RAISED,
    Verdict.INTERRUPTED: Fault.TIMEOUT,
    Verdict.MEMORY: Fault.MEMORY,
}
_SIGNALS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic fault",
    signal.SIGABRT: "abort",
    signal.SIGILL: "illegal instruction",
    signal.SIGSYS: "forbidden system call",
}


class Printed:
    """What a call prints: the first characters are kept, the rest is counted."""

    def __init__(self, characters: int) -> None:
        self._most, self._held, self._dropped = characters, bytearray(), 0

    def add(self, data: bytes) -> None:
        """Take some more."""
        room = 4 * self._most - len(self._held)  # a character has four bytes at most
        self._held += data[:room]
        self._dropped += max(0, len(data) - room)

    @property
    def flooded(self) -> bool:
        """Whether far more was printed than anybody will read."""
        return self._dropped > limits.MIB

    def text(self) -> str:
        """What is kept, with a mark where something was left out."""
        text = self._held.decode("utf-8", "replace")
        shown = text[: self._most]
        more = self._dropped + len(text[self._most :].encode())
        return f"{shown}\n{limits.bytes_more(more)}" if more else shown


@dataclass(slots=True, kw_only=True)
class Call:
    """One call; `number` is that of the next picture, `left` how many may still be shown."""

    guest: Guest
    limits: Limits
    films: Sequence[Film]
    number: int
    left: int
    count_threads: bool
    first: bool = False  # of this guest: none of the model's code has run in it yet
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    pictures: list[Shown] = field(default_factory=list)
    blame: Fault | None = None  # why the host killed it
    lost: bool = False
    over: bool = False
    _late: asyncio.Event = field(default_factory=asyncio.Event)
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    async def make(self, source: str, before: Sequence[bytes] = ()) -> Outcome:
        """Run the source and say what came of it; `before` are messages to send first.

        Raises SandboxError where the sandbox itself failed; the guest is then of no more use.
        """
        loop, printed, started = asyncio.get_running_loop(), Printed(self.limits.characters), time.monotonic()
        loop.add_reader(self.guest.text, self._drain, printed)
        self._after(self.limits.seconds, self._stop, started + self.limits.seconds + self.limits.grace)
        if self.count_threads or self.guest.folder:
            self._after(LOOK_SECONDS, self._look)
        try:
            verdict, error = await self._exchange(source, before)
            self._look()
        except BreachError:
            self._kill(Fault.PROTOCOL)
        except (EOFError, ConnectionError):
            await self._expect_death()
        finally:
            self.over = True
            for timer in self._timers.values():
                timer.cancel()
            loop.remove_reader(self.guest.text)
        seconds = time.monotonic() - started
        if self.lost:
            return await self._farewell(printed, seconds)
        self.guest.signal(signal.SIGSTOP)
        self._empty(printed)
        return self._outcome(printed, seconds, verdict, error)

    async def _exchange(self, source: str, before: Sequence[bytes]) -> tuple[Verdict, str]:
        loop, payload = asyncio.get_running_loop(), source.encode("utf-8", "replace")
        head = Head(Kind.RUN, self.number, self.left, size=len(payload)).packed(self.nonce)
        self._expect_silence()
        self.guest.signal(signal.SIGCONT)
        for message in (*before, head + payload):
            await loop.sock_sendall(self.guest.line, message)
        return await self._converse()

    # ---- the line ----------------------------------------------------------------------------------------------------

    def _expect_silence(self) -> None:
        """Raises BreachError where the guest has spoken out of turn."""
        try:
            waiting = b"" if self.first else self.guest.line.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, ConnectionError):
            return
        if waiting:
            raise BreachError("the guest spoke before it was asked")

    async def _converse(self) -> tuple[Verdict, str]:
        """Take messages until the call is done: its verdict, and the text of its error."""
        while True:
            data = bytes(await self._exactly(HEAD.size))
            # Only before any code has run may a guest say so: whatever is the host's fault isn't held against a model.
            broken = self.first and data[:NONCE_BYTES] == NO_NONCE
            head = checked(data, NO_NONCE if broken else self.nonce, self.limits, len(self.films))
            payload = bytes(await self._exactly(head.size))
            if broken:
                raise SandboxError(f"the sandbox can't lock up an interpreter: {payload.decode()}")
            if head.kind == Kind.DONE:
                return Verdict(head.a), payload.decode("utf-8", "replace")
            if head.kind == Kind.ASK:
                await self._serve(head, payload)
            elif len(self.pictures) >= self.left:
                raise BreachError("more pictures than were allowed")
            else:
                name = f"image_clue_{self.number + len(self.pictures)}"
                self.pictures.append(Shown(name=name, width=head.a, height=head.b, rgb=payload))

    async def _exactly(self, size: int) -> bytearray:
        """So many bytes of the line. Raises EOFError where it ends before."""
        loop, data = asyncio.get_running_loop(), bytearray(size)
        view = memoryview(data)
        while view.nbytes:
            count = await loop.sock_recv_into(self.guest.line, view)
            if not count:
                raise EOFError
            view = view[count:]
        return data

    async def _serve(self, head: Head, payload: bytes) -> None:
        """Answer a request for frames, or for the facts of a video; at the limit, refuse at once."""
        loop, film = asyncio.get_running_loop(), self.films[head.a]
        numbers = memoryview(payload).cast("I").tolist()
        work = loop.run_in_executor(films.pool(), _answer, film, head.b, head.c, numbers)
        late = loop.create_task(self._late.wait())
        either: list[asyncio.Future[Any]] = [work, late]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        late.cancel()
        for part in work.result() if work.done() else _refusal("stopped"):
            await loop.sock_sendall(self.guest.line, part)

    # ---- the clock, and what is printed ------------------------------------------------------------------------------

    def _after(self, seconds: float, what: Callable[..., None], *arguments: float) -> None:
        loop = asyncio.get_running_loop()
        if what.__name__ in self._timers:
            self._timers[what.__name__].cancel()
        self._timers[what.__name__] = loop.call_later(seconds, what, *arguments)

    def _stop(self, deadline: float) -> None:
        self._late.set()
        if time.monotonic() >= deadline:
            self._kill(Fault.TIMEOUT)
            return
        self.guest.signal(signal.SIGUSR1)
        self._after(min(AGAIN_SECONDS, max(0.0, deadline - time.monotonic())), self._stop, deadline)

    def _look(self) -> None:
        """Kill a guest with too many threads or files, where the kernel doesn't see to it."""
        if self.count_threads and self.guest.threads() > self.limits.threads:
            self._kill(Fault.THREADS)
        elif self.guest.folder:
            size, count = scratch.used(self.guest.folder, self.limits.files)
            if size > self.limits.disk_mib * limits.MIB or count >= self.limits.files:
                self._kill(Fault.DISK)
        if not self.lost and (self.count_threads or self.guest.folder):
            self._after(LOOK_SECONDS, self._look)

    def _kill(self, blame: Fault) -> None:
        self.blame, self.lost = self.blame or blame, True
        self.guest.signal(signal.SIGKILL)

    def _drain(self, printed: Printed) -> None:
        for _ in range(_READS):
            try:
                data = os.read(self.guest.text, _READ)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self.guest.text)
                return
            printed.add(data)
        if printed.flooded:  # nobody will read it: the loop has better things to do
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.guest.text)
            loop.call_later(_PAUSE, self._listen_again, printed)

    def _listen_again(self, printed: Printed) -> None:
        if not self.over:
            asyncio.get_running_loop().add_reader(self.guest.text, self._drain, printed)

    def _empty(self, printed: Printed) -> None:
        """Take what is still in the pipe of a guest that no longer runs."""
        for _ in range(_READS):
            try:
                data = os.read(self.guest.text, _READ)
            except BlockingIOError:
                return
            if not data:
                return
            printed.add(data)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _expect_death(self) -> None:
        """The line has ended: with the guest, or because its code closed it."""
        self.lost = True
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await ready(self.guest.watch)
        except TimeoutError:
            self._kill(Fault.PROTOCOL)

    async def _farewell(self, printed: Printed, seconds: float) -> Outcome:
        """What to say of a call whose guest is lost. Raises SandboxError where its zygote ended with it."""
        self.guest.signal(signal.SIGKILL)
        said, _ = await heard(self.guest.life)
        fault, detail = ended(int(said["status"]), spent=said["cpu"] >= self.limits.cpu_seconds)
        fault = self.blame or fault
        self._empty(printed)
        late = fault is Fault.TIMEOUT
        error = limits.stopped(self.limits, kept=False) if late else limits.restarted(fault, self.limits, detail)
        return Outcome(
            text=printed.text(),
            pictures=tuple(self.pictures),
            error=error,
            fault=fault,
            kept=False,
            seconds=seconds,
        )

    def _outcome(self, printed: Printed, seconds: float, verdict: Verdict, error: str) -> Outcome:
        fault = _FAULTS[verdict]
        # A guest's word on time is worth nothing: who was asked to stop was late, and nobody else.
        if self._late.is_set() and fault is None:
            fault = Fault.TIMEOUT
        if fault is Fault.TIMEOUT and not self._late.is_set():
            fault, error = Fault.RAISED, limits.INTERRUPTED
        elif fault is Fault.TIMEOUT:
            error = limits.stopped(self.limits, kept=True)
        return Outcome(
            text=printed.text(),
            pictures=tuple(self.pictures),
            error=error if fault else None,
            fault=fault,
            kept=True,
            seconds=seconds,
        )


def ended(status: int, *, spent: bool = False) -> tuple[Fault, str]:
    """Why a guest ended, by its wait status and whether it had spent its CPU time, and in words.

    >>> ended(3 << 8)
    (<Fault.EXITED: 'exited'>, 'exit code 3')
    """
    code = os.waitstatus_to_exitcode(status)
    if code == BROKEN:
        return Fault.BROKEN, ""
    if code >= 0:
        return Fault.EXITED, f"exit code {code}"
    number = signal.Signals(-code)
    if number is signal.SIGXCPU or (number is signal.SIGKILL and spent):  # it may ignore the former
        return Fault.CPU, ""
    if number is signal.SIGKILL:  # not by its host: the kernel, for want of memory
        return Fault.MEMORY, ""
    return Fault.CRASHED, _SIGNALS.get(number, f"signal {number.name}")


def _answer(film: Film, width: int, height: int, numbers: list[int]) -> list[Any]:
    """The answer to a guest's request, as parts to be sent."""
    try:
        if not numbers:
            facts = film.facts()
            return [Head(Kind.TOLD, size=len(facts)).packed(NO_NONCE), facts]
        frames = film.frames(width, height, numbers)
    except MediaError as error:
        return _refusal(str(error))
    height, width, _ = frames[0].shape
    size = sum(frame.nbytes for frame in frames)
    return [Head(Kind.FRAMES, width, height, size=size).packed(NO_NONCE), *(frame.data.cast("B") for frame in frames)]


def _refusal(why: str) -> list[Any]:
    text = why.encode()
    return [Head(Kind.REFUSED, size=len(text)).packed(NO_NONCE), text]
