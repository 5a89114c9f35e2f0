"""Write the report of any run, or of several: of SFT, RL or evaluations, finished or not."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from saccade.chat.renderer import load_renderer
from saccade.config.load import resolve_model_path
from saccade.errors import DataError, ModelError, RunError
from saccade.evaluation.compare import Evaluation, read_evaluations
from saccade.media.cache import CachingMediaLoader
from saccade.reporting.comparison_report import build_comparison, build_last_sections
from saccade.reporting.episode_view import DecodeFn
from saccade.reporting.run_report import (
    read_examples,
    render_episode_page,
    render_run_page,
    write_report,
    write_report_file,
)
from saccade.runs.pipeline import find_newest_weights, is_address, resolve_checkpoint
from saccade.runs.run_folder import Run
from saccade.runs.run_lock import REPORT, RunLock
from saccade.types import Episode
from saccade.utils.files import write_text


def report_run(folder: Path, page: Path | None = None) -> Path:
    """Write the report of the run in `folder`, or only one file of it to `page`, by its ending; return the file's path.

    Without the run's tokenizer, as with a model that was moved, replies are shown as text instead of tokens. Raises
    RunError if there is no run or a file can't be written, DataError for a damaged file of the run.
    """
    if page is not None:
        require_report_suffix(page)
    run, evaluations = Run.open(folder), read_any_evaluations(folder)
    more = build_last_sections(folder)
    is_html = page is None or page.suffix == ".html"
    with RunLock(folder, REPORT) if page is None else contextlib.nullcontext():
        return write_report(
            folder,
            evaluations=evaluations,
            decode=load_run_decoder(run) if is_html else None,
            load_pixels=CachingMediaLoader().load_pixels,
            page_path=page,
            more_sections=more,
        )


def report_runs(folders: Sequence[Path], page: Path) -> Path:
    """Write a report that compares runs; return its path. Raises what `report_run` raises."""
    require_report_suffix(page)
    runs: dict[str, Path] = {}
    decoders: dict[str, DecodeFn | None] = {}
    for folder in folders:
        run, name = Run.open(folder), folder.resolve().name
        name = name if name not in runs else str(folder)
        runs[name], decoders[name] = folder, load_run_decoder(run) if page.suffix == ".html" else None
    evaluations = {name: read_any_evaluations(folder) for name, folder in runs.items()}
    examples, load_pixels = read_examples(runs, evaluations), CachingMediaLoader().load_pixels
    report = build_comparison(runs, evaluations, examples, load_pixels)
    if page.suffix != ".html":
        return write_report_file(report, page)
    return write_text(page, render_run_page(report, examples, decoders=decoders, load_pixels=load_pixels))


def require_report_suffix(page: Path) -> None:
    """Raise RunError unless a report can be written as a file of this ending."""
    if page.suffix not in (".html", ".md", ".pdf"):
        raise RunError(f"{page} must end in .html, .md or .pdf", key="--out", value=str(page))


def write_episode_page(episode: Episode, model: str, page: Path) -> Path:
    """Write the page of one episode that nothing graded; `model` is what `saccade ask` was given. Return the page."""
    decode = None
    if not is_address(model):
        with contextlib.suppress(ModelError, RunError):
            decode = load_renderer(str(resolve_checkpoint(Path(model)))).decode
    text = render_episode_page(episode, decode=decode, load_pixels=CachingMediaLoader().load_pixels)
    return write_text(page, text)


def read_any_evaluations(folder: Path) -> dict[str, Evaluation]:
    """Return the evaluations of a run by name, as `read_evaluations` does; {} without any."""
    try:
        return read_evaluations(folder)
    except DataError as error:
        if error.key == str(folder):  # there is none
            return {}
        raise


def load_run_decoder(run: Run) -> DecodeFn | None:
    """Return the decoder of a run's tokens; None if its model is gone."""
    with contextlib.suppress(ModelError, RunError):
        return load_renderer(str(find_newest_weights(run.path) or resolve_model_path(run.path, run.recipe))).decode
    return None
