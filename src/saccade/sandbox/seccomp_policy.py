"""Which system calls a guest may make: an allowlist, as a seccomp filter. Everything not named here is refused.

No fork and no exec: a guest is one process for ever, so one signal ends it. No sockets but pairs, no truncate by path,
no namespaces, keys, tracing or io_uring, no questions about other processes. Calls that only change metadata, and
locks, succeed without doing anything: Landlock doesn't cover them, and libraries make them in passing.
"""

import errno
import functools
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.errors import ConfigError

# name, number on x86-64, number on aarch64 ("-": it has none)
_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, creat 85 -, close 3 57, close_range 436 436,
    lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
    faccessat2 439 439, getdents 78 -, getdents64 217 61, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -,
    unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -,
    symlinkat 266 36, readlink 89 -, readlinkat 267 78, ftruncate 77 46, fallocate 285 47, fadvise64 221 223,
    fsync 74 82, fdatasync 75 83, sync_file_range 277 84, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -,
    pipe2 293 59, getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166, statfs 137 43, fstatfs 138 44,
    copy_file_range 326 285, sendfile 40 71,
    mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214, mincore 27 232, msync 26 227,
    futex 202 98, set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, sched_yield 24 124,
    sched_get_priority_max 146 125, sched_get_priority_min 147 126, getcpu 309 168, membarrier 324 283,
    arch_prctl 158 -, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169,
    time 201 -, times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -, timer_create 222 107,
    timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
    timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133,
    rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128, pause 34 -,
    poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
    epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19,
    shutdown 48 210, getsockname 51 204, getpeername 52 205,
    uname 63 160, sysinfo 99 179, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175,
    getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
    getpgrp 111 -, getrlimit 97 163, setrlimit 160 164, getrusage 98 165,
    getrandom 318 278
"""
_IGNORED = """
    chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -,
    fchownat 260 54, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, sync 162 81, syncfs 306 267,
    mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231, flock 73 32
"""
_UNSUPPORTED = (
    "getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13"
)
_UNKNOWN = "clone3 435 435, openat2 437 437"  # libraries fall back to older calls, whose arguments a filter can see
_NAMED = """
    ioctl 16 29, fcntl 72 25, prctl 157 167, prlimit64 302 261, kill 62 129, tgkill 234 131, clone 56 220,
    socketpair 53 199, sendto 44 206, recvfrom 45 207, getsockopt 55 209, getpgid 121 155, getsid 124 156,
    capget 125 90, getpriority 140 141, get_robust_list 274 100, sched_getaffinity 204 123, sched_getparam 143 121,
    sched_getscheduler 145 120, pivot_root 155 41, mount_setattr 442 442,
    landlock_create_ruleset 444 444, landlock_add_rule 445 445, landlock_restrict_self 446 446, seccomp 317 277
"""
_NEWEST = 462  # the last number that was known when this list was made

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)  # DUPFD, flags, GETPIPE_SZ; no owners, no pipe sizes
_LOCKS = (5, 6, 7, 36, 37, 38)
_SOCKET_OPTIONS = (3, 4, 7, 8, 30, 38, 39)  # type, error, sizes, listening?, protocol, domain; nothing of the peer
_OF_PROCESSES = ("getpgid", "getsid", "get_robust_list", "sched_getaffinity", "sched_getparam", "sched_getscheduler")
_PRCTLS = (3, 15, 16, 23, 0x53564D41)  # dumpable?, names, capability?, names of memory
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # every kind of namespace
_AF_UNIX = 1
_MSG_OOB = 1  # young code of the kernel, by which others have broken out of sandboxes

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A processor architecture: its audit number and its system calls by name."""

    audit: int
    calls: dict[str, int]

    def numbers(self, table: str) -> list[int]:
        """The numbers of a table's calls, as far as this architecture has them."""
        return [self.calls[name] for name in _names(table) if name in self.calls]


@functools.cache
def machine(name: str = "") -> Machine:
    """The architecture by name (default: this machine's). Raises ConfigError where no table exists for it.

    >>> machine("x86_64").calls["read"], machine("aarch64").calls["read"]
    (0, 63)
    """
    name = name or platform.machine()
    columns = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7), "arm64": (2, 0xC00000B7)}
    if name not in columns:
        raise ConfigError(
            f"the sandbox knows the system calls of x86_64 and aarch64, not of {name}; run it on one of them"
        )
    column, audit = columns[name]
    entries = [entry.split() for table in _TABLES for entry in table.split(",")]
    return Machine(audit=audit, calls={entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"})


def program(pid: int, name: str = "") -> bytes:
    """The filter for the guest with this process id, which can signal nobody else: BPF instructions, 8 bytes each."""
    calls, code = machine(name).calls, []
    for call, body in _conditions(pid).items():
        code += [_step(_EQUAL, calls[call], 0, len(body)), *body]
    return b"".join([_unconditional(name), *code, _step(_RETURN, _ERRNO | errno.EPERM)])


@functools.cache
def _unconditional(name: str) -> bytes:
    """The part that is the same for every guest; what it doesn't decide falls through, its number loaded."""
    on = machine(name)
    code = [_step(_LOAD, _ARCH_AT), _step(_EQUAL, on.audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER_AT)]
    # x32 calls and calls younger than this list don't exist as far as a guest can tell.
    code += [_step(_AT_LEAST, _NEWEST + 1, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    for table, verdict in _VERDICTS:
        for number in on.numbers(table):
            code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, verdict)]
    return b"".join(code)


def _conditions(pid: int) -> dict[str, list[bytes]]:
    """Calls that are allowed for some values of one argument."""
    return {
        "ioctl": _one_of(1, _IOCTLS),
        # A lock on a library's file is seen by all who can read it: by it, episodes could talk to each other.
        "fcntl": [*_one_of(1, _LOCKS, verdict=_ERRNO)[:-1], *_one_of(1, _FCNTLS)],
        "prctl": _one_of(0, _PRCTLS),
        "prlimit64": _one_of(0, (0, pid)),
        "kill": _one_of(0, (pid,)),
        "tgkill": _one_of(0, (pid,)),
        "clone": _one_of(0, (_CLONE_THREAD,), mask=_CLONE_THREAD | _CLONE_NEW),
        "socketpair": _one_of(0, (_AF_UNIX,)),
        "getsockopt": _one_of(2, _SOCKET_OPTIONS),
        # A datagram pair could otherwise write to any socket that has a path.
        "sendto": [*_ordinary(3), *_not_null(4), *_one_of(4, (0,))],
        "recvfrom": [*_ordinary(3), _step(_RETURN, _ALLOW)],
        # Who else is alive is none of a guest's business, be it a thread of another one.
        **dict.fromkeys(_OF_PROCESSES, _one_of(0, (0, pid))),
        "getpriority": _one_of(1, (0, pid)),
    }


def _one_of(argument: int, values: Sequence[int], mask: int | None = None, verdict: int = _ALLOW) -> list[bytes]:
    """Allow if the low half of an argument (those here are 32 bits wide) is one of `values`, else refuse."""
    code = [_step(_LOAD, _ARGUMENTS_AT + 8 * argument)]
    code += [] if mask is None else [_step(_AND, mask)]
    for value in values:
        code += [_step(_EQUAL, value, 0, 1), _step(_RETURN, verdict)]
    return [*code, _step(_RETURN, _ERRNO | errno.EPERM)]


def _ordinary(flags: int) -> list[bytes]:
    """Refuse a message out of band, by the argument that holds a message's flags."""
    load = _step(_LOAD, _ARGUMENTS_AT + 8 * flags)
    return [load, _step(_AND, _MSG_OOB), _step(_EQUAL, 0, 1, 0), _step(_RETURN, _ERRNO | errno.EPERM)]


def _not_null(argument: int) -> list[bytes]:
    """Refuse an address with a high half; what follows looks at the low one."""
    load = _step(_LOAD, _ARGUMENTS_AT + 8 * argument + 4)
    return [load, _step(_EQUAL, 0, 1, 0), _step(_RETURN, _ERRNO | errno.EPERM)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _names(table: str) -> list[str]:
    return [entry.split()[0] for entry in table.split(",")]


_TABLES = (_ALLOWED, _IGNORED, _UNSUPPORTED, _UNKNOWN, _NAMED)
_VERDICTS = (
    (_ALLOWED, _ALLOW),
    (_IGNORED, _ERRNO),  # "failed with error 0" is success without doing anything
    (_UNSUPPORTED, _ERRNO | errno.ENOTSUP),
    (_UNKNOWN, _ERRNO | errno.ENOSYS),
)
