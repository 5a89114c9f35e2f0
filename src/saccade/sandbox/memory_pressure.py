"""Delay new workers and calls while the machine, or this process's container, is nearly out of memory.

Limits bound one worker; this bounds all of them together, before the kernel kills processes. A process may belong to
several nested control groups, each with a limit: the smallest remainder counts.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from saccade.errors import SandboxError
from saccade.sandbox.limits import MIB

RESERVED_BYTES = 512 * MIB  # left to other processes
WAIT_TIMEOUT = 120.0  # other episodes finish and free memory meanwhile
_POLL_INTERVAL, _CACHE_SECONDS = 0.25, 0.2
_UNBOUNDED_BYTES = 2**60  # cgroup v1 reports "no limit" as a number near 2**63


class MemoryMonitor:
    """Measures available memory; `root` is the folder that holds `proc` and `sys`."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)
        self._measured_at, self._available_bytes = 0.0, 0

    def measure_available(self) -> int:
        """Return the available bytes, cached for a fraction of a second."""
        now = time.monotonic()
        if not self._measured_at or now - self._measured_at > _CACHE_SECONDS:
            self._measured_at = now
            fields = dict(line.split(":", 1) for line in (self._root / "proc/meminfo").read_text().splitlines())
            machine_bytes = int(fields["MemAvailable"].split()[0]) * 1024
            self._available_bytes = min([machine_bytes, *self._read_cgroups_available()])
        return self._available_bytes

    def measure_shortage(self, needed_bytes: int = 0) -> int:
        """Return how many bytes are missing to `needed_bytes` beyond RESERVED_BYTES; negative if none are."""
        return RESERVED_BYTES + needed_bytes - self.measure_available()

    async def wait_for_memory(
        self, compute_needed_bytes: Callable[[], int] = int, timeout: float = WAIT_TIMEOUT
    ) -> None:
        """Wait until `compute_needed_bytes()` bytes are available beyond RESERVED_BYTES.

        Raises SandboxError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.measure_shortage(compute_needed_bytes()) > 0:
            available = self.measure_available()
            if time.monotonic() >= deadline:
                raise SandboxError(
                    f"no memory is left for model-written code: {available // MIB} MiB are available, of which "
                    f"{RESERVED_BYTES // MIB} MiB are reserved; run fewer rollouts at a time, or lower memory_mib of "
                    "the tool python",
                    key="memory",
                    value=available // MIB,
                )
            await asyncio.sleep(_POLL_INTERVAL)

    def _read_cgroups_available(self) -> Iterator[int]:
        for folder, limit_file, usage_file in self._cgroups:
            try:
                limit = (folder / limit_file).read_text().strip()
                if limit == "max" or int(limit) >= _UNBOUNDED_BYTES:
                    continue
                fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # The kernel reclaims the page cache's inactive pages first, at no cost.
                inactive = int(fields.get("total_inactive_file", fields["inactive_file"]))
                yield int(limit) - int((folder / usage_file).read_text()) + inactive
            except OSError:  # the group has no limit, or was removed
                continue

    @functools.cached_property
    def _cgroups(self) -> list[tuple[Path, str, str]]:
        """The control groups of this process that may limit memory: (folder, limit file, usage file)."""
        groups = []
        for line in (self._root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = self._root / "sys/fs/cgroup" / ("memory" if controllers else "")
            v1, v2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
            own = top / path.lstrip("/")
            # A container may see its own group as the top, although the path is the machine's.
            folders = [own, *own.parents] if own.is_dir() else [top]
            groups += [(folder, *(v1 if controllers else v2)) for folder in folders if folder.is_relative_to(top)]
        return [group for group in groups if (group[0] / group[1]).exists()]
