"""The process that has imported everything and forks one jailed guest per episode; it never sees data.

    host ──limits and three descriptors──> zygote ──fork──> guest: locked up, then guest.Guest.serve
      ^                                      │
      └── life socket: pid and pidfd, later how the guest ended

It is started by exec with a clean environment, so that nothing of the trainer (heap, descriptors, keys) is in it. Its
parent, the keeper, waits for the host's end and then kills it, and the kernel kills every guest with it.
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
from pathlib import Path
from typing import Any, NoReturn

from saccade.tools._sandbox import jail, keeper, kernel, policy, scratch, trial, walls
from saccade.tools._sandbox.jail import ENVIRONMENT
from saccade.tools._sandbox.limits import Limits

OPTIONAL = (
    "scipy",
    "scipy.ndimage",
    "scipy.signal",
    "skimage",
    "skimage.io",
    "skimage.measure",
    "skimage.filters",
    "skimage.transform",
    "cv2",
)
_PILLOW = ("ImageChops", "ImageColor", "ImageDraw", "ImageEnhance", "ImageFilter", "ImageFont", "ImageOps", "ImageStat")
_OWN = ("saccade.tools._sandbox.guest", "saccade.tools._sandbox.wire")
_USUAL = (
    "collections",
    "csv",
    "datetime",
    "functools",
    "itertools",
    "json",
    "math",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "time",
    "typing",
    "decimal",
    "fractions",
    "heapq",
    "bisect",
    "copy",
    "tempfile",
    "concurrent.futures",
    "asyncio",
    "numpy.fft",
    "numpy.linalg",
    "numpy.random",
    "matplotlib.patches",
    "matplotlib.cm",
    "matplotlib.gridspec",
)
_MESSAGE = 65536
_QUIET = 0.002  # seconds without a request or an end
_PLACES = 253  # descriptors that one message can carry
_ENDS = 3  # of them belong to the guest's line, text and life


def main(settings: str) -> NoReturn:
    """Serve the host that these settings (JSON) name: its pid, control socket, cache folder, walls to leave out."""
    given = json.loads(settings)
    kernel.die_with_parent()
    if os.getppid() != given["host"]:
        os._exit(1)
    host = os.pidfd_open(given["host"])
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        # A guest that ran for ever in real time would keep its own host from stopping it.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    control = socket.socket(fileno=given["control"])
    try:
        space = load(given["cache"], OPTIONAL if given["optional"] else ())
        if (threads() > 1 or shared_memory()) and given["optional"]:
            # One of them started a thread, which a fork would leave behind in the middle of something, or made memory
            # that all guests would share: begin again.
            again = json.dumps({**given, "optional": False})
            os.execv(sys.executable, [again if word == settings else word for word in sys.orig_argv])
        if threads() > 1:
            raise OSError("a library that the sandbox imports starts threads; see which one did so lately")
        if shared_memory():
            raise OSError(f"the library of {shared_memory()[0]} shares memory among guests; see which one does so")
        report = trial.choose(space, frozenset(given["without"]))
        said = json.dumps(walls.packed(report)).encode()
        if not report.safe:
            control.send(said)
            os._exit(1)
        base = "" if report.walls.namespaces else scratch.make_base()
        locked = keeper.settle(report.walls, space, base, lambda zygote: keeper.keep(zygote, host, base))
        policy.program(0)  # the part that all filters share is made here, once
        control.send(said)
        Zygote(locked, control).serve()
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
    os._exit(1)


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def shared_memory() -> list[str]:
    """What of this process's memory its children could write to together."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [line[-1] for line in lines if line[1].endswith("s") and "w" in line[1]]


def load(cache: str, optional: Sequence[str]) -> int:
    """Import what guests will want, once, of `optional` what is installed; the address space that it takes (bytes)."""
    os.environ["MPLCONFIGDIR"] = cache
    from PIL import Image

    from saccade.tools._sandbox import gallery, reader

    Image.init()
    gallery.warm_up()
    reader.stand_in()
    for name in [*_OWN, *_USUAL, *(f"PIL.{part}" for part in _PILLOW), *optional]:
        # What isn't installed is a plain ModuleNotFoundError inside as well.
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    if "cv2" in sys.modules:
        vars(sys.modules["cv2"])["setNumThreads"](0)
        gallery.GALLERY.hook_windows(sys.modules["cv2"])
    os.environ.update({**ENVIRONMENT, "MPLCONFIGDIR": ENVIRONMENT["HOME"]})
    # The sources of the project are none of a guest's business.
    sys.path[:] = [path for path in sys.path if any(jail.within(path, place) for place in jail.libraries())]
    gc.collect()
    gc.freeze()
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class Zygote:
    """Forks guests on request, and one ahead in quiet moments, which is half the work; says how each one ended."""

    def __init__(self, locked: jail.Jail, control: socket.socket) -> None:
        self._jail, self._control = locked, control
        self._guests: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid, life
        self._spare: tuple[int, socket.socket] | None = None  # its pid, and the way to it
        self._patience, self._poll = _QUIET, select.epoll()

    def serve(self) -> NoReturn:
        """Until the host hangs up."""
        self._poll.register(self._control, select.EPOLLIN)
        while True:
            events = self._poll.poll(None if self._spare else self._patience)
            if not events:
                self._spare = self._forked_ahead()
            for place, _ in events:
                if place == self._control.fileno():
                    self._accept()
                else:
                    self._bury(place)

    def _accept(self) -> None:
        data, places, _, _ = socket.recv_fds(self._control, _MESSAGE, _PLACES)
        if not data:
            os._exit(0)
        if len(places) < _ENDS:  # there was no room for them; with the last of them gone the host knows
            for place in places:
                os.close(place)
            return
        line, text, ends, *shared = places
        life = socket.socket(fileno=ends)
        try:
            pid = self._handed_over(data, (line, text, *shared)) or os.fork()
        except OSError as error:
            _say(life, {"error": f"the sandbox can't start an interpreter: {error}"})
            pid = -1
        if pid == 0:
            _become_guest(self._jail, data, (line, text, *shared))
        for place in (line, text, *shared):
            os.close(place)
        if pid > 0:
            watch = os.pidfd_open(pid)
            self._guests[watch] = pid, life
            self._poll.register(watch, select.EPOLLIN)
            folder = "" if self._jail.walls.namespaces else self._jail.folder(pid)
            _say(life, {"pid": pid, "folder": folder}, watch)

    def _forked_ahead(self) -> tuple[int, socket.socket] | None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._patience, pid = _QUIET, os.fork()
        except OSError:  # whoever asks for a guest will be told
            self._patience = 1.0
            return None
        if pid == 0:
            _wait_for_orders(self._jail, theirs.fileno())
        theirs.close()
        return pid, ours

    def _handed_over(self, data: bytes, places: Sequence[int]) -> int:
        """The pid of the process that was forked ahead, which becomes the guest; 0 where there is none."""
        if self._spare is None:
            return 0
        (pid, way), self._spare = self._spare, None
        try:
            with way:
                socket.send_fds(way, [data], list(places))
        except OSError:  # it was killed meanwhile
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 0
        return pid

    def _bury(self, watch: int) -> None:
        """Say how a guest ended, and forget it."""
        pid, life = self._guests.pop(watch)
        self._poll.unregister(watch)
        os.close(watch)
        _, status, used = os.wait4(pid, 0)
        if not self._jail.walls.namespaces and os.path.isdir(self._jail.folder(pid)):
            with contextlib.suppress(OSError):  # what can't be removed now is swept up with the rest
                scratch.clear(self._jail.folder(pid))
        _say(life, {"status": status, "cpu": used.ru_utime + used.ru_stime})
        life.close()


def _say(life: socket.socket, message: dict[str, Any], *places: int) -> None:
    try:
        socket.send_fds(life, [json.dumps(message).encode()], list(places))
    except OSError:  # the host no longer wants to know
        return


def _wait_for_orders(locked: jail.Jail, way: int) -> NoReturn:
    """In a process that was forked ahead: hold nothing that is another guest's, and become one when told to."""
    try:
        os.dup2(way, jail.LINE)  # what is received lands behind it
        kernel.close_others((jail.LINE, locked.proc))
        kernel.die_with_parent()
        orders = socket.socket(fileno=jail.LINE)
        data, places, _, _ = socket.recv_fds(orders, _MESSAGE, _PLACES)
        orders.detach()
        if data and os.getppid() == locked.zygote:
            _become_guest(locked, data, tuple(places))
    finally:
        os._exit(0)


def _become_guest(locked: jail.Jail, data: bytes, places: tuple[int, ...]) -> NoReturn:
    """Lock up this process and serve the host until one of them ends; never returns into the zygote's code.

    `data` is what the host asked for.
    """
    from saccade.tools._sandbox import guest, wire

    try:
        signal.set_wakeup_fd(-1)
        given = json.loads(data)
        limits, seed = Limits(**given["limits"]), given["seed"]
        line, text, *shared = places
        os.dup2(text, 1)
        os.dup2(text, 2)
        os.dup2(line, jail.LINE)
        # One of its own: of a shared one, guests could read each other's flags.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kept = jail.gather(shared)
        try:
            jail.lock_up(locked, limits, kept)
        except OSError as error:
            head = wire.Head(wire.Kind.DONE, wire.Verdict.RAISED, size=len(str(error).encode()))
            os.write(jail.LINE, head.packed(wire.NO_NONCE) + str(error).encode())
            os._exit(1)
        guest.Guest(jail.LINE, limits, seed, kept).serve()
    finally:
        os._exit(wire.BROKEN)
