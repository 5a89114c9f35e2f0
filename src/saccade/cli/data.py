"""`saccade data`: published files into tasks, their paths to local ones, checks, a row to look at."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from saccade.commands._terminal import out, progress
from saccade.data.hub import HUB, MARK, Hub
from saccade.errors import ConfigError, DataError
from saccade.runlog import version_of, writing
from saccade.view.live import say

if TYPE_CHECKING:
    from saccade.data.gather import Found

data = typer.Typer(no_args_is_help=True, help="Make data, import it, check it, look at it.")


class Policy(StrEnum):
    """What to do about a row that can't be used."""

    ERROR = "error"
    SKIP = "skip"


Files = Annotated[list[Path], typer.Argument(help="Files of rows.")]


@data.command("import")
def _import(
    source: Annotated[str, typer.Argument(help="The format: a source such as plain or llava, or a path ./mine.py.")],
    words: Annotated[
        list[str],
        typer.Argument(metavar="FILE... [SETTING=VALUE]...", help="Files of rows; settings of the source."),
    ],
    target: Annotated[Path, typer.Option("--out", help="The file of tasks to write: .jsonl or .parquet.")],
    root: Annotated[Path | None, typer.Option(help="Where relative paths of media start; else at their file.")] = None,
    on_missing: Annotated[Policy, typer.Option(help="What to do about rows whose files are missing.")] = Policy.ERROR,
    on_bad: Annotated[Policy, typer.Option(help="What to do about rows that can't be read.")] = Policy.ERROR,
    hub: Annotated[str, typer.Option(help="Where files such as hub:owner/name/file are: the hub, or a mirror.")] = HUB,
) -> None:
    """Turn published rows into a file of tasks, or of demonstrations; what is missing is counted and listed."""
    from saccade import plugins
    from saccade.config import parsed
    from saccade.data.gather import gather
    from saccade.media.files import digest

    # A file may have an equals sign in its name; what exists is a file.
    pairs = [word.partition("=") for word in words if "=" in word and not Path(word).exists()]
    named = [word for word in words if "=" not in word or Path(word).exists()]
    if not named:
        raise ConfigError("there is nothing to import; name at least one file of rows")
    settings = {key: parsed(value, f"the setting {key}") for key, _, value in pairs}
    make = plugins.bind("data.sources", source, settings)
    there = Hub(endpoint=hub)
    paths = [there.file(word) if word.startswith(MARK) else Path(word) for word in named]
    with writing(target), progress(f"import {source}") as advance:
        reports = gather(
            make,
            paths,
            target,
            root=root,
            on_missing=on_missing.value,
            on_bad=on_bad.value,
            identity=[source, settings, digest(source) if source.endswith(".py") else version_of("saccade")],
            told=lambda rows: advance(rows, "") if rows % 256 == 0 else None,
        )
    for one in reports:
        say(out, f"{one.file}: {', '.join(_counts(one))}")
        for problem in one.bad:
            say(out, problem, style="dim")
    out.print(f"wrote {escape(str(target))}: {sum(one.written for one in reports)} rows", soft_wrap=True)


@data.command("unpack")
def _unpack(
    files: Annotated[list[Path], typer.Argument(help="Archives, such as a.zip, b.tar.gz, or all parts of one.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
) -> None:
    """Unpack archives, whole or cut into parts; a stopped call goes on, and files that are there stay."""
    from saccade.data.archives import archives, by_hand, unpack

    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise DataError(f"there is no file {missing}")
    if told := by_hand(map(str, files)):
        raise DataError(told)
    found = archives(map(str, files))
    other = {*map(str, files)}.difference(part for one in found for part in one.parts)
    if other:
        raise DataError(f"{min(other)} is no archive that can be unpacked; give .zip, .tar, .tar.gz, or parts of such")
    with progress("unpack") as advance:
        counts = [unpack(Path(), one, folder, told=advance) for one in found]
    done = sum(counts)
    out.print(f"wrote {escape(str(folder))}: {done} file{'s' if done != 1 else ''} written", soft_wrap=True)


@data.command("materialize")
def _materialize(
    files: Files,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    root: Annotated[Path, typer.Option(help="Where the archives were unpacked.")],
    sentinel: Annotated[
        list[str] | None, typer.Option(help="How published paths begin, such as selfqa/; ParaVT's by default.")
    ] = None,
    back: Annotated[bool, typer.Option("--back", help="Take the root away again.")] = False,
    digest_media: Annotated[bool, typer.Option("--digest-media", help="List media with content digests.")] = False,
) -> None:
    """Point published paths of media to a local folder; a stopped call goes on, a finished one looks again."""
    from saccade.data.materialize import SENTINELS, materialize

    marks = tuple(sentinel or SENTINELS)
    with writing(folder), progress("materialize") as advance:
        reports = materialize(
            files,
            folder,
            root,
            sentinels=marks,
            back=back,
            digest_media=digest_media,
            told=lambda name, rows: advance(rows, name),
        )
    for one in reports:
        lacking = one.lacking()
        say(out, f"{one.file}: {one.rows} rows, {sum(one.paths.values())} paths, {len(one.missing)} files missing")
        for bucket in sorted({*one.paths, *lacking}):
            gone = lacking.get(bucket, 0)
            say(out, f"  {bucket}: {one.paths.get(bucket, 0)} paths, {gone} files missing")
        if one.missing:
            say(out, f"  the first is {one.missing[0]}; {folder / one.file}.missing.txt lists them", style="dim")
    out.print(f"wrote {escape(str(folder))}", soft_wrap=True)


@data.command("check")
def _check(
    files: Annotated[list[Path], typer.Argument(help="Files of tasks or demonstrations, each a split.")],
    look: Annotated[
        bool, typer.Option("--open/--no-open", help="Open every file of media, and know it by content.")
    ] = True,
) -> None:
    """See whether data sets are sound: rows, files, times, answers, repetitions, and what splits share."""
    from saccade.data.check import FINDINGS, NOTES, check

    with progress("check") as advance:
        splits = check(files, look=look, told=lambda name, rows: advance(rows, name) if rows % 64 == 0 else None)
    for split in splits:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(split.kinds.items())) or "no task"
        say(out, f"{split.file}: {kinds}; {split.media} files of media, {split.seconds / 3600:.2f} h of video")
        for what, count in sorted(split.findings.items()):
            say(out, f"  {'note' if what in NOTES else 'problem'}: {count} {FINDINGS[what]}")
            for example in split.examples[what]:
                say(out, f"    {example}", style="dim")
    problems = sum(split.problems for split in splits)
    if problems:
        raise DataError(f"{problems} problems were found in {len(splits)} files")
    out.print("no problem was found")


@data.command("show")
def _show(
    file: Annotated[Path, typer.Argument(help="A file of tasks or demonstrations.")],
    row: Annotated[int, typer.Option(min=1, help="Which row, from 1.")] = 1,
    id: Annotated[str | None, typer.Option(help="Or the row with this id.")] = None,
    page: Annotated[Path | None, typer.Option(help="An HTML page to write.")] = None,
) -> None:
    """Show a row as text, and as a page with its pictures."""
    from saccade.data import native
    from saccade.data.rows import located
    from saccade.view.rows import page_of, text_of

    item = located(native.find(file, row, id), file)
    out.print(escape(text_of(item)), soft_wrap=True)
    if page is not None:
        with writing(page):
            page.write_text(page_of(item, file), encoding="utf-8")
        out.print(f"wrote {escape(str(page))}", soft_wrap=True)


def _counts(one: "Found") -> Iterator[str]:
    yield f"{one.rows} rows, {one.written} written"
    if one.bad_rows:
        yield f"{one.bad_rows} rows can't be read"
    if one.missing_rows:
        folders = ", ".join(f"{count} in {folder}" for folder, count in sorted(one.missing_files.items()))
        more = ", ..." if one.missing_rows > len(one.missing_ids) else ""
        yield f"{one.missing_rows} rows lack files ({folders}): {', '.join(one.missing_ids)}{more}"
