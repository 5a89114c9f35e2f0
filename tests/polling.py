"""Wait for a condition without a limit: slowness must not fail a test, and pytest ends one that hangs."""

import asyncio
import time


async def wait_until(condition):
    """Return as soon as `condition()` is true; other tasks run meanwhile."""
    while not condition():
        await asyncio.sleep(0.01)


def block_until(condition):
    """Return as soon as `condition()` is true; for conditions that other threads or processes fulfill."""
    while not condition():
        time.sleep(0.01)
