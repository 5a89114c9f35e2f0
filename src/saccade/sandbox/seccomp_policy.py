"""The system calls a worker may make: an allowlist, compiled to a seccomp filter. Everything else is refused.

No fork and no exec: a worker stays one process, so one signal kills it. No SIGCONT and no POSIX timers, which can send
it: a stopped worker stays stopped. No sockets but pairs, no truncate by path, no
namespaces, keys, tracing or io_uring, no queries about other processes. Calls that only change metadata, and locks,
succeed without any effect: Landlock doesn't cover them, and libraries make them routinely.
"""

import errno
import functools
import platform
import signal
import struct
from collections.abc import Sequence
from typing import NamedTuple

from saccade.errors import ConfigError

# name, number on x86-64, number on aarch64 ("-": it has none)
_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    creat 85 -, close 3 57,
    lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
    faccessat2 439 439, getdents 78 -, getdents64 217 61, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -,
    unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -,
    symlinkat 266 36, readlink 89 -, readlinkat 267 78, ftruncate 77 46,
    fsync 74 82, fdatasync 75 83, sync_file_range 277 84, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -,
    pipe2 293 59, getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166, statfs 137 43, fstatfs 138 44,
    copy_file_range 326 285, sendfile 40 71,
    mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, msync 26 227,
    set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, sched_yield 24 124,
    sched_get_priority_max 146 125, sched_get_priority_min 147 126, getcpu 309 168, membarrier 324 283,
    arch_prctl 158 -, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
    nanosleep 35 101, gettimeofday 96 169,
    time 201 -, times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -,
    timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133,
    rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128, pause 34 -,
    poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
    epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19,
    shutdown 48 210, getsockname 51 204, getpeername 52 205,
    uname 63 160, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175,
    getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
    getpgrp 111 -, getrlimit 97 163, setrlimit 160 164, getrusage 98 165,
    getrandom 318 278
"""
_IGNORED = """
    chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -,
    fchownat 260 54, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, sync 162 81, syncfs 306 267,
    mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231, flock 73 32,
    fadvise64 221 223
"""
# fallocate would fill a disk faster than the host measures; libraries fall back to writing.
_UNSUPPORTED = """
    getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
    fallocate 285 47
"""
# Libraries fall back to older calls, whose arguments a filter can read.
_NOT_IMPLEMENTED = "clone3 435 435, openat2 437 437"
_CONDITIONAL = """
    open 2 -, openat 257 56, close_range 436 436, futex 202 98, preadv2 327 286, pwritev2 328 287, madvise 28 233,
    clock_gettime 228 113,
    clock_getres 229 114, clock_nanosleep 230 115, ioctl 16 29, fcntl 72 25, prctl 157 167,
    prlimit64 302 261, kill 62 129, tgkill 234 131,
    clone 56 220, socketpair 53 199, sendto 44 206, recvfrom 45 207, getsockopt 55 209, getpgid 121 155, getsid 124 156,
    capget 125 90, getpriority 140 141, get_robust_list 274 100, sched_getaffinity 204 123, sched_getparam 143 121,
    sched_getscheduler 145 120, pivot_root 155 41, mount_setattr 442 442,
    landlock_create_ruleset 444 444, landlock_add_rule 445 445, landlock_restrict_self 446 446, seccomp 317 277
"""
_NEWEST_NUMBER = 462  # the last number known when this list was written

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX
# DUPFD, flags, GETPIPE_SZ; no owners, no pipe sizes, and no F_SETFL, which could undo O_NOATIME of shared images
_FCNTLS = (0, 1, 2, 3, 1030, 1032)
_LOCK_COMMANDS = (5, 6, 7, 36, 37, 38)
_SOCKET_OPTIONS = (3, 4, 7, 8, 30, 38, 39)  # type, error, sizes, listening?, protocol, domain; nothing about the peer
_PROCESS_QUERIES = ("getpgid", "getsid", "get_robust_list", "sched_getaffinity", "sched_getparam", "sched_getscheduler")
_PRCTLS = (3, 15, 16, 23, 0x53564D41)  # dumpable?, names, capability?, names of memory
# What a thread of a process shares with the others: CLONE_VM, FS, FILES, SIGHAND, THREAD
_CLONE_SHARED = 0x00000100 | 0x00000200 | 0x00000400 | 0x00000800 | 0x00010000
_CLONE_REFUSED = 0x7E020000 | 0x0000F000  # every kind of namespace; PIDFD, PTRACE, VFORK, PARENT
_CLOSE_RANGE_UNSHARE = 2
_FUTEX_WAKE, _FUTEX_PRIVATE, _FUTEX_COMMANDS = 1, 0x80, 0xFF
_AF_UNIX = 1
_TMPFILE = 0x400000  # __O_TMPFILE: a file without a name, which the host couldn't count
_MADVISE_RECLAIM = (20, 21)  # MADV_COLD, MADV_PAGEOUT
_OTHERS_CLOCK = 0x80000000  # set in the ids of CPU clocks of processes and threads by number
_MSG_OOB = 1  # recent kernel code with known sandbox escapes

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16


class Architecture(NamedTuple):
    """A processor architecture: its audit number and its system calls by name."""

    audit_number: int
    syscalls: dict[str, int]


@functools.cache
def get_architecture(name: str = "") -> Architecture:
    """Return an architecture by name (default: this machine's). Raises ConfigError for one without a table.

    >>> get_architecture("x86_64").syscalls["read"], get_architecture("aarch64").syscalls["read"]
    (0, 63)
    """
    name = name or platform.machine()
    columns = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7), "arm64": (2, 0xC00000B7)}
    if name not in columns:
        message = f"the sandbox supports x86_64 and aarch64, not {name}; run it on one of them"
        raise ConfigError(message, key="architecture", value=name)
    column, audit_number = columns[name]
    tables = (_ALLOWED, _IGNORED, _UNSUPPORTED, _NOT_IMPLEMENTED, _CONDITIONAL)
    entries = [entry.split() for table in tables for entry in table.split(",")]
    return Architecture(audit_number, {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"})


def build_filter(pid: int, architecture_name: str = "") -> bytes:
    """Build the filter for the worker with this process id, which may signal only itself: BPF code, 8 bytes each."""
    calls, code = get_architecture(architecture_name).syscalls, []
    for call, body in _build_conditions(pid).items():
        if call not in calls:
            continue
        code += [_encode_instruction(_EQUAL, calls[call], 0, len(body)), *body]
    return b"".join(
        [_build_common_filter(architecture_name), *code, _encode_instruction(_RETURN, _ERRNO | errno.EPERM)]
    )


@functools.cache
def _build_common_filter(architecture_name: str) -> bytes:
    """Build the part shared by all workers; undecided calls fall through with their number loaded."""
    architecture = get_architecture(architecture_name)
    code = [
        _encode_instruction(_LOAD, _ARCH_OFFSET),
        _encode_instruction(_EQUAL, architecture.audit_number, 1, 0),
        _encode_instruction(_RETURN, _KILL),
        _encode_instruction(_LOAD, _NUMBER_OFFSET),
    ]
    # x32 calls and calls newer than this list seem not to exist.
    code += [
        _encode_instruction(_AT_LEAST, _NEWEST_NUMBER + 1, 0, 1),
        _encode_instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    actions = {
        _ALLOWED: _ALLOW,
        _IGNORED: _ERRNO,  # "failed with error 0" is success without any effect
        _UNSUPPORTED: _ERRNO | errno.ENOTSUP,
        _NOT_IMPLEMENTED: _ERRNO | errno.ENOSYS,
    }
    for table, action in actions.items():
        for entry in table.split(","):
            if (name := entry.split()[0]) in architecture.syscalls:
                number = architecture.syscalls[name]
                code += [_encode_instruction(_EQUAL, number, 0, 1), _encode_instruction(_RETURN, action)]
    return b"".join(code)


def _build_conditions(pid: int) -> dict[str, list[bytes]]:
    """Build the filters of calls that are allowed for some values of one argument."""
    refuse_out_of_band = _refuse_nonzero(_ARGUMENTS_OFFSET + 8 * 3, _MSG_OOB)
    allow = _encode_instruction(_RETURN, _ALLOW)
    without_flags = [*_refuse_nonzero(_ARGUMENTS_OFFSET + 8 * 5, error=errno.EOPNOTSUPP), allow]
    own_clocks = [*_refuse_nonzero(_ARGUMENTS_OFFSET, _OTHERS_CLOCK, errno.EINVAL), allow]
    return {
        "openat": [*_refuse_nonzero(_ARGUMENTS_OFFSET + 8 * 2, _TMPFILE, errno.EOPNOTSUPP), allow],
        "open": [*_refuse_nonzero(_ARGUMENTS_OFFSET + 8 * 1, _TMPFILE, errno.EOPNOTSUPP), allow],
        # Each table of descriptors may hold RLIMIT_NOFILE of them: sockets full of data, which no limit on memory
        # counts, and unlinked files, which the host finds only in the table of the main thread.
        "clone": _allow_values(0, (_CLONE_SHARED,), mask=_CLONE_SHARED | _CLONE_REFUSED),
        "close_range": [*_refuse_nonzero(_ARGUMENTS_OFFSET + 8 * 2, _CLOSE_RANGE_UNSHARE, errno.EINVAL), allow],
        # Episodes that wait at the same word of a library file could wake each other. pthread_join, which waits in the
        # same way for the end of a native thread, tries again until that has ended. Wakes alone find nothing to wake.
        "futex": [
            _encode_instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * 1),
            _encode_instruction(_AND, _FUTEX_PRIVATE),
            _encode_instruction(_EQUAL, 0, 1, 0),
            allow,
            *_allow_values(1, (_FUTEX_WAKE,), mask=_FUTEX_COMMANDS, error=errno.EAGAIN),
        ],
        # What other episodes do must not show: in the page cache (RWF_NOWAIT, reclaim) or in CPU clocks.
        "preadv2": without_flags,
        "pwritev2": without_flags,
        "madvise": [*(part for advice in _MADVISE_RECLAIM for part in _refuse_value(2, advice)), allow],
        "clock_gettime": own_clocks,
        "clock_getres": own_clocks,
        "clock_nanosleep": own_clocks,
        "ioctl": _allow_values(1, _IOCTLS),
        # Locks on library files are visible to all workers, so episodes could exchange information through them.
        "fcntl": [*_allow_values(1, _LOCK_COMMANDS, action=_ERRNO)[:-1], *_allow_values(1, _FCNTLS)],
        "prctl": _allow_values(0, _PRCTLS),
        "prlimit64": _allow_values(0, (0, pid)),
        # A worker that could continue itself would run between calls.
        "kill": [*_refuse_value(1, signal.SIGCONT), *_allow_values(0, (pid,))],
        "tgkill": [*_refuse_value(2, signal.SIGCONT), *_allow_values(0, (pid,))],
        "socketpair": _allow_values(0, (_AF_UNIX,)),
        "getsockopt": _allow_values(2, _SOCKET_OPTIONS),
        # With an address, a datagram pair could write to any socket that has a path.
        "sendto": [*refuse_out_of_band, *_refuse_nonzero(_ARGUMENTS_OFFSET + 8 * 4 + 4), *_allow_values(4, (0,))],
        "recvfrom": [*refuse_out_of_band, allow],
        # A worker must not learn which other processes and threads exist.
        **dict.fromkeys(_PROCESS_QUERIES, _allow_values(0, (0, pid))),
        "getpriority": _allow_values(1, (0, pid)),
    }


def _allow_values(
    argument: int, values: Sequence[int], mask: int | None = None, action: int = _ALLOW, error: int = errno.EPERM
) -> list[bytes]:
    """Allow a call if the low half of an argument (these arguments have 32 bits) is in `values`, else refuse it."""
    code = [_encode_instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * argument)]
    code += [] if mask is None else [_encode_instruction(_AND, mask)]
    for value in values:
        code += [_encode_instruction(_EQUAL, value, 0, 1), _encode_instruction(_RETURN, action)]
    return [*code, _encode_instruction(_RETURN, _ERRNO | error)]


def _refuse_value(argument: int, value: int) -> list[bytes]:
    """Refuse a call if the low half of an argument is `value`."""
    return [
        _encode_instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * argument),
        _encode_instruction(_EQUAL, value, 0, 1),
        _encode_instruction(_RETURN, _ERRNO | errno.EPERM),
    ]


def _refuse_nonzero(offset: int, mask: int = 0xFFFFFFFF, error: int = errno.EPERM) -> list[bytes]:
    """Refuse a call if any of these bits, of the four bytes at this offset of its description, is set."""
    return [
        _encode_instruction(_LOAD, offset),
        _encode_instruction(_AND, mask),
        _encode_instruction(_EQUAL, 0, 1, 0),
        _encode_instruction(_RETURN, _ERRNO | error),
    ]


def _encode_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
