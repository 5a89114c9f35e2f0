"""A signal's handler for the time of a test, which this process may have inherited or a library replaced."""

import contextlib
import signal


@contextlib.contextmanager
def handle_signal(number, handler):
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)
