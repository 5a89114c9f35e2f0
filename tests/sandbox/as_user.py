"""Run every simple attack in one environment: `as_user.py NAMES FOLDER ENVIRONMENT`; print the breaches as JSON.

Must be started by root. Folders that only root may enter (such as a home folder that holds the interpreter) are made
accessible in a private mount namespace. Environments:

user          an ordinary user
refused       the same where user namespaces are refused, as on many machines
old Landlock  root without namespaces, with the first version of Landlock's interface
container     root as in a container: Docker's default capabilities, and what its default seccomp profile refuses
"""

import asyncio
import ctypes
import errno
import json
import os
import struct
import sys
from dataclasses import asdict, replace
from pathlib import Path

from attacks import FILES, NETWORK, PRELUDE, PROCESSES, PROTOCOL, PROTOCOL_PRELUDE, TRICKS
from corners import CORNERS, HABITS, UNLINKED
from sandbox_cases import run_attack

from saccade.sandbox import ForkServerClient, Limits, Sandbox, isolation_selftest, jail, syscalls

USER = 54321
# Docker's defaults: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW,
# SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP
CONTAINER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
# Of x86-64, what its seccomp profile refuses without further capabilities: mounts, namespaces, keys, bpf, perf, …
CONTAINER_REFUSED = (
    *(155, 161, 165, 166, 167, 169, 170, 171, 175, 176, 246, 248, 249, 250, 272, 298, 304, 308, 313, 320, 321, 323),
    *(425, 426, 427, 428, 429, 430, 431, 432, 433, 442),
)
SHORT_LIMITS = Limits(timeout=4, grace_seconds=0.5, memory_mib=512, max_images=4)


def make_accessible(path, scratch):
    """Make `path` accessible to all users, although a folder above it is accessible only to root."""
    closed_dir = next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)
    if closed_dir is None:
        return
    bound = scratch / f"bound-{path.name}"
    bound.mkdir(exist_ok=True)
    syscalls.mount(str(path), str(bound), flags=4096 | 16384)
    syscalls.mount("tmpfs", str(closed_dir), "tmpfs", 0, "mode=755")
    path.mkdir(parents=True)
    syscalls.mount(str(bound), str(path), flags=4096 | 16384)


def enter_user_namespace():
    """Enter a user namespace with unchanged user ids; only a process outside may write such a mapping."""
    read_end, write_end = os.pipe()
    parent_pid, child_pid = os.getpid(), os.fork()
    if not child_pid:
        os.read(read_end, 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{parent_pid}/{name}").write_text("0 0 100000")
        os._exit(0)
    syscalls.unshare(syscalls.NEW_USER)
    os.write(write_end, b"x")
    os.waitpid(child_pid, 0)


def enter_environment(environment, scratch):
    if environment == "refused":
        enter_user_namespace()
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    syscalls.unshare(syscalls.NEW_MOUNT)
    syscalls.make_mounts_private()
    make_accessible(Path(sys.base_prefix), scratch)
    if environment in ("user", "refused"):
        become_user(scratch)
    elif environment == "container":
        enter_container()


def enter_container():
    """Give up what a process in a container of Docker lacks by default."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(41):
        if number not in CONTAINER_CAPABILITIES:
            assert libc.prctl(24, ctypes.c_ulong(number), 0, 0, 0) == 0
    mask = sum(1 << number for number in CONTAINER_CAPABILITIES)
    sets = struct.pack("=6I", *(mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0), *(mask >> 32, mask >> 32, 0))
    assert libc.capset(struct.pack("=II", 0x20080522, 0), sets) == 0
    load, equal, any_of, result, allow = 0x20, 0x15, 0x45, 0x06, 0x7FFF0000
    refuse, missing = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    code = [(load, 0, 0, 0)]
    for number in CONTAINER_REFUSED:
        code += [(equal, 0, 1, number), (result, 0, 0, refuse)]
    code += [(equal, 0, 1, 435), (result, 0, 0, missing)]  # clone3
    code += [(equal, 0, 3, 56), (load, 0, 0, 16), (any_of, 0, 1, 0x7E020000), (result, 0, 0, refuse)]
    code += [(result, 0, 0, allow)]
    syscalls.set_no_new_privs()
    syscalls.install_seccomp_filter(
        b"".join(struct.pack("=HBBI", kind, if_true, if_false, value) for kind, if_true, if_false, value in code)
    )


def become_user(scratch):
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.environ["HOME"] = str(scratch)


async def run_attacks(names, environment):
    disabled_layers = ("namespaces", isolation_selftest.LATER_LANDLOCK) if environment == "old Landlock" else ()
    server = ForkServerClient.start(disabled_layers=disabled_layers)
    report = {"isolation": asdict(server.report.isolation), "breaches": {}}
    simple = {**FILES, **NETWORK, **PROCESSES, **CORNERS, **TRICKS, **HABITS}
    codes = {name: PRELUDE + code.format(**names) for name, code in simple.items()}
    codes |= {f"protocol: {name}": PROTOCOL_PRELUDE + code for name, code in PROTOCOL.items()}
    labels_before = Path(names["labels"]).read_text()
    semaphore = asyncio.Semaphore(8)

    async def attack(name, code):
        async with semaphore, Sandbox.open(SHORT_LIMITS, fork_server=server) as sandbox:
            first, *later = await run_attack(sandbox, code)
        is_contained = not any(word in first.text for word in ("BREACH", "MISSED"))
        works_afterwards = [result.text for result in later].count("42\n") >= 2
        if not (is_contained and works_afterwards) or Path(names["labels"]).read_text() != labels_before:
            report["breaches"][name] = repr((first, *later))

    await asyncio.gather(*(attack(name, code) for name, code in codes.items()))
    async with Sandbox.open(replace(SHORT_LIMITS, timeout=60), fork_server=server) as sandbox:
        result = await sandbox.run(UNLINKED)
        report["unlinked"] = result.failure_reason, os.strerror(errno.ENOSPC) in (result.error or "")
    report["reasons"] = dict(server.report.reasons)
    report["count"] = len(codes)
    server.close()
    print(json.dumps(report))


def main():
    names, scratch = json.loads(sys.argv[1]), Path(sys.argv[2])
    names["host"] = os.getpid()
    assert jail.find_library_paths()
    enter_environment(sys.argv[3], scratch)
    asyncio.run(run_attacks(names, sys.argv[3]))


if __name__ == "__main__":
    main()
