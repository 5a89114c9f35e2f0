"""Linux system calls that Python lacks, through ctypes; no other file of the sandbox uses ctypes.

Every function raises OSError, naming the call, if the kernel refuses.
"""

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Mapping, Sequence

from saccade.sandbox.seccomp_policy import get_architecture

_libc = ctypes.CDLL(None, use_errno=True)

NEW_MOUNT, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8  # of mounts
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH, _AT_RECURSIVE = 2, 0x8000
_PR_PDEATHSIG, _PR_DUMPABLE, _PR_SECCOMP, _PR_BOUNDING, _PR_NO_NEW_PRIVS, _PR_AMBIENT = 1, 4, 22, 24, 38, 47
_LAST_CAPABILITY = 63  # the kernel returns EINVAL beyond the last one it has
_CAPABILITY_VERSION = 0x20080522

# Landlock rights; _LATER_RIGHTS by the version of the interface that introduced them
_EXECUTE, _WRITE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE, _MAKE_LINK = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = {2: _REFER, 3: _TRUNCATE, 5: 1 << 15}
READ_RIGHTS = _READ_FILE | _READ_DIR
WRITE_RIGHTS = (
    READ_RIGHTS | _WRITE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_LINK | _REFER | _TRUNCATE
)
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ_FILE | _TRUNCATE  # the rights that a rule on a file (not a folder) may grant
DEVICE_RIGHTS = _READ_FILE | _WRITE


def _check_result(result: int, call_name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call_name}: {os.strerror(number)}")
    return int(result)


def _call_syscall(name: str, *arguments: object) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check_result(_libc.syscall(ctypes.c_long(get_architecture().syscalls[name]), *wide), name)


def _call_prctl(option: int, *values: object) -> None:
    wide = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    _check_result(_libc.prctl(ctypes.c_int(option), *wide), f"prctl({option})")


# ---- namespaces and mounts -----------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    """Move this process into new namespaces of these kinds."""
    try:
        _check_result(_libc.unshare(ctypes.c_int(flags)), "unshare")
    except OSError as error:  # the kernel's text for these is about a disk and about users
        if error.errno in (errno.ENOSPC, errno.EUSERS):
            message = "the limit of namespaces is 0 or reached (sysctl user.max_user_namespaces and its siblings)"
            raise OSError(error.errno, f"unshare: {message}") from error
        raise


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    names = [text.encode() for text in (source, target, kind)]
    _check_result(_libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def make_mounts_private() -> None:
    """Keep mounts made from now on invisible to other mount namespaces."""
    mount("none", "/", flags=_RECURSIVE | _PRIVATE)


def bind_mount(source: str, target: str, *, writable: bool = False) -> None:
    """Bind-mount `source` and what is mounted below it; unless `writable`, read-only, without set-uid and devices."""
    mount(source, target, flags=_BIND | _RECURSIVE)
    if writable:
        return
    try:
        attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", READ_ONLY | NO_SUID | NO_DEVICES, 0, 0, 0), 32)
        _call_syscall("mount_setattr", -100, target.encode(), _AT_RECURSIVE, attributes, 32)
    except OSError:  # before Linux 5.12: only one mount at a time, and existing flags must be repeated
        existing = os.statvfs(target).f_flag & (NO_SUID | NO_DEVICES | NO_EXEC)
        mount("none", target, flags=_BIND | _REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES | existing)


def mask_dir(target: str) -> None:
    """Hide the content of a folder behind an empty read-only mount."""
    mount("tmpfs", target, "tmpfs", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC, "size=4k,mode=755")


def pivot_root(folder: str) -> None:
    """Make `folder`, a mount point, the read-only root and detach the old root for this process and its children."""
    mount("none", folder, flags=_BIND | _REMOUNT | READ_ONLY | NO_SUID)
    os.chdir(folder)
    _call_syscall("pivot_root", b".", b".")
    _check_result(_libc.umount2(b".", ctypes.c_int(_DETACH)), "umount2")
    os.chdir("/")


# ---- a process and its rights --------------------------------------------------------------------------------------


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal (0: none) when the thread that forked this process ends; a new user resets this."""
    _call_prctl(_PR_PDEATHSIG, int(number))


def close_other_fds(kept_fds: Sequence[int]) -> None:
    """Close every descriptor but `kept_fds` and the first three."""
    first = 3
    for fd in sorted(kept_fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)


def disable_tracing() -> None:
    """Prevent processes of the same user from tracing or dumping this process."""
    _call_prctl(_PR_DUMPABLE, 0)


def set_no_new_privs() -> None:
    """Prevent executed programs from gaining privileges, which Landlock and seccomp require."""
    _call_prctl(_PR_NO_NEW_PRIVS, 1)


def drop_bounding_set() -> None:
    """Remove every capability from the bounding set, as far as permitted."""
    for number in range(_LAST_CAPABILITY + 1):
        try:
            _call_prctl(_PR_BOUNDING, number)
        except OSError:  # unknown to this kernel, or not permitted: `no_new_privs` protects anyway
            return


def drop_capabilities() -> None:
    """Give up every capability, ambient ones included."""
    _call_prctl(_PR_AMBIENT, 4)
    header = ctypes.create_string_buffer(struct.pack("=II", _CAPABILITY_VERSION, 0), 8)
    nothing = ctypes.create_string_buffer(24)
    _check_result(_libc.capset(header, nothing), "capset")


def probe_seccomp() -> int:
    """Return 1 if the kernel supports seccomp filters. Raises OSError otherwise."""
    _call_syscall("seccomp", 2, 0, ctypes.byref(ctypes.c_uint32(0x00050000)))  # is SECCOMP_RET_ERRNO available?
    return 1


def install_seccomp_filter(code: bytes) -> None:
    """Filter every system call of this process by a seccomp program, irrevocably."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 16)
    _call_prctl(_PR_SECCOMP, 2, ctypes.cast(program, ctypes.c_void_p))


# ---- Landlock ------------------------------------------------------------------------------------------------------


def probe_landlock_version() -> int:
    """Return the version of the kernel's Landlock interface. Raises OSError if it has none."""
    return _call_syscall("landlock_create_ruleset", None, 0, 1)


def restrict_file_access(rights: Mapping[str, int], version: int) -> None:
    """Restrict this process to the files below these paths, with these rights; forbid TCP and signals to others."""
    handled = _FIRST_RIGHTS
    for since, right in _LATER_RIGHTS.items():
        handled |= right if version >= since else 0
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    fields = struct.pack("=QQQ", handled, network, scopes)
    _apply_landlock_rules(rights, handled, fields[: 24 if version >= 6 else 16 if version >= 4 else 8])


def restrict_file_reads(rights: Mapping[str, int], version: int) -> None:
    """Forbid reading any file but those below these paths; `restrict_file_access` may forbid more later."""
    # Every Landlock ruleset forbids moving files between folders unless it grants _REFER.
    handled = _READ_FILE | (_REFER if version >= 2 else 0)
    _apply_landlock_rules(rights, handled, struct.pack("=Q", handled))


def _apply_landlock_rules(rights: Mapping[str, int], handled: int, fields: bytes) -> None:
    buffer = ctypes.create_string_buffer(fields, len(fields))
    ruleset_fd = _call_syscall("landlock_create_ruleset", buffer, len(fields), 0)
    try:
        for path, granted in rights.items():
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                granted &= handled & (-1 if os.path.isdir(path) else _FILE_RIGHTS)
                rule = ctypes.create_string_buffer(struct.pack("=Qi", granted, fd), 12)
                _call_syscall("landlock_add_rule", ruleset_fd, 1, rule, 0)
            finally:
                os.close(fd)
        _call_syscall("landlock_restrict_self", ruleset_fd, 0)
    finally:
        os.close(ruleset_fd)
