"""The zygote's parent: it holds the namespaces and waits for the host's end.

keeper ── poll(host's pidfd, zygote's pidfd) ──> host gone: kill the zygote, and with it every guest
                                             └─> zygote gone: sweep up and end
"""

import fcntl
import os
import select
import signal
from collections.abc import Callable
from typing import NoReturn

from saccade.tools._sandbox import jail, kernel, scratch
from saccade.tools._sandbox.walls import Walls

Keep = Callable[[int], NoReturn]


def settle(walls: Walls, space: int, base: str, keep: Keep) -> jail.Jail:
    """Be a zygote within these walls: returns in a child of this process, while the parent goes on with `keep(child)`.

    `space` is the address space (bytes) that the libraries take, `base` the folder for working folders. Raises OSError
    in whichever of the two was refused something.
    """
    block, readable = os.getpid() & 0x3FFF, jail.libraries()
    hidden = jail.sources(readable)
    if walls.namespaces:
        jail.leave_namespaces(walls)
    child = os.fork()
    if child:
        keep(child)
    kernel.die_with_parent()
    proc = _high(os.open("/proc", os.O_PATH))
    found = jail.Jail(
        walls=walls,
        readable=readable,
        hidden=hidden,
        space=space,
        zygote=os.getpid(),
        user_block=block,
        base=base,
        proc=proc,
    )
    if walls.namespaces:
        jail.change_root(found)
    elif hidden:
        jail.hide_sources(found)
    return found


def _high(place: int) -> int:
    """The same descriptor with a number above those that a guest is given."""
    high = fcntl.fcntl(place, fcntl.F_DUPFD_CLOEXEC, 256)
    os.close(place)
    return high


def keep(zygote: int, host: int, base: str) -> NoReturn:
    """Wait until the host (a pidfd) or the zygote (a pid) ends, and see that nothing stays behind."""
    kernel.outlive_parent()  # which was one thread of the host, and may end before the host does
    watch = os.pidfd_open(zygote)
    poll = select.poll()
    for place in (host, watch):
        poll.register(place, select.POLLIN)
    kernel.close_others((host, watch))
    poll.poll()
    try:
        os.kill(zygote, signal.SIGKILL)
        os.waitpid(zygote, 0)
        if base:
            scratch.clear(base)
    finally:
        os._exit(0)
