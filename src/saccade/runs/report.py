"""Write the page of any run: of SFT, RL or evaluations, finished or not."""

import contextlib
from pathlib import Path

from saccade.chat.renderer import load_renderer
from saccade.config.load import resolve_model_path
from saccade.errors import DataError, ModelError, RunError
from saccade.evaluation.compare import Evaluation, read_evaluations
from saccade.media.cache import CachingMediaLoader
from saccade.reporting.episode_view import DecodeFn
from saccade.reporting.run_report import render_episode_page, write_report
from saccade.runs.pipeline import find_newest_weights, is_address, resolve_checkpoint
from saccade.runs.run_folder import Run
from saccade.runs.run_lock import REPORT, RunLock
from saccade.types import Episode
from saccade.utils.files import write_text


def report_run(folder: Path, page: Path | None = None) -> Path:
    """Write the report of the run in `folder`, or only its page to `page`; return the page's path.

    Without the run's tokenizer, as with a model that was moved, replies are shown as text instead of tokens. Raises
    RunError if there is no run or a file can't be written, DataError for a damaged file of the run.
    """
    run = Run.open(folder)
    with RunLock(folder, REPORT) if page is None else contextlib.nullcontext():
        return write_report(
            folder,
            evaluations=read_any_evaluations(folder),
            decode=load_run_decoder(run),
            load_pixels=CachingMediaLoader().load_pixels,
            page_path=page,
        )


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
