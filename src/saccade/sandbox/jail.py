"""Locking up: the walls of a zygote (once) and of each guest, in the order in which they must be raised.

zygote   namespaces -> a root of its own, read-only, with the libraries alone; without: nothing of this package is read
guest    own mounts and a private folder -> own user -> not traceable, no new privileges -> Landlock
         -> no capabilities -> limits -> dies with the zygote -> seccomp, last, since it forbids all of the above
"""

import fcntl
import os
import resource
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.tools._sandbox import kernel, policy
from saccade.tools._sandbox.limits import MIB, Limits
from saccade.tools._sandbox.walls import Walls

NICE = 5  # whoever trains comes first
LINE = 3  # a guest's descriptor for the host; 0 is empty, 1 and 2 are its text
DESCRIPTORS = 128  # of a guest, beside the pictures that it is given
WORK_PLACES = ("/tmp", "/var/tmp", "/scratch")  # the first that hides no library becomes the working folder
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each thread would take 64 MiB more of its guest's addresses
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/usr/share/fonts",
    "/usr/local/share/fonts",
)
_ROOTS = ("/mnt", "/srv", "/media", "/proc")  # where a new root may be put together, unseen by anybody
_FIRST_USER = 0x70000000


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """What every guest of a zygote is locked up with; `space` is the address space in bytes that libraries take."""

    walls: Walls
    readable: tuple[str, ...]
    hidden: tuple[str, ...]  # folders in them that it may not
    space: int
    zygote: int  # its process id as its guests see it
    user_block: int
    base: str  # the folder of working folders, where guests have no file system of their own
    proc: int  # a descriptor of /proc

    def user(self, pid: int) -> int:
        """The user id of the guest with this process id: no two living guests of a machine have the same."""
        return _FIRST_USER + (self.user_block << 16) + (pid & 0xFFFF)

    def folder(self, pid: int) -> str:
        """The working folder of the guest with this process id."""
        return self.work if self.walls.namespaces else f"{self.base}/{pid}"

    @property
    def work(self) -> str:
        """The working folder in a guest's own file system."""
        hidden = {place for place in WORK_PLACES for path in self.readable if within(path, place)}
        return next(place for place in WORK_PLACES if place not in hidden)


def libraries() -> tuple[str, ...]:
    """The places a guest may read: the interpreter's libraries, those they need, fonts and time zones; no sources."""
    paths = sysconfig.get_paths()
    places = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages", "lib-dynload")}
    places |= set(_SYSTEM)
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.partition("/")[2]
        if ".so" in name:
            places.add(str(Path("/" + name).parent))
    found = {path for place in places for path in (place, os.path.realpath(place)) if os.path.exists(path)}
    return tuple(sorted(path for path in found if not any(within(path, other) for other in found - {path})))


def sources(readable: Iterable[str]) -> tuple[str, ...]:
    """The folders of this package among those places: with what lies there, a guest could make labels anew."""
    package = Path(__file__).parents[2]
    folders = {os.path.realpath(each) for each in (str(package), *(f"{path}/{package.name}" for path in sys.path))}
    places = [os.path.realpath(place) for place in readable]
    return tuple(each for each in folders if os.path.isdir(each) and any(within(each, place) for place in places))


def within(path: str, folder: str) -> bool:
    """Whether a path lies in a folder or is it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# ---- the zygote ----------------------------------------------------------------------------------------------------


def leave_namespaces(walls: Walls) -> None:
    """Be in new namespaces; the next child of this process is the first in them. Raises OSError where refused."""
    kinds = kernel.NEW_MOUNT | kernel.NEW_PID | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS
    if walls.namespaces == "user":
        proc = os.open("/proc", os.O_PATH)
        _own_namespace(kinds, proc)
        os.close(proc)
    else:
        kernel.unshare(kinds)


def _own_namespace(kinds: int, proc: int) -> None:
    """New namespaces below a new user namespace, in which this user is the same as outside."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.NEW_USER | kinds)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        place = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(place, text.encode())
        os.close(place)


def change_root(jail: Jail) -> None:
    """Leave the machine's files for a root that holds the libraries, five devices and an empty working folder."""
    readable = jail.readable
    kernel.make_private()
    # The new root is put together in a folder that hides none of what goes into it.
    free = (root for root in _ROOTS if os.path.isdir(root) and not any(within(path, root) for path in readable))
    place = next(free)
    kernel.mount("tmpfs", place, "tmpfs", kernel.NO_SUID, "size=1m,mode=755")
    for path in readable:
        _show(path, place + path)
        real = os.path.realpath(path)
        for folder in jail.hidden:
            if within(folder, real):
                kernel.cover(place + path + folder[len(real) :])
    for path in _DEVICES:
        if os.path.exists(path):
            _show(path, place + path, writable=True)
    os.makedirs(place + jail.work, 0o755, exist_ok=True)
    kernel.enter_root(place)


def hide_sources(jail: Jail) -> None:
    """Read nothing of this package any more, neither this process nor its children: for who has no root of its own."""
    kernel.give_up_privileges()
    places = [part for path in jail.readable for part in _parts(os.path.realpath(path), jail.hidden)]
    devices = [path for path in _DEVICES if os.path.exists(path)]
    rights = {**dict.fromkeys([*places, *devices], kernel.READ), jail.base: kernel.KEEP}
    kernel.restrict_reading(rights, jail.walls.landlock)


def _parts(place: str, hidden: Sequence[str]) -> Iterator[str]:
    """What there is in a place, in as few parts as possible, but for the hidden folders."""
    if not any(within(folder, place) for folder in hidden):
        yield place
    elif place not in hidden:
        for entry in os.scandir(place):
            if not entry.is_symlink():  # what it leads to has a place of its own
                yield from _parts(entry.path, hidden)


def _show(path: str, target: str, *, writable: bool = False) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.bind(path, target, writable=writable)


# ---- a guest -------------------------------------------------------------------------------------------------------


def gather(places: Sequence[int]) -> range:
    """Copies of some descriptors, side by side right behind the line."""
    # High up first: a copy must not land on one that is still to be copied.
    high = [fcntl.fcntl(place, fcntl.F_DUPFD, 512) for place in places]
    kept = range(LINE + 1, LINE + 1 + len(high))
    for place, number in zip(high, kept, strict=True):
        os.dup2(place, number)
    return kept


def lock_up(jail: Jail, limits: Limits, kept: Sequence[int] = ()) -> None:
    """Raise every wall around this process, a fresh fork of the zygote, which keeps these descriptors.

    Raises OSError where a wall is refused.
    """
    walls, pid = jail.walls, os.getpid()
    os.setsid()
    os.sched_setaffinity(0, _processors(limits.processors, pid))
    user = jail.user(pid) if walls.own_user and walls.namespaces != "user" else None
    folder = jail.folder(pid)
    if walls.namespaces:
        _private_mounts(jail, limits, user)
    else:
        os.mkdir(folder, 0o700)
        os.chown(folder, *((-1, -1) if user is None else (user, user)))
    _offer(jail)
    os.closerange(LINE + 1 + len(kept), 1 << 20)
    kernel.drop_bounding()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, MPLCONFIGDIR=folder)
    tempfile.tempdir = folder
    kernel.hide()
    kernel.give_up_privileges()
    if walls.landlock:
        kernel.restrict_files(_rights(jail, folder), walls.landlock)
    kernel.drop_capabilities()
    _set_limits(jail, limits, len(kept))
    kernel.die_with_parent()
    if os.getppid() != jail.zygote:  # it ended before it could be promised to
        os.kill(pid, signal.SIGKILL)
    os.nice(NICE)  # not before: whoever waits for this sandbox comes first too
    if walls.seccomp:
        kernel.install_filter(policy.program(pid))


def _processors(count: int, pid: int) -> set[int]:
    """Some of the processors that this process may use: neighbours have others, as far as there are enough."""
    mine = sorted(os.sched_getaffinity(0))
    return {mine[(pid * count + number) % len(mine)] for number in range(count)}


def _offer(jail: Jail) -> None:
    """Be the first to go when the machine has no memory left, ahead of whoever trains."""
    try:
        place = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=jail.proc)
    except OSError:  # /proc is read-only here; no wall depends on it
        return
    os.write(place, b"1000")
    os.close(place)


def _private_mounts(jail: Jail, limits: Limits, user: int | None) -> None:
    if jail.walls.namespaces == "user":
        _own_namespace(kernel.NEW_MOUNT, jail.proc)
    else:
        kernel.unshare(kernel.NEW_MOUNT)
    owner = "" if user is None else f",uid={user},gid={user}"
    options = f"size={limits.disk_mib}m,nr_inodes={limits.files},mode=700{owner}"
    kernel.mount("tmpfs", jail.work, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC, options)


def _rights(jail: Jail, folder: str) -> dict[str, int]:
    devices = {path: kernel.DEVICE for path in _DEVICES if os.path.exists(path)}
    return {**dict.fromkeys(jail.readable, kernel.READ), **devices, folder: kernel.KEEP}


def _set_limits(jail: Jail, limits: Limits, kept: int) -> None:
    bounds = {
        resource.RLIMIT_AS: jail.space + limits.memory_mib * MIB,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: limits.file_mib * MIB,
        resource.RLIMIT_NOFILE: DESCRIPTORS + kept,
        resource.RLIMIT_STACK: 8 * MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,  # and timers, each of which has a signal set aside
    }
    if jail.walls.own_user:
        bounds[resource.RLIMIT_NPROC] = limits.threads
    for kind, most in bounds.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # The hard limit on CPU time kills without a word; the soft one says why.
        grace = 1 if kind == resource.RLIMIT_CPU and hard != most else 0
        resource.setrlimit(kind, (most, most + grace))
