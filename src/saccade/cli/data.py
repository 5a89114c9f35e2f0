"""`saccade data`: import datasets, build one from videos, unpack archives, rewrite media paths, validate, show rows."""

import os
import sys
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from saccade.cli.terminal import complete_name, err, file_option, out, print_tables, show_progress
from saccade.data.hub import DEFAULT_ENDPOINT, HUB_PREFIX, HubClient
from saccade.errors import ConfigError, DataError
from saccade.plugins import list_plugins
from saccade.reporting.console import print_text, show_progress_lines
from saccade.utils.files import convert_file_errors, write_text
from saccade.utils.text import pluralize
from saccade.utils.versions import find_package_version

if TYPE_CHECKING:
    from saccade.config.schema import DataBuildRecipe
    from saccade.runs.data_build.journal import StageUsage

MAX_LISTED = 20  # refused videos
data_app = typer.Typer(no_args_is_help=True, help="Generate, import, validate and show data.")


class RowErrorAction(StrEnum):
    """What to do with an unusable row."""

    ERROR = "error"
    SKIP = "skip"


Files = Annotated[list[Path], typer.Argument(help="Files of rows.")]
AnswerTypes = Annotated[
    list[str] | None, typer.Option("--answer-type", help="File of an answer type of your own, such as ./color.py.")
]
Root = Annotated[Path | None, typer.Option(help="Folder of relative media paths; the file's own by default.")]


def _complete_importer(incomplete: str) -> list[str]:
    return complete_name(list_plugins("data.importers"), incomplete)


def _split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return files and settings; an argument with an equals sign is a file if it exists."""
    settings = [word for word in arguments if "=" in word and not os.path.exists(word)]
    return [word for word in arguments if word not in settings], settings


@data_app.command("import")
def _import(
    source: Annotated[
        str,
        typer.Argument(
            help="The format: an importer such as plain or llava, or a path ./mine.py.",
            autocompletion=_complete_importer,
        ),
    ],
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE... [SETTING=VALUE]...", help="Files of rows; settings of the importer."),
    ],
    output_path: Annotated[Path, typer.Option("--out", help="The file of tasks to write: .jsonl or .parquet.")],
    root: Root = None,
    answer_types: AnswerTypes = None,
    on_missing: Annotated[
        RowErrorAction, typer.Option(help="What to do with rows whose media files are missing.")
    ] = RowErrorAction.ERROR,
    on_bad: Annotated[
        RowErrorAction, typer.Option(help="What to do with rows that can't be read.")
    ] = RowErrorAction.ERROR,
    hub: Annotated[
        str, typer.Option(help="The hub, or a mirror, of files such as hub:owner/name/file.")
    ] = DEFAULT_ENDPOINT,
) -> None:
    """Convert published rows to a file of tasks or demonstrations; missing files are counted and listed."""
    from saccade import plugins
    from saccade.config.load import parse_yaml
    from saccade.data.importer import import_dataset
    from saccade.media.hashing import compute_file_digest

    _register(answer_types)
    files, overrides = _split_arguments(arguments)
    if not files:
        raise ConfigError("there is nothing to import; name at least one file of rows", key="FILE")
    pairs = (word.partition("=") for word in overrides)
    settings = {key: parse_yaml(value, f"the setting {key}") for key, _, value in pairs}
    importer = plugins.resolve("data.importers", source, settings)
    client = HubClient(endpoint=hub)
    paths = [client.download_file(file) if file.startswith(HUB_PREFIX) else Path(file) for file in files]
    plugin_files = filter(None, map(plugins.get_file, [source, *(answer_types or ())]))
    digests = [compute_file_digest(str(file)) for file in plugin_files]
    with convert_file_errors(output_path), show_progress(f"import {source}") as update_progress:
        reports = import_dataset(
            importer,
            paths,
            output_path,
            media_root=root,
            on_missing=on_missing.value,
            on_bad=on_bad.value,
            identity=[source, settings, find_package_version("saccade"), *digests],
            on_progress=lambda rows: update_progress(rows, "") if rows % 256 == 0 else None,
        )
    for report in reports:
        counts = [f"{report.rows} rows, {report.written} written"]
        if report.bad_rows:
            counts.append(f"{report.bad_rows} rows can't be read")
        if report.missing_rows:
            folders = ", ".join(f"{count} in {folder}" for folder, count in sorted(report.missing_files.items()))
            more = ", ..." if report.missing_rows > len(report.missing_ids) else ""
            counts.append(f"{report.missing_rows} rows lack files ({folders}): {', '.join(report.missing_ids)}{more}")
        print_text(out, f"{report.file}: {', '.join(counts)}")
        for problem in report.bad_row_errors:
            print_text(out, problem, style="dim")
    out.print(f"wrote {escape(str(output_path))}: {sum(report.written for report in reports)} rows", soft_wrap=True)


@data_app.command("build")
def _build(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="VIDEO... [SETTING=VALUE]...", help="Videos or folders; settings of the recipe."),
    ],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write; the same command continues a build.")],
    teacher: Annotated[
        str | None, typer.Option(help="The URL of the teacher, a chat completions server; or set engine.settings.")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="The recipe of the later SFT, or one that extends it with a section data_build.")
    ] = "paravt/sft",
    on_bad: Annotated[
        RowErrorAction, typer.Option(help="What to do with videos that can't be used.")
    ] = RowErrorAction.ERROR,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Find the scenes and show the cost; send no request.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start without asking about the cost.")] = False,
) -> None:
    """Make tasks and demonstrations from videos: scenes, captions, questions, filters and episodes of a teacher."""
    from saccade.config.load import load_data_build_recipe
    from saccade.runs.data_build import build as data_build
    from saccade.runs.pipeline import CHAT_ENGINE
    from saccade.runs.run_lock import DATA_BUILD, hold_lock

    videos, settings = _split_arguments(arguments)
    if not videos:
        raise ConfigError("there is no video to build from; name files or folders", key="VIDEO")
    server = [f"engine.name={CHAT_ENGINE}", f"engine.settings.url={teacher}"] if teacher else []
    loaded = load_data_build_recipe(recipe, [*server, *settings])
    if not dry_run:
        data_build.require_teacher(loaded)
    with hold_lock(folder, DATA_BUILD):
        with show_progress_lines(out) as add_task:
            build = data_build.prepare(
                [*map(Path, videos)], folder, loaded, skip_bad=on_bad is RowErrorAction.SKIP, start_stage=add_task
            )
        for rejection in build.rejections[:MAX_LISTED]:
            print_text(out, f"left out {rejection.item}: {rejection.reason} ({rejection.detail})", style="dim")
        _print_usage(data_build.estimate(build), loaded, title="At most, without replies recorded earlier")
        if dry_run:
            return
        if not yes and not (sys.stdin.isatty() and typer.confirm("Start?")):
            raise ConfigError("the cost was not confirmed; give --yes to start", key="--yes", value=False)
        with show_progress_lines(out) as add_task:
            report = data_build.run_build(build, start_stage=add_task)
    for name, count in report.counts.items():
        reasons = ", ".join(f"{number} {reason}" for reason, number in report.rejected.get(name, {}).items())
        print_text(out, f"{name}: {count}" + (f"; dropped: {reasons}" if reasons else ""))
    _print_usage(report.usage, loaded, title="Used, replies recorded earlier included")
    out.print(f"wrote {escape(str(folder))}", soft_wrap=True)
    if report.num_failed:
        print_text(err, f"{report.num_failed} items lack a reply; the same command requests them again", style="red")


def _format_path_counts(num_paths: int, num_missing: int) -> str:
    return f"{pluralize(num_paths, 'path')}, {pluralize(num_missing, 'file')} missing"


def _print_usage(usage: "Mapping[str, StageUsage]", recipe: "DataBuildRecipe", *, title: str) -> None:
    """Print requests, tokens and, with known prices, the cost of each stage and of all."""
    from saccade.metrics.tables import Table
    from saccade.runs.data_build.estimate import compute_cost
    from saccade.runs.data_build.journal import StageUsage

    price = recipe.data_build.price
    rows = {**usage, "all": sum(usage.values(), StageUsage())}
    cells = [
        (
            stage,
            *(f"{count:,}" for count in (item.requests, item.prompt_tokens, item.completion_tokens)),
            *([] if (cost := compute_cost(item, price)) is None else [f"{cost:,.2f}"]),
        )
        for stage, item in rows.items()
    ]
    header = ("stage", "requests", "prompt tokens", "completion tokens", "cost")[: len(cells[0])]
    print_tables([Table(title=title, header=header, rows=tuple(cells))])


@data_app.command("unpack")
def _unpack(
    files: Annotated[list[Path], typer.Argument(help="Archives, such as a.zip, b.tar.gz, or all parts of one.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
) -> None:
    """Unpack archives, whole or split into parts; an interrupted call resumes, and existing files are kept."""
    from saccade.data.archives import explain_manual_unpacking, find_archives, unpack

    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise DataError(f"there is no file {missing}", key=str(missing))
    if explanation := explain_manual_unpacking(map(str, files)):
        raise DataError(explanation, key=str(files[0]))
    archives = find_archives(map(str, files))
    other = {*map(str, files)}.difference(part for archive in archives for part in archive.parts)
    if other:
        raise DataError(
            f"{min(other)} is not an archive that can be unpacked; give .zip, .tar, .tar.gz, or their parts",
            key=min(other),
        )
    with show_progress("unpack") as update_progress:
        count = sum(unpack(Path(), archive, folder, on_progress=update_progress) for archive in archives)
    out.print(f"wrote {escape(str(folder))}: {pluralize(count, 'file')} written", soft_wrap=True)


@data_app.command("rewrite-paths")
def _rewrite_paths(
    files: Files,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    root: Annotated[Path, typer.Option(help="The folder of the unpacked archives.")],
    prefix: Annotated[
        list[str] | None, typer.Option(help="A prefix of published paths, such as selfqa/; ParaVT's by default.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Remove the root again.")] = False,
) -> None:
    """Rewrite published media paths to local ones, for other programs; `--root` of `import` needs none."""
    from saccade.data.importer import get_archive_folder
    from saccade.data.rewrite_paths import MEDIA_PREFIXES, rewrite_paths

    with convert_file_errors(folder), show_progress("rewrite-paths") as update_progress:
        reports = rewrite_paths(
            files,
            folder,
            root,
            prefixes=tuple(prefix or MEDIA_PREFIXES),
            reverse=reverse,
            on_progress=lambda name, rows: update_progress(rows, name),
        )
    for report in reports:
        missing = Counter(map(get_archive_folder, report.missing_files))
        counts = _format_path_counts(sum(report.path_counts.values()), len(report.missing_files))
        print_text(out, f"{report.file}: {pluralize(report.rows, 'row')}, {counts}")
        for bucket in sorted({*report.path_counts, *missing}):
            counts = _format_path_counts(report.path_counts.get(bucket, 0), missing[bucket])
            print_text(out, f"  {bucket}: {counts}")
        if report.missing_files:
            listing = f"{folder / report.file}.missing.txt"
            print_text(out, f"  the first is {report.missing_files[0]}; {listing} lists them", style="dim")
    out.print(f"wrote {escape(str(folder))}", soft_wrap=True)


@data_app.command("check")
def _check(
    files: Annotated[list[Path], typer.Argument(help="Files of tasks or demonstrations, each a split.")],
    root: Root = None,
    answer_types: AnswerTypes = None,
    open_media: Annotated[
        bool, typer.Option("--open/--no-open", help="Open every media file, and compare files by content.")
    ] = True,
    recipe: Annotated[
        str | None,
        typer.Option(help="The recipe whose environment replays demonstrations; by default a published one."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The checkpoint whose tokens count for limits of length.")] = None,
) -> None:
    """Validate datasets: rows, files, times, answers, duplicates, and overlap between splits.

    Demonstrations are replayed: the recipe's environment runs their calls and code, and reports those that can't be
    replayed completely.
    """
    from saccade.data.validate import FINDING_DESCRIPTIONS, NOTE_FINDINGS, validate_dataset
    from saccade.runs.demonstration_check import check_demonstration_file

    _register(answer_types)
    with show_progress("check") as update_progress:
        splits = validate_dataset(
            files,
            media_root=root,
            open_media=open_media,
            on_progress=lambda name, rows: update_progress(rows, name) if rows % 64 == 0 else None,
        )
    problems = 0
    for split in splits:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(split.answer_types.items())) or "no task"
        print_text(
            out,
            f"{split.file}: {kinds}; {pluralize(split.num_media, 'file')} of media, "
            f"{split.video_seconds / 3600:.2f} h of video",
        )
        for finding, count in sorted(split.findings.items()):
            level = "note" if finding in NOTE_FINDINGS else "problem"
            problems += count if level == "problem" else 0
            print_text(out, f"  {level}: {count} {FINDING_DESCRIPTIONS[finding]}")
            for example in split.examples[finding]:
                print_text(out, f"    {example}", style="dim")
    for file in files if open_media else ():
        with show_progress("check") as update_progress:
            report = check_demonstration_file(
                file, recipe=recipe, model=model, media_root=root, on_progress=lambda done: update_progress(done, "")
            )
        if report is not None:
            problems += len(report.reasons_by_row)
            print_text(out, f"{file}: {report.summary}")
    if problems:
        message = f"{pluralize(problems, 'problem')} found in {pluralize(len(splits), 'file')}"
        raise DataError(message, key=str(files[0]), value=problems)
    out.print("no problem was found")


@data_app.command("show")
def _show(
    file: Annotated[Path, typer.Argument(help="A file of tasks or demonstrations.")],
    row: Annotated[int, typer.Option(min=1, help="Which row, from 1.")] = 1,
    id: Annotated[str | None, typer.Option(help="The id of the row, instead of --row.")] = None,
    root: Root = None,
    answer_types: AnswerTypes = None,
    page: Annotated[Path | None, file_option(suffix=".html", help_text="An HTML page to write.")] = None,
) -> None:
    """Show a row as text, and as a page with its images."""
    from saccade.data.dataset import find_item, resolve_media_paths
    from saccade.reporting.task_view import format_item, render_item_page

    _register(answer_types)
    item = resolve_media_paths(find_item(file, row, id), root or file.parent)
    out.print(escape(format_item(item)), soft_wrap=True)
    if page is not None:
        write_text(page, render_item_page(item, file))
        out.print(f"wrote {escape(str(page))}", soft_wrap=True)


def _register(answer_types: list[str] | None) -> None:
    from saccade.rewards.answer_types.base import register_file

    for path in answer_types or ():
        register_file(path)
