"""Unpack archives of media as datasets publish them, whole or split into parts: all members, or the required ones.

    videos_chunked_01.zip                          members are written atomically; existing
    videos.tar.part.aa + .ab + ...  ── members ──> files are skipped, so that the same call
    data.tar.gz                                    resumes after an interruption

Archives are untrusted: `unpack` extracts regular files only, never links, and rejects names that lead out of the
folder; `extract_missing` writes only to the paths that rows name.
"""

import bisect
import contextlib
import functools
import io
import itertools
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from saccade.errors import DataError
from saccade.utils.files import convert_file_errors, open_file, write_atomically

# Of two suffixes with a common start the longer comes first.
_ARCHIVE_SUFFIX_PATTERN = r"\.(?:zip|tgz|tar\.gz|tar\.bz2|tar\.xz|tar)"
_PART_SUFFIX_PATTERN = r"(?:[._-]?part[._-]?(?P<named>[a-z]{2,3}|\d{1,4})|[._-]?(?P<bare>a[a-z]|\d{2,4}))?"
_ARCHIVE_NAME_PATTERN = re.compile(rf"(?P<whole>.+{_ARCHIVE_SUFFIX_PATTERN}){_PART_SUFFIX_PATTERN}", re.IGNORECASE)
_UNSUPPORTED_NAME_PATTERN = re.compile(
    r"(?P<whole>.+)\.(?:(?:7z|rar)(?:\.\d{3})?|(?P<volume>[zr]\d{2,3}))", re.IGNORECASE
)
_READ_ERRORS = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError),
    *(ValueError, IndexError, OverflowError, struct.error),  # zipfile's for damaged directories
    MemoryError,  # lzma's for a damaged size of its dictionary
)
_CHUNK_BYTES = 2**20  # held in memory at a time

ProgressCallback = Callable[[int, str], None]  # number of files unpacked from an archive so far, the archive's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive: its name, and the files that hold it in order (one file unless it is split).

    >>> find_archives(["v.tar.part.ab", "v.tar.part.aa", "a.zip", "a.mp4"])[1]
    Archive(name='v.tar', parts=('v.tar.part.aa', 'v.tar.part.ab'))
    """

    name: str
    parts: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The file name without the suffix, such as "v" for v.tar.gz."""
        return re.sub(_ARCHIVE_SUFFIX_PATTERN + "$", "", PurePosixPath(self.name).name, flags=re.IGNORECASE)


def find_archives(files: Iterable[str]) -> list[Archive]:
    """Return the archives among files, sorted by name. Raises DataError if a part of one is missing."""
    parts_by_archive: dict[str, dict[str, str]] = {}
    for file in files:
        match = _ARCHIVE_NAME_PATTERN.fullmatch(file)
        if match:
            parts_by_archive.setdefault(match["whole"], {})[match["named"] or match["bare"] or ""] = file
    return [_build_archive(name, parts) for name, parts in sorted(parts_by_archive.items())]


def list_archive_files(folder: Path, *, supported: bool = True) -> list[str]:
    """List archives and their parts below a folder, as relative paths: those that `unpack` supports, or the others."""
    pattern = _ARCHIVE_NAME_PATTERN if supported else _UNSUPPORTED_NAME_PATTERN
    matches = (path for path in folder.rglob("*") if pattern.fullmatch(path.name) and path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in matches)


def explain_manual_unpacking(files: Iterable[str]) -> str:
    """Explain how to unpack the first of these files that is an unsupported archive; "" if there is none.

    >>> explain_manual_unpacking(["a.zip", "a.z02", "a.z01"])
    'a.z01 is a volume of a split archive; unpack it with `7z x a.zip`, all volumes in one folder'
    """
    for match in filter(None, map(_UNSUPPORTED_NAME_PATTERN.fullmatch, sorted(files))):
        file, volume = match[0], match["volume"]
        problem = "is a volume of a split archive" if volume else "has an unsupported format"
        first = file if not volume else f"{match['whole']}.{'zip' if volume[0] in 'zZ' else 'rar'}"
        return f"{file} {problem}; unpack it with `7z x {first}`, all volumes in one folder"
    return ""


def _build_archive(name: str, parts: dict[str, str]) -> Archive:
    if "" in parts:  # the whole archive; parts beside it are what it was joined from
        return Archive(name=name, parts=(parts[""],))
    numbered = sorted((_parse_part_number(part), part) for part in parts)
    first_number, first_part = numbered[0]
    start = min(first_number, int(first_part.isdigit()))  # numbers may begin at 1
    gap = next((part for expected, (number, part) in enumerate(numbered, start) if number != expected), None)
    if gap is not None:
        problem = f"{parts[gap]}: a part before it is missing; download all parts of {name} into one folder"
        raise DataError(problem, key=parts[gap])
    return Archive(name=name, parts=tuple(parts[part] for _, part in numbered))


def _parse_part_number(part: str) -> int:
    """Return the number of a part: aa, ab, ... count from 0; 00, 01, ... are numbers."""
    if part.isdigit():
        return int(part)
    return functools.reduce(lambda value, letter: 26 * value + ord(letter) - ord("a"), part.lower(), 0)


def require_disk_space(folder: Path, size: int, what: str) -> None:
    """Raise DataError if the disk of `folder` has less than `size` bytes free; `what` begins the sentence."""
    with convert_file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if size > free:
        available = f"the disk of {folder} has {free / 2**30:.2f}"
        fix = "free some space and run the same command again, which resumes"
        raise DataError(f"{what} needs {size / 2**30:.2f} GiB and {available}; {fix}", key=str(folder), value=size)


def unpack(folder: Path, archive: Archive, target: Path, *, on_progress: ProgressCallback = lambda *_: None) -> int:
    """Extract every missing file of an archive in `folder` to `target`; return the number of files written.

    Raises DataError for an archive that can't be read or doesn't fit on the disk, or a member outside of `target`.
    """

    def resolve_target(member: str) -> Path:
        parts = PurePosixPath(member.replace("\\", "/")).parts
        if not parts or parts[0].endswith(("/", ":")) or ".." in parts:
            source = folder / archive.name
            problem = f"{source} holds {member!r}, which leads out of {target}; don't trust this archive"
            raise DataError(problem, key=str(source), value=member)
        return target.joinpath(*parts)

    return _extract_members(folder, archive, resolve_target, on_progress)


def extract_missing(
    folder: Path,
    missing: Collection[str],
    *,
    referenced: Iterable[str],
    archives: Sequence[Archive],
    ensure_downloaded: Callable[[Archive], None] = lambda archive: None,
    on_progress: ProgressCallback = lambda *_: None,
) -> set[str]:
    """Extract the `missing` files (paths relative to `folder`) from archives; return the paths that no archive holds.

    A member matches the missing path that equals the end of its own path (with the archive's stem in front); otherwise
    the missing path with its file name, if only one of the `referenced` files has that name. Archives named after a
    folder with missing files come first; `ensure_downloaded` is called only while files are missing.
    """
    name_counts = Counter(PurePosixPath(path).name for path in {*referenced, *missing})
    unique_names = {name for name, count in name_counts.items() if count == 1}
    remaining = set(missing)
    top_folders = {PurePosixPath(path).parts[0] for path in remaining}
    for archive in sorted(archives, key=lambda archive: (archive.stem not in top_folders, archive.name)):
        if not remaining:
            break
        ensure_downloaded(archive)
        named = {PurePosixPath(path).name: path for path in remaining}
        by_name = {name: path for name, path in named.items() if name in unique_names}
        resolve_target = functools.partial(_match_member, folder, archive.stem, frozenset(remaining), by_name)
        _extract_members(folder, archive, resolve_target, on_progress)
        remaining = {path for path in remaining if not os.path.isfile(folder / path)}
    return remaining


def _match_member(
    folder: Path, archive_stem: str, wanted_paths: Collection[str], by_name: Mapping[str, str], member_name: str
) -> Path | None:
    """Return the path that a member is extracted to, or None if no wanted path, nor one `by_name`, matches it."""
    member = PurePosixPath(archive_stem, member_name.replace("\\", "/").lstrip("/"))
    tails = ("/".join(member.parts[start:]) for start in range(len(member.parts)))
    match = next((tail for tail in tails if tail in wanted_paths), None) or by_name.get(member.name)
    return None if match is None else folder / match


def _extract_members(
    folder: Path, archive: Archive, resolve_target: Callable[[str], Path | None], on_progress: ProgressCallback
) -> int:
    num_written, archive_path = 0, folder / archive.name
    with _explain_read_errors(archive_path), _ConcatenatedFile([folder / part for part in archive.parts]) as raw:
        for name, size, opened in _iterate_members(archive, io.BufferedReader(raw, _CHUNK_BYTES)):
            target = resolve_target(name)
            if target is None or os.path.isfile(target):
                continue
            require_disk_space(target.parent, size, f"{name} of {archive_path}")
            with (
                opened() as source,
                convert_file_errors(target),
                write_atomically(target, is_durable=False) as partial,
                open_file(partial, "wb") as out,
            ):
                out.writelines(_iterate_chunks(source))
            num_written += 1
            on_progress(num_written, archive.name)
    return num_written


@contextlib.contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """Turn errors of zipfile and tarfile into DataError."""
    try:
        yield
    except (*_READ_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of a file; gzip's and bz2's for damaged data have no number
        # The last volume of a split ZIP ends in .zip, the others in .z01, .z02, ...
        if "multiple disks" in str(error) or path.with_suffix(".z01").is_file():
            raise DataError(explain_manual_unpacking([str(path.with_suffix(".z01"))]), key=str(path)) from error
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        problem = f"{path} can't be unpacked ({reason}); download it again, all its parts"
        raise DataError(problem, key=str(path)) from error
    except RuntimeError as error:  # zipfile raises it for encrypted members
        raise DataError(f"{path} can't be unpacked: {error}; unpack it by hand", key=str(path)) from error


def _iterate_members(archive: Archive, file: IO[bytes]) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield name, size in bytes and an open function for every regular file of an archive, in the archive's order."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(file) as zip_file:
            for info in zip_file.infolist():
                if not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG):
                    yield info.filename, info.file_size, functools.partial(zip_file.open, info)
        return
    with tarfile.open(fileobj=file, mode="r:*") as tar_file:
        for member in filter(tarfile.TarInfo.isreg, tar_file):
            yield member.name, member.size, functools.partial(tar_file.extractfile, member)
        # A compressed stream's checksum is at its end, which tarfile doesn't read.
        while tar_file.fileobj is not None and tar_file.fileobj.read(_CHUNK_BYTES):
            pass


def _iterate_chunks(source: IO[bytes]) -> Iterator[bytes]:
    """Yield a member's content in chunks; zipfile verifies its checksum at the end."""
    try:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk
    except OSError as error:  # such as a bad gzip; write errors are handled elsewhere
        raise EOFError(str(error)) from error


class _ConcatenatedFile(io.RawIOBase):
    """Read several files as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._files = [open_file(path) for path in paths]
        self._end_offsets = list(itertools.accumulate(path.stat().st_size for path in paths))
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end_offsets[-1]}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = bisect.bisect_right(self._end_offsets, self._position)
        if part == len(self._files):
            return 0
        self._files[part].seek(self._position - (self._end_offsets[part - 1] if part else 0))
        num_bytes = self._files[part].readinto(buffer)
        self._position += num_bytes
        return num_bytes

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()
