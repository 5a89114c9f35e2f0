"""End a process that torchrun started."""

import atexit
import os
import sys
from typing import NoReturn


def exit_rank(code: int) -> NoReturn:
    """End a rank's process without finalizing the interpreter; functions registered with `atexit` run.

    DTensor's caches hold the process group, so gloo's threads outlive `destroy_process_group`. One of them that drops
    a tensor while the interpreter is finalized ends the process with SIGABRT.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
