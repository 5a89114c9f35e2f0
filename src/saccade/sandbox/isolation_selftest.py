"""Finding out what holds: each set of walls is raised in a throw-away child, which then tries to break out.

A wall is believed in only if everything that it must forbid fails, and if a figure can still be drawn.
"""

import importlib
import json
import os
import select
import shutil
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from saccade.tools._sandbox import jail, keeper, kernel, walls
from saccade.tools._sandbox.limits import Limits
from saccade.tools._sandbox.walls import Namespaces, Report, Walls

PATIENCE = 60.0  # seconds for one trial


def choose(space: int, without: frozenset[str]) -> Report:
    """The strongest walls that hold on this machine; `without` names walls to leave out, as if it had none of them.

    `space` is the address space (bytes) that the libraries take.
    """
    reasons = dict.fromkeys(without, "left out on purpose")
    landlock = 0 if "Landlock" in without else _found("Landlock", kernel.landlock_version, reasons)
    seccomp = "seccomp" not in without and bool(_found("seccomp", kernel.can_filter, reasons))
    escapes: tuple[str, ...] = ()
    for namespaces, own_user in _candidates(without):
        found = Walls(namespaces=namespaces, landlock=landlock, seccomp=seccomp, own_user=own_user)
        if not found.enough:
            continue
        result = _tried(found, space)
        if result == {"escapes": []}:
            return walls.report(found, reasons)
        escapes = tuple(result.get("escapes") or [f"can't be locked up: {result['refused']}"])
        reasons.setdefault("namespaces" if namespaces else "own user", escapes[0])
    bare = Walls(namespaces="", landlock=landlock, seccomp=seccomp, own_user=False)
    return walls.report(bare, reasons, escapes)


def _found(name: str, ask: Callable[[], int], reasons: dict[str, str]) -> int:
    try:
        return ask()
    except OSError as error:
        reasons[name] = f"the kernel says: {error.strerror}"
        return 0


def _candidates(without: frozenset[str]) -> Iterator[tuple[Namespaces, bool]]:
    """Ways to raise walls, the strongest first."""
    ways: list[tuple[Namespaces, bool]] = [("user", True), ("user", False), ("", False)]
    if os.geteuid() == 0:  # whose threads the kernel doesn't count, in whatever namespace
        ways = [("root", True), ("root", False), ("user", False), ("", True), ("", False)]
    for namespaces, own_user in ways:
        if not (namespaces and "namespaces" in without) and not (own_user and "own user" in without):
            yield namespaces, own_user


def _tried(found: Walls, space: int) -> Mapping[str, Any]:
    """What came of raising these walls: {"escapes": [...]}, or {"refused": why}."""
    ear, mouth = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    base = tempfile.mkdtemp(prefix="saccade-trial-")
    os.chmod(base, 0o711)
    child = os.fork()
    if not child:
        ear.close()
        _try(found, space, base, mouth)
    mouth.close()
    heard = select.select([ear], [], [], PATIENCE)[0]
    data = ear.recv(65536) if heard else b""
    ear.close()
    os.waitpid(child, 0)
    shutil.rmtree(base, ignore_errors=True)
    result: dict[str, Any] = json.loads(data) if data else {"refused": "a trial ended without a word"}
    return result


def _try(found: Walls, space: int, base: str, mouth: socket.socket) -> NoReturn:
    """In a child: raise the walls, fork a guest, let it try."""
    try:
        locked = keeper.settle(found, space, base, _wait)
        guest = os.fork()
        if guest:
            _wait(guest)
        # Locking up closes every descriptor but this one.
        os.dup2(mouth.fileno(), jail.LINE)
        mouth.detach()
        mouth = socket.socket(fileno=jail.LINE)
        jail.lock_up(locked, Limits())
        mouth.send(json.dumps({"escapes": list(_escapes())}).encode())
    except OSError as error:
        mouth.send(json.dumps({"refused": str(error)}).encode())
    finally:
        os._exit(0)


def _wait(child: int) -> NoReturn:
    os.waitpid(child, 0)
    os._exit(0)


def _escapes() -> Iterator[str]:
    """Forbidden things that this process can do nevertheless, and allowed ones that it can't."""
    library = sysconfig.get_paths()["purelib"]
    forbidden: dict[str, Callable[[], Any]] = {
        "can read /etc/passwd": lambda: open("/etc/passwd").close(),
        "can open a socket": lambda: socket.socket().close(),
        "can start a process": _fork,
        "can run a program": lambda: os.execv(sys.executable, ["python", "-c", ""]),
        "can signal its parent": lambda: os.kill(os.getppid(), 0),
        "can write among the libraries": lambda: open(f"{library}/saccade-trial", "w").close(),
    }
    for what, attempt in forbidden.items():
        try:
            attempt()
        except OSError:
            continue
        yield what
    try:
        importlib.import_module("colorsys")
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        _draw()
    except (OSError, ImportError, RuntimeError) as error:
        yield f"can't use the libraries ({error})"


def _fork() -> None:
    if not os.fork():
        os._exit(0)


def _draw() -> None:
    plt = importlib.import_module("matplotlib.pyplot")
    plt.figure().suptitle("trial")
    plt.gcf().canvas.draw()
    plt.close("all")
