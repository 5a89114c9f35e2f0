"""Write files that survive kills and power cuts, and convert file system errors into one clear sentence.

    content ──> temporary file ──> fsync ──> rename ──> fsync of the folder

A reader sees the old file or the new one. Without the first fsync a power cut may leave an empty file of the new name,
without the second one the old file. Everything that a run can't do without is written here.

Files that may come from users are opened by `open_file`, or checked by `require_regular` before a library opens them: a
named pipe without a writer would block for ever.
"""

import contextlib
import errno
import itertools
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.errors import RunError

_logger = logging.getLogger("saccade")
_RUN_FILES = ("invocations.json", "recipe.yaml")
_RESUME = "then continue with --resume, or repeat the command if it has no such option"
_REPEAT = "then repeat the command"
OS_ERROR_HINTS = {
    errno.ENOSPC: "free some space, {retry}",
    errno.EDQUOT: "free some space, {retry}",
    errno.EFBIG: "allow larger files (ulimit -f), {retry}",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder",
    errno.EEXIST: "it is a file or a broken link; choose another path",
    errno.ENOTDIR: "a part of the path is a file or a broken link",
}


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path without symbolic links; a link to itself stays, and can't be opened later.

    `Path.resolve` raises RuntimeError for such a link up to Python 3.12.
    """
    return Path(os.path.realpath(path))


_FILE_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str | os.PathLike[str], mode: str = "rb", **options: Any) -> Any:
    """Open a file, as `open` does. Raises OSError at once if it is there and neither a file nor a folder."""
    return open(path, mode, opener=_open_regular, **options)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file. Raises OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a file. Raises OSError as `open_file`, and ValueError for another encoding."""
    with open_file(path, "r", encoding=encoding, errors=errors) as file:
        return file.read()


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path is a file or a folder, or doesn't exist: what opens it reports that."""
    with contextlib.suppress(FileNotFoundError):
        _check_kind(os.stat(path), os.fspath(path))


def require_regular_files(folder: str | os.PathLike[str]) -> None:
    """Raise OSError if anything in a folder is neither a file nor a folder; what isn't a folder is left alone."""
    if os.path.isdir(folder):
        for name in sorted(os.listdir(folder)):
            require_regular(os.path.join(folder, name))


def _open_regular(path: str, flags: int) -> int:
    require_regular(path)  # opening a socket or a device has other errors, or effects
    file_descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_kind(os.fstat(file_descriptor), path)
        os.set_blocking(file_descriptor, True)
    except BaseException:
        os.close(file_descriptor)
        raise
    return file_descriptor


def _check_kind(status: os.stat_result, path: str) -> None:
    kind = _FILE_KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}; give a regular file", path)


def write_text(path: Path, text: str) -> Path:
    """Write a file durably and create its folder. Raises RunError with the path as key."""
    with convert_file_errors(path):
        create_folder(path.parent)
        # Two processes may write the same file, such as an id or a report.
        with write_atomically(path, is_shared=True) as draft:
            draft.write_text(text, encoding="utf-8")
    return path


def require_writable(path: Path) -> None:
    """Raise RunError unless a file can be written there: before work whose result it will hold."""
    if path.exists() and not path.is_file():  # a folder, or a device
        raise RunError(f"{path} can't be written: it is not a file; choose another path", key=str(path))
    with convert_file_errors(path):
        create_folder(path.parent)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def create_folder(folder: Path) -> None:
    """Create a folder and its parents durably: without a sync a power cut may lose the folder with all in it."""
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_path(created.parent)


def create_private_folder(folder: Path) -> None:
    """Create a folder at a path that other users can predict, closed to them. Raises OSError if it is another's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):  # others could replace its files
        raise PermissionError(errno.EACCES, "is not a folder of this user", str(folder))
    if status.st_mode & 0o077:
        folder.chmod(0o700)


@contextlib.contextmanager
def write_atomically(target: Path, *, is_durable: bool = True, is_shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `target` on success and deleted on failure.

    `is_durable=False` saves the two fsyncs for a file that can be written again, such as one of an archive;
    `is_shared` is for a file that other threads or processes may write at the same time. Raises OSError, too, if the
    target is a pipe, a socket or a device, which the rename would replace.
    """
    require_regular(target)
    # Next to the target: a rename is atomic only within one file system.
    name = f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.draft" if is_shared else f"{target.name}.part"
    partial = target.with_name(name)
    require_regular(partial)
    try:
        yield partial
        if is_durable:
            sync_path(partial)
        os.replace(partial, target)
        if is_durable:
            sync_path(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def write_folder_atomically(target: Path) -> Iterator[Path]:
    """Yield an empty folder that is synced and renamed to `target` on success, and deleted on failure.

    `target` may be an empty folder. Raises OSError if it is another one, or can't be written.
    """
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # it would keep the disk full
        raise
    try:
        sync_path(target.parent)
    except OSError as error:  # the folder is complete, and a second try would be refused because of it
        reason = (error.strerror or str(error)).lower()
        _logger.warning("%s is complete, but a power cut may undo its renaming: %s", target, reason)


def sync_path(path: Path) -> None:
    """Write a file's content, or a folder's list of names, to the disk. Raises OSError, e.g. for a full disk."""
    file_descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(file_descriptor)
    except OSError as error:
        # Some network file systems can't sync folders; they write them at once.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(file_descriptor)


def sync_tree(folder: Path) -> None:
    """Write every file and folder below `folder`, and `folder` itself, to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):  # a folder after its files
        if not path.is_symlink():
            sync_path(path)
    sync_path(folder)


@contextlib.contextmanager
def convert_file_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a RunError about `path`, its key, with a fix where one is known."""
    try:
        yield
    except OSError as error:
        hint = OS_ERROR_HINTS.get(error.errno or 0, "").format(retry=describe_retry(path))
        reason = (error.strerror or str(error)).lower() + (f"; {hint}" if hint else "")
        raise RunError(f"{path} can't be written: {reason}", key=str(path)) from error


def is_resumable(path: Path) -> bool:
    """Return whether a path is a run or an ablation, or below one: `--resume` needs these files, written at a start."""
    folders = (path, *path.parents)
    # A folder with a recipe.yaml alone may be a user's.
    return any(
        (folder / "ablation.json").is_file() or all((folder / name).is_file() for name in _RUN_FILES)
        for folder in folders
    )


def describe_retry(path: Path) -> str:
    """Return how a command that failed to write below a path is continued."""
    return _RESUME if is_resumable(path) else _REPEAT
