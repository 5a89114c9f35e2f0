"""A worker's limits, the result of a call, and the sentences that the model reads when a limit ended the call.

The sentences are training data: short, true, always the same, and they state whether variables are kept.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

IsolationMode = Literal["strict", "best_effort"]
MIB = 2**20
MAX_ASPECT_RATIO = 200  # of shown images
_END_SECONDS = 1.0  # that the end of a call may take beyond its limit and the grace period


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one worker; exceeding one produces a sentence for the model.

    `timeout` is in seconds per call; it is extended, at most fourfold, while other processes leave the worker, all its
    threads together, less than an eighth of it.
    `grace_seconds` pass between interrupting and killing a cell. `cpu_seconds` counts all calls together. `memory_mib`
    comes on top of the libraries, `disk_mib` bounds all files together, `file_mib` one file, `max_files` their number.
    `max_chars` of text are kept per call. `max_images` may be shown per episode, each of at most `max_image_pixels`,
    and all together of at most `images_mib` as RGB: the host keeps them until the sandbox closes.
    """

    timeout: float = 30.0
    grace_seconds: float = 2.0
    cpu_seconds: int = 600
    num_cpus: int = 4
    memory_mib: int = 2048
    disk_mib: int = 64
    file_mib: int = 32
    max_files: int = 4096
    max_threads: int = 64
    max_chars: int = 20_000
    max_images: int = 32
    max_image_pixels: int = 4_000_000
    images_mib: int = 128


class FailureReason(StrEnum):
    """Why a call failed, for metrics and logs; the model reads the sentence instead."""

    RAISED = "raised"  # an exception in the code
    MEMORY = "memory"
    TIMEOUT = "timeout"
    CPU = "cpu"
    THREADS = "threads"
    DISK = "disk"
    EXITED = "exited"
    CRASHED = "crashed"
    KILLED = "killed"  # by its own code or by the kernel's out-of-memory killer: they can't be distinguished
    BROKEN = "broken"  # the code damaged what the interpreter needs
    PROTOCOL = "protocol"  # the code damaged its own connection


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImage:
    """An image that a call showed: its variable name, and its pixels as RGB bytes [height, width, 3]."""

    name: str
    width: int
    height: int
    rgb_bytes: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """The result of one call: printed text, shown images, and the error for the model to read, if any.

    `variables_kept` is False if the worker was lost; `seconds` excludes waiting for a CPU slot.
    """

    text: str
    images: tuple[ShownImage, ...]
    error: str | None
    failure_reason: FailureReason | None
    variables_kept: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the code finished without an exception."""
        return self.failure_reason is None


VARIABLES_LOST_NOTE = "Variables are lost; image_clue_* and video_clue_* are available again."
INTERRUPTED_MESSAGE = "The code interrupted itself. Variables are kept."
TOO_NARROW = "too narrow"
FORBIDDEN_HINT = "(no network, no processes, files only in the working directory)"


def format_timeout(limits: Limits, seconds: float, *, variables_kept: bool) -> str:
    """Return the sentence for a call that exceeded its time limit and was charged `seconds`, those to end included.

    >>> format_timeout(Limits(timeout=10), 10.2, variables_kept=True)
    'Execution timeout: stopped after 10 s. Variables are kept.'
    >>> format_timeout(Limits(timeout=10), 38.7, variables_kept=True)
    'Execution timeout: stopped after 39 s (limit 10 s, extended because the machine was busy). Variables are kept.'
    """
    head = f"Execution timeout: stopped after {limits.timeout:g} s"
    if seconds > limits.timeout + limits.grace_seconds + _END_SECONDS:
        note = f"(limit {limits.timeout:g} s, extended because the machine was busy)"
        head = f"Execution timeout: stopped after {seconds:.0f} s {note}"
    if variables_kept:
        return f"{head}. Variables are kept."
    return f"{head} and the interpreter was restarted. {VARIABLES_LOST_NOTE}"


def is_too_narrow(width: int, height: int) -> bool:
    """Return whether vision processors would refuse an image of this size."""
    return max(width, height) >= MAX_ASPECT_RATIO * min(width, height)


def format_image_refusal(width: float, height: float, reason: str) -> str:
    """Return the line that replaces an image that can't be shown."""
    return f"[image of {width:.0f}x{height:.0f} not shown: {reason}]\n"


def format_omitted_images(count: int, limit: int | str) -> str:
    """Return the line that replaces images beyond a limit: a number of images, or their size in words."""
    return f"[{count} further images not shown, limit {limit}]\n"


def format_memory_shortage(num_bytes: int) -> str:
    """Return the sentence for a worker that was replaced before a call since it held memory that the machine lacks."""
    head = f"Out of memory: the interpreter held {num_bytes // MIB} MiB and the machine has no more"
    return f"{head}. The code was not run, and the interpreter was restarted. {VARIABLES_LOST_NOTE}"


def format_restart(failure_reason: FailureReason, limits: Limits, detail: str = "") -> str:
    """Return the sentence for a worker that was replaced."""
    reasons = {
        FailureReason.KILLED: "The interpreter was killed, by its own code or because the machine had no memory left,",
        FailureReason.CPU: f"Out of CPU time (limit {limits.cpu_seconds} s for all calls together)",
        FailureReason.THREADS: f"Too many threads (limit {limits.max_threads})",
        FailureReason.DISK: f"Too many or too large files (limit {limits.disk_mib} MiB in {limits.max_files} files)",
        FailureReason.EXITED: f"The code ended the interpreter ({detail})",
        FailureReason.BROKEN: "The code closed or changed what the interpreter needs",
        FailureReason.CRASHED: f"The interpreter crashed ({detail})",
        FailureReason.PROTOCOL: "The interpreter's connection was damaged by the code",
    }
    return f"{reasons[failure_reason]} and it was restarted. {VARIABLES_LOST_NOTE}"


def format_omitted_bytes(count: int) -> str:
    """Return the mark that replaces omitted text.

    >>> format_omitted_bytes(268 * 2**20)
    '[… 268 MiB more not shown]'
    """
    size = (
        f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count} bytes"
    )
    return f"[… {size} more not shown]"
