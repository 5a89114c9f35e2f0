"""The zygote as its host sees it: started once per process and isolation, and asked for guests.

    Server.start ──exec──> keeper, zygote ──report──> checked against the isolation that is wanted
    Server.spawn ──limits, 3 descriptors──> zygote ──(pid, pidfd)──> Guest: line, text, life, pidfd

Requests carry their own reply sockets, so that spawning needs no lock and no thread, and works from any event loop;
they wait while memory is short (memory.py).
Who ends the zygote: `close`, the end of this process, or its own failure; each of them ends every guest.
"""

import asyncio
import atexit
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from saccade.errors import ConfigError, SandboxError
from saccade.tools._sandbox import walls
from saccade.tools._sandbox.jail import ENVIRONMENT
from saccade.tools._sandbox.limits import MIB, Isolation, Limits
from saccade.tools._sandbox.line import Line
from saccade.tools._sandbox.memory import Memory
from saccade.tools._sandbox.policy import machine
from saccade.tools._sandbox.turns import Turn, Turns
from saccade.tools._sandbox.walls import Report

START_SECONDS = 180.0  # a second or two, on a machine that has nothing else to do
SPAWN_SECONDS = 120.0  # milliseconds each, and hundreds may be asked for at once
END_SECONDS = 10.0
NEW_BYTES = 16 * MIB  # of a guest before the first call, which the machine doesn't count as taken at once
SHORT, LONG = 4, 4  # cells that run at the same time, per processor
MEMORY = Memory()
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from saccade.tools._sandbox import zygote
zygote.main(sys.argv[1])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A guest's ends in the host: `life` is a socket, `text` and `watch` (its pidfd) are descriptors.

    `folder` is its working folder on this machine's disk, "" where it has a file system of its own.
    """

    line: Line
    life: socket.socket
    text: int
    watch: int
    pid: int  # as its zygote sees it
    folder: str

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; to one that has ended already, nothing happens."""
        try:
            signal.pidfd_send_signal(self.watch, number)
        except ProcessLookupError:
            return

    def threads(self) -> int:
        """How many threads it has, by the host's own count; 0 for one that has ended."""
        return self._figures(17)[0]

    def waited(self) -> float:
        """Seconds for which its main thread has stood in line for a processor; 0 where the kernel doesn't say."""
        try:
            return int(Path(self._proc(), "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def spent(self) -> float:
        """Seconds that its threads have spent on processors; 0 for one that has ended."""
        return sum(self._figures(11, 12)) / os.sysconf("SC_CLK_TCK")

    def _figures(self, *places: int) -> list[int]:
        """Some of the numbers behind its name in /proc/…/stat; 0 each for one that has ended."""
        try:  # it may give itself any name: bytes that are no text, brackets, line feeds
            fields = Path(self._proc(), "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return [0] * len(places)
        return [int(fields[place]) for place in places]

    def _proc(self) -> str:
        """Its folder in /proc, by the host's own count of processes."""
        return f"/proc/{int(_fields(f'/proc/self/fdinfo/{self.watch}')['Pid'])}"

    def close(self) -> None:
        """Kill it and let go of everything."""
        self.signal(signal.SIGKILL)
        self.line.close()
        self.life.close()
        os.close(self.text)
        os.close(self.watch)


class Server:
    """A running zygote. `report` says what its guests are locked up with."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, report: Report) -> None:
        self.process, self.report = process, report
        self._control, self._owner = control, os.getpid()
        self._starting = 0
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()

    @classmethod
    def start(cls, isolation: Isolation = "best_effort", *, without: tuple[str, ...] = ()) -> "Server":
        """Start a zygote, which takes about a second. `without` leaves out walls by name, to see what the others hold.

        Raises ConfigError where the machine is weaker than `isolation` allows, SandboxError where nothing starts.
        """
        server = cls(*_started(without))
        try:
            server.report.check(isolation)
        except ConfigError:
            server.close()
            raise
        return server

    @property
    def alive(self) -> bool:
        """Whether it can still be asked for guests."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the zygote and every guest of it."""
        if os.getpid() == self._owner:  # a fork of this process must not end what is still in use here
            # Such forks hold copies of the line, so that closing ours alone might end nothing.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def turn(self) -> Turn:
        """A turn to run. Waiting for it isn't charged; too many at a time would end honest cells at their limit."""
        loop = asyncio.get_running_loop()
        turns = self._turns.get(loop)
        if turns is None:
            processors = os.cpu_count() or 1
            turns = self._turns[loop] = Turns(SHORT * processors, LONG * processors)
        return Turn(turns)

    async def spawn(self, limits: Limits, seed: int, shared: Sequence[int] = ()) -> Guest:
        """A new guest, locked up, with copies of the `shared` descriptors, when there is memory for one.

        Raises SandboxError if it can't be.
        """
        await MEMORY.room(lambda: (self._starting + 1) * NEW_BYTES)
        self._starting += 1
        try:
            return await self._spawned(json.dumps({"limits": asdict(limits), "seed": seed}).encode(), shared)
        finally:
            self._starting -= 1

    async def _spawned(self, request: bytes, shared: Sequence[int]) -> Guest:
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                line, their_line = _pair(socket.SOCK_STREAM, ours, theirs)
                life, their_life = _pair(socket.SOCK_SEQPACKET, ours, theirs)
                text, their_text = _pipe(ours, theirs)
                await self._send(request, [their_line.fileno(), their_text, their_life.fileno(), *shared])
            # Their ends are the server's alone now: if it ends, so does `life`.
            data, found = await heard(life)
            if "error" in data:
                raise SandboxError(data["error"])
            if not found:
                raise _no_room()
            ours.pop_all()  # the guest's from here on
        return Guest(line=Line(line), life=life, text=text, watch=found[0], pid=data["pid"], folder=data["folder"])

    async def _send(self, request: bytes, places: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._control, [request], places)
                return
            except OSError as error:
                # Too many requests, or too many descriptors in them, are on their way: some will have arrived soon.
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                    raise SandboxError("the sandbox's server has ended; start the run again") from error
                await asyncio.sleep(0.001)


def _pair(kind: int, ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    try:
        mine, other = socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise _no_room() from error
    ours.callback(mine.close)
    theirs.callback(other.close)
    mine.setblocking(False)
    return mine, other


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    try:
        mine, other = os.pipe()
    except OSError as error:
        raise _no_room() from error
    ours.callback(os.close, mine)
    theirs.callback(os.close, other)
    os.set_blocking(mine, False)
    return mine, other


def _no_room() -> SandboxError:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return SandboxError(
        f"this process has as many files open as it may ({most}), and an interpreter takes four; "
        "make fewer attempts at a time, or raise the limit (ulimit -n)"
    )


def examine(*, without: tuple[str, ...] = ()) -> Report:
    """What guests would be locked up with on this machine, weak or not. Raises SandboxError where nothing starts."""
    server = Server(*_started(without))
    server.close()
    return server.report


def _started(without: tuple[str, ...]) -> "tuple[subprocess.Popen[bytes], socket.socket, Report]":
    if sys.platform != "linux":
        raise ConfigError(f"the sandbox needs Linux's Landlock and seccomp, which {sys.platform} hasn't; use Linux")
    machine()
    _make_room()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, tempfile.TemporaryFile() as errors:
        process = _launch(theirs, errors.fileno(), without)
        theirs.close()
        ours.settimeout(START_SECONDS)
        try:
            said = ours.recv(65536)
        except OSError:  # it took too long, or ended
            said = b""
        data = json.loads(said) if said else {"error": _last_line(errors.fileno())}
        if "error" in data:
            process.kill()
            process.wait()
            raise SandboxError(f"the sandbox can't start: {data['error']}")
        control = ours.dup()
    control.setblocking(False)
    return process, control, walls.unpacked(data)


def _fields(path: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(path).read_text().splitlines())


def _launch(control: socket.socket, errors: int, without: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    settings = {
        "host": os.getpid(),
        "control": control.fileno(),
        "cache": _cache(),
        "without": without,
        "optional": True,
    }
    root = str(Path(walls.__file__).parents[3])
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, json.dumps(settings), json.dumps([root, *sys.path])],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[control.fileno()],
        start_new_session=True,  # Ctrl-C is the host's to handle
    )


def _cache() -> str:
    """Where matplotlib keeps its list of fonts, which takes seconds to make."""
    try:
        folder = Path.home() / ".cache" / "saccade" / "matplotlib"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)
    except (OSError, RuntimeError):  # no home, or none to write to
        return tempfile.gettempdir()


def _last_line(errors: int) -> str:
    size = os.fstat(errors).st_size
    lines = os.pread(errors, 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it ended without a word")


def _make_room() -> None:
    """Allow this process as many descriptors as it may have: hundreds of guests need thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def ready(place: int) -> None:
    """Wait until a descriptor can be read."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    loop.add_reader(place, wake)
    try:
        await waiting
    finally:
        loop.remove_reader(place)


async def heard(life: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The zygote's next word on a guest, and descriptors with it. Raises SandboxError where there is none."""
    try:
        async with asyncio.timeout(SPAWN_SECONDS):
            await ready(life.fileno())
        data, places, _, _ = socket.recv_fds(life, 65536, 1)
    except (TimeoutError, OSError) as error:
        raise SandboxError("the sandbox's server does not answer; start the run again") from error
    if not data:
        raise SandboxError("the sandbox's server has ended; start the run again")
    said: dict[str, Any] = json.loads(data)
    return said, places


# ---- one for the whole process -------------------------------------------------------------------------------------

_shared: dict[Isolation, Server] = {}
_lock = Lock()


def shared(isolation: Isolation) -> Server:
    """The server that this process shares; started at first use, and again where it has ended.

    Raises what `Server.start` raises.
    """
    with _lock:
        server = _shared.get(isolation)
        if server is not None and not server.alive:
            server.close()
            server = None
        if server is None:
            server = _shared[isolation] = Server.start(isolation)
        return server


@atexit.register
def close_shared() -> None:
    """End what `shared` started."""
    with _lock:
        while _shared:
            _shared.popitem()[1].close()
