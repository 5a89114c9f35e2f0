"""The host's client of the fork server (zygote): started once per process and isolation mode; spawns workers.

    ForkServerClient.start ──exec──> supervisor, zygote ──report──> checked against the required isolation mode
    ForkServerClient.spawn ──limits, status socket──> zygote, worker ──pidfd, socket, stdout──> WorkerHandle

Each request carries its own status socket, so spawning needs no lock and no thread and works from any event loop;
requests wait while memory is short (memory_pressure.py). The zygote exits on `close`, when this process exits, or when
it fails; each of these kills every worker.
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
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from saccade.errors import ConfigError, SandboxError
from saccade.sandbox.descriptors import plan_sandboxes
from saccade.sandbox.isolation import IsolationLayers, IsolationReport
from saccade.sandbox.jail import ENVIRONMENT
from saccade.sandbox.limits import MIB, IsolationMode, Limits
from saccade.sandbox.memory_pressure import MemoryMonitor
from saccade.sandbox.protocol import receive_json, send_json
from saccade.sandbox.scheduler import CpuSlot, Scheduler, count_cpus
from saccade.sandbox.seccomp_policy import get_architecture
from saccade.sandbox.streams import WorkerConnection, wait_readable

START_TIMEOUT = 180.0  # starting takes 1 to 2 s on an idle machine
SPAWN_TIMEOUT = 120.0  # spawning takes milliseconds, but hundreds of requests may be queued
STOP_TIMEOUT = 10.0
ROOM_TIMEOUT = 3600.0  # for descriptors: other episodes end and close their sandboxes meanwhile
ROOM_POLL_INTERVAL = 0.1
WORKER_START_BYTES = 16 * MIB  # of a worker before its first call; MemAvailable shows them only later
SHORT_SLOTS_PER_CPU, LONG_SLOTS_PER_CPU = 4, 4  # cells that run at the same time, per CPU
MEMORY_MONITOR = MemoryMonitor()
_CPUCLOCK_SCHED = 2  # the kind of CPU clock that counts the time that the scheduler gave
_BOOT_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from saccade.sandbox import zygote
zygote.main(sys.argv[1])
"""


@dataclass(slots=True, kw_only=True)
class WorkerHandle:
    """The host's handles of one worker: sockets, the reading end of its stdout pipe, and its pidfd.

    `work_dir` is its working folder on this machine's disk, "" if the worker has a private file system.
    `cpu_seconds_at_stop` are the CPU seconds that it had used when its last call ended.
    """

    connection: WorkerConnection
    status_socket: socket.socket
    stdout_fd: int
    pidfd: int
    work_dir: str
    cpu_seconds_at_stop: float = 0.0
    _host_pid: int = field(init=False)  # its pid in the host's pid namespace; -1 if it has exited

    def __post_init__(self) -> None:
        self._host_pid = self._read_host_pid()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; do nothing if the worker has exited."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def count_threads(self) -> int:
        """Return the number of its threads as the kernel reports it; 0 if the worker has exited."""
        return self._read_proc_stat(17)[0]

    def read_queue_seconds(self) -> float:
        """Return the seconds its main thread has waited in the run queue; 0.0 if the kernel doesn't report them."""
        try:
            return int(Path(self.find_proc_dir(), "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def read_cpu_seconds(self) -> float:
        """Return the CPU seconds of all its threads; 0.0 if the worker has exited."""
        if self._host_pid <= 0:
            return 0.0
        try:  # a process's CPU clock (MAKE_PROCESS_CPUCLOCK in Linux's posix-timers.h): exact, and no file is read
            return time.clock_gettime((~self._host_pid << 3) | _CPUCLOCK_SCHED)
        except OSError:
            return 0.0

    def read_memory_bytes(self) -> int:
        """Return the bytes of memory that it holds, the libraries' included; 0 if it has exited."""
        return self._read_proc_stat(21)[0] * os.sysconf("SC_PAGE_SIZE")

    def _read_proc_stat(self, *field_indices: int) -> list[int]:
        """Return fields of /proc/<pid>/stat, counted from behind the process name; 0 each if the worker has exited."""
        try:  # the code may choose any process name: invalid UTF-8, brackets, line feeds
            fields = Path(self.find_proc_dir(), "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return [0] * len(field_indices)
        return [int(fields[index]) for index in field_indices]

    def find_proc_dir(self) -> str:
        """Return its folder in /proc, by its current pid: after its exit another process may have the number."""
        return f"/proc/{self._read_host_pid()}"

    def _read_host_pid(self) -> int:
        lines = Path(f"/proc/self/fdinfo/{self.pidfd}").read_text().splitlines()
        return next(int(line[4:]) for line in lines if line.startswith("Pid:"))

    def close(self) -> None:
        """Kill the worker and close every handle."""
        self.send_signal(signal.SIGKILL)
        self.connection.close()
        self.status_socket.close()
        os.close(self.stdout_fd)
        os.close(self.pidfd)


class ForkServerClient:
    """A running fork server; `report` is the isolation of its workers. `start` checks that it is sufficient."""

    def __init__(self, disabled_layers: tuple[str, ...] = ()) -> None:
        """Start a fork server, however weak. Raises ConfigError on other systems, SandboxError if it can't start."""
        if sys.platform != "linux":
            message = f"the sandbox needs Landlock and seccomp, which {sys.platform} lacks; use Linux"
            raise ConfigError(message, key="platform", value=sys.platform)
        get_architecture()
        self._max_sandboxes = plan_sandboxes()
        self._owner_pid, self._num_starting, self._num_sandboxes = os.getpid(), 0, 0
        self._schedulers: WeakKeyDictionary[asyncio.AbstractEventLoop, Scheduler] = WeakKeyDictionary()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as stderr:
            settings = {
                "host_pid": os.getpid(),
                "control_fd": theirs.fileno(),
                "cache_dir": _find_cache_dir(),
                "disabled_layers": disabled_layers,
                "import_optional": True,
            }
            root = str(Path(__file__).parents[2])  # the folder that holds the package
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT_SCRIPT, json.dumps(settings), json.dumps([root, *sys.path])],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr.fileno(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the host handles Ctrl-C
            )
            theirs.close()
            self._control.settimeout(START_TIMEOUT)
            try:
                data = receive_json(self._control)[0]
            except OSError:  # timeout, or the process exited
                data = None
            data = data or {"error": _read_last_line(stderr.fileno())}
        if "error" in data:
            self._control.close()
            self.process.kill()
            self.process.wait()
            raise SandboxError(f"the sandbox can't start: {data['error']}")
        self._control.setblocking(False)
        self.report = IsolationReport(IsolationLayers(**data["isolation"]), data["reasons"], tuple(data["escapes"]))

    @classmethod
    def start(
        cls, isolation: IsolationMode = "best_effort", *, disabled_layers: tuple[str, ...] = ()
    ) -> "ForkServerClient":
        """Start a fork server, which takes about a second.

        `disabled_layers` turns off isolation layers by name, to test the remaining ones. Raises ConfigError if the
        machine is weaker than `isolation` requires, SandboxError if the fork server doesn't start.
        """
        server = cls(disabled_layers)
        try:
            server.report.check(isolation)
        except ConfigError:
            server.close()
            raise
        return server

    def close(self) -> None:
        """Stop the zygote and all its workers."""
        if os.getpid() == self._owner_pid:  # a fork of this process must not stop the server its parent still uses
            # Forks hold copies of the socket, so the zygote may not see end of file when only ours is closed.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def request_slot(self) -> CpuSlot:
        """Return a slot to run a cell in; waiting for it isn't charged to the cell.

        Without slots, too many concurrent cells would exceed their time limits because of load alone.
        """
        loop = asyncio.get_running_loop()
        scheduler = self._schedulers.get(loop)
        if scheduler is None:
            num_cpus = count_cpus()
            scheduler = Scheduler(SHORT_SLOTS_PER_CPU * num_cpus, LONG_SLOTS_PER_CPU * num_cpus)
            self._schedulers[loop] = scheduler
        return CpuSlot(scheduler)

    @contextlib.asynccontextmanager
    async def reserve_sandbox(self) -> AsyncIterator[None]:
        """Wait until there are descriptors for one more sandbox, and count it inside the block.

        Raises SandboxError after ROOM_TIMEOUT seconds.
        """
        deadline = time.monotonic() + ROOM_TIMEOUT
        while self._num_sandboxes >= self._max_sandboxes:
            if time.monotonic() > deadline:
                raise _build_fd_limit_error()
            await asyncio.sleep(ROOM_POLL_INTERVAL)
        self._num_sandboxes += 1
        try:
            yield
        finally:
            self._num_sandboxes -= 1

    async def spawn(self, limits: Limits, seed: int, shared_fds: Sequence[int] = ()) -> WorkerHandle:
        """Start a jailed worker with copies of `shared_fds`, once there is memory for one. Raises SandboxError."""
        await MEMORY_MONITOR.wait_for_memory(lambda: (self._num_starting + 1) * WORKER_START_BYTES)
        self._num_starting += 1
        try:
            return await self._spawn({"limits": asdict(limits), "seed": seed}, shared_fds)
        finally:
            self._num_starting -= 1

    async def _spawn(self, request: dict[str, Any], shared_fds: Sequence[int]) -> WorkerHandle:
        try:
            status_socket, zygote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _build_fd_limit_error() from error
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(status_socket)
            status_socket.setblocking(False)
            with zygote_socket:
                await self._send(request, [zygote_socket.fileno(), *shared_fds])
            # Our copy of the other end is closed, so `status_socket` reports end of file if the zygote exits.
            status, fds = await receive_status(status_socket)
            for fd in fds:
                on_failure.callback(os.close, fd)
            if "work_dir" not in status:
                raise SandboxError(status.get("error", "an interpreter was killed while it started"))
            if len(fds) < 3:
                raise _build_fd_limit_error()
            on_failure.pop_all()
        pidfd, socket_fd, stdout_fd = fds
        os.set_blocking(stdout_fd, False)
        return WorkerHandle(
            connection=WorkerConnection(socket.socket(fileno=socket_fd)),
            status_socket=status_socket,
            stdout_fd=stdout_fd,
            pidfd=pidfd,
            work_dir=status["work_dir"],
        )

    async def _send(self, request: dict[str, Any], fds: list[int]) -> None:
        while True:
            try:
                send_json(self._control, request, fds)
                return
            except OSError as error:
                # Too many requests, or too many descriptors in them, are in flight: retry when some have arrived.
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                    raise SandboxError("the sandbox's server has ended; start the run again") from error
                await asyncio.sleep(0.001)


def _build_fd_limit_error() -> SandboxError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return SandboxError(
        f"this process has reached its limit of open files ({limit}), and an interpreter needs four; "
        "run fewer rollouts at a time, or raise the limit (ulimit -n)",
        key="RLIMIT_NOFILE",
        value=limit,
    )


def probe_isolation(*, disabled_layers: tuple[str, ...] = ()) -> IsolationReport:
    """Return the isolation available on this machine, sufficient or not. Raises SandboxError if nothing starts."""
    server = ForkServerClient(disabled_layers)
    server.close()
    return server.report


def _find_cache_dir() -> str:
    """Return the folder of matplotlib's font cache, which takes seconds to build."""
    try:
        folder = Path.home() / ".cache" / "saccade" / "matplotlib"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        return tempfile.gettempdir()


def _read_last_line(stderr_fd: int) -> str:
    size = os.fstat(stderr_fd).st_size
    lines = os.pread(stderr_fd, 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "the process exited without a message")


async def receive_status(status_socket: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the zygote's next status message about a worker, with descriptors. Raises SandboxError if none comes."""
    try:
        async with asyncio.timeout(SPAWN_TIMEOUT):
            await wait_readable(status_socket.fileno())
        status, fds = receive_json(status_socket)
    except (TimeoutError, OSError) as error:
        raise SandboxError("the sandbox's server does not answer; start the run again") from error
    if status is None:
        raise SandboxError("the sandbox's server has ended; start the run again")
    return status, fds


# ---- servers shared by the whole process ---------------------------------------------------------------------------

_shared_servers: dict[IsolationMode, ForkServerClient] = {}
_shared_servers_lock = Lock()


def get_shared_server(isolation: IsolationMode) -> ForkServerClient:
    """Return the fork server that this process shares; start it at first use, and again after it has exited.

    Raises what `ForkServerClient.start` raises.
    """
    with _shared_servers_lock:
        if isolation in _shared_servers and _shared_servers[isolation].process.poll() is not None:
            _shared_servers.pop(isolation).close()
        if isolation not in _shared_servers:
            _shared_servers[isolation] = ForkServerClient.start(isolation)
        return _shared_servers[isolation]


@atexit.register
def close_shared_servers() -> None:
    """Stop every server that `get_shared_server` started."""
    with _shared_servers_lock:
        while _shared_servers:
            _shared_servers.popitem()[1].close()
