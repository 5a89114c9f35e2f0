"""A cell's clock: the seconds that it is charged for, and whether it has had enough of them.

The clock stands still while the cell is paused, while it waits for a decoder that others keep busy, and while its host
stood still. Where others had the processors, a cell may run on for a while.
"""

import time

LEAST, MOST = 1 / 8, 4  # of its limit: what a cell has had when it is stopped, and what it may take by the clock
STILL_SECONDS = 0.5  # behind its time: whoever keeps the clock stood still meanwhile, as by Ctrl-Z


class Clock:
    """Begins with its making; `limit` is in seconds."""

    def __init__(self, limit: float) -> None:
        self._limit, self._begun = limit, time.monotonic()
        self._paused: float | None = None  # since when
        self._asked = self._served = 0.0  # when it last asked for frames, and when a decoder turned to it (0: not yet)
        self._room = (MOST - 1) * limit  # seconds that it may still wait for decoders without being charged
        self._waited = self._uncounted = 0.0  # seconds in line for a processor by now, and how many don't count
        self._spent = 0.0  # seconds on processors by then

    @property
    def paused(self) -> bool:
        """Whether it was told to stand still."""
        return self._paused is not None

    @property
    def seconds(self) -> float:
        """How long it has run."""
        self._leave_out_the_line(time.monotonic())
        return (time.monotonic() if self._paused is None else self._paused) - self._begun

    @property
    def lacking(self) -> float:
        """Seconds that it may still run."""
        ran = self.seconds
        return max(self._limit - ran, owed(self._limit, ran, self._waited - self._uncounted))

    def begin(self, late: float, waited: float, spent: float) -> None:
        """The first `beat`: what was waited and spent before, in earlier cells, doesn't count."""
        self._waited, self._uncounted, self._spent = waited, waited, spent
        self.beat(late, waited, spent)

    def beat(self, late: float, waited: float, spent: float) -> float:
        """Look at it, `late` seconds after one wanted to; the seconds that aren't charged because of that.

        `waited` is for how long its interpreter has stood in line for a processor, and `spent` for how long it had
        some, ever since it began: what it spent while its host stood still is charged.
        """
        now = time.monotonic()
        left_out = max(0.0, late - (spent - self._spent)) if late > STILL_SECONDS else 0.0
        self._leave_out_the_line(now - left_out)
        if left_out:
            self._begun += left_out
            self._uncounted += waited - self._waited
            self._asked = now if self._asked else 0.0
        self._waited, self._spent = waited, spent
        return left_out

    def ask(self) -> None:
        """It waits for a decoder, until `serve`."""
        self._leave_out_the_line(time.monotonic())
        self._asked, self._served = time.monotonic(), 0.0

    def serve(self) -> None:
        """A decoder has turned to it, or it waits no longer; may be called from any thread, and again."""
        self._served = self._served or time.monotonic()

    def pause(self) -> None:
        """Stand still until `resume`."""
        self._leave_out_the_line(time.monotonic())
        self._paused = time.monotonic()

    def resume(self, *, charged: bool) -> None:
        """Go on; `charged`: as if it had never stood still."""
        now = time.monotonic()
        if self._paused is not None and not charged:
            self._begun += now - self._paused
        self._paused, self._asked = None, now if self._asked else 0.0

    def _leave_out_the_line(self, now: float) -> None:
        if not self._asked or self._paused is not None:
            return
        until = min(self._served or now, now)
        waited = min(max(0.0, until - self._asked), self._room)
        self._begun, self._room, self._asked = self._begun + waited, self._room - waited, max(until, self._asked)


def owed(limit: float, ran: float, waited: float) -> float:
    """Seconds that a cell may still run though it is at its limit, because others had the processors all the while.

    `waited` are those of the seconds that it `ran` in which it stood in line for a processor. A busy machine shall not
    end what needs an eighth of its limit.

    >>> owed(8, 8, 7.5), owed(8, 8, 4), owed(8, 31.9, 31.8)
    (0.5, -3.0, 0.10000000000000142)
    """
    return min(LEAST * limit - (ran - waited), MOST * limit - ran)
