"""Rewrite the published media paths of files to local ones, or back; everything else in a file stays the same.

Published files name their media relative to an archive (`longvt_source/...`, `museg/charades/...`). Such paths get the
media root as a prefix: in columns, in lists, in JSON inside texts. Removing the prefix restores the file. This is for
other programs: Saccade takes the folder as `saccade data import --root` and as the recipe's `data.media_root`.
"""

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.data import parquet
from saccade.data.importer import get_archive_folder
from saccade.errors import DataError
from saccade.utils.files import open_file, resolve_path, write_atomically, write_text
from saccade.utils.jsonl import require_file

MEDIA_PREFIXES = ("longvt_source/", "museg/charades/", "museg/et_instruct_164k/", "selfqa/")
_ESCAPED = re.compile(r"(?<!\\)\\++([u/])")  # each layer of JSON in JSON doubles the backslashes
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


@dataclass(slots=True)
class PathRewriter:
    """Rewrite published paths (those with one of `prefixes`) to local ones, or back, and count them by archive folder.

    >>> PathRewriter(media_root="/data").rewrite_value("file://selfqa/1.mp4")
    'file:///data/selfqa/1.mp4'
    """

    media_root: str
    prefixes: Sequence[str] = MEDIA_PREFIXES
    reverse: bool = False
    path_counts: Counter[str] = field(default_factory=Counter)
    missing_files: set[str] = field(default_factory=set)
    _whole_pattern: re.Pattern[str] = field(init=False)
    _quoted_pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        # in JSON a slash may be escaped, and in JSON inside JSON quotes are
        prefixes = [re.escape(prefix).replace("/", r"\\*/") for prefix in self.prefixes]
        root = re.escape(f"{self.media_root}/") if self.reverse else ""
        path = rf"(file:(?:\\*/){{2}})?({root})((?:{'|'.join(prefixes)})"
        self._whole_pattern = re.compile(rf"{path}[^\r\n]*)")
        self._quoted_pattern = re.compile(rf'(?<="){path}(?:[^"\\]|\\+[u/])*)(?=\\*")')

    def rewrite_value(self, value: Any) -> Any:
        """Return a value with every path in it rewritten."""
        if isinstance(value, str):
            if value.lstrip()[:1] in ("{", "["):
                return self.rewrite_json(value)
            match = self._whole_pattern.fullmatch(value)
            return self._replace_match(match) if match else value
        if isinstance(value, dict):
            return {key: self.rewrite_value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.rewrite_value, value))
        return value

    def rewrite_json(self, text: str) -> str:
        """Rewrite every string of a JSON text that is a path; everything else, spaces included, stays."""
        return self._quoted_pattern.sub(self._replace_match, text)

    def _replace_match(self, match: re.Match[str]) -> str:
        scheme, path = match[1] or "", match[3]
        decoded = _ESCAPED.sub(r"\\\1", path).replace("\\/", "/")
        if "\\u" in decoded:
            with contextlib.suppress(ValueError):  # the path has a backslash of its own
                decoded = json.loads(f'"{decoded}"')
        # never rewrite a path that leads out of the root
        if ".." in decoded.split("/"):
            self.missing_files.add(decoded)
            return match[0]
        self.path_counts[get_archive_folder(decoded)] += 1
        if self.reverse:
            return f"{scheme}{path}"
        if not os.path.isfile(f"{self.media_root}/{decoded}"):
            self.missing_files.add(decoded)
        return f"{scheme}{self.media_root}/{path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteReport:
    """Counts for one file: rows (lines of JSON), references by archive folder, and files that don't exist locally."""

    file: str
    rows: int
    path_counts: dict[str, int]
    missing_files: tuple[str, ...]


def rewrite_paths(
    sources: Sequence[Path],
    folder: Path,
    media_root: Path,
    *,
    prefixes: Sequence[str] = MEDIA_PREFIXES,
    reverse: bool = False,
    on_progress: Callable[[str, int], None] = lambda file, rows: None,
) -> list[RewriteReport]:
    """Write files to `folder`, paths below `media_root` (or back); `<file>.missing.txt` lists missing media.

    Each file is replaced atomically. Raises DataError for a file that can't be read or written.
    """
    local = os.path.abspath(media_root)
    names = Counter(source.name for source in sources)
    for source in sources:
        require_file(source)
        if source.suffix not in SUFFIXES:
            raise DataError(f"{source}: the name must end in one of {', '.join(SUFFIXES)}", key=str(source))
        if names[source.name] > 1:
            raise DataError(f"{source}: two files with the same name can't be written to one folder", key=str(source))
        if resolve_path(folder) == resolve_path(source.parent):
            raise DataError(f"{source}: it would be overwritten; give --out another folder", key=str(source))
    if not reverse and not os.path.isdir(local):
        problem = "there is no such folder; give --root the folder of the unpacked archives"
        raise DataError(f"{media_root}: {problem}", key=str(media_root))
    # Each layer of JSON in JSON would escape them again, and rewriting would not be reversible.
    if re.search(r'["\\\x00-\x1f]', local):
        problem = "the name of a media root can't contain quotes, backslashes or control characters"
        raise DataError(f"{media_root}: {problem}", key=str(media_root))
    folder.mkdir(parents=True, exist_ok=True)
    reports = []
    for source in sources:
        rewriter, rows = PathRewriter(local, prefixes, reverse), 0
        with write_atomically(folder / source.name) as partial:
            if source.suffix == ".parquet":
                rows = parquet.rewrite_parquet(source, partial, rewriter.rewrite_value)
            else:
                rows = _rewrite_lines(source, partial, rewriter)
        on_progress(source.name, rows)
        missing_list = folder / f"{source.name}.missing.txt"
        missing_list.unlink(missing_ok=True)
        missing = tuple(sorted(rewriter.missing_files))
        if missing:
            write_text(missing_list, "".join(f"{name}\n" for name in missing))
        path_counts = dict(sorted(rewriter.path_counts.items()))
        reports.append(RewriteReport(file=source.name, rows=rows, path_counts=path_counts, missing_files=missing))
    return reports


def _rewrite_lines(source: Path, target: Path, rewriter: PathRewriter) -> int:
    """Copy the lines of a JSON or JSONL file with every path rewritten; return their number."""
    number = 0
    with open_file(source) as file, open_file(target, "wb") as out:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode()
                # so that a truncated file isn't taken for a complete one
                if source.suffix != ".json" and text.strip():
                    json.loads(text.removeprefix("\ufeff"))
            except (ValueError, RecursionError) as error:
                problem = f"not valid JSON; fix it or download it again: {error}"
                raise DataError(f"{source}, line {number}: {problem}", key=f"{source}, line {number}") from error
            out.write(rewriter.rewrite_json(text).encode())
    return number
