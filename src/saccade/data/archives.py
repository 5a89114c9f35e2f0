"""Archives of media as data sets publish them, whole or cut into parts, unpacked as far as they are wanted.

    videos_chunked_01.zip                         each member is written whole or not at all, and one that
    videos.tar.part.aa + .ab + ...  ── members ──> is there is passed over: a stopped call goes on where it was
    data.tar.gz

What is in an archive decides nothing about where it is written: `unpack` takes plain files alone, never links, and
refuses a name that leads out of the folder; `complete` writes to the paths that rows name, and to no others.
"""

import bisect
import contextlib
import functools
import hashlib
import io
import itertools
import lzma
import re
import shutil
import stat
import string
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from saccade.data.record import whole
from saccade.errors import DataError
from saccade.runlog import writing

_FORMS = r"\.(?:zip|tgz|tar\.gz|tar\.bz2|tar\.xz|tar)"  # the longer of two that begin alike first
_PART = r"(?:[._-]?part[._-]?(?P<named>[a-z]{2,3}|\d{1,4})|[._-]?(?P<bare>a[a-z]|\d{2,4}))?"
_NAME = re.compile(rf"(?P<whole>.+{_FORMS}){_PART}", re.IGNORECASE)
_FOREIGN = re.compile(r"(?P<whole>.+)\.(?:(?P<seven>(?:7z|rar)(?:\.\d{3})?)|(?P<volume>[zr]\d{2,3}))", re.IGNORECASE)
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError)
_CHUNK = 2**20  # bytes in memory at a time

Told = Callable[[int, str], None]  # files unpacked so far of an archive, and its name


def untold(done: int, name: str) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive by its name, and the files that it is cut into (itself, where it isn't cut), in order.

    >>> archives(["v.tar.part.ab", "v.tar.part.aa", "a.zip", "a.mp4"])[1]
    Archive(name='v.tar', parts=('v.tar.part.aa', 'v.tar.part.ab'))
    """

    name: str
    parts: tuple[str, ...]

    @property
    def stem(self) -> str:
        """What its members are called together, such as "v" of v.tar.gz."""
        return re.sub(_FORMS + "$", "", PurePosixPath(self.name).name, flags=re.IGNORECASE)


def archives(files: Iterable[str]) -> list[Archive]:
    """The archives among files, in order of their names. DataError where one of several parts is missing."""
    found: dict[str, dict[str, str]] = {}
    for file in files:
        match = _NAME.fullmatch(file)
        if match:
            found.setdefault(match["whole"], {})[match["named"] or match["bare"] or ""] = file
    return [_joined(name, found[name]) for name in sorted(found)]


def packed_in(folder: Path) -> list[str]:
    """The archives, and parts of such, that lie in a folder or below it, as seen from there."""
    return _below(folder, _NAME)


def foreign_in(folder: Path) -> list[str]:
    """Those, and volumes of such, that are of another form and can't be unpacked here."""
    return _below(folder, _FOREIGN)


def _below(folder: Path, form: re.Pattern[str]) -> list[str]:
    found = (path for path in folder.rglob("*") if form.fullmatch(path.name) and path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def by_hand(files: Iterable[str]) -> str:
    """How the first of these files that is an archive of another form, or a volume of one, is unpacked by hand; "" for
    none such.

    >>> by_hand(["a.zip", "a.z02", "a.z01"])
    'a.z01 is a volume of an archive that is split; unpack it by hand: `7z x a.zip`, all volumes in one folder'
    """
    for file in sorted(files):
        match = _FOREIGN.fullmatch(file)
        if match and match["seven"]:
            return f"{file} can't be unpacked here; unpack it by hand: `7z x {file}`, all its volumes in one folder"
        if match:
            first = f"{match['whole']}.{'zip' if match['volume'][0] in 'zZ' else 'rar'}"
            how = f"`7z x {first}`, all volumes in one folder"
            return f"{file} is a volume of an archive that is split; unpack it by hand: {how}"
    return ""


def _joined(name: str, parts: dict[str, str]) -> Archive:
    if "" in parts:  # whole; parts beside it are what it was joined from
        return Archive(name=name, parts=(parts[""],))
    order = sorted(parts, key=_place)
    first = order[0] if _place(order[0]) > order[0].isdigit() else None  # numbers may begin at 1
    gap = first or next((two for one, two in itertools.pairwise(order) if _place(two) != _place(one) + 1), None)
    if gap is not None:
        raise DataError(f"{parts[gap]}: a part before it is missing; download all parts of {name} into one folder")
    return Archive(name=name, parts=tuple(parts[part] for part in order))


def _place(part: str) -> int:
    """Where a part stands: aa, ab, ... or 00, 01, ..., which may also begin at 1."""
    if part.isdigit():
        return int(part)
    value = 0
    for letter in part.lower():
        value = 26 * value + string.ascii_lowercase.index(letter)
    return value


def sha256(path: Path) -> str:
    """SHA-256 of a whole file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def room(folder: Path, size: int, what: str) -> None:
    """Raises DataError where the disk of a folder has no room for `size` more bytes."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if size > free:
        mend = "free some space and run the same command again: what is there already stays"
        raise DataError(f"{what} needs {size / 2**30:.2f} GiB and the disk of {folder} has {free / 2**30:.2f}; {mend}")


# ---- taking files out ----------------------------------------------------------------------------------------------


def unpack(folder: Path, archive: Archive, target: Path, *, told: Told = untold) -> int:
    """Write all files of an archive that lies in `folder` to `target`, those that aren't there; how many were written.

    DataError for an archive that can't be read, that doesn't fit, or of which a name leads out of `target`.
    """

    def place(member: str) -> Path:
        parts = PurePosixPath(member.replace("\\", "/")).parts
        if not parts or parts[0].endswith(("/", ":")) or ".." in parts:
            raise DataError(f"{folder / archive.name} holds {member!r}, which leads out of {target}; don't trust it")
        return target.joinpath(*parts)

    return _written(folder, archive, place, told)


def complete(
    folder: Path,
    lacking: Collection[str],
    *,
    named: Iterable[str],
    packed: Sequence[Archive],
    fetched: Callable[[Archive], None] = lambda archive: None,
    told: Told = untold,
) -> set[str]:
    """Write what a folder lacks of files that rows name, from archives in it; what no archive holds is returned.

    A member is the file whose path it ends with (or the archive's name and it do), else the one of its name, where of
    all the `named` files only one has it. Archives that are called as a folder is in which something is lacking come
    first, and none is `fetched` once nothing lacks.
    """
    names = Counter(PurePosixPath(path).name for path in {*named, *lacking})
    lone = {name for name, times in names.items() if times == 1}
    left = set(lacking)
    tops = {PurePosixPath(path).parts[0] for path in left}
    for archive in sorted(packed, key=lambda each: (each.stem not in tops, each.name)):
        if not left:
            break
        fetched(archive)
        _written(folder, archive, functools.partial(_meant, folder, archive.stem, frozenset(left), lone), told)
        left = {path for path in left if not (folder / path).is_file()}
    return left


def _meant(folder: Path, stem: str, wanted: Collection[str], lone: Collection[str], name: str) -> Path | None:
    """Where a member of an archive is looked for, if it is wanted."""
    member = PurePosixPath(stem, name.replace("\\", "/").lstrip("/"))
    tails = ("/".join(member.parts[at:]) for at in range(len(member.parts)))
    found = next((tail for tail in tails if tail in wanted), None)
    if found is None and member.name in lone:
        found = next((path for path in wanted if PurePosixPath(path).name == member.name), None)
    return None if found is None else folder / found


def _written(folder: Path, archive: Archive, place: Callable[[str], Path | None], told: Told) -> int:
    done, where = 0, folder / archive.name
    with _readable(where), io.BufferedReader(_Joined([folder / part for part in archive.parts]), _CHUNK) as file:
        for name, size, opened in _members(archive, file):
            target = place(name)
            if target is None or target.is_file():
                continue
            room(target.parent, size, f"{name} of {where}")
            with opened() as source, writing(target), whole(target) as partial, partial.open("wb") as out:
                out.writelines(_chunks(source))
            done += 1
            told(done, archive.name)
    return done


@contextlib.contextmanager
def _readable(where: Path) -> Iterator[None]:
    """Say in one sentence why an archive can't be read."""
    try:
        yield
    except _BROKEN as error:
        # Of a split ZIP the last volume alone ends in .zip.
        if "multiple disks" in str(error) or where.with_suffix(".z01").is_file():
            raise DataError(by_hand([str(where.with_suffix(".z01"))])) from error
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise DataError(f"{where} can't be unpacked ({reason}); download it again, all its parts") from error
    except RuntimeError as error:  # what zipfile raises for a password
        raise DataError(f"{where} can't be unpacked: {error}; unpack it by hand") from error


def _members(archive: Archive, file: IO[bytes]) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """The plain files of an archive in its own order: name, bytes, and how it is opened."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(file) as packed:
            for info in filter(_plain, packed.infolist()):
                yield info.filename, info.file_size, functools.partial(packed.open, info)
        return
    with tarfile.open(fileobj=file, mode="r:*") as tape:
        for member in filter(tarfile.TarInfo.isreg, tape):
            yield member.name, member.size, functools.partial(_opened, tape, member)


def _plain(info: zipfile.ZipInfo) -> bool:
    return not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)


def _opened(tape: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tape.extractfile(member)
    assert file is not None  # of a plain file there is always one
    return file


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    """What a member holds; a ZIP's check sums are compared on the way."""
    try:
        while chunk := source.read(_CHUNK):
            yield chunk
    except OSError as error:  # such as a bad gzip; what can't be written is another matter
        raise EOFError(str(error)) from error


class _Joined(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._files = [path.open("rb") for path in paths]
        self._ends = list(itertools.accumulate(path.stat().st_size for path in paths))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._ends[-1]}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read from the part that the position is in, up to its end."""
        part = bisect.bisect_right(self._ends, self._at)
        if part == len(self._files):
            return 0
        file, begins = self._files[part], self._ends[part - 1] if part else 0
        file.seek(self._at - begins)
        read = file.readinto(buffer)
        self._at += read
        return read

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()
