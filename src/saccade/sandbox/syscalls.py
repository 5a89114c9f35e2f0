"""Linux calls that Python lacks, by ctypes: the only file of the sandbox that speaks to the kernel in its own tongue.

Every function raises OSError where the kernel refuses, named after the call.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Mapping, Sequence

from saccade.tools._sandbox.policy import machine

_libc = ctypes.CDLL(None, use_errno=True)

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8  # of mounts
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH, _AT_RECURSIVE = 2, 0x8000
_PR_PDEATHSIG, _PR_DUMPABLE, _PR_SECCOMP, _PR_BOUNDING, _PR_NO_NEW_PRIVS, _PR_AMBIENT = 1, 4, 22, 24, 38, 47
_LAST_CAPABILITY = 63  # beyond the last known one the kernel says EINVAL
_CAPABILITY_VERSION = 0x20080522

# Landlock rights, by the version of its interface in which they came
_EXECUTE, _WRITE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE, _MAKE_LINK = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = {2: _REFER, 3: _TRUNCATE, 5: 1 << 15}
READ = _READ_FILE | _READ_DIR
KEEP = READ | _WRITE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_LINK | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE | _READ_FILE | _TRUNCATE  # the rights that a rule on a file may name
DEVICE = _READ_FILE | _WRITE


def _done(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)


def _call(name: str, *arguments: object) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _done(_libc.syscall(ctypes.c_long(machine().calls[name]), *wide), name)


def _prctl(option: int, *values: object) -> None:
    wide = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    _done(_libc.prctl(ctypes.c_int(option), *wide), f"prctl({option})")


# ---- namespaces and mounts -----------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    """Leave the namespaces of these kinds for new ones."""
    _done(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    names = [text.encode() for text in (source, target, kind)]
    _done(_libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def make_private() -> None:
    """Let no mount made from here on be seen outside."""
    mount("none", "/", flags=_RECURSIVE | _PRIVATE)


def bind(source: str, target: str, *, writable: bool = False) -> None:
    """Show what lies at `source` at `target` too, read-only unless it is to be `writable`."""
    mount(source, target, flags=_BIND | _RECURSIVE)
    if not writable:
        _protect(target)


def _protect(target: str) -> None:
    """Make a mount and those below it read-only, without set-uid programs and devices."""
    try:
        attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", READ_ONLY | NO_SUID | NO_DEVICES, 0, 0, 0), 32)
        _call("mount_setattr", -100, target.encode(), _AT_RECURSIVE, attributes, 32)
    except OSError:  # before Linux 5.12: one mount at a time, and the flags it has must be named again
        held = os.statvfs(target).f_flag & (NO_SUID | NO_DEVICES | NO_EXEC)
        mount("none", target, flags=_BIND | _REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES | held)


def cover(target: str) -> None:
    """Let nothing be seen of what lies in a folder."""
    mount("tmpfs", target, "tmpfs", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC, "size=4k,mode=755")


def enter_root(folder: str) -> None:
    """Make `folder`, a mount, the root, read-only; the old one is gone for this process and its children."""
    mount("none", folder, flags=_BIND | _REMOUNT | READ_ONLY | NO_SUID)
    os.chdir(folder)
    _call("pivot_root", b".", b".")
    _done(_libc.umount2(b".", ctypes.c_int(_DETACH)), "umount2")
    os.chdir("/")


# ---- a process and its rights --------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Be killed when the thread that forked this process ends. A change of user undoes this."""
    _prctl(_PR_PDEATHSIG, int(signal.SIGKILL))


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_PDEATHSIG, 0)


def close_others(kept: Sequence[int]) -> None:
    """Close every descriptor but these and the first three."""
    first = 3
    for place in sorted(kept):
        os.closerange(first, place)
        first = place + 1
    os.closerange(first, 1 << 20)


def hide() -> None:
    """Be neither traced nor dumped by processes of the same user."""
    _prctl(_PR_DUMPABLE, 0)


def give_up_privileges() -> None:
    """No program that this process executes gains rights: what Landlock and seccomp ask for."""
    _prctl(_PR_NO_NEW_PRIVS, 1)


def drop_bounding() -> None:
    """Take every capability out of what this process could ever regain, as far as it may."""
    for number in range(_LAST_CAPABILITY + 1):
        try:
            _prctl(_PR_BOUNDING, number)
        except OSError:  # not known to this kernel, or no right to drop: `no_new_privs` holds anyway
            return


def drop_capabilities() -> None:
    """Give up every capability, ambient ones included."""
    _prctl(_PR_AMBIENT, 4)
    header = ctypes.create_string_buffer(struct.pack("=II", _CAPABILITY_VERSION, 0), 8)
    nothing = ctypes.create_string_buffer(24)
    _done(_libc.capset(header, nothing), "capset")


def can_filter() -> int:
    """1 where the kernel knows seccomp filters. Raises OSError where it doesn't."""
    _call("seccomp", 2, 0, ctypes.byref(ctypes.c_uint32(0x00050000)))  # is "refuse with an error" available?
    return 1


def install_filter(code: bytes) -> None:
    """Let the kernel judge every system call of this process by a seccomp program. There is no way back."""
    held = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(held)), 16)
    _prctl(_PR_SECCOMP, 2, ctypes.cast(program, ctypes.c_void_p))


# ---- Landlock ------------------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """The version of the kernel's Landlock interface. Raises OSError where it has none."""
    return _call("landlock_create_ruleset", None, 0, 1)


def restrict_files(rights: Mapping[str, int], version: int) -> None:
    """Forbid every file but those beneath the given paths, with the given rights; and TCP, and signals to others."""
    handled = _FIRST_RIGHTS
    for since, right in _LATER_RIGHTS.items():
        handled |= right if version >= since else 0
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    fields = struct.pack("=QQQ", handled, network, scopes)
    _restrict(rights, handled, fields[: 24 if version >= 6 else 16 if version >= 4 else 8])


def restrict_reading(rights: Mapping[str, int], version: int) -> None:
    """Forbid to read any file but those beneath the given paths; `restrict_files` may forbid more later."""
    # Moving files from folder to folder is forbidden by all rules that don't allow it.
    handled = _READ_FILE | (_REFER if version >= 2 else 0)
    _restrict(rights, handled, struct.pack("=Q", handled))


def _restrict(rights: Mapping[str, int], handled: int, fields: bytes) -> None:
    rules = _call("landlock_create_ruleset", ctypes.create_string_buffer(fields, len(fields)), len(fields), 0)
    try:
        for path, granted in rights.items():
            _allow_beneath(rules, path, granted & handled)
        _call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow_beneath(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights &= -1 if os.path.isdir(path) else _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        _call("landlock_add_rule", rules, 1, rule, 0)
    finally:
        os.close(place)
