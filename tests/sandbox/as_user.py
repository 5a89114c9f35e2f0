"""Runs every simple attack as an ordinary user: `as_user.py FOLDER [refused]`; prints what it found as JSON.

Started by root. Folders that only root may enter (such as a home that holds the interpreter) are made passable in a
mount namespace of its own. With "refused" the machine denies user namespaces, as many do.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from attacks import FILES, NETWORK, PRELUDE, PROCESSES, PROTOCOL, PROTOCOL_PRELUDE, TRICKS
from corners import CORNERS, HABITS

from saccade.tools._sandbox import jail, kernel
from saccade.tools._sandbox.client import Sandbox
from saccade.tools._sandbox.limits import Limits
from saccade.tools._sandbox.server import Server

USER = 54321
HASTY = Limits(seconds=4, grace=0.5, memory_mib=512, pictures=4)


def make_passable(path, scratch):
    """Show the content of `path` to everybody, although a folder above it is root's alone."""
    closed = next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
    if closed is None:
        return
    held = scratch / f"held-{path.name}"
    held.mkdir(exist_ok=True)
    kernel.mount(str(path), str(held), flags=4096 | 16384)
    kernel.mount("tmpfs", str(closed), "tmpfs", 0, "mode=755")
    path.mkdir(parents=True)
    kernel.mount(str(held), str(path), flags=4096 | 16384)


def own_user_namespace():
    """In which users are the same as outside; only a process that stays outside may say so."""
    ready, go = os.pipe()
    me, helper = os.getpid(), os.fork()
    if not helper:
        os.read(ready, 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{me}/{name}").write_text("0 0 100000")
        os._exit(0)
    kernel.unshare(kernel.NEW_USER)
    os.write(go, b"x")
    os.waitpid(helper, 0)


def become_user(scratch, refused):
    if refused:
        own_user_namespace()
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    kernel.unshare(kernel.NEW_MOUNT)
    kernel.make_private()
    make_passable(Path(sys.base_prefix), scratch)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.environ["HOME"] = str(scratch)


async def attacked(names, folder):
    server = Server.start()
    found = {"walls": repr(server.report.walls), "complete": server.report.walls.complete, "breaches": {}}
    simple = {**FILES, **NETWORK, **PROCESSES, **CORNERS, **TRICKS, **HABITS}
    codes = {name: PRELUDE + code.format(**names) for name, code in simple.items()}
    codes |= {name: PROTOCOL_PRELUDE + code for name, code in PROTOCOL.items()}
    before = Path(names["labels"]).read_text()
    places = asyncio.Semaphore(8)

    async def attack(name, code):
        async with places, Sandbox.open(HASTY, host=server) as box:
            outcome, *after = [await box.run(cell) for cell in (code, *["print(6 * 7)"] * 3)]
        fine = [each.text for each in after].count("42\n") >= 2 and "BREACH" not in outcome.text
        if not fine or Path(names["labels"]).read_text() != before:
            found["breaches"][name] = repr((outcome, *after))

    await asyncio.gather(*(attack(name, code) for name, code in codes.items()))
    found["count"] = len(codes)
    server.close()
    print(json.dumps(found))


def main():
    names, scratch = json.loads(sys.argv[1]), Path(sys.argv[2])
    names["host"] = os.getpid()
    assert jail.libraries()
    become_user(scratch, "refused" in sys.argv[3:])
    asyncio.run(attacked(names, scratch))


if __name__ == "__main__":
    main()
