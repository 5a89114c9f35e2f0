"""Run every simple attack as an unprivileged user: `as_user.py NAMES FOLDER [refused]`; print the breaches as JSON.

Must be started by root. Folders that only root may enter (such as a home folder that holds the interpreter) are made
accessible in a private mount namespace. With "refused", user namespaces are denied, as on many machines.
"""

import asyncio
import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from attacks import FILES, NETWORK, PRELUDE, PROCESSES, PROTOCOL, PROTOCOL_PRELUDE, TRICKS
from corners import CORNERS, HABITS, UNLINKED
from sandbox_cases import run_attack

from saccade.sandbox import ForkServerClient, Limits, Sandbox, jail, syscalls

USER = 54321
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


def become_user(scratch, refuse_namespaces):
    if refuse_namespaces:
        enter_user_namespace()
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    syscalls.unshare(syscalls.NEW_MOUNT)
    syscalls.make_mounts_private()
    make_accessible(Path(sys.base_prefix), scratch)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.environ["HOME"] = str(scratch)


async def run_attacks(names):
    server = ForkServerClient.start()
    report = {"is_complete": server.report.isolation.is_complete, "breaches": {}}
    simple = {**FILES, **NETWORK, **PROCESSES, **CORNERS, **TRICKS, **HABITS}
    codes = {name: PRELUDE + code.format(**names) for name, code in simple.items()}
    codes |= {name: PROTOCOL_PRELUDE + code for name, code in PROTOCOL.items()}
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
    become_user(scratch, "refused" in sys.argv[3:])
    asyncio.run(run_attacks(names))


if __name__ == "__main__":
    main()
