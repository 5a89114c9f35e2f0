"""An event loop whose time passes only while all tasks wait, and then at once: no test of it depends on the machine."""

import asyncio
import selectors


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the loop's time to the next timer instead of waiting for it; not for loops that wait for threads."""

    now = 0.0

    def select(self, timeout=None):
        if not timeout:
            return super().select(timeout)
        self.now += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop for coroutines that wait only for timers and for each other."""

    def __init__(self):
        super().__init__(_JumpingSelector())

    def time(self):
        return self._selector.now

    def advance(self, seconds):
        """Let time pass as in a blocking call: no task runs meanwhile."""
        self._selector.now += seconds


def run_in_virtual_time(coroutine):
    """Like `asyncio.run`, on a `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
