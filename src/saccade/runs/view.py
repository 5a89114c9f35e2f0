"""Serve the viewer of runs, or write it as one page: `saccade view`."""

import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from saccade.data.hub import is_model_name
from saccade.errors import RunError, SaccadeError
from saccade.media.cache import CachingMediaLoader
from saccade.reporting.episode_view import DecodeFn
from saccade.reporting.viewer.asking import OnEvent, Questions
from saccade.runs.pipeline import find_default_recipe, is_address
from saccade.runs.run_lock import TRAINING, is_locked
from saccade.types import Episode
from saccade.utils.files import require_writable, write_text


def view_runs(
    paths: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = False,
    ask_model: str = "",
    ask_recipe: str = "",
    ask_settings: Sequence[str] = (),
    on_ready: Callable[[str], None],
) -> None:
    """Serve the runs at and below `paths` until Ctrl-C; `on_ready` receives the address, which holds the token.

    With `ask_model`, a checkpoint, a run or a server's address, a page asks that model; see `api.ask` for recipe and
    settings.

    Raises RunError if the address can't be bound, or without the packages of the extra `view`, and ModelError for a
    folder that is no model.
    """
    from saccade.reporting.viewer.library import Library
    from saccade.reporting.viewer.results import ResultsWorker

    try:
        from saccade.reporting.viewer.server import ViewerServer
    except ImportError as error:
        message = f"the viewer needs {error.name}; install it with: pip install 'saccade[view]'"
        raise RunError(message, key="view") from error
    worker = ResultsWorker()
    library = Library(paths, load_decoder=load_decoder, is_running=is_running, compute=worker.run)
    questions = build_questions(ask_model, recipe=ask_recipe, settings=ask_settings) if ask_model else None
    server = ViewerServer(library, host=host, port=port, questions=questions, on_stop=worker.close)
    on_ready(server.address)
    if open_browser:
        webbrowser.open(server.address)
    server.run()


def build_questions(model: str, *, recipe: str = "", settings: Sequence[str] = ()) -> Questions:
    """Return what the page needs to ask a model. Raises ModelError for a folder that is no model."""
    from saccade.runs.api import ask

    if not recipe and not is_address(model) and (Path(model).exists() or not is_model_name(model)):
        find_default_recipe(model)

    def ask_model(question: str, videos: Sequence[Path], images: Sequence[Path], on_event: OnEvent) -> Episode:
        return ask(
            question,
            model=model,
            videos=videos,
            images=images,
            recipe=recipe,
            settings=settings,
            on_event=on_event,
        )

    return Questions(model, ask_model)


def export_page(paths: Sequence[Path], page: Path) -> str:
    """Write one self-contained page of a run; return a sentence about what it holds.

    Raises RunError unless there is exactly one run at or below `paths`, and if the page can't be written.
    """
    require_writable(page)
    from saccade.reporting.viewer.export import export_run
    from saccade.reporting.viewer.library import Library

    library = Library(paths, is_running=is_running)
    names = [run.name for run in library.scan()]
    if len(names) != 1:
        message = f"--export needs exactly one run; there are {len(names)}: {', '.join(names[:8]) or 'none'}"
        raise RunError(message, key="export", value=len(names))
    library.refresh()
    exported = export_run(library, names[0], CachingMediaLoader().load_pixels)
    write_text(page, exported.text)
    return exported.note


def is_running(folder: Path) -> bool:
    """Return whether a process of this machine trains the run."""
    return is_locked(folder, TRAINING)


def load_decoder(folder: Path) -> DecodeFn | None:
    """Return the decoder of a run's tokens; None if its model is gone."""
    from saccade.runs.report import load_run_decoder
    from saccade.runs.run_folder import Run

    try:
        return load_run_decoder(Run.open(folder))
    except SaccadeError:
        return None
