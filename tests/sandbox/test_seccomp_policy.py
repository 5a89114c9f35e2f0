"""The seccomp filter, run by an interpreter of BPF: the action for every system call, on both architectures."""

import errno
import os
import struct
import time

import pytest
from error_cases import raises
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import ConfigError
from saccade.sandbox.seccomp_policy import build_filter, get_architecture

ALLOW, KILL = 0x7FFF0000, 0x80000000
PID = 4242
ARCHITECTURES = ["x86_64", "aarch64"]


def run_filter(code, number, arguments=(), audit=None):
    """Interpret a seccomp program; return its action for a system call."""
    arguments = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, audit, 0, *(value % 2**64 for value in arguments))
    instructions = [struct.unpack_from("=HBBI", code, offset) for offset in range(0, len(code), 8)]
    accumulator = position = 0
    while True:
        operation, if_true, if_false, value = instructions[position]
        position += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x15:
            position += if_true if accumulator == value else if_false
        elif operation == 0x35:
            position += if_true if accumulator >= value else if_false
        else:
            raise AssertionError(f"unknown instruction {operation:#x}")


def filter_call(name, call, *arguments):
    architecture = get_architecture(name)
    return run_filter(build_filter(PID, name), architecture.syscalls[call], arguments, architecture.audit_number)


def errno_action(number):
    return 0x00050000 | number


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("call", ["read", "openat", "mmap", "ppoll", "getrandom", "exit_group"])
def test_common_calls_are_allowed(name, call):
    assert filter_call(name, call, 3, 2**40) == ALLOW


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("call", ["fchmodat", "fchownat", "utimensat", "fsetxattr", "mlock", "flock"])
def test_metadata_and_lock_calls_do_nothing(name, call):
    assert filter_call(name, call) == errno_action(0)
    for lock in (5, 6, 7, 36, 37, 38):
        assert filter_call(name, "fcntl", 3, lock) == errno_action(0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_that_the_host_could_not_count_are_unsupported(name):
    assert filter_call(name, "fallocate", 3) == errno_action(errno.EOPNOTSUPP)
    assert filter_call(name, "openat", -100, 0, os.O_TMPFILE | os.O_RDWR) == errno_action(errno.EOPNOTSUPP)
    assert filter_call(name, "openat", -100, 0, os.O_CREAT | os.O_DIRECTORY | os.O_RDWR) == ALLOW


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_other_episodes_do_does_not_show(name):
    for clock_call in ("clock_gettime", "clock_getres", "clock_nanosleep"):
        assert filter_call(name, clock_call, time.CLOCK_PROCESS_CPUTIME_ID) == ALLOW
        assert filter_call(name, clock_call, (~4243 << 3) | 2) == errno_action(errno.EINVAL)
    for read_call in ("preadv2", "pwritev2"):
        assert filter_call(name, read_call, 3, 0, 1, 0, 0, 0) == ALLOW
        assert filter_call(name, read_call, 3, 0, 1, 0, 0, os.RWF_NOWAIT) == errno_action(errno.EOPNOTSUPP)
    assert filter_call(name, "fadvise64", 3, 0, 0, 4) == errno_action(0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_threads_share_one_table_of_descriptors(name):
    assert filter_call(name, "close_range", 3, 9, 0) == filter_call(name, "close_range", 3, 9, 4) == ALLOW
    assert filter_call(name, "close_range", 3, 9, 2) == filter_call(name, "close_range", 3, 9, 6)
    assert filter_call(name, "close_range", 3, 9, 2) == errno_action(errno.EINVAL)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_waits_at_a_word_that_other_processes_see(name):
    for command in (0, 1, 3, 9, 11, 0x109):  # wait, wake, requeue, wait for bits, requeue to a lock; by the real clock
        assert filter_call(name, "futex", 2**40, command | 128) == ALLOW
        assert filter_call(name, "futex", 2**40, command) == (ALLOW if command == 1 else errno_action(errno.EAGAIN))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_newer_calls_are_reported_as_missing(name):
    assert filter_call(name, "clone3") == filter_call(name, "openat2") == errno_action(errno.ENOSYS)
    architecture = get_architecture(name)
    assert run_filter(build_filter(PID, name), 9999, (), architecture.audit_number) == errno_action(errno.ENOSYS)
    assert run_filter(build_filter(PID, name), 0x40000000, (), architecture.audit_number) == errno_action(errno.ENOSYS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_calls_of_another_architecture_kill(name):
    assert run_filter(build_filter(PID, name), 1, (), 0x40000003) == KILL


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("call", "arguments", "is_allowed"),
    [
        ("kill", (PID, 9), True),
        ("kill", (PID + 1, 9), False),
        ("kill", (-1, 9), False),
        ("kill", (0, 9), False),
        ("kill", (PID, 18), False),  # SIGCONT would undo the host's SIGSTOP
        ("tgkill", (PID, 5, 9), True),
        ("tgkill", (PID, 5, 18), False),
        ("tgkill", (1, 1, 9), False),
        ("clone", (0x3D0F00,), True),  # a thread
        ("clone", (17,), False),  # a process
        ("clone", (0x4111,), False),  # vfork
        ("clone", (0x3D0F00 | 0x10000000,), False),
        ("clone", (0x3D0F00 & ~0x400,), False),  # descriptors of its own
        ("clone", (0x3D0F00 | 0x1000,), False),  # with a pidfd
        ("prlimit64", (0, 7), True),
        ("prlimit64", (1, 7), False),
        ("fcntl", (3, 1), True),
        ("fcntl", (3, 8), False),
        ("fcntl", (3, 4, 0), False),  # F_SETFL could clear O_NOATIME
        ("madvise", (0, 4096, 4), True),
        ("madvise", (0, 4096, 21), False),  # MADV_PAGEOUT
        ("fcntl", (3, 1031), False),
        ("ioctl", (0, 0x5401), True),
        ("ioctl", (0, 0x5412), False),  # push characters into a terminal
        ("prctl", (15,), True),
        ("prctl", (1,), False),
        ("prctl", (22, 2), False),
        ("socketpair", (1, 1), True),
        ("socketpair", (2, 1), False),
        ("getsockopt", (3, 1, 4), True),
        ("getsockopt", (3, 1, 77), False),  # a handle of the peer
        ("sendto", (3, 0, 0, 0, 0, 0), True),
        ("sendto", (3, 0, 0, 0, 0x7F0000000000, 16), False),
        ("sendto", (3, 0, 0, 0, 0x1000, 16), False),
        ("sendto", (3, 0, 0, 0x4000, 0, 0), True),
        ("sendto", (3, 0, 0, 0x4001, 0, 0), False),  # out of band
        ("recvfrom", (3, 0, 0, 0x42, 0x7F0000000000, 16), True),
        ("recvfrom", (3, 0, 0, 1, 0, 0), False),
        ("getpgid", (0,), True),
        ("getpgid", (PID,), True),
        ("getpgid", (1,), False),
        ("sched_getaffinity", (0, 128), True),
        ("sched_getaffinity", (PID + 1, 128), False),
        ("getpriority", (0, PID), True),
        ("getpriority", (2, 1000), False),
        ("getpriority", (0, PID + 1), False),
    ],
)
def test_some_calls_depend_on_an_argument(name, call, arguments, is_allowed):
    assert filter_call(name, call, *arguments) == (ALLOW if is_allowed else errno_action(errno.EPERM))


# Numbers from the kernel's own tables, so that a mistake in ours shows.
FORBIDDEN = {
    "x86_64": {"execve": 59, "fork": 57, "vfork": 58, "socket": 41, "connect": 42, "bind": 49, "sendmsg": 46,
               "truncate": 76, "mknod": 133, "memfd_create": 319, "ptrace": 101, "unshare": 272, "setns": 308,
               "mount": 165, "chroot": 161, "pidfd_open": 434, "bpf": 321, "io_uring_setup": 425, "setuid": 105,
               "execveat": 322, "process_vm_readv": 310, "rt_sigqueueinfo": 129, "pidfd_send_signal": 424,
               "tkill": 200, "shmget": 29, "keyctl": 250, "perf_event_open": 298, "personality": 135, "splice": 275,
               "sched_setaffinity": 203, "setpriority": 141, "open_by_handle_at": 304, "setsockopt": 54,
               "timer_create": 222, "mincore": 27, "sysinfo": 99},
    "aarch64": {"execve": 221, "socket": 198, "connect": 203, "bind": 200, "sendmsg": 211, "truncate": 45,
                "mknodat": 33, "memfd_create": 279, "ptrace": 117, "unshare": 97, "setns": 268, "mount": 40,
                "chroot": 51, "pidfd_open": 434, "bpf": 280, "io_uring_setup": 425, "setuid": 146, "execveat": 281,
                "process_vm_readv": 270, "rt_sigqueueinfo": 138, "pidfd_send_signal": 424, "tkill": 130,
                "shmget": 194, "keyctl": 219, "perf_event_open": 241, "personality": 92, "splice": 76,
                "sched_setaffinity": 122, "setpriority": 140, "open_by_handle_at": 265, "setsockopt": 208,
                "timer_create": 107, "mincore": 232, "sysinfo": 179},
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dangerous_calls_are_refused(name):
    for call, number in FORBIDDEN[name].items():
        assert run_filter(
            build_filter(PID, name), number, (1, 2, 3), get_architecture(name).audit_number
        ) == errno_action(errno.EPERM), call


@given(number=st.integers(0, 2**32 - 1), arguments=st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_every_call_gets_an_action_and_unknown_ones_are_refused(number, arguments):
    for name in ARCHITECTURES:
        architecture = get_architecture(name)
        action = run_filter(build_filter(PID, name), number, arguments, architecture.audit_number)
        if number not in architecture.syscalls.values():
            assert action in (errno_action(errno.EPERM), errno_action(errno.ENOSYS))


def test_numbers_are_unique():
    for name in ARCHITECTURES:
        numbers = list(get_architecture(name).syscalls.values())
        assert len(numbers) == len(set(numbers))


def test_an_unknown_architecture_is_refused():
    with raises(ConfigError, key="architecture", value="mips"):
        get_architecture("mips")
