"""Select the isolation layers by a self-test: set them up in a throw-away child, which then tries to escape.

A set of layers is used only if every forbidden action fails and a figure can still be drawn.
"""

import importlib
import os
import select
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from saccade.sandbox import jail, syscalls
from saccade.sandbox.isolation import IsolationLayers, IsolationReport, Namespaces
from saccade.sandbox.limits import Limits
from saccade.sandbox.protocol import receive_json, send_json

SELFTEST_TIMEOUT = 60.0
LATER_LANDLOCK = "later Landlock"  # a disabled layer: what came after the first version of the kernel's interface


def select_isolation(library_bytes: int, disabled_layers: frozenset[str]) -> IsolationReport:
    """Return the strongest layers that pass the self-test on this machine, not counting `disabled_layers`.

    `library_bytes` is the address space that the libraries take.
    """
    reasons = dict.fromkeys(disabled_layers, "disabled on purpose")
    landlock = _probe_feature("Landlock", syscalls.probe_landlock_version, reasons)
    landlock = min(landlock, 1) if LATER_LANDLOCK in disabled_layers else landlock
    seccomp = bool(_probe_feature("seccomp", syscalls.probe_seccomp, reasons))
    escapes: tuple[str, ...] = ()
    candidates: list[tuple[Namespaces, bool]] = [("user", True), ("user", False), ("", False)]  # the strongest first
    if os.geteuid() == 0:  # the kernel never limits the number of root's threads
        candidates = [("root", True), ("root", False), ("user", False), ("", True), ("", False)]
    for namespaces, per_worker_user in candidates:
        used_layers = {"namespaces": namespaces, "worker user": per_worker_user}
        if any(used_layers.get(name) for name in disabled_layers):
            continue
        layers = IsolationLayers(
            namespaces=namespaces, landlock=landlock, seccomp=seccomp, per_worker_user=per_worker_user
        )
        if not layers.is_sufficient:
            continue
        result = _run_selftest(layers, library_bytes)
        if result == {"escapes": []}:
            return IsolationReport(layers, reasons)
        escapes = tuple(result.get("escapes") or [f"can't be jailed: {result['refused']}"])
        reasons.setdefault("namespaces" if namespaces else "worker user", escapes[0])
    layers = IsolationLayers(namespaces="", landlock=landlock, seccomp=seccomp, per_worker_user=False)
    return IsolationReport(layers, reasons, escapes)


def _probe_feature(name: str, probe: Callable[[], int], reasons: dict[str, str]) -> int:
    """Return the feature's version, 0 if the kernel lacks it, and add the reason, or if `reasons` has one already."""
    if name in reasons:
        return 0
    try:
        return probe()
    except OSError as error:
        reasons[name] = f"refused by the kernel: {error.strerror}"
        return 0


def _run_selftest(layers: IsolationLayers, library_bytes: int) -> Mapping[str, Any]:
    """Run the self-test within these layers; return {"escapes": [...]}, or {"refused": why} if the setup fails."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    work_root = tempfile.mkdtemp(prefix="saccade-selftest-")
    os.chmod(work_root, 0o711)
    child_pid = os.fork()
    if not child_pid:
        receiver.close()
        _run_selftest_child(layers, library_bytes, work_root, sender)
    sender.close()
    is_readable = select.select([receiver], [], [], SELFTEST_TIMEOUT)[0]
    result = receive_json(receiver)[0] if is_readable else None
    receiver.close()
    if not is_readable:  # it may never end
        os.kill(child_pid, signal.SIGKILL)
    os.waitpid(child_pid, 0)
    shutil.rmtree(work_root, ignore_errors=True)
    return result or {"refused": "the self-test sent no result"}


def _run_selftest_child(
    layers: IsolationLayers, library_bytes: int, work_root: str, result_socket: socket.socket
) -> NoReturn:
    """In a child process: set up the layers, fork a worker and run the self-test in it."""
    try:
        jail_config = jail.fork_isolated(layers, library_bytes, work_root, _wait_and_exit)
        worker_pid = os.fork()
        if worker_pid:
            _wait_and_exit(worker_pid)
        # enter_jail closes every descriptor but this one.
        os.dup2(result_socket.fileno(), jail.HOST_FD)
        result_socket.detach()
        result_socket = socket.socket(fileno=jail.HOST_FD)
        jail.enter_jail(jail_config, Limits())
        send_json(result_socket, {"escapes": list(_find_escapes())})
    except OSError as error:
        reason = error.strerror or str(error)
        send_json(result_socket, {"refused": f"{reason}: {error.filename}" if error.filename else reason})
    finally:
        os._exit(0)


def _wait_and_exit(child_pid: int) -> NoReturn:
    os.waitpid(child_pid, 0)
    os._exit(0)


def _find_escapes() -> Iterator[str]:
    """Yield forbidden actions that succeed in this process, and allowed ones that fail."""
    library = sysconfig.get_paths()["purelib"]
    forbidden: dict[str, Callable[[], Any]] = {
        "can read /etc/passwd": lambda: open("/etc/passwd").close(),
        "can open a socket": lambda: socket.socket().close(),
        "can start a process": lambda: os.fork() or os._exit(0),
        "can run a program": lambda: os.execv(sys.executable, ["python", "-c", ""]),
        "can signal its parent": lambda: os.kill(os.getppid(), 0),
        "can write among the libraries": lambda: open(f"{library}/saccade-selftest", "w").close(),
    }
    for description, action in forbidden.items():
        try:
            action()
        except OSError:
            continue
        yield description
    try:
        importlib.import_module("colorsys")
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        plt = importlib.import_module("matplotlib.pyplot")
        plt.figure().suptitle("self-test")
        plt.gcf().canvas.draw()
        plt.close("all")
    except (OSError, ImportError, RuntimeError) as error:
        yield f"can't use the libraries ({error})"
