"""Published paths of media to local ones, and back: whatever else a file says stays as it is.

    file ──shards of rows, each written whole──> .parts/<file>/ ──joined──> out/<file>, manifest.json
                  └── a second call begins behind the last whole shard

A published file names its media by archive (`longvt_source/...`, `museg/charades/...`). Here each such path gets a root
in front, wherever it stands: in a column, in a list, in JSON inside a text. Taking the root away gives the file back.
"""

import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.data import parquet
from saccade.data.archives import sha256
from saccade.data.cells import Cells
from saccade.data.gather import bucket_of
from saccade.data.raw import read_rows
from saccade.data.record import need_file, whole, write_jsonl
from saccade.errors import DataError
from saccade.media import files

SENTINELS = ("longvt_source/", "museg/charades/", "museg/et_instruct_164k/", "selfqa/")
SHARD_ROWS = 8192
LINES = (".jsonl", ".ndjson")
TEXTS = (*LINES, ".json")
TABLES = {".csv": ",", ".tsv": "\t"}  # what stands between their cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of one file: `missing` are the local files that aren't there, `media` those that are, each once.

    >>> Done(file="a.parquet", rows=2, paths={"selfqa": 2}, missing=("selfqa/1.mp4",)).lacking()
    {'selfqa': 1}
    """

    file: str
    rows: int
    paths: dict[str, int]  # references, by bucket
    missing: tuple[str, ...]
    media: tuple[str, ...] = ()
    source_digest: str = ""
    digest: str = ""

    def lacking(self) -> dict[str, int]:
        """How many files are missing, by bucket."""
        return dict(Counter(map(bucket_of, self.missing)))


@dataclass(slots=True)
class Paths:
    """Sentinel paths to local ones (or back, where `back`), counted by bucket while they are changed.

    >>> Paths(root="/data", sentinels=SENTINELS, back=True).changed("file:///data/selfqa/1.mp4")
    'file://selfqa/1.mp4'
    """

    root: str
    sentinels: tuple[str, ...]
    back: bool = False
    paths: Counter[str] = field(default_factory=Counter)
    missing: set[str] = field(default_factory=set)
    media: set[str] = field(default_factory=set)
    _alone: re.Pattern[str] = field(init=False)
    _quoted: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        # a slash in JSON may have backslashes before it, and JSON in JSON has some before its quotes
        words = [re.escape(sentinel).replace("/", r"\\*/") for sentinel in self.sentinels]
        root = re.escape(f"{self.root}/") if self.back else ""
        path = rf"(file:(?:\\*/){{2}})?({root})((?:{'|'.join(words)})"
        self._alone = re.compile(rf"{path}[^\r\n]*)")
        self._quoted = re.compile(rf'(?<="){path}(?:[^"\\]|\\+[u/])*)(?=\\*")')

    def changed(self, value: Any) -> Any:
        """A value with every path in it changed."""
        if isinstance(value, str):
            if value.lstrip()[:1] in ("{", "["):
                return self.text(value)
            match = self._alone.fullmatch(value)
            return self._replaced(match) if match else value
        if isinstance(value, dict):
            return {key: self.changed(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.changed, value))
        return value

    def text(self, text: str) -> str:
        """JSON with every string in it that is a path changed; all else, spaces included, stays."""
        return self._quoted.sub(self._replaced, text)

    def cell(self, text: str) -> str:
        """A cell of a table, which may hold several paths with `|` between them."""
        if text.lstrip()[:1] in ("{", "["):
            return self.text(text)
        return "".join(self.changed(part) for part in re.split(r"(\s*\|\s*)", text))

    def subtitles(self, row: Any) -> None:
        """Count the subtitles that a row of the native format names, whose paths start at its video's folder."""
        if self.back:
            return
        task = row.get("task", row) if isinstance(row, dict) else {}
        video, named = _subtitled(_opened(task.get("media")), _opened(task.get("extras")))
        path = os.path.normpath(os.path.join(os.path.dirname(video), named)) if video and named else ""
        # A name that is a published path itself was changed, and so counted, like all others.
        if path.startswith(f"{self.root}/") and not os.path.isabs(named):
            plain = path.removeprefix(f"{self.root}/")
            self.paths[bucket_of(plain)] += 1
            (self.media if os.path.isfile(path) else self.missing).add(plain)

    def _replaced(self, match: re.Match[str]) -> str:
        scheme, _, path = match[1] or "", match[2], match[3]
        plain = re.sub(r"\\+/", "/", path)
        if "\\u" in plain:
            plain = json.loads('"' + re.sub(r"\\+u", r"\\u", plain) + '"')
        # nothing may lead out of the root
        if ".." in plain.split("/"):
            self.missing.add(plain)
            return match[0]
        self.paths[bucket_of(plain)] += 1
        if self.back:
            return f"{scheme}{path}"
        (self.media if os.path.isfile(f"{self.root}/{plain}") else self.missing).add(plain)
        return f"{scheme}{self.root}/{path}"


def _opened(value: Any) -> Any:
    """What JSON in a text says, or the value where it is none."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def _subtitled(media: Any, extras: Any) -> tuple[str, str]:
    """The paths of the first video and of its subtitles as a row has them; "" where it has none."""
    listed = [each for each in media if isinstance(each, dict)] if isinstance(media, list) else []
    video = next((each.get("path") for each in listed if each.get("kind", "video") == "video"), None)
    named = extras.get("subtitles") if isinstance(extras, dict) else None
    return (video, named) if isinstance(video, str) and isinstance(named, str) else ("", "")


def materialize(
    sources: Sequence[Path],
    folder: Path,
    root: Path,
    *,
    sentinels: Sequence[str] = SENTINELS,
    back: bool = False,
    digest_media: bool = False,
    told: Callable[[str, int], None] = lambda file, rows: None,
) -> list[Done]:
    """Write each file to `folder` with its sentinel paths below `root`; `back` takes the root away again.

    What was finished before stays, and what is missing is looked for anew. `folder/manifest.json` holds rows, counts by
    bucket and digests, `<file>.missing.txt` the media that aren't there, `<file>.media.jsonl` those that are with their
    sizes, and where `digest_media` with digests of their content. Raises DataError.
    """
    names = Counter(source.name for source in sources)
    for source in sources:
        _check(source, folder, names[source.name])
    local = os.path.abspath(root)
    if not back and not os.path.isdir(local):
        raise DataError(f"{root}: there is no such folder; give --root where the archives were unpacked")
    # They would have to be escaped once more in each layer of JSON in JSON, and the way back would not be the same.
    if re.search(r'["\\\x00-\x1f]', local):
        raise DataError(f"{root}: a root can't have quotes or backslashes in its name")
    folder.mkdir(parents=True, exist_ok=True)
    manifest = _read(folder / "manifest.json") or {"root": local, "files": {}}
    reports = []
    for source in sources:
        identity = [*files.identity(str(source))[1:], local, sorted(sentinels), back]
        entry = manifest["files"].get(source.name, {})
        # Written before, from the same file with the same settings: only what is missing may have changed.
        if entry.get("identity") == identity and (folder / source.name).is_file():
            done = _again(folder, entry, local, back)
        else:
            marks = tuple(sentinels)
            job = _Job(source=source, folder=folder, identity=identity, root=local, sentinels=marks, back=back)
            done = job.run(told)
        _write_missing(folder, done)
        _write_media(folder / f"{source.name}.media.jsonl", done.media, local, digest_media)
        short = {key: value for key, value in asdict(done).items() if key not in ("missing", "media")}
        manifest["files"][source.name] = {**short, "missing": done.lacking(), "identity": identity}
        manifest["root"] = local
        _write(folder / "manifest.json", manifest)
        reports.append(done)
    return reports


def _check(source: Path, folder: Path, times: int) -> None:
    need_file(source)
    if source.suffix not in (*TEXTS, *TABLES, ".parquet"):
        raise DataError(f"{source}: paths are changed in files that end in {', '.join((*TEXTS, *TABLES))} or .parquet")
    if times > 1:
        raise DataError(f"{source}: two files of one name can't go into one folder")
    if folder.resolve() == source.parent.resolve():
        raise DataError(f"{source}: it would be overwritten; give --out another folder than its own")


# ---- one file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    source: Path
    folder: Path
    identity: list[Any]
    root: str
    sentinels: tuple[str, ...]
    back: bool

    @property
    def place(self) -> Path:
        return self.folder / ".parts" / self.source.name

    def run(self, told: Callable[[str, int], None]) -> Done:
        """Write the shards that are missing, then all of them as one file."""
        if _read(self.place / "of.json") != self.identity:
            shutil.rmtree(self.place, ignore_errors=True)
            self.place.mkdir(parents=True)
            _write(self.place / "of.json", self.identity)
        total: Counter[str] = Counter()
        missing: set[str] = set()
        media: set[str] = set()
        parts: list[Path] = []
        feed: parquet.Feed | None = None
        rows, at, more = 0, 0, True
        while more:
            part = self.place / f"{len(parts):06d}{self.source.suffix}"
            note = _read(part.with_suffix(".note"))
            if note is None:
                # the shards that were finished before are the first ones: from here on the file is read once
                feed = feed or (parquet.Feed(self.source, rows) if self.source.suffix == ".parquet" else None)
                note = self.shard(part, rows, at, feed)
            rows, at, more = rows + note["rows"], note["at"], note["more"]
            total.update(note["paths"])
            missing.update(note["missing"])
            media.update(note["media"])
            parts.append(part)
            told(self.source.name, rows)
        target = self.folder / self.source.name
        with whole(target) as partial:
            self.join(parts, partial)
        done = Done(
            file=self.source.name,
            rows=rows,
            paths=dict(sorted(total.items())),
            missing=tuple(sorted(missing)),
            media=tuple(sorted(media)),
            source_digest=sha256(self.source),
            digest=sha256(target),
        )
        shutil.rmtree(self.place)
        return done

    def shard(self, part: Path, rows: int, at: int, feed: parquet.Feed | None) -> dict[str, Any]:
        """Write the shard behind so many rows, and once it is whole a note on it.

        Of a text it begins at a byte, else the feed goes on.
        """
        paths = Paths(root=self.root, sentinels=self.sentinels, back=self.back)
        with whole(part) as partial:
            if feed is not None:
                count = parquet.rewrite(feed, partial, paths.changed, rows=SHARD_ROWS)
                more = feed.left > 0
                for row in parquet.iterate(partial) if {"media", "extras"} <= {*feed.schema.names} else ():
                    paths.subtitles(row)
            else:
                count, at = self.lines(partial, paths, rows, at)
                more = at < self.source.stat().st_size
        note = {"rows": count, "at": at, "more": more, "paths": paths.paths}
        note |= {"missing": sorted(paths.missing), "media": sorted(paths.media)}
        _write(part.with_suffix(".note"), note)
        return note

    def lines(self, target: Path, paths: Paths, rows: int, at: int) -> tuple[int, int]:
        """Copy lines, or rows of a table, from byte `at` on, before which are so many; how many, the byte behind."""
        cells = Cells(mark=TABLES[self.source.suffix]) if self.source.suffix in TABLES else None
        count = -1 if cells and not at else 0  # the names of the columns are no row
        with self.source.open("rb") as file, target.open("wb") as out:
            file.seek(at)
            lines = map(self.decoded, file)
            for text in itertools.islice(cells.rows(lines) if cells else lines, SHARD_ROWS - count):
                if self.source.suffix in LINES:
                    _whole(text, f"{self.source}, line {rows + count + 1}")
                done = self.changed(text, cells, paths)
                out.write(done.encode())
                if '"subtitles"' in done and cells is None:
                    paths.subtitles(_opened(done))
                count, at = count + 1, at + len(text.encode())
        return count, at

    def decoded(self, line: bytes) -> str:
        """A line as text."""
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.source}: the line that begins with {line[:40]!r} is not UTF-8: {error}") from error

    def changed(self, text: str, cells: Cells | None, paths: Paths) -> str:
        """A line, or a row of a table, with every path in it changed."""
        try:
            return cells.changed(text, paths.cell) if cells else paths.text(text)
        except DataError as error:
            raise DataError(f"{self.source}: {error}; give --root a name without it") from error

    def join(self, parts: Sequence[Path], target: Path) -> None:
        """All shards as one file."""
        if self.source.suffix == ".parquet":
            return parquet.join(parts, target)
        with target.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out)
        return None


def _whole(line: str, where: str) -> None:
    """Raises DataError for a line that is no JSON: a file that was cut off must not pass for a whole one."""
    if not line.strip():
        return
    try:
        json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON; mend it or download it again: {error}") from error


def _again(folder: Path, entry: dict[str, Any], root: str, back: bool) -> Done:
    """What a finished file lacks now: more archives may have been unpacked since."""
    listed = folder / f"{entry['file']}.missing.txt"
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    known = {*lines, *_media(folder / f"{entry['file']}.media.jsonl")}
    missing = {*lines} if back else {path for path in known if not os.path.isfile(f"{root}/{path}")}
    return Done(
        file=entry["file"],
        rows=entry["rows"],
        paths=entry["paths"],
        missing=tuple(sorted(missing)),
        media=() if back else tuple(sorted(known - missing)),
        source_digest=entry["source_digest"],
        digest=entry["digest"],
    )


def _media(path: Path) -> dict[str, dict[str, Any]]:
    """The media that a list of ours names."""
    if not path.is_file():
        return {}
    return {row.values["path"]: dict(row.values) for row in read_rows(path)}


def _write_media(path: Path, media: Sequence[str], root: str, digests: bool) -> None:
    """List media with their sizes; a digest that is known stays while the size does."""
    known, rows = _media(path), []
    for name in media:
        size = os.path.getsize(f"{root}/{name}")
        row = {"path": name, "bytes": size}
        before = known.get(name, {})
        if before.get("bytes") == size and "digest" in before:
            row["digest"] = before["digest"]
        elif digests and size:
            row["digest"] = files.digest(f"{root}/{name}")
        rows.append(row)
    if rows:
        write_jsonl(path, rows)


def _write_missing(folder: Path, done: Done) -> None:
    path = folder / f"{done.file}.missing.txt"
    if not done.missing:
        path.unlink(missing_ok=True)
        return
    with whole(path) as partial:
        partial.write_text("".join(f"{name}\n" for name in done.missing), encoding="utf-8")


def _write(path: Path, value: Any) -> None:
    with whole(path) as partial:
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _read(path: Path) -> Any:
    """What a file of ours says; None where there is none, or none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
