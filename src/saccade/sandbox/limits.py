"""What a guest may use, what comes back from a call, and the sentences a model reads where a limit ended it.

The sentences are training data: short, true, the same every time, and they say what is left.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Isolation = Literal["strict", "best_effort"]
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one guest; each ends in a sentence for the model.

    `seconds` of one call (more where other processes left it less than an eighth of them), then `grace` seconds between
    asking it to stop and killing it; `cpu_seconds` of all its calls, on so many `processors`; MiB of memory beyond the
    libraries, of all files and of one file; `threads`; `characters` of text per call; `pictures` of the whole episode
    and the most `pixels` of one.
    """

    seconds: float = 30.0
    grace: float = 2.0
    cpu_seconds: int = 600
    processors: int = 4
    memory_mib: int = 2048
    disk_mib: int = 64
    file_mib: int = 32
    files: int = 4096
    threads: int = 64
    characters: int = 20_000
    pictures: int = 32
    pixels: int = 4_000_000


class Fault(StrEnum):
    """Why a call did not end well, for the trainer's record; the model reads the sentence."""

    RAISED = "raised"  # an exception in the code
    MEMORY = "memory"
    TIMEOUT = "timeout"
    CPU = "cpu"
    THREADS = "threads"
    DISK = "disk"
    EXITED = "exited"
    CRASHED = "crashed"
    KILLED = "killed"  # by its own code, or by the kernel for want of memory: nobody can tell
    BROKEN = "broken"  # the code damaged what the interpreter needs
    PROTOCOL = "protocol"  # the code damaged its own connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A picture that a call showed: the name it has inside, and its pixels, RGB in rows from the top, 3 bytes each.

    >>> Shown(name="image_clue_1", width=2, height=1, rgb=bytes(6)).name
    'image_clue_1'
    """

    name: str
    width: int
    height: int
    rgb: bytes

    def __repr__(self) -> str:
        return f"Shown({self.name}, {self.width}x{self.height})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one call came to: printed text, shown pictures, and the error for the model to read, if any.

    `kept` says whether the variables are still there; `seconds` is the call's own time, waiting for its turn left out.

    >>> Outcome(text="4", pictures=(), error=None, fault=None, kept=True, seconds=0.01).ok
    True
    """

    text: str
    pictures: tuple[Shown, ...]
    error: str | None
    fault: Fault | None
    kept: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end without an exception."""
        return self.fault is None


AGAIN = "Variables are lost; image_clue_* and video_clue_* are available again."
INTERRUPTED = "The code interrupted itself. Variables are kept."
FORBIDDEN_HINT = "(no network, no processes, files only in the working directory)"


def stopped(limits: Limits, *, kept: bool) -> str:
    """The sentence for a call that ran too long."""
    head = f"Execution timeout: stopped after {limits.seconds:g} s"
    return f"{head}. Variables are kept." if kept else f"{head} and the interpreter was restarted. {AGAIN}"


def restarted(fault: Fault, limits: Limits, detail: str = "") -> str:
    """The sentence for a guest that had to be replaced."""
    reasons = {
        Fault.KILLED: "The interpreter was killed, by its own code or because the machine had no memory left,",
        Fault.CPU: f"Out of CPU time (limit {limits.cpu_seconds} s for all calls together)",
        Fault.THREADS: f"Too many threads (limit {limits.threads})",
        Fault.DISK: f"Too many or too large files (limit {limits.disk_mib} MiB in {limits.files} files)",
        Fault.EXITED: f"The code ended the interpreter ({detail})",
        Fault.BROKEN: "The code closed or changed what the interpreter needs",
        Fault.CRASHED: f"The interpreter crashed ({detail})",
        Fault.PROTOCOL: "The interpreter's connection was damaged by the code",
    }
    return f"{reasons[fault]} and it was restarted. {AGAIN}"


def bytes_more(count: int) -> str:
    """The mark where text was cut.

    >>> bytes_more(268 * 2**20)
    '[… 268 MiB more not shown]'
    """
    size = (
        f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count} bytes"
    )
    return f"[… {size} more not shown]"
