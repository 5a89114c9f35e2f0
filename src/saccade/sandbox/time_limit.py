"""Measure the seconds that a cell is charged for, and decide when it has exceeded its time limit.

The cell isn't charged while it is paused, while it waits for a busy decoder, and while its host was stopped. If other
processes used the CPUs, the cell may exceed its limit for a while; its own threads are no reason for that.
"""

import time

MIN_RUN_FRACTION = 1 / 8  # of its limit, that a cell has run at least before it is interrupted
MAX_WALL_FACTOR = 4  # times its limit, that a cell may take at most
HOST_STALL_SECONDS = 0.5  # a timer later than this means that the host was stopped, as by Ctrl-Z


class CellClock:
    """The clock of one cell; it starts when it is constructed. `limit` is in seconds."""

    def __init__(self, limit: float) -> None:
        self._limit, self._started_at = limit, time.monotonic()
        self._paused_at: float | None = None
        # When the cell last requested frames, and when a decoder started on them; 0.0: not yet.
        self._decode_requested_at = self._decode_started_at = 0.0
        self._free_wait_seconds = (MAX_WALL_FACTOR - 1) * limit  # that it may still wait for decoders uncharged
        # Seconds in the run queue at the last update, and how many of them don't count.
        self._queue_seconds = self._uncounted_queue_seconds = 0.0
        self._cpu_seconds = self._first_cpu_seconds = 0.0  # of all its threads: at the last update, and at the first

    @property
    def is_paused(self) -> bool:
        """Whether the clock is paused."""
        return self._paused_at is not None

    @property
    def elapsed(self) -> float:
        """The seconds charged so far."""
        self._exclude_decode_wait(time.monotonic())
        return (time.monotonic() if self._paused_at is None else self._paused_at) - self._started_at

    @property
    def remaining(self) -> float:
        """The seconds that the cell may still run."""
        elapsed, queue_seconds = self.elapsed, self._queue_seconds - self._uncounted_queue_seconds
        # The main thread also queues behind threads of its own process: what those used, the cell has had.
        run_seconds = max(elapsed - queue_seconds, self._cpu_seconds - self._first_cpu_seconds)
        return max(self._limit - elapsed, compute_extra_seconds(self._limit, elapsed, run_seconds))

    def charge(self, seconds: float) -> None:
        """Charge seconds that the worker ran before the clock was constructed."""
        self._started_at -= seconds

    def start(self, timer_delay: float, queue_seconds: float, cpu_seconds: float) -> float:
        """Make the first `update`: queue and CPU seconds of the worker's earlier cells don't count."""
        self._queue_seconds = self._uncounted_queue_seconds = queue_seconds
        self._cpu_seconds = self._first_cpu_seconds = cpu_seconds
        return self.update(timer_delay, queue_seconds, cpu_seconds)

    def update(self, timer_delay: float, queue_seconds: float, cpu_seconds: float) -> float:
        """Update the clock from a timer that is `timer_delay` seconds late; return the seconds excluded for that.

        `queue_seconds` and `cpu_seconds` are the worker's totals since it started. CPU time that the cell used while
        its host was stopped is charged.
        """
        now = time.monotonic()
        excluded = 0.0
        if timer_delay > HOST_STALL_SECONDS:
            excluded = max(0.0, timer_delay - (cpu_seconds - self._cpu_seconds))
        self._exclude_decode_wait(now - excluded)
        if excluded:
            self._started_at += excluded
            self._uncounted_queue_seconds += queue_seconds - self._queue_seconds
            self._decode_requested_at = now if self._decode_requested_at else 0.0
        self._queue_seconds, self._cpu_seconds = queue_seconds, cpu_seconds
        return excluded

    def begin_decode_wait(self) -> None:
        """Record that the cell waits for a decoder, until `end_decode_wait`."""
        self._exclude_decode_wait(time.monotonic())
        self._decode_requested_at, self._decode_started_at = time.monotonic(), 0.0

    def end_decode_wait(self) -> None:
        """Record that a decoder started, or that the wait was given up; callable from any thread, and repeatedly."""
        self._decode_started_at = self._decode_started_at or time.monotonic()

    def pause(self) -> None:
        """Pause until `resume`."""
        self._exclude_decode_wait(time.monotonic())
        self._paused_at = time.monotonic()

    def resume(self, *, is_charged: bool) -> None:
        """Continue; with `is_charged`, as if the clock had not been paused."""
        now = time.monotonic()
        if self._paused_at is not None and not is_charged:
            self._started_at += now - self._paused_at
        self._paused_at, self._decode_requested_at = None, now if self._decode_requested_at else 0.0

    def _exclude_decode_wait(self, now: float) -> None:
        if not self._decode_requested_at or self._paused_at is not None:
            return
        wait_end = min(self._decode_started_at or now, now)
        excluded = min(max(0.0, wait_end - self._decode_requested_at), self._free_wait_seconds)
        self._started_at += excluded
        self._free_wait_seconds -= excluded
        self._decode_requested_at = max(wait_end, self._decode_requested_at)


def compute_extra_seconds(limit: float, elapsed: float, run_seconds: float) -> float:
    """Return the seconds a cell may still run at its limit because other processes used the CPUs.

    `run_seconds` is the part of `elapsed` that it didn't wait for a CPU, or the CPU time of its threads if that is
    more. On a busy machine a cell that needs an eighth of its limit must still finish.

    >>> compute_extra_seconds(8, 8, 0.5), compute_extra_seconds(8, 8, 4), compute_extra_seconds(8, 31.75, 0.5)
    (0.5, -3.0, 0.25)
    """
    return min(MIN_RUN_FRACTION * limit - run_seconds, MAX_WALL_FACTOR * limit - elapsed)
