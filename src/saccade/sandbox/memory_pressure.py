"""Room in memory: whoever would take more of it waits while the machine, or the container around us, is nearly full.

What one guest may take is bounded by its limits; this bounds all of them together, before the kernel has to. A process
may stand in several nested groups, each with a bound of its own: the least that any of them leaves counts.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from saccade.errors import SandboxError
from saccade.tools._sandbox.limits import MIB

ROOM = 512 * MIB  # what is left to others
PATIENCE_SECONDS = 120.0  # attempts end meanwhile, and give back what they held
_AGAIN_SECONDS, _FRESH_SECONDS = 0.25, 0.2
_UNBOUNDED = 2**60  # older groups say so with a number near 2**63


class Memory:
    """How much memory is left; `root` is where the kernel's files lie."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)
        self._seen, self._available = 0.0, 0

    def available(self) -> int:
        """Bytes that can be taken before something must give way, as of a moment ago."""
        now = time.monotonic()
        if not self._seen or now - self._seen > _FRESH_SECONDS:
            self._seen, self._available = now, min([self._of_machine(), *self._of_groups()])
        return self._available

    async def room(self, more: Callable[[], int] = int, patience: float = PATIENCE_SECONDS) -> None:
        """Wait until `more()` bytes (and some for others) are there. Raises SandboxError where that doesn't happen."""
        deadline = time.monotonic() + patience
        while (left := self.available()) < ROOM + more():
            if time.monotonic() >= deadline:
                raise SandboxError(
                    f"no memory is left for model-written code: {left // MIB} MiB are available, of which "
                    f"{ROOM // MIB} remain for others; make fewer attempts at a time, or lower memory_mib of the tool "
                    "python"
                )
            await asyncio.sleep(_AGAIN_SECONDS)

    def _of_machine(self) -> int:
        facts = dict(line.split(":", 1) for line in (self._root / "proc/meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024

    def _of_groups(self) -> Iterator[int]:
        for folder, most, used in self._groups:
            try:
                bound = (folder / most).read_text().strip()
                if bound == "max" or int(bound) >= _UNBOUNDED:
                    continue
                facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Pages of files that nobody has touched for a while go first, and cost nothing.
                idle = int(facts.get("total_inactive_file", facts["inactive_file"]))
                yield int(bound) - int((folder / used).read_text()) + idle
            except OSError:  # it has no bound, or is gone
                continue

    @functools.cached_property
    def _groups(self) -> list[tuple[Path, str, str]]:
        """The control groups of this process that may bound memory: folder, file of the bound, file of what is used."""
        found = []
        for line in (self._root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            top = self._root / "sys/fs/cgroup" / ("memory" if kinds else "")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
            own = top / path.lstrip("/")
            # A container may see its own group as the top, under a path that is the machine's.
            folders = [own, *own.parents] if own.is_dir() else [top]
            found += [(folder, *names) for folder in folders if folder.is_relative_to(top)]
        return [each for each in found if (each[0] / each[1]).exists()]
