"""Set up the isolation layers of the zygote (once) and of each worker, in the order in which they must be applied.

zygote   namespaces -> a private, read-only root that holds only the libraries;
         without namespaces: Landlock denies reading this package
worker   private mounts and working folder -> per-worker user -> not traceable, no new privileges -> Landlock
         -> no capabilities -> rlimits -> parent-death signal -> seccomp, last, since it forbids all of the above
"""

import contextlib
import fcntl
import os
import resource
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from saccade.sandbox import seccomp_policy, syscalls
from saccade.sandbox.isolation import IsolationLayers
from saccade.sandbox.limits import MIB, Limits

NICE_LEVEL = 5  # training has priority
HOST_FD = 3  # a worker's socket to the host; 0 is /dev/null, 1 and 2 are the stdout pipe
MAX_FDS = 128  # of a worker, not counting shared images
WORK_DIR_CANDIDATES = ("/tmp", "/var/tmp", "/scratch")  # the first without libraries becomes the working folder
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # otherwise each thread reserves 64 MiB of the worker's address space
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
_SYSTEM_PATHS = (
    "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache "
    "/usr/share/zoneinfo /usr/share/fonts /usr/local/share/fonts"
)
_NEW_ROOT_CANDIDATES = ("/mnt", "/srv", "/media", "/proc")  # mount points to assemble the new root at
_FIRST_USER_ID = 0x70000000


@dataclass(frozen=True, slots=True, kw_only=True)
class JailConfig:
    """The jail shared by all workers of a zygote; `library_bytes` is the address space that the libraries take."""

    isolation: IsolationLayers
    readable_paths: tuple[str, ...]
    hidden_dirs: tuple[str, ...]  # folders below `readable_paths` that are not readable
    library_bytes: int
    zygote_pid: int  # in the workers' pid namespace
    first_user_id: int
    work_root: str  # parent of the working folders, used when workers have no private file system
    proc_fd: int  # a descriptor of /proc, which the new root lacks

    def resolve_work_dir(self, pid: int) -> str:
        """Return the working folder of the worker with this process id."""
        if self.isolation.namespaces:
            return find_free_dir(WORK_DIR_CANDIDATES, self.readable_paths)
        return f"{self.work_root}/{pid}"


def find_library_paths() -> tuple[str, ...]:
    """Return the paths a worker may read: the interpreter's libraries, what they link to, fonts and time zones."""
    sysconfig_paths = sysconfig.get_paths()
    paths = {sysconfig_paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages", "lib-dynload")}
    paths |= set(_SYSTEM_PATHS.split())
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.partition("/")[2]
        if ".so" in name:
            paths.add(str(Path("/" + name).parent))
    existing = {form for path in paths for form in (path, os.path.realpath(path)) if os.path.exists(form)}
    return tuple(sorted(path for path in existing if not any(is_within(path, other) for other in existing - {path})))


def find_source_dirs(readable_paths: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of this package below those paths: its data generators would let code recompute labels."""
    package = Path(__file__).parents[1]
    candidates = (str(package), *(f"{path}/{package.name}" for path in sys.path))
    folders = {os.path.realpath(folder) for folder in candidates if os.path.isdir(folder)}
    readable = [os.path.realpath(path) for path in readable_paths]
    return tuple(folder for folder in folders if any(is_within(folder, path) for path in readable))


def _list_devices() -> list[str]:
    devices = (f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
    return [path for path in devices if os.path.exists(path)]


def find_free_dir(candidates: Iterable[str], paths: Sequence[str]) -> str:
    """Return the first of these folders that holds none of the paths."""
    return next(folder for folder in candidates if not any(is_within(path, folder) for path in paths))


def is_within(path: str, folder: str) -> bool:
    """Return whether a path is a folder or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# ---- the zygote ----------------------------------------------------------------------------------------------------


def fork_isolated(
    isolation: IsolationLayers, library_bytes: int, work_root: str, run_parent: Callable[[int], NoReturn]
) -> JailConfig:
    """Fork a zygote into these isolation layers; return in the child, and call `run_parent(pid)` in the parent.

    `library_bytes` is the address space that the libraries take, `work_root` the parent of the working folders. Raises
    OSError in the process in which the kernel refuses a step.
    """
    # Unique among the machine's running workers, with their process ids added.
    first_user_id, readable_paths = _FIRST_USER_ID + ((os.getpid() & 0x3FFF) << 16), find_library_paths()
    hidden_dirs = find_source_dirs(readable_paths)
    if isolation.namespaces:  # the next child of this process is pid 1 in them
        flags = syscalls.NEW_MOUNT | syscalls.NEW_PID | syscalls.NEW_NET | syscalls.NEW_IPC | syscalls.NEW_UTS
        proc_fd = os.open("/proc", os.O_PATH)
        _enter_namespaces(isolation, flags, proc_fd)
        os.close(proc_fd)
    child_pid = os.fork()
    if child_pid:
        run_parent(child_pid)
    syscalls.die_with_parent()
    proc_fd = os.open("/proc", os.O_PATH)
    jail = JailConfig(
        isolation=isolation,
        readable_paths=readable_paths,
        hidden_dirs=hidden_dirs,
        library_bytes=library_bytes,
        zygote_pid=os.getpid(),
        first_user_id=first_user_id,
        work_root=work_root,
        proc_fd=fcntl.fcntl(proc_fd, fcntl.F_DUPFD_CLOEXEC, 256),  # above the numbers that a worker uses
    )
    os.close(proc_fd)
    if isolation.namespaces:
        change_root(jail)
    elif hidden_dirs:
        hide_sources(jail)
    return jail


def _enter_namespaces(isolation: IsolationLayers, flags: int, proc_fd: int) -> None:
    """Enter new namespaces; without root's privileges, below a new user namespace that maps this user to itself."""
    if isolation.namespaces == "root":
        syscalls.unshare(flags)
        return
    uid, gid = os.getuid(), os.getgid()
    syscalls.unshare(syscalls.NEW_USER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc_fd)
        os.write(fd, text.encode())
        os.close(fd)


def change_root(jail: JailConfig) -> None:
    """Switch to a root that holds only the libraries, five devices and an empty working folder."""
    readable = jail.readable_paths
    syscalls.make_mounts_private()
    # The mount point of the new root must not hide what is bound into it.
    root = find_free_dir(filter(os.path.isdir, _NEW_ROOT_CANDIDATES), readable)
    syscalls.mount("tmpfs", root, "tmpfs", syscalls.NO_SUID, "size=1m,mode=755")
    for path in readable:
        _bind_path(path, root + path)
        real_path = os.path.realpath(path)
        for folder in jail.hidden_dirs:
            if is_within(folder, real_path):
                syscalls.mask_dir(root + path + folder[len(real_path) :])
    for path in _list_devices():
        _bind_path(path, root + path, writable=True)
    os.makedirs(root + jail.resolve_work_dir(os.getpid()), 0o755, exist_ok=True)
    syscalls.pivot_root(root)


def hide_sources(jail: JailConfig) -> None:
    """Deny this process and its children reading this package by Landlock, for processes without a private root."""
    syscalls.set_no_new_privs()
    paths = [
        visible
        for path in jail.readable_paths
        for visible in _iter_visible_paths(os.path.realpath(path), jail.hidden_dirs)
    ]
    rights = dict.fromkeys([*paths, *_list_devices()], syscalls.READ_RIGHTS)
    rights[jail.work_root] = syscalls.WRITE_RIGHTS
    syscalls.restrict_file_reads(rights, jail.isolation.landlock)


def _iter_visible_paths(path: str, hidden_dirs: Sequence[str]) -> Iterator[str]:
    """Yield as few paths as possible that together cover `path` except the hidden folders."""
    if not any(is_within(folder, path) for folder in hidden_dirs):
        yield path
    elif path not in hidden_dirs:
        for entry in os.scandir(path):
            if not entry.is_symlink():  # a rule on a link applies to its target
                yield from _iter_visible_paths(entry.path, hidden_dirs)


def _bind_path(path: str, target: str, *, writable: bool = False) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    syscalls.bind_mount(path, target, writable=writable)


# ---- a worker ------------------------------------------------------------------------------------------------------


def copy_fds(fds: Sequence[int]) -> range:
    """Copy descriptors to consecutive numbers behind HOST_FD; return those numbers."""
    # Copy to high numbers first: a copy must not overwrite a descriptor that isn't copied yet.
    high_fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in fds]
    copies = range(HOST_FD + 1, HOST_FD + 1 + len(high_fds))
    for high_fd, copy in zip(high_fds, copies, strict=True):
        os.dup2(high_fd, copy)
    return copies


def enter_jail(jail: JailConfig, limits: Limits, kept_fds: Sequence[int] = ()) -> None:
    """Apply every isolation layer to this process, a fresh fork of the zygote, which keeps `kept_fds`.

    Raises OSError if the kernel refuses one.
    """
    isolation, pid = jail.isolation, os.getpid()
    os.setsid()
    cpus = sorted(os.sched_getaffinity(0))  # consecutive pids get different ones if there are enough
    os.sched_setaffinity(0, {cpus[(pid * limits.num_cpus + number) % len(cpus)] for number in range(limits.num_cpus)})
    has_user_id = isolation.per_worker_user and isolation.namespaces != "user"
    user_id = jail.first_user_id + (pid & 0xFFFF) if has_user_id else None
    work_dir = jail.resolve_work_dir(pid)
    if isolation.namespaces:
        _enter_namespaces(isolation, syscalls.NEW_MOUNT, jail.proc_fd)
        owner = "" if user_id is None else f",uid={user_id},gid={user_id}"
        options = f"size={limits.disk_mib}m,nr_inodes={limits.max_files},mode=700{owner}"
        syscalls.mount("tmpfs", work_dir, "tmpfs", syscalls.NO_SUID | syscalls.NO_DEVICES | syscalls.NO_EXEC, options)
    else:
        os.mkdir(work_dir, 0o700)
        os.chown(work_dir, *((-1, -1) if user_id is None else (user_id, user_id)))
    with contextlib.suppress(OSError):  # /proc may be read-only here; isolation doesn't depend on it
        fd = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=jail.proc_fd)
        os.write(fd, b"1000")  # the kernel's out-of-memory killer chooses this process before the trainer
        os.close(fd)
    os.closerange(HOST_FD + 1 + len(kept_fds), 1 << 20)
    syscalls.drop_bounding_set()
    if user_id is not None:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    os.chdir(work_dir)
    os.environ.update(HOME=work_dir, TMPDIR=work_dir, MPLCONFIGDIR=work_dir)
    tempfile.tempdir = work_dir
    # A host of the same user can count unlinked files only if /proc shows them to that user. Other workers can't read
    # /proc there: Landlock, the only layer for files, denies it.
    if isolation.namespaces or user_id is not None or os.geteuid() == 0:
        syscalls.disable_tracing()
    syscalls.set_no_new_privs()
    if isolation.landlock:
        rights = dict.fromkeys(jail.readable_paths, syscalls.READ_RIGHTS)
        rights |= dict.fromkeys(_list_devices(), syscalls.DEVICE_RIGHTS) | {work_dir: syscalls.WRITE_RIGHTS}
        syscalls.restrict_file_access(rights, isolation.landlock)
    syscalls.drop_capabilities()
    _set_limits(jail, limits, len(kept_fds))
    syscalls.die_with_parent()
    if os.getppid() != jail.zygote_pid:  # the zygote exited before the parent-death signal was set
        os.kill(pid, signal.SIGKILL)
    os.nice(NICE_LEVEL)  # last, because a caller waits for the steps before
    if isolation.seccomp:
        syscalls.install_seccomp_filter(seccomp_policy.build_filter(pid))


def _set_limits(jail: JailConfig, limits: Limits, num_kept_fds: int) -> None:
    bounds = {
        resource.RLIMIT_AS: jail.library_bytes + limits.memory_mib * MIB,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: limits.file_mib * MIB,
        resource.RLIMIT_NOFILE: MAX_FDS + num_kept_fds,
        resource.RLIMIT_STACK: 8 * MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # The kernel counts queued signals per user: workers of one user could see each other's. Those that it sends
        # itself, and kill() below SIGRTMIN, are exempt.
        resource.RLIMIT_SIGPENDING: 0,
    }
    if jail.isolation.per_worker_user:
        bounds[resource.RLIMIT_NPROC] = limits.max_threads
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        # The soft limit on CPU time sends SIGXCPU, which shows the cause; the hard one sends SIGKILL.
        grace = 1 if kind == resource.RLIMIT_CPU and hard != bound else 0
        resource.setrlimit(kind, (bound, bound + grace))
