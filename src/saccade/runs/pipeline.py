"""The stages of a run as functions, shared by the command line, the demo, the ablations and scripts.

generate_data(folder, recipe)   synthetic media, tasks and demonstrations, validated
run_sft(folder, recipe)         demonstrations -> checkpoints in folder/sft
run_rl(folder, recipe)          tasks          -> checkpoints in folder/rl

What needs torch is imported by the functions that use it: reading the results of a run takes none.
"""

import asyncio
import functools
import json
import logging
import signal
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

from saccade.config.load import load_recipe, resolve_model_path
from saccade.config.schema import PluginConfig, Recipe
from saccade.data.dataset import iterate_items, load_recipe_data
from saccade.data.digests import DataSource, record_data
from saccade.data.hub import find_model, is_model_name
from saccade.data.mixture import Mixture
from saccade.data.synthetic import build_tokenizer_pieces, generate_dataset, validate_dataset
from saccade.data.synthetic.contact_sheet import draw_contact_sheet
from saccade.data.synthetic.dataset import SPLITS, ValidationReport
from saccade.data.synthetic.generate import FRAME_BUDGETS
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import ConfigError, DataError, ModelError, RunError, convert_errors
from saccade.models.checkpoint_files import verify_model_files
from saccade.protocols import ChatEngine, OnStep
from saccade.reporting.loggers.dispatch import open_loggers
from saccade.rollouts.components import (
    RolloutComponents,
    TrainingComponents,
    apply_evaluation_settings,
    apply_validation_settings,
    remove_rewards,
    uses_chat_engine,
)
from saccade.rollouts.executors import connect_executor
from saccade.runs.run_folder import RESUMABLE_KEYS, Run
from saccade.runs.run_lock import TRAINING, RunLock
from saccade.runs.validation import (
    STAGE_SUFFIX,
    Validation,
    load_validation_file,
    load_validation_tasks,
    require_checkpoint_metric,
)
from saccade.training import checkpoint
from saccade.training.alarms import AlarmMonitor, prefix_validation
from saccade.training.background import STOPPED_BY_TORCHRUN
from saccade.training.demonstrations import DemonstrationReport
from saccade.training.distributed.active_controller import explain_sigterm, get_controller, handle_sigterm
from saccade.training.episode_log import EpisodeWriter
from saccade.training.validation import ValidationSchedule
from saccade.types import Demonstration, Task
from saccade.utils.async_utils import hide_interrupted_tasks, keep_collections_short
from saccade.utils.files import convert_file_errors, create_folder, read_text, resolve_path
from saccade.utils.jsonl import relativize_path

if TYPE_CHECKING:
    from saccade.checks.machine import CheckResult
    from saccade.training.step_trace import StepTrace

_logger = logging.getLogger("saccade")
T = TypeVar("T")
CHAT_ENGINE = "chat_completions"  # the engine used for a model that is given as a URL
EXPORTED_RECIPE = "saccade_recipe.yaml"  # of an exported checkpoint: a folder with recipe.yaml would be a run
IMAGES_FOLDER = "images"  # of a run: the images that its tools made
TRACES_FOLDER = "profile"  # of a run: the traces of single steps
TINY_TOKEN_PIXELS = 16  # pixels per side of a visual token of the tiny models; published models have larger ones


def with_paths(
    recipe: Recipe,
    *,
    folder: Path | None = None,
    model: Path | None = None,
    data: Path | None = None,
    downloads: bool = True,
) -> Recipe:
    """Return the recipe with the paths of a model and of a synthetic dataset, as the run in `folder` stores them.

    Paths inside the run's folder are relative to it, so that the folder can be moved; all others are absolute, so that
    the run can be resumed from any directory. A relative model path of the recipe is resolved against the run's folder
    if it exists there, else against the working directory. `downloads` is as in `resolve_checkpoint`. Raises RunError
    if `data` is a file.
    """
    if model is not None:
        model = resolve_checkpoint(model, downloads=downloads)
    elif recipe.model.path:
        inside = None if folder is None else folder / recipe.model.path
        model = inside if inside is not None and inside.exists() else Path(recipe.model.path)
    if model is not None:
        recipe = recipe.with_values({"model.path": _format_path(model, folder)})
    if data is not None:
        if data.is_file():
            message = (
                f"{data} is a file, not a folder of `saccade data synth`; set data.train={data.absolute()} instead"
            )
            raise RunError(message, key="data")
        paths = {split: _format_path(data / split / "tasks.jsonl", folder) for split in SPLITS}
        paths["demonstrations"] = _format_path(data / "train" / "demonstrations.jsonl", folder)
        if not isinstance(recipe.data.train, str):  # the recipe names a mixture for training
            del paths["train"]
        recipe = recipe.with_values({f"data.{name}": path for name, path in paths.items()})
    return recipe


def _format_path(path: Path, folder: Path | None) -> str:
    root = None if folder is None else resolve_path(folder)
    return relativize_path(root or Path(), str(resolve_path(path)), root)


def find_newest_weights(run_folder: Path, stage: str | None = None) -> Path | None:
    """Return the newest checkpoint of a stage (default: of "rl" if there is one, else of "sft"); None without any."""
    stages = ("rl", "sft") if stage is None else (stage,)
    newest = (checkpoint.find_newest_checkpoint(run_folder / name) for name in stages)
    return next((saved.folder for saved in newest if saved), None)


def resolve_checkpoint(path: Path, *, downloads: bool = True) -> Path:
    """Return a checkpoint's path, the newest checkpoint of a run, or the folder of a model of the hub (owner/name).

    Without `downloads` only a model that was downloaded before is found. Raises RunError for a run without a
    checkpoint, ModelError for a model that the hub doesn't have.
    """
    if "\0" in str(path):
        raise RunError(f"{str(path)!r} can't be a path: it contains a null character", key="--model", value=str(path))
    if not path.exists() and is_model_name(str(path)):
        return find_model(str(path), downloads=downloads)
    if not (path / "recipe.yaml").exists():
        return path
    weights = find_newest_weights(path)
    if weights is None:
        raise RunError(f"the run {path} has no checkpoint yet; train it first", key=str(path))
    return weights


def find_default_recipe(model: str | Path) -> tuple[str, tuple[str, ...]]:
    """Return the default recipe for a model and the overrides it needs on this machine.

    It is the recipe of the run that the checkpoint belongs to or was exported from, or else a packaged one that suits a
    server or the pixels of the checkpoint's visual tokens. Raises ModelError if the folder holds no config.json with a
    vision config.
    """
    if is_address(model):
        return "paravt/para_grpo", ()
    for folder in (Path(model), *resolve_path(model).parents[:2]):
        if (folder / "recipe.yaml").is_file():
            return str(folder / "recipe.yaml"), ()
    if (Path(model) / EXPORTED_RECIPE).is_file():
        return str(Path(model) / EXPORTED_RECIPE), ()
    if not Path(model).is_dir():
        message = f"there is no folder {model}; name a checkpoint, a run, a model of the hub, or a server"
        raise ModelError(message, key=str(model))
    message = f"{model} is not a vision-language model, whose config.json has a vision_config"
    with convert_errors(ModelError, message, key=str(model)):
        vision = json.loads(read_text(Path(model) / "config.json"))["vision_config"]
        side = int(vision["patch_size"]) * int(vision["spatial_merge_size"])
    if side <= TINY_TOKEN_PIXELS:
        return "tiny/para_grpo", ()
    import torch

    device = () if torch.cuda.is_available() else ("model.device=cpu", "model.dtype=float32")
    return "paravt/para_grpo", ("engine.name=local", *device)


def load_for_inference(model: str | Path, *, recipe: str = "", settings: Sequence[str] = ()) -> RolloutComponents:
    """Load what answers questions with a run's newest weights, a checkpoint's or a server's; nothing is graded.

    `recipe` defaults to `find_default_recipe(model)`; `settings` are dotted overrides. Raises SaccadeError for a model
    that can't be used. Replies by a default recipe begin with no text if the server can't continue one.
    """
    if not is_address(model):
        model = resolve_checkpoint(Path(model)) if is_model_name(str(model)) else model
    name, overrides = (recipe, ()) if recipe else find_default_recipe(model)
    loaded, weights = load_with_model(name, [*overrides, *settings], str(model))
    used = remove_rewards(apply_evaluation_settings(loaded))
    checkpoint = weights and resolve_checkpoint(weights)
    if checkpoint:
        verify_model_files(checkpoint)
    return load_components(connect_server(used, may_drop_prefill=not recipe), checkpoint)


def load_training_components(recipe: Recipe, weights: Path) -> TrainingComponents:
    """Load a recipe's components with these weights, which are sharded if several processes train."""
    from saccade.training.distributed.vlm import ShardedVisionLanguageModel

    controller = get_controller()
    load_vlm = functools.partial(ShardedVisionLanguageModel, controller) if controller else None
    return TrainingComponents.from_recipe(recipe.with_values({"model.path": str(weights)}), load_vlm)


def load_components(recipe: Recipe, weights: Path | None) -> RolloutComponents:
    """Load a recipe's components for rollouts: with these weights, or with the server of a chat API (None)."""
    return RolloutComponents.from_recipe(recipe.with_values({"model.path": str(weights)}) if weights else recipe)


def is_address(model: str | Path) -> bool:
    """Return whether a model is given as a server's URL."""
    return str(model).startswith(("http://", "https://"))


def load_with_model(name: str, settings: Sequence[str], model: str | None) -> tuple[Recipe, Path | None]:
    """Load a recipe by name or path with dotted overrides; return it and the weights as `resolve_target` does.

    For a URL, overrides of the engine's settings are those of the chat engine. Raises ConfigError if they name an
    engine that isn't one.
    """
    if model is None or not is_address(model):
        return resolve_target(load_recipe(name, settings), model)
    is_named = any(text.startswith(("engine.name=", "engine=")) for text in settings)
    recipe = load_recipe(name, settings if is_named else [f"engine.name={CHAT_ENGINE}", *settings])
    if not uses_chat_engine(recipe):
        raise ConfigError(
            f"--model {model} is the address of a chat completions server, which the engine {recipe.engine.name} can't "
            "use; leave out engine.name, or --model",
            key="engine.name",
            value=recipe.engine.name,
        )
    return resolve_target(recipe, model)


def resolve_target(recipe: Recipe, model: str | None) -> tuple[Recipe, Path | None]:
    """Return the recipe and the weights for a model: for a URL, a recipe whose engine is that server's chat API.

    Settings that the recipe already has for a chat engine are kept.
    """
    if model is None or not is_address(model):
        return recipe, Path(model) if model else None
    engine = recipe.engine if uses_chat_engine(recipe) else PluginConfig(name=CHAT_ENGINE)
    values: dict[str, object] = {"engine": engine.with_values({"settings": {**engine.settings, "url": model}})}
    if recipe.rollouts.executor == "processes":  # of a run that sampled here; a server needs none
        values["rollouts.executor"] = "local"
    return recipe.with_values(values), None


def connect_server(recipe: Recipe, *, may_drop_prefill: bool = False) -> Recipe:
    """Return the recipe with the name of the model that its chat API serves, if it has one. Raises SaccadeError.

    With `may_drop_prefill`, the environment doesn't prefill replies if the server can't continue them.
    """
    if not uses_chat_engine(recipe):
        return recipe
    components = RolloutComponents.from_recipe(recipe)
    engine = cast(ChatEngine, components.engine)
    served_model = run_and_close(components, engine.connect())
    values: dict[str, Any] = {"engine.settings": {**recipe.engine.settings, "model": served_model}}
    if may_drop_prefill and not engine.supports_prefill and recipe.environment.settings.get("force_think"):
        values["environment.settings"] = {**recipe.environment.settings, "force_think": False}
    return recipe.with_values(values)


def start_run(
    folder: Path,
    recipe: Recipe,
    stages: Sequence[str],
    *,
    resume: bool = False,
    resumable_keys: Collection[str] = RESUMABLE_KEYS,
    has_model: bool = True,
    lock: RunLock,
) -> Run:
    """Check what the stages need, start their sandboxes, acquire the lock, and create or resume the run.

    Without `has_model` the run makes a tiny model itself. Raises the error of the first check that fails, before the
    folder becomes a run, which with an unusable recipe could only be deleted.
    """
    from saccade.checks.run_checks import PlannedRun, require_checks, start_sandboxes
    from saccade.training.distributed.launch import count_processes

    Run(path=folder, recipe=recipe).check_plugin_files()
    checked = recipe if has_model else recipe.with_values({"model.path": "", "model.memory_plan_model": ""})
    num_processes, num_nodes = count_processes()
    planned_run = PlannedRun(
        recipe=checked,
        folder=folder,
        stages=stages,
        weights=find_newest_weights(folder),
        has_model=has_model,
        num_processes=num_processes,
        num_nodes=num_nodes,
    )
    require_checks(planned_run)
    used = [*([recipe] if "rl" in stages else []), *([apply_evaluation_settings(recipe)] if "eval" in stages else [])]
    metadata = start_sandboxes(*used)
    lock.acquire()  # before the folder is a run: a second process that starts one must not replace its recipe
    return Run.create(folder, recipe, resume=resume, resumable_keys=resumable_keys, metadata=metadata)


def check_run(
    folder: Path, recipe: Recipe, stages: Collection[str], *, uses_own_tasks: bool = True, num_processes: int = 1
) -> "Iterator[CheckResult]":
    """Report every check of a run of so many processes in `folder`, without loading weights or writing anything."""
    from saccade.checks.run_checks import Check, PlannedRun, report_checks, run_check

    def check_folder() -> str:
        if not (folder / "recipe.yaml").exists():
            return f"{folder} is a new run"
        run = Run(path=folder, recipe=recipe)
        run.diff_recipe()
        if "rl" in stages and "sft" not in stages:
            require_finished_sft(run)
        return f"{folder} is an existing run; resume it with --resume"

    planned_run = PlannedRun(
        recipe=recipe,
        folder=folder,
        stages=stages,
        weights=find_newest_weights(folder),
        has_model=not uses_chat_engine(recipe),
        uses_own_tasks=uses_own_tasks,
        num_processes=num_processes,
    )
    yield from report_checks(planned_run)
    yield from run_check(Check("run folder", check_folder))


def run_and_close(components: RolloutComponents, coroutine: Coroutine[None, None, T]) -> T:
    """Run a coroutine to its end in a new event loop, and close the engine even if it fails.

    SIGTERM, which schedulers send before they kill a job, stops it like Ctrl-C: it is cancelled; when it has ended,
    KeyboardInterrupt is raised, or RunError on rank 0 of several processes.
    """
    has_received_sigterm = False
    previous = signal.getsignal(signal.SIGTERM)
    is_handled = current_thread() is main_thread() and previous in (signal.SIG_DFL, handle_sigterm)

    async def run() -> T:
        task = cast(asyncio.Task[T], asyncio.current_task())

        def stop() -> None:
            nonlocal has_received_sigterm
            # A second one changes nothing: torchrun repeats that of the scheduler, and a second cancellation would drop
            # the checkpoint that is being written. Nor does that which torchrun sends because a rank is lost, once the
            # run ends with the reason.
            controller = get_controller()
            if not has_received_sigterm and not (controller and controller.has_lost_rank):
                has_received_sigterm = True
                task.cancel(STOPPED_BY_TORCHRUN if previous is handle_sigterm else None)

        hide_interrupted_tasks()
        if is_handled:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        try:
            return await coroutine
        finally:
            await components.engine.close()

    try:
        with keep_collections_short():
            return asyncio.run(run())
    except asyncio.CancelledError:
        if not has_received_sigterm:
            raise
        if previous is handle_sigterm:
            raise explain_sigterm() from None
        raise KeyboardInterrupt from None
    finally:
        if is_handled:
            signal.signal(signal.SIGTERM, previous)


def generate_data(folder: Path, recipe: Recipe, *, on_progress: Callable[[int, str, int], None]) -> ValidationReport:
    """Generate a synthetic dataset, validate it (labels, leakage between splits), and draw contact_sheet.png.

    Video demonstrations use the recipe's frame budgets if it has any. `on_progress(done, remark, total)` counts the
    videos or images of all splits. Raises DataError for a dataset that fails validation.
    """
    num_done = dict.fromkeys(SPLITS, 0)
    total = recipe.synthetic.num_files

    def count_files(split: str, done: int, _: int) -> None:
        num_done[split] = done
        on_progress(sum(num_done.values()), split, total)

    with convert_file_errors(folder):
        budgets = recipe.frame_budgets or FRAME_BUDGETS
        generate_dataset(folder, recipe.synthetic, seed=recipe.seed, frame_budgets=budgets, progress=count_files)
        on_progress(total, "validating", total)
        report = validate_dataset(folder)
        if report.problems:
            raise DataError(
                f"the synthetic data in {folder} is invalid: {report.problems[0]}; delete the folder and start again",
                key=str(folder),
            )
        draw_contact_sheet(folder, folder / "contact_sheet.png")
    return report


def create_tiny_model(folder: Path, recipe: Recipe, *, demonstrations: Path, phrases: Sequence[str] = ()) -> None:
    """Write a checkpoint of random weights whose tokens are the words of demonstrations, fixed texts and `phrases`.

    Its sizes are those of `recipe.synthetic.model`.
    """
    from saccade.models.tiny import make_tiny_model

    texts: dict[str, None] = {}
    for demonstration in iterate_items(demonstrations, Demonstration):
        replies = (*demonstration.replies, *(text for turn in demonstration.children for text in turn))
        texts |= dict.fromkeys((demonstration.task.question, *demonstration.task.options, *replies))
    with convert_file_errors(folder):
        make_tiny_model(
            str(folder),
            family=recipe.model.family,
            seed=recipe.seed,
            vocabulary_text=tuple(texts),
            phrases=(*build_tokenizer_pieces(recipe.synthetic), *phrases),
            hidden_size=recipe.synthetic.model.hidden_size,
            num_layers=recipe.synthetic.model.num_layers,
        )


def run_sft(
    folder: Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    run: Run | None = None,
    on_step: OnStep,
    on_validation: OnStep = lambda step, metrics: None,
    profile_step: int = 0,
    accept_changed_data: bool = False,
    on_message: Callable[[str], None] = lambda message: None,
) -> Path:
    """Fine-tune on the recipe's demonstrations from the newest checkpoint; return the last. `run`: if it is open.

    `on_step` and `on_validation` receive a step and its metrics, `on_message` how many demonstrations can be replayed
    completely; demonstration_check.json in the run folder lists the rest. Raises RunError, unless
    `accept_changed_data`, if the run has been started with other demonstrations, validation tasks or media files.
    """
    from saccade.training import sft as sft_training

    file = recipe.data.demonstrations
    demonstrations = load_recipe_data(folder, recipe, "data.demonstrations", file, Demonstration)
    held_out = load_validation_tasks(folder, recipe, [demonstration.task for demonstration in demonstrations])
    with RunLock(folder, TRAINING) as lock:
        used_run = run or start_run(folder, recipe, ["sft"], resume=resume, lock=lock)
        lock.acquire()
        _record_data(used_run, {"data.demonstrations": (file, demonstrations)}, accepts_changes=accept_changed_data)

        def report_check(report: DemonstrationReport) -> None:
            rejected = dict(report.reasons_by_row)
            used_run.write_json("demonstration_check.json", {"rows": report.num_rows, "rejected": rejected})
            on_message(f"{recipe.data.demonstrations}: {report.summary}")

        train = functools.partial(sft_training.train, demonstrations=demonstrations, on_check=report_check)
        used = used_run.recipe if held_out else remove_rewards(used_run.recipe)
        return _train_stage("sft", used, train, used_run, (on_step, on_validation), held_out, profile_step)


def run_rl(
    folder: Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    run: Run | None = None,
    on_step: OnStep,
    on_validation: OnStep = lambda step, metrics: None,
    profile_step: int = 0,
    accept_changed_data: bool = False,
) -> Path:
    """Run RL on the recipe's training tasks, from the run's newest checkpoint; return the last checkpoint.

    In the folder of a finished `sft` run, with `resume`, RL starts from that run's weights; else from the recipe's
    model. `run` is the folder's run if it is already open; `profile_step` is the step to trace (0: none). Raises
    RunError if the folder's SFT is unfinished or, unless `accept_changed_data`, if the run has been started with other
    tasks or media files, and AlarmError if an alarm stops the training.
    """
    from saccade.training import rl as rl_training

    tasks = load_training_tasks(folder, recipe)
    held_out = load_validation_tasks(folder, recipe, [*tasks[:], *_load_demonstrated_tasks(folder, recipe)])
    with RunLock(folder, TRAINING) as lock:
        run = run or start_run(folder, recipe, ["rl"], resume=resume, lock=lock)
        lock.acquire()
        require_finished_sft(run)
        _record_data(run, _list_training_files(recipe, tasks), accepts_changes=accept_changed_data)
        train = functools.partial(rl_training.train, tasks=tasks)
        return _train_stage("rl", run.recipe, train, run, (on_step, on_validation), held_out, profile_step)


def _load_demonstrated_tasks(folder: Path, recipe: Recipe) -> list[Task]:
    """Return the tasks that the SFT before RL learned from, if there was one and the run is validated.

    It is that of the run's folder, and that of another run whose checkpoint RL starts from.
    """
    if not recipe.validation.every:
        return []
    runs, source = [Run(path=folder, recipe=recipe)], _find_run(folder / recipe.model.path)
    if source is not None and source.path != resolve_path(folder):
        runs.append(source)
    items: list[Demonstration] = []
    for run in runs:
        file = run.recipe.data.demonstrations
        if file and (run.path / "sft").exists():
            items += load_recipe_data(run.path, run.recipe, "data.demonstrations", file, Demonstration)
    return [demonstration.task for demonstration in items]


def _find_run(weights: Path) -> Run | None:
    """Return the run of a checkpoint; None if it belongs to none, or to one whose demonstrations are gone."""
    folder = resolve_path(weights).parent.parent
    if not (folder / "recipe.yaml").is_file():
        return None
    run = Run.open(folder)
    return run if (folder / run.recipe.data.demonstrations).is_file() else None


def require_finished_sft(run: Run) -> None:
    """Check that SFT in a run's folder, if it was started, is finished. Raises RunError."""
    # RL from an unfinished cold start would give no error and wrong results.
    if (run.path / "sft").exists() and not run.is_done("sft") and find_newest_weights(run.path, "rl") is None:
        raise RunError(
            f"the SFT in {run.path} is not finished; finish it first with `saccade sft … --out {run.path} --resume`",
            key=str(run.path / "sft"),
        )


def load_training_tasks(folder: Path, recipe: Recipe) -> Sequence[Task]:
    """Load the training tasks of the run in `folder`: one file, or a mixture of several by weight."""
    train = recipe.data.train
    if isinstance(train, str) or not train:
        return load_recipe_data(folder, recipe, "data.train", str(train or ""), Task)
    datasets = tuple(load_recipe_data(folder, recipe, "data.train", file, Task) for file in train)
    return Mixture(datasets, tuple(train.values()))


def _list_training_files(recipe: Recipe, tasks: Sequence[Task]) -> dict[str, tuple[str, Sequence[Task]]]:
    """Return the file and the tasks of each training dataset, by the keys of their digests."""
    if not isinstance(tasks, Mixture):
        return {"data.train": (str(recipe.data.train), tasks)}
    return {
        f"data.train.{file}": (file, dataset) for file, dataset in zip(recipe.data.train, tasks.datasets, strict=True)
    }


def _record_data(
    run: Run, files: Mapping[str, tuple[str, Sequence[Task | Demonstration]]], *, accepts_changes: bool
) -> None:
    """Record the digests of a stage's data files, given with their rows, and of the run's validation."""
    recipe, sources = run.recipe, dict(files)
    if validation_tasks := load_validation_file(run.path, recipe):
        sources["data.validation"] = (recipe.data.validation, validation_tasks)
    record_data(
        run.path,
        [
            DataSource(
                key=key,
                file=run.path / file,
                media_folder=run.path / recipe.data.media_root if recipe.data.media_root else (run.path / file).parent,
                items=items,
            )
            for key, (file, items) in sources.items()
        ],
        accepts_changes=accepts_changes,
    )


def _train_stage(
    stage_name: str,
    recipe: Recipe,
    train: Callable[..., Coroutine[None, None, None]],
    run: Run,
    callbacks: tuple[OnStep, OnStep],
    validation_tasks: Sequence[Task],
    profile_step: int,
) -> Path:
    from saccade.training.train_step import read_token_limit, write_token_limit

    on_step, on_validation = callbacks
    folder, last = run.path, checkpoint.find_newest_checkpoint(run.path / stage_name)
    weights = (last and last.folder) or find_newest_weights(folder) or resolve_model_path(folder, recipe)
    try:
        components = load_training_components(recipe, weights)
    except ModelError as error:
        if last is None:
            raise
        raise RunError(
            f"the checkpoint {last.folder} can't be read; delete it to resume from the one before: {error}",
            key=str(last.folder),
        ) from error

    components.vlm.max_micro_batch_tokens = read_token_limit(folder)
    components.media.generated_dir = str(resolve_path(folder) / IMAGES_FOLDER)
    components = connect_executor(components, folder)
    trace = _plan_trace(stage_name, recipe, run, last, profile_step)
    run.cut_metrics((stage_name, f"{stage_name}{STAGE_SUFFIX}"), last.step if last else 0)
    run.mark_begun(stage_name)
    with convert_file_errors(folder / stage_name):
        create_folder(folder / stage_name)  # records that the stage was started
    alarms, logged_steps = AlarmMonitor(run.recipe.alarms), _read_numbers(run, stage_name)
    validations = {int(row["step"]): row for row in _read_numbers(run, f"{stage_name}{STAGE_SUFFIX}")}
    if last is not None and last.step and last.step not in {int(row["step"]) for row in logged_steps}:
        _logger.warning(
            "%s has no line of step %d of %s, which has a checkpoint: lines of it are lost, and curves will miss them",
            *(folder / "metrics.jsonl", last.step, stage_name),
        )
    alarms.replay(logged_steps)
    alarms.replay(map(prefix_validation, validations.values()))
    writer = EpisodeWriter(folder, run.recipe.episodes.max_bytes)
    with open_loggers(folder, run.recipe) as log_to_loggers:

        def log(stage: str, values: Mapping[str, float]) -> None:
            run.log(stage, int(values["step"]), values)
            log_to_loggers(stage, int(values["step"]), values)

        def log_step(values: Mapping[str, float]) -> None:
            log(stage_name, values)
            on_step(int(values["step"]), values)

        validation = Validation(
            components=replace(
                components, environments=TaskEnvironments.from_recipe(apply_validation_settings(recipe))
            ),
            tasks=validation_tasks,
            stage=stage_name,
            on_rollouts=writer.write,
        )

        async def validate(step: int) -> Mapping[str, float]:
            metrics = await validation.run(step)
            log(f"{stage_name}{STAGE_SUFFIX}", {**metrics, **alarms.check(step, prefix_validation(metrics))})
            require_checkpoint_metric(retention, stage_name, metrics)
            on_validation(step, metrics)
            return metrics

        retention = recipe.sft.checkpoints if stage_name == "sft" else recipe.rl.checkpoints
        interval = recipe.validation.every if validation_tasks else 0
        work = train(
            components,
            folder=folder / stage_name,
            log_step=log_step,
            validation=ValidationSchedule(validate, interval, validations),
            alarms=alarms,
            trace=trace,
            **({"on_rollouts": writer.write, "on_tokens": writer.write_tokens} if stage_name == "rl" else {}),
        )
        try:
            run_and_close(components, work)
        finally:
            write_token_limit(folder, components.vlm.max_micro_batch_tokens)
    weights = checkpoint.list_checkpoints(folder / stage_name)[-1].folder
    run.mark_done(stage_name, {"checkpoint": weights.relative_to(folder).as_posix()})
    return weights


def _plan_trace(
    stage: str, recipe: Recipe, run: Run, last: checkpoint.Checkpoint | None, step: int
) -> "StepTrace | None":
    """Return the trace of a step, None for step 0. Raises ConfigError for a step that the stage won't make."""
    first, end = last.step + 1 if last else 1, recipe.sft.steps if stage == "sft" else recipe.rl.steps
    if not step:
        return None
    if not first <= step <= end:
        message = f"--profile {step} is none of the steps that {stage} makes now, {first} to {end}; choose one of these"
        raise ConfigError(message, key="--profile", value=step)
    from saccade.training.step_trace import StepTrace

    return StepTrace(step, run.path / TRACES_FOLDER / f"{stage}-step-{step:06d}.json")


def _read_numbers(run: Run, stage: str) -> list[dict[str, float]]:
    """Return the rows that a run has logged for a stage, without their texts."""
    rows = run.read_metrics(stage)
    return [{key: value for key, value in row.items() if isinstance(value, int | float)} for row in rows]
