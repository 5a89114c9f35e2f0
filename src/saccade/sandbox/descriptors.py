"""Plan the use of file descriptors from the limit that this process has.

    limit of open files ── reserved: files, media, libraries
                        ├─ half of the rest ──> open sandboxes
                        └─ a third of it ────> connections to servers

Sandboxes and requests beyond their share wait for room, so that none fails because others have taken all descriptors.
"""

import resource

from saccade.errors import SandboxError

_MAX_FDS = 1 << 16  # more are never needed
_RESERVED_FDS = 96
_MAX_CONNECTIONS = 8192
_FDS_PER_SANDBOX = 6  # four of its worker, some while that starts, and its images
MIN_FDS = 768  # a worker numbers what it receives from 512 on, up to 253 descriptors (jail.py, protocol.py)


def raise_fd_limit() -> int:
    """Raise this process's soft limit of open files as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FDS if hard == resource.RLIM_INFINITY else min(hard, _MAX_FDS)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(soft, limit)


def plan_connections() -> int:
    """Return how many connections to servers may be open at a time."""
    return max(1, min(_MAX_CONNECTIONS, (raise_fd_limit() - _RESERVED_FDS) // 3))


def plan_sandboxes() -> int:
    """Return how many sandboxes may be open at a time. Raises SandboxError if the limit is too low for any."""
    limit = raise_fd_limit()
    if limit < MIN_FDS:
        raise SandboxError(
            f"this process may have {limit} open files, and the sandbox needs {MIN_FDS}; raise the hard limit "
            f"(ulimit -Hn {MIN_FDS}, or the limit of the container or service)",
            key="RLIMIT_NOFILE",
            value=limit,
        )
    return (limit - _RESERVED_FDS) // 2 // _FDS_PER_SANDBOX
