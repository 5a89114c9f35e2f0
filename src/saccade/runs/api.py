"""The stages of a run as functions: what `saccade data synth`, `sft`, `rl`, `train`, `eval` and `ask` do, from Python.

    recipe = saccade.load_recipe("tiny/para_grpo", ["rl.steps=20"])
    saccade.generate_data(recipe, "data/a")
    saccade.make_tiny_model(recipe, "models/a", data="data/a")
    saccade.sft(recipe, out="runs/a", model="models/a", data="data/a")
    saccade.rl(recipe, out="runs/a", resume=True)
    episodes = saccade.evaluate("runs/a")

`saccade.train` runs `sft`, `rl` and `evaluate` in one call.

`recipe` is a `Recipe`, a packaged recipe's name or a YAML file's path. Every function raises a SaccadeError with one
sentence for every error that the caller can fix.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from saccade.config.load import load_recipe
from saccade.config.schema import Recipe
from saccade.errors import ConfigError, DataError, MediaError, RunError
from saccade.evaluation.judge_results import apply_verdicts, read_verdicts
from saccade.evaluation.records import read_scored_episodes
from saccade.evaluation.runner import EvaluationProgress
from saccade.evaluation.shards import get_results_path
from saccade.protocols import OnStep
from saccade.rollouts.runner import run_episode
from saccade.runs import evaluation, pipeline, stages
from saccade.runs.run_folder import Run
from saccade.training.episode_log import RolloutRecord, read_rollouts
from saccade.types import AnswerType, Episode, Media, MediaKind, ScoredEpisode, Task

AnyPath = str | os.PathLike[str]  # a path; relative ones start at the working directory


def generate_data(
    recipe: Recipe | str, folder: AnyPath, *, on_progress: Callable[[int, str, int], None] = lambda *_: None
) -> Path:
    """Generate the recipe's data in `folder`, or finish it; `on_progress(done, text, total)` is called per file."""
    pipeline.generate_data(Path(folder), _load(recipe), on_progress=on_progress)
    return Path(folder)


def make_tiny_model(recipe: Recipe | str, folder: AnyPath, *, data: AnyPath) -> Path:
    """Make a checkpoint of random weights whose tokenizer has the words of the dataset in `data`; return its folder."""
    demonstrations = Path(data) / "train" / "demonstrations.jsonl"
    pipeline.create_tiny_model(Path(folder), _load(recipe), demonstrations=demonstrations)
    return Path(folder)


def sft(
    recipe: Recipe | str,
    *,
    out: AnyPath,
    model: AnyPath | None = None,
    data: AnyPath | None = None,
    resume: bool = False,
    accept_changed_data: bool = False,
    profile_step: int = 0,
    on_step: OnStep = lambda step, metrics: None,
    on_validation: OnStep = lambda step, metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> Path:
    """Fine-tune `model` on the demonstrations of `data` in the run folder `out`; return the last checkpoint.

    `model` and `data` default to what the recipe names, and with `resume` to what the run in `out` was started with.
    `on_step(step, metrics)` is called after every step and `on_validation` after every validation, `on_message` with
    the counts of demonstrations at the start; `profile_step` is a step to trace (0: none). With
    `accept_changed_data` a run is resumed although demonstrations, validation tasks or media files have changed.
    """
    filled = fill_paths(recipe, out, model, data, resume=resume)
    return pipeline.run_sft(
        Path(out),
        filled,
        resume=resume,
        accept_changed_data=accept_changed_data,
        on_step=on_step,
        on_validation=on_validation,
        on_message=on_message,
        profile_step=profile_step,
    )


def rl(
    recipe: Recipe | str,
    *,
    out: AnyPath,
    model: AnyPath | None = None,
    data: AnyPath | None = None,
    resume: bool = False,
    accept_changed_data: bool = False,
    profile_step: int = 0,
    on_step: OnStep = lambda step, metrics: None,
    on_validation: OnStep = lambda step, metrics: None,
) -> Path:
    """Train with RL on the tasks of `data` in the run folder `out`; return the last checkpoint.

    In the folder of a finished `sft` run, with `resume`, RL starts from that run's weights. The other arguments are as
    in `sft`. Raises AlarmError if an alarm of the recipe stops the training.
    """
    filled = fill_paths(recipe, out, model, data, resume=resume)
    return pipeline.run_rl(
        Path(out),
        filled,
        resume=resume,
        accept_changed_data=accept_changed_data,
        on_step=on_step,
        on_validation=on_validation,
        profile_step=profile_step,
    )


def train(
    recipe: Recipe | str,
    *,
    out: AnyPath,
    model: AnyPath | None = None,
    data: AnyPath | None = None,
    resume: bool = False,
    accept_changed_data: bool = False,
    on_step: Callable[[str, int, Mapping[str, float]], None] = lambda stage, step, metrics: None,
) -> list[ScoredEpisode]:
    """Run a whole recipe in the run folder `out`: SFT, RL and the evaluation; return the evaluation's episodes.

    A stage runs if the recipe has its section and names its data; without a test split the list is empty. With
    `resume`, an interrupted call continues; `accept_changed_data` is as in `sft`. `on_step(stage, step, metrics)` is
    called after every training step.
    """
    filled = fill_paths(recipe, out, model, data, resume=resume)
    names = stages.list_stages(filled)
    weights = stages.run_stages(
        Path(out),
        filled,
        names,
        resume=resume,
        accept_changed_data=accept_changed_data,
        start_stage=lambda stage, steps: (functools.partial(on_step, stage), lambda step, metrics: None),
    )
    return evaluate(out, name=stages.name_evaluation(weights)) if "eval" in names else []


def evaluate(
    run: AnyPath,
    *,
    recipe: Recipe | str | None = None,
    model: AnyPath | None = None,
    tasks: AnyPath | Sequence[Task] | None = None,
    name: str = "test",
    on_progress: Callable[[EvaluationProgress], None] = lambda progress: None,
) -> list[ScoredEpisode]:
    """Evaluate a run's newest checkpoint, or `model`, on `tasks` (default: the recipe's test split).

    `model` is a run, a checkpoint folder or a server's address; `recipe` defaults to the run's.
    The scored episodes are returned and written to `run/evaluations/<name>.jsonl`; an interrupted evaluation resumes.
    """
    loaded = Run.open(Path(run)).recipe if recipe is None else _load(recipe)
    given = Path(tasks) if isinstance(tasks, str | os.PathLike) else tasks
    loaded, path = pipeline.resolve_target(loaded, None if model is None else str(model))
    weights = None if path is None else pipeline.resolve_checkpoint(path)
    return evaluation.evaluate(Path(run), loaded, name=name, weights=weights, tasks=given, on_progress=on_progress)


def ask(
    question: str,
    *,
    model: AnyPath,
    videos: Sequence[AnyPath] = (),
    images: Sequence[AnyPath] = (),
    recipe: str = "",
    settings: Sequence[str] = (),
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> Episode:
    """Ask a model one question about videos or images; return the episode, whose `answer` is the answer.

    `model` is a run, a checkpoint folder or a server's address; `recipe` defaults to the run's, or to one that fits.
    `on_event(event, data)` receives what happens as it happens.
    """
    if not question.strip():
        raise DataError("the question is empty; give a question", key="question", value=question)
    files = [*((MediaKind.VIDEO, path) for path in videos), *((MediaKind.IMAGE, path) for path in images)]
    if not files:
        raise DataError("there is nothing to look at; give a video or an image", key="videos")
    media = [_open_media(str(path), kind) for kind, path in files]  # before a model is loaded
    components = pipeline.load_for_inference(str(model), recipe=recipe, settings=settings)
    task = Task(id="ask", question=question, media=tuple(media), answer_type=AnswerType.OPEN, ground_truth="")
    seed, temperature = components.recipe.seed, components.recipe.evaluation.temperature
    context = components.build_context(seed=seed, temperature=temperature, on_event=on_event)
    return pipeline.run_and_close(components, run_episode(task, components.environments(task), context))


def _open_media(path: str, kind: MediaKind) -> Media:
    """Return a file as media. Raises DataError or MediaError for one that can't be opened as its kind."""
    from saccade.checks.run_checks import open_media  # imports torch

    if not Path(path).exists():
        raise DataError(f"there is no file {path}; give the path of a file", key=path)
    media, (other,) = Media(path=path, kind=kind), set(MediaKind) - {kind}
    try:
        open_media(media)
    except MediaError:
        with contextlib.suppress(MediaError):
            open_media(Media(path=path, kind=other))
            message = f"{path} is a file of the other kind; give it as {other.value} (--{other.value})"
            raise DataError(message, key=path) from None
        raise
    return media


@overload
def read_episodes(path: AnyPath, *, name: str = "test") -> list[ScoredEpisode]: ...


@overload
def read_episodes(path: AnyPath, *, step: int, stage: str = "rl") -> list[RolloutRecord]: ...


def read_episodes(
    path: AnyPath, *, name: str = "test", step: int | None = None, stage: str = "rl"
) -> list[ScoredEpisode] | list[RolloutRecord]:
    """Read the scored episodes of an evaluation: of a results file, or of a run's evaluation `name`.

    With `step`, read instead what a run's training sampled for that step, dropped, failed and cancelled episodes
    included; `stage` may also be "sft_validation" or "rl_validation", whose `step` is the number of finished steps.
    Raises DataError for a step without episodes.
    """
    source = Path(path)
    if step is not None:
        return read_rollouts(source, stage, step)
    results = get_results_path(source, name, None) if source.is_dir() else source
    return apply_verdicts(read_scored_episodes(results), read_verdicts(results))


def _load(recipe: Recipe | str) -> Recipe:
    return load_recipe(recipe) if isinstance(recipe, str) else recipe


def fill_paths(
    recipe: Recipe | str, out: AnyPath, model: AnyPath | None, data: AnyPath | None, *, resume: bool
) -> Recipe:
    """Return the recipe with these paths, or with `resume` those of the run. Raises RunError without one."""
    if model is not None and pipeline.is_address(os.fspath(model)):
        message = f"{model} is a server's address, and training needs weights; give --model a checkpoint or a run"
        raise ConfigError(message, key="--model", value=str(model))
    filled = pipeline.with_paths(
        _load(recipe),
        folder=Path(out),
        model=None if model is None else Path(model),
        data=None if data is None else Path(data),
    )
    if not resume:
        return filled
    if not (Path(out) / "recipe.yaml").exists():
        hint = "repeat the command without --resume, which starts it"
        raise RunError(f"there is no run at {out} to resume: it has no recipe.yaml; {hint}", key=str(out))
    started = Run.open(Path(out)).recipe
    paths = {f"data.{name}": path for name, path in started.data if not getattr(filled.data, name)}
    return filled.with_values({**paths, "model.path": filled.model.path or started.model.path})
