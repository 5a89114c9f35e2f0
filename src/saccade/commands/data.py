"""`saccade data`: published files into tasks, their paths to local ones, checks, a row to look at."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from saccade.commands._terminal import out, progress
from saccade.errors import ConfigError
from saccade.runlog import writing
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
    files: Annotated[
        list[Path], typer.Argument(help="Files of rows, and settings of the source, such as media=video.")
    ],
    target: Annotated[Path, typer.Option("--out", help="The file of tasks to write: .jsonl or .parquet.")],
    root: Annotated[Path | None, typer.Option(help="Where relative paths of media start; else at their file.")] = None,
    on_missing: Annotated[Policy, typer.Option(help="What to do about rows whose files are missing.")] = Policy.ERROR,
    on_bad: Annotated[Policy, typer.Option(help="What to do about rows that can't be read.")] = Policy.ERROR,
) -> None:
    """Turn published rows into a file of tasks, or of demonstrations; what is missing is counted and listed."""
    from saccade import plugins
    from saccade.config import parsed
    from saccade.data.gather import gather

    words = [str(word) for word in files]
    pairs = [word.partition("=") for word in words if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in words if "=" not in word or Path(word).exists()]
    if not paths:
        raise ConfigError("there is nothing to import; name at least one file of rows")
    settings = {key: parsed(value, f"the setting {key}") for key, _, value in pairs}
    make = plugins.bind("data.sources", source, settings)
    with writing(target), progress(f"import {source}") as advance:
        reports = gather(
            make,
            paths,
            target,
            root=root,
            on_missing=on_missing.value,
            on_bad=on_bad.value,
            told=lambda rows: advance(rows, "") if rows % 256 == 0 else None,
        )
    for one in reports:
        say(out, f"{one.file}: {', '.join(_counts(one))}")
        for problem in one.bad:
            say(out, problem, style="dim")
    out.print(f"wrote {escape(str(target))}: {sum(one.written for one in reports)}", soft_wrap=True)


@data.command("materialize")
def _materialize(
    files: Files,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    root: Annotated[Path, typer.Option(help="Where the archives were unpacked.")],
    sentinel: Annotated[
        list[str] | None, typer.Option(help="How published paths begin, such as selfqa/; ParaVT's by default.")
    ] = None,
    back: Annotated[bool, typer.Option("--back", help="Take the root away again.")] = False,
) -> None:
    """Point published paths of media to a local folder; a stopped call goes on, a finished one looks again."""
    from saccade.data.materialize import SENTINELS, materialize

    marks = tuple(sentinel or SENTINELS)
    with writing(folder), progress("materialize") as advance:
        reports = materialize(
            files, folder, root, sentinels=marks, back=back, told=lambda name, rows: advance(rows, name)
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


def _counts(one: "Found") -> Iterator[str]:
    yield f"{one.rows} rows, {one.written} written"
    if one.bad_rows:
        yield f"{one.bad_rows} rows can't be read"
    if one.missing_rows:
        folders = ", ".join(f"{count} in {folder}" for folder, count in sorted(one.missing_files.items()))
        more = ", ..." if one.missing_rows > len(one.missing_ids) else ""
        yield f"{one.missing_rows} rows lack files ({folders}): {', '.join(one.missing_ids)}{more}"
