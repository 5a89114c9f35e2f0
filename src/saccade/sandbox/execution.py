"""One call on one guest: the conversation, its clock, and what is left when it is over.

    Call.make ──RUN──> guest ──SHOWN, ASK, DONE──> _converse, which alone reads the line
       └─ _attend  to what isn't over at once:
           ├─ Printed  is taken out of its pipe on the loop, all the time
           ├─ _lapse   again and again: a cell that runs on gives way to others, and may be paused for them
           ├─ _expire  looks at its clock (clock.py) twice a second, and at the limit
           │    └─ _stop: SIGUSR1, again and again; after the grace SIGKILL, and the line ends
           └─ _look    every quarter of a second: threads and files, where the kernel doesn't count them

Between calls a guest is stopped (SIGSTOP): its threads can't run, print or write while the model thinks. It is woken
with its orders before it, and most calls are over before anybody has to attend to them.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import MediaError, SandboxError
from saccade.tools._sandbox import films, limits, scratch
from saccade.tools._sandbox.clock import Clock
from saccade.tools._sandbox.films import Film
from saccade.tools._sandbox.limits import Fault, Limits, Outcome, Shown
from saccade.tools._sandbox.printed import Printed
from saccade.tools._sandbox.server import Guest, heard, ready
from saccade.tools._sandbox.turns import Turn
from saccade.tools._sandbox.wire import BROKEN, HEAD, NO_NONCE, NONCE_BYTES, BreachError, Head, Kind, Verdict, checked

AGAIN_SECONDS, LOOK_SECONDS, CLOSING_SECONDS = 0.5, 0.25, 0.2
BEAT_SECONDS = 0.5  # between two looks at the clock
SOON_SECONDS = 0.005  # a call that is over by then needs nobody to attend to it
SHORT_SECONDS, LONG_SECONDS = 0.05, 0.5  # until others may want a short cell's place, and a long one's
AWAKE_SECONDS = 0.03  # on processors while paused: it has a timer that wakes it, and is charged for the pause
_FAULTS = {
    Verdict.FINE: None,
    Verdict.RAISED: Fault.RAISED,
    Verdict.INTERRUPTED: Fault.TIMEOUT,
    Verdict.MEMORY: Fault.MEMORY,
}
_SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic fault",
    signal.SIGABRT: "abort",
    signal.SIGILL: "illegal instruction",
    signal.SIGSYS: "forbidden system call",
}


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call; `number` is that of the next picture, `left` how many may still be shown, `turn` whose it is to run."""

    guest: Guest
    limits: Limits
    films: Sequence[Film]
    number: int
    left: int
    count_threads: bool
    turn: Turn | None = None  # None: nobody waits for its place
    first: bool = False  # of this guest: none of the model's code has run in it yet
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    pictures: list[Shown] = field(default_factory=list)
    blame: Fault | None = None  # why the host killed it
    lost: bool = False
    over: bool = False
    _late: asyncio.Event = field(default_factory=asyncio.Event)
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _clock: Clock = field(init=False)
    _heard_out: bool = False
    _spent: float = 0.0  # seconds on processors, before it was paused

    def __post_init__(self) -> None:
        self._clock = Clock(self.limits.seconds)

    async def make(self, source: str, before: Sequence[bytes] = ()) -> Outcome:
        """Run the source and say what came of it; `before` are messages to send first.

        Raises SandboxError where the sandbox itself failed; the guest is then of no more use.
        """
        printed = Printed(self.guest.text, self.limits.characters)
        try:
            verdict, error = await self._exchange(source, before, printed)
            self._look()
        except BreachError:
            self._kill(Fault.PROTOCOL)
        except (EOFError, ConnectionError):
            await self._expect_death()
        finally:
            self.over = True
            for timer in self._timers.values():
                timer.cancel()
            printed.hush()
        if self.lost:
            return await self._farewell(printed, self._clock.seconds)
        self.guest.signal(signal.SIGSTOP)
        printed.empty()
        return self._outcome(printed, self._clock.seconds, verdict, error)

    async def _exchange(self, source: str, before: Sequence[bytes], printed: Printed) -> tuple[Verdict, str]:
        line, payload = self.guest.line, source.encode("utf-8", "replace")
        head = Head(Kind.RUN, self.number, self.left, size=len(payload)).packed(self.nonce)
        if not self.first and not line.silent():
            raise BreachError("the guest spoke before it was asked")
        first, *others = *before, head + payload
        rest = line.post(first)
        self.guest.signal(signal.SIGCONT)
        self._after(min(SOON_SECONDS, self.limits.seconds), self._attend, printed)
        if rest:
            await line.send(rest)
        for message in others:
            await line.send(message)
        return await self._converse()

    # ---- the line ----------------------------------------------------------------------------------------------------

    async def _converse(self) -> tuple[Verdict, str]:
        """Take messages until the call is done: its verdict, and the text of its error."""
        while True:
            data = await self.guest.line.exactly(HEAD.size)
            # Only before any code has run may a guest say so: whatever is the host's fault isn't held against a model.
            broken = self.first and data[:NONCE_BYTES] == NO_NONCE
            head = checked(data, NO_NONCE if broken else self.nonce, self.limits, len(self.films))
            payload = bytes(await self.guest.line.exactly(head.size)) if head.size else b""
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

    async def _serve(self, head: Head, payload: bytes) -> None:
        """Answer a request for frames, or for the facts of a video; after the limit, refuse."""
        numbers = memoryview(payload).cast("I").tolist()
        parts = await self._answer(head, numbers) if not self._late.is_set() else _refusal("stopped")
        for part in parts:
            await self.guest.line.send(part)

    async def _answer(self, head: Head, numbers: list[int]) -> list[Any]:
        """A decoder's answer, as parts to be sent. To wait for a decoder isn't charged; at the limit, nobody waits."""
        loop, film = asyncio.get_running_loop(), self.films[head.a]

        def answer() -> list[Any]:
            self._clock.serve()
            return _answered(film, head.b, head.c, numbers)

        self._clock.ask()
        work, late = loop.run_in_executor(films.pool(), answer), loop.create_task(self._late.wait())
        either: list[asyncio.Future[Any]] = [work, late]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else _refusal("stopped")
        finally:
            self._clock.serve()
            for part in either:
                part.cancel()

    # ---- the clock ---------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        self._cancel(what)
        self._timers[what.__name__] = asyncio.get_running_loop().call_later(seconds, what, *arguments)

    def _cancel(self, what: Callable[..., None]) -> None:
        if timer := self._timers.pop(what.__name__, None):
            timer.cancel()

    def _attend(self, printed: Printed) -> None:
        printed.listen()
        self._clock.begin(self._behind(self._attend), self.guest.waited(), self.guest.spent())
        self._run_on(SHORT_SECONDS - SOON_SECONDS)
        if self.count_threads or self.guest.folder:
            self._after(LOOK_SECONDS, self._look)

    def _run_on(self, seconds: float) -> None:
        """Let it run for so many more seconds before others may want its place."""
        self._expire_after(self._clock.lacking)
        if self.turn is not None:
            self._after(seconds, self._lapse, self.turn)

    def _lapse(self, turn: Turn) -> None:
        self._after(LONG_SECONDS, self._lapse, turn)
        turn.lapse(self)

    def pause(self) -> None:
        """Rest until `resume`: the time until then isn't charged."""
        self._spent = self.guest.spent()
        self.guest.signal(signal.SIGSTOP)
        self._clock.beat(self._behind(self._expire), self.guest.waited(), self._spent)
        self._clock.pause()
        self._cancel(self._lapse)  # last: no failure leaves a cell running without its clock
        self._cancel(self._expire)

    def resume(self) -> None:
        """Go on."""
        if not self._clock.paused or self.over:
            return
        self._clock.resume(charged=self.guest.spent() - self._spent >= AWAKE_SECONDS)
        self._run_on(LONG_SECONDS)
        self.guest.signal(signal.SIGCONT)

    def _expire_after(self, seconds: float) -> None:
        self._after(min(max(seconds, SOON_SECONDS), BEAT_SECONDS), self._expire)

    def _behind(self, what: Callable[..., None]) -> float:
        """How late a timer is by now (seconds); 0 where there is none."""
        timer = self._timers.get(what.__name__)
        return 0.0 if timer is None else asyncio.get_running_loop().time() - timer.when()

    def _expire(self) -> None:
        self._clock.beat(self._behind(self._expire), self.guest.waited(), self.guest.spent())
        lacking = self._clock.lacking
        if lacking > 0:
            self._expire_after(lacking)
        elif not self._heard_out and not self.guest.line.silent():  # it may have said that it is done
            self._heard_out = True
            self._expire_after(SOON_SECONDS)
        else:
            self._cancel(self._lapse)  # it shall be over soon
            self._late.set()
            self._stop(time.monotonic() + self.limits.grace)

    def _stop(self, deadline: float) -> None:
        deadline += self._clock.beat(self._behind(self._stop), self.guest.waited(), self.guest.spent())
        left = deadline - time.monotonic()
        if left <= 0:
            self._kill(Fault.TIMEOUT)
            return
        self.guest.signal(signal.SIGUSR1)
        self._after(min(AGAIN_SECONDS, left), self._stop, deadline)

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
        printed.empty()
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
    >>> ended(40)
    (<Fault.CRASHED: 'crashed'>, 'signal 40')
    """
    code = os.waitstatus_to_exitcode(status)
    if code == BROKEN:
        return Fault.BROKEN, ""
    if code >= 0:
        return Fault.EXITED, f"exit code {code}"
    number = -code
    if number == signal.SIGXCPU or (number == signal.SIGKILL and spent):  # it may ignore the former
        return Fault.CPU, ""
    if number == signal.SIGKILL:  # not by its host: by itself, or by the kernel for want of memory
        return Fault.KILLED, ""
    named = number in set(signal.Signals)  # those for the program's own use have no names
    return Fault.CRASHED, _SIGNALS.get(number, f"signal {signal.Signals(number).name if named else number}")


def _answered(film: Film, width: int, height: int, numbers: list[int]) -> list[Any]:
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
