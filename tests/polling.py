"""Wait for a condition without a limit: slowness must not fail a test, and pytest ends one that hangs."""

import asyncio
import time
from pathlib import Path


async def wait_until(condition):
    """Return as soon as `condition()` is true; other tasks run meanwhile."""
    while not condition():
        await asyncio.sleep(0.01)


def block_until(condition):
    """Return as soon as `condition()` is true; for conditions that other threads or processes fulfill."""
    while not condition():
        time.sleep(0.01)


def is_alive(pid):
    """Return whether a process runs: a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
