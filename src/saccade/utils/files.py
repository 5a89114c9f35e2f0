"""Write files atomically and convert file system errors into one clear sentence."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from saccade.errors import RunError

RESUME_HINT = "then continue with --resume, or repeat the command if it has no such option"
OS_ERROR_HINTS = {
    errno.ENOSPC: f"free some space, {RESUME_HINT}",
    errno.EDQUOT: f"free some space, {RESUME_HINT}",
    errno.EFBIG: f"allow larger files (ulimit -f), {RESUME_HINT}",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder",
    errno.ENOTDIR: "a part of the path is a file",
}


def write_text(path: Path, text: str) -> Path:
    """Write a file atomically and create its folder. Raises RunError with the path as key."""
    # Next to the target: a rename is atomic only within one file system.
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with convert_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def convert_file_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a RunError about `path`, its key, with a fix where one is known."""
    try:
        yield
    except OSError as error:
        hint = OS_ERROR_HINTS.get(error.errno or 0)
        reason = (error.strerror or str(error)).lower() + (f"; {hint}" if hint else "")
        raise RunError(f"{path} can't be written: {reason}", key=str(path)) from error
