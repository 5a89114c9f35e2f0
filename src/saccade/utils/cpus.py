"""Count the CPUs that this process may use."""

import os

_limit: int | None = None


def limit_cpus(count: int) -> None:
    """Let pools of threads that this process creates from now on have at most `count` threads."""
    global _limit  # a property of the process, like its affinity
    _limit = count


def count_cpus() -> int:
    """Return the number of CPUs of the process's affinity, or the limit if it is lower."""
    available = len(os.sched_getaffinity(0))
    return available if _limit is None else min(available, _limit)
