"""The fork server: imports the libraries once and forks one jailed worker per episode; it never holds task data.

    host ──limits, status socket──> zygote ──fork──> worker: enter_jail, then SandboxWorker.serve
      ^                                │                │
      └──── status socket: exit status ┘      at first: pidfd, socket, stdout

It is started by exec with a clean environment, so that it holds nothing of the trainer (heap, descriptors, keys). Its
parent, the supervisor, owns the namespaces. When the host or the zygote exits, the supervisor kills the zygote, the
kernel kills every worker with it, and the supervisor removes the working folders.
"""

import contextlib
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image

from saccade.sandbox import isolation_selftest, jail, protocol, seccomp_policy, syscalls, workdir
from saccade.sandbox.jail import ENVIRONMENT
from saccade.sandbox.limits import Limits

OPTIONAL_MODULES = (
    "scipy scipy.ndimage scipy.signal skimage skimage.io skimage.measure skimage.filters skimage.transform cv2"
)
_COMMON_MODULES = (
    "saccade.sandbox.worker collections csv datetime functools itertools json math random re statistics string "
    "textwrap time typing decimal fractions heapq bisect copy tempfile concurrent.futures asyncio numpy.fft "
    "numpy.linalg numpy.random matplotlib.patches matplotlib.cm matplotlib.gridspec PIL.ImageChops PIL.ImageColor "
    "PIL.ImageDraw PIL.ImageEnhance PIL.ImageFilter PIL.ImageFont PIL.ImageOps PIL.ImageStat"
)
MAX_FAST_REMOVAL = 256  # files and folders of a working folder that is removed at once
MAX_WAITING_FOLDERS = 64  # working folders that wait to be removed
_IDLE_SECONDS = 0.002  # without a request or an exit, after which a worker is preforked


def main(settings_json: str) -> NoReturn:
    """Serve the host that the settings describe: its pid, control socket, cache folder, disabled layers."""
    settings = json.loads(settings_json)
    syscalls.die_with_parent()
    if os.getppid() != settings["host_pid"]:
        os._exit(1)
    host_pidfd = os.pidfd_open(settings["host_pid"])
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        # A real-time worker in an endless loop would keep its host from interrupting it.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    control = socket.socket(fileno=settings["control_fd"])
    try:
        library_bytes = import_libraries(settings["cache_dir"], OPTIONAL_MODULES if settings["import_optional"] else "")
        num_threads = len(os.listdir("/proc/self/task"))
        mappings = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        shared_mappings = [
            fields[-1] for fields in mappings if fields[1].endswith("s") and "w" in fields[1]
        ]  # writable
        if (num_threads > 1 or shared_mappings) and settings["import_optional"]:
            # An optional library started a thread, which fork would not copy, or mapped memory that all workers would
            # share: start again without optional libraries.
            without_optional = json.dumps({**settings, "import_optional": False})
            arguments = [without_optional if argument == settings_json else argument for argument in sys.orig_argv]
            os.execv(sys.executable, arguments)
        if num_threads > 1:
            raise OSError("a library that the sandbox imports starts threads; check recently updated libraries")
        if shared_mappings:
            raise OSError(
                f"a library maps {shared_mappings[0]} as memory shared by all workers; check updated libraries"
            )
        report = isolation_selftest.select_isolation(library_bytes, frozenset(settings["disabled_layers"]))
        if not report.is_safe:
            protocol.send_json(control, asdict(report))
            os._exit(1)
        work_root = "" if report.isolation.namespaces else workdir.create_work_root()
        jail_config = jail.fork_isolated(
            report.isolation, library_bytes, work_root, lambda pid: supervise(pid, host_pidfd, work_root)
        )
        seccomp_policy.build_filter(0)  # caches the part that all filters share
        protocol.send_json(control, asdict(report))
        Zygote(jail_config, control).serve()
    except OSError as error:
        protocol.send_json(control, {"error": str(error)})
    os._exit(1)


def supervise(zygote_pid: int, host_pidfd: int, work_root: str) -> NoReturn:
    """In the supervisor: wait until the host or the zygote exits; kill the zygote and remove the working folders."""
    syscalls.die_with_parent(0)  # the parent-death signal follows a thread of the host, which may end before the host
    zygote_pidfd = os.pidfd_open(zygote_pid)
    poll = select.poll()
    for pidfd in (host_pidfd, zygote_pidfd):
        poll.register(pidfd, select.POLLIN)
    syscalls.close_other_fds((host_pidfd, zygote_pidfd))
    poll.poll()
    try:
        os.kill(zygote_pid, signal.SIGKILL)
        os.waitpid(zygote_pid, 0)
        if work_root:
            workdir.remove_tree(work_root)
    finally:
        os._exit(0)


def import_libraries(cache_dir: str, optional_modules: str) -> int:
    """Import what workers need, and the installed ones of `optional_modules`; return the address space in bytes."""
    os.environ["MPLCONFIGDIR"] = cache_dir  # before matplotlib is imported
    from saccade.sandbox import figure_capture, video_reader

    Image.init()
    figure_capture.warm_up()
    video_reader.install_decord_stub()
    for name in f"{_COMMON_MODULES} {optional_modules}".split():
        # Missing modules raise ModuleNotFoundError in workers too.
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    if "cv2" in sys.modules:
        vars(sys.modules["cv2"])["setNumThreads"](0)
        figure_capture.install_opencv_hooks(sys.modules["cv2"])
    os.environ.update({**ENVIRONMENT, "MPLCONFIGDIR": ENVIRONMENT["HOME"]})
    # Workers can't read the sources of this package.
    libraries = jail.find_library_paths()
    sys.path[:] = [path for path in sys.path if any(jail.is_within(path, folder) for folder in libraries)]
    gc.collect()
    gc.freeze()
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class Zygote:
    """Passes each request to a forked process, one of which waits in advance; reports the workers' exit statuses."""

    def __init__(self, jail_config: jail.JailConfig, control: socket.socket) -> None:
        self._jail_config, self._control = jail_config, control
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> (pid, status socket)
        self._waiting: tuple[int, socket.socket] | None = None  # the pid and request socket of a forked process
        self._poll = select.epoll()
        self._remover = FolderRemover(jail_config.work_root, self._poll)

    def serve(self) -> NoReturn:
        """Serve the host until it closes the control socket."""
        self._poll.register(self._control, select.EPOLLIN)
        delay = _IDLE_SECONDS
        while True:
            events = self._poll.poll(None if self._waiting else delay)
            if not events:
                try:
                    self._waiting, delay = self._fork(), _IDLE_SECONDS
                except OSError:  # the next request reports the error
                    delay = 1.0
            for fd, _ in events:
                if fd == self._control.fileno():
                    self._accept()
                elif fd == self._remover.pidfd:
                    self._remover.handle_exit()
                else:
                    self._reap_worker(fd)

    def _accept(self) -> None:
        request, fds = protocol.receive_json(self._control)
        if request is None:
            os._exit(0)
        if not fds:  # descriptor limit; the host receives end of file
            return
        status_socket = socket.socket(fileno=fds[0])
        try:
            pid = self._hand_over(request, fds)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            _send_status(status_socket, {"error": f"the sandbox can't start an interpreter: {error}"})
        else:
            self._workers[pidfd] = pid, status_socket
            self._poll.register(pidfd, select.EPOLLIN)
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def _fork(self) -> tuple[int, socket.socket]:
        """Fork a process that waits for a request. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = os.fork()
            if pid == 0:
                _run_worker(self._jail_config, theirs.fileno())
        return pid, ours

    def _hand_over(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """Pass a request to the waiting process, or to a new one; return its pid. Raises OSError."""
        while True:
            is_new = self._waiting is None
            (pid, request_socket), self._waiting = self._waiting or self._fork(), None
            try:
                with request_socket:
                    protocol.send_json(request_socket, request, fds)
                return pid
            except OSError:  # the process was killed while it waited
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                if is_new:
                    raise

    def _reap_worker(self, pidfd: int) -> None:
        """Report a worker's exit status, then remove its working folder."""
        pid, status_socket = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        _send_status(status_socket, {"status": status, "cpu": usage.ru_utime + usage.ru_stime})
        status_socket.close()
        if not self._jail_config.isolation.namespaces:
            with contextlib.suppress(OSError):  # the supervisor removes the rest at the end
                self._remover.remove(self._jail_config.resolve_work_dir(pid))


class FolderRemover:
    """Removes working folders; those with many files in a child process, so that no other worker waits for that."""

    def __init__(self, work_root: str, poll: select.epoll) -> None:
        self._work_root, self._poll = work_root, poll
        self._waiting: list[str] = []
        self._num_moved = self._pid = 0
        self.pidfd = -1  # of the child process, if there is one

    def remove(self, folder: str) -> None:
        """Remove a folder if it exists, now or later; its path is free at once. Raises OSError."""
        if workdir.is_small(folder, MAX_FAST_REMOVAL):
            if os.path.isdir(folder):
                workdir.remove_tree(folder)
            return
        moved = f"{self._work_root}/removed-{self._num_moved}"
        os.rename(folder, moved)
        self._num_moved += 1
        self._waiting.append(moved)
        if self._pid and len(self._waiting) > MAX_WAITING_FOLDERS:  # added faster than the child removes them
            self.handle_exit()
        if not self._pid:
            self._start()

    def handle_exit(self) -> None:
        """Wait for the child process to end, and start the next one if folders are left."""
        os.waitpid(self._pid, 0)
        self._poll.unregister(self.pidfd)
        os.close(self.pidfd)
        self._pid, self.pidfd = 0, -1
        if self._waiting:
            self._start()

    def _start(self) -> None:
        folders = self._waiting
        try:
            self._pid = os.fork()
        except OSError:  # no memory or process is left: the next removal tries again
            return
        if not self._pid:
            try:
                syscalls.die_with_parent()
                os.nice(jail.NICE_LEVEL)
                for folder in folders:
                    with contextlib.suppress(OSError):
                        workdir.remove_tree(folder)
            finally:
                os._exit(0)
        self._waiting = []
        try:
            self.pidfd = os.pidfd_open(self._pid)
        except OSError:  # no descriptor is left
            os.waitpid(self._pid, 0)
            self._pid = 0
        else:
            self._poll.register(self.pidfd, select.EPOLLIN)


def _send_status(status_socket: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the host has closed the socket
        protocol.send_json(status_socket, message)


def _run_worker(jail_config: jail.JailConfig, request_fd: int) -> NoReturn:
    """In a forked process: wait for a request, jail this process and serve the host; never return into the zygote."""
    from saccade.sandbox import worker

    try:
        os.dup2(request_fd, jail.HOST_FD)  # received descriptors get the numbers behind it
        syscalls.close_other_fds((jail.HOST_FD, jail_config.proc_fd))
        syscalls.die_with_parent()
        signal.set_wakeup_fd(-1)
        request_socket = socket.socket(fileno=jail.HOST_FD)
        request, fds = protocol.receive_json(request_socket)
        if request is None or os.getppid() != jail_config.zygote_pid:
            os._exit(0)
        status_fd, *shared = fds
        host_socket, worker_socket = socket.socketpair()
        host_stdout, stdout = os.pipe()
        work_dir = "" if jail_config.isolation.namespaces else jail_config.resolve_work_dir(os.getpid())
        host_fds = (os.pidfd_open(os.getpid()), host_socket.detach(), host_stdout)
        with socket.socket(fileno=status_fd) as status_socket:
            protocol.send_json(status_socket, {"work_dir": work_dir}, host_fds)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        os.dup2(worker_socket.detach(), request_socket.detach())  # HOST_FD; enter_jail closes the others
        # A separate file description of /dev/null: workers could see each other's flags on a shared one.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        shared_fds = jail.copy_fds(shared)
        try:
            limits = Limits(**request["limits"])
            jail.enter_jail(jail_config, limits, shared_fds)
        except OSError as error:
            message, status = str(error).encode(), protocol.CompletionStatus.RAISED
            header = protocol.Header(protocol.MessageKind.DONE, status, payload_size=len(message))
            os.write(jail.HOST_FD, header.pack() + message)
            os._exit(1)
        worker.SandboxWorker(jail.HOST_FD, limits, request["seed"], shared_fds).serve()
    finally:
        os._exit(protocol.BROKEN_EXIT_CODE)
