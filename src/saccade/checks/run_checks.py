"""Every check of a run, in one list: `saccade doctor` reports all of them, and a run stops at the first that fails.

    list_checks ──┬─> report_checks    every check, also the costly ones; no weights are loaded
                  └─> require_checks   those with `before_run`, before the run's folder is written

What the run does itself when it starts (read its data, connect to its servers, start its sandboxes) and what is only an
estimate is left to the doctor.
"""

import asyncio
import contextlib
import functools
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from saccade import plugins, sandbox
from saccade.algorithms.group_advantages import needs_correctness
from saccade.chat.renderer import ChatRenderer, load_renderer
from saccade.checks.estimates import (
    DTYPE_BYTES,
    PlanAssumptions,
    estimate_environment,
    estimate_state,
    resolve_assumptions,
    resolve_model_sizes,
)
from saccade.checks.machine import CheckResult
from saccade.checks.plan import format_bytes
from saccade.config.load import resolve_model_path
from saccade.config.schema import STAGES, Recipe
from saccade.data.dataset import load_recipe_data
from saccade.engines.sampling_filters import check_neutral
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import ConfigError, ModelError, RunError, SaccadeError, convert_errors
from saccade.media import image, video
from saccade.models.adapter_package import check_adapters
from saccade.models.checkpoint_files import check_weights
from saccade.protocols import ChatEngine, EngineRequirements, ProbeableEngine
from saccade.reporting.loggers.dispatch import check_loggers
from saccade.rollouts.components import (
    ENGINE_DEPENDENCIES,
    RolloutComponents,
    apply_evaluation_settings,
    apply_sft_settings,
    apply_validation_settings,
    check_frame_pairs,
    compose_task_rewards,
    require_trainable,
    resolve_settings,
    resolve_tool_settings,
    uses_chat_engine,
)
from saccade.rollouts.executors import check_executor, has_separate_weights
from saccade.training.checkpoint import count_kept_checkpoints, list_checkpoints, should_save
from saccade.training.optimizer_package import check_optimizer
from saccade.training.rl_checks import check_algorithms, check_staleness
from saccade.types import Demonstration, Media, MediaKind, Task

MAX_ROWS = 2000  # rows read of each file
MAX_OPENED_FILES = 8  # media files opened


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A recipe as a run in `folder` would have it, and the stages to check."""

    recipe: Recipe
    folder: Path
    stages: Collection[str]
    weights: Path | None = None  # the run's newest checkpoint if it has one
    has_model: bool = True  # False if the model is made by the run, or served by a chat API
    uses_own_tasks: bool = True  # False if an evaluation has other tasks than the recipe's test split
    num_processes: int = 1  # that train on each node
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name: `run` raises SaccadeError if the check fails; else its result is the `message`.

    `run` may return another message, or messages by name, of which an exception is a failure. The check is skipped if
    one that it `requires` has failed.
    """

    name: str
    run: Callable[[], object]
    message: str = ""
    requires: Collection[str] = ()
    before_run: bool = True


def require_checks(planned_run: PlannedRun) -> None:
    """Raise the error of the first check of a run that fails."""
    for check in list_checks(planned_run):
        if check.before_run:
            execute_check(check)


def check_recipe(recipe: Recipe, stages: Collection[str] = STAGES) -> None:
    """Check that the recipe's plugins and their settings can be used for the stages. Raises ConfigError."""
    for check in list_recipe_checks(recipe, stages):
        execute_check(check)


def report_checks(planned_run: PlannedRun) -> Iterator[CheckResult]:
    """Run every check and yield its results."""
    failed: set[str] = set()
    for check in list_checks(planned_run):
        if failed.isdisjoint(check.requires):
            results = run_check(check)
            failed |= {check.name for result in results if not result.is_ok}
            yield from results


def execute_check(check: Check) -> object:
    """Return what a check's `run` returns; any exception becomes a SaccadeError that names the check."""
    with convert_errors(SaccadeError, f"{check.name} can't be checked", key=check.name):
        return check.run()


def run_check(check: Check) -> list[CheckResult]:
    """Run a check and return its results; an exception becomes the message of a failed one."""
    try:
        result = execute_check(check)
    except SaccadeError as error:
        result = {check.name: error}
    message = result if isinstance(result, str) else check.message
    by_name = result if isinstance(result, Mapping) else {check.name: message}
    return [
        CheckResult(name=name, message=message)
        if isinstance(message, str)
        else CheckResult(name=name, message=str(message), is_ok=False, error=message)
        for name, message in by_name.items()
    ]


def list_checks(planned_run: PlannedRun) -> list[Check]:
    """List the checks of a run: settings, device, model, memory, disk, data, context, servers, sandbox."""
    recipe, stages, bind = planned_run.recipe, planned_run.stages, functools.partial
    sizes = ("family", "model") if recipe.model.path else ("family",)  # what the sizes of the model depend on
    is_new = planned_run.weights is None  # a run with a checkpoint has passed these, and loading names what is broken
    checks = list_recipe_checks(recipe, stages)
    checks.append(Check("device", bind(check_device, recipe.model.device), recipe.model.device))
    if planned_run.has_model:
        checks.append(Check("model", bind(_check_model, planned_run), before_run=is_new))
    if _is_training(stages):
        requires = ("device", *sizes)
        checks.append(Check("memory", bind(_check_memory, planned_run), requires=requires, before_run=is_new))
        checks.append(Check("disk", bind(_check_disk, planned_run), requires=sizes, before_run=is_new))
    for key, file in _list_data_files(planned_run):
        checks.append(Check(key, bind(_check_file, planned_run, file, key), before_run=False))
    for name, (used, environment) in _list_environments(planned_run).items():
        run = bind(_check_context, planned_run.folder, used, environment)
        checks.append(Check(name, run, requires=("environment", *sizes), before_run=False))
    requires = ("environment", "engine", *_list_environments(planned_run))
    checks.append(Check("servers", bind(_check_servers, planned_run), requires=requires, before_run=False))
    requires = ("environment",)
    return [*checks, Check("sandbox", bind(_check_sandboxes, planned_run), requires=requires, before_run=False)]


def list_recipe_checks(recipe: Recipe, stages: Collection[str]) -> list[Check]:
    """List the checks of settings, which need no files; only RL and evaluation check what rewards depend on."""
    model, bind = recipe.model, functools.partial
    environments = [f"{name}: {config.name}" for name, config in recipe.environments.items()]
    algorithms = (recipe.rl.advantage.estimator, recipe.rl.loss.name, *recipe.rl.active_filters)
    is_marked = any(term.is_accuracy for term in recipe.rewards.values())
    unmarked = "" if is_marked else "; none is marked `is_accuracy: true`, so accuracy reads 0"
    auxiliary = f"{recipe.sft.auxiliary_fraction:g} of the demonstrations"
    if recipe.sft.order == "shuffled_epochs":
        auxiliary = "each demonstration once per epoch"
    rank = f"rank {model.lora_rank}" if model.lora_rank else "none"
    optims = {stage: getattr(recipe, stage).optim for stage in ("sft", "rl") if stage in stages}
    checks = [
        Check(
            "environment",
            lambda: [
                TaskEnvironments.from_recipe(used)
                for used in (
                    recipe,
                    apply_evaluation_settings(recipe),
                    apply_sft_settings(recipe),
                    apply_validation_settings(recipe),
                )
            ],
            ", ".join((recipe.environment.name, *environments)),
        ),
        Check("engine", bind(_check_engine, recipe, stages), recipe.engine.name),
        Check("executor", bind(check_executor, recipe), recipe.rollouts.executor, requires=("engine",)),
        Check("rewards", bind(_check_rewards, recipe, stages), f"{', '.join(recipe.rewards)}{unmarked}"),
        Check("algorithms", bind(check_algorithms, recipe.rl), ", ".join(algorithms)),
        *(
            Check(f"{key}.optim", bind(check_optimizer, optim, key, cpu_offload=model.cpu_offload), optim.name)
            for key, optim in optims.items()
        ),
        Check("family", bind(plugins.load, "chat.families", model.family), model.family),
        Check("adapters", bind(check_adapters, model.lora_rank), rank),
        Check("auxiliary data", bind(_check_auxiliary_data, recipe), auxiliary),
        Check("loggers", bind(check_loggers, recipe.loggers), ", ".join(recipe.loggers) or "none"),
    ]
    trainable = Check("trainable", bind(require_trainable, recipe), f"by {', '.join(stages)}")
    return [*([trainable] if _is_training(stages) else []), *checks]


def _is_training(stages: Collection[str]) -> bool:
    return not {"sft", "rl"}.isdisjoint(stages)


def _check_engine(recipe: Recipe, stages: Collection[str]) -> None:
    name = recipe.engine.name
    settings = plugins.check_settings("engines", name, recipe.engine.settings, ENGINE_DEPENDENCIES)
    check_frame_pairs(recipe)
    if "rl" in stages:  # episodes that aren't trained on may be sampled from any distribution
        check_staleness(recipe, has_separate_weights(recipe))
        check_neutral(settings)


def _check_rewards(recipe: Recipe, stages: Collection[str]) -> None:
    if "rl" in stages or "eval" in stages or recipe.validation.every:
        compose_task_rewards(recipe)
    else:
        for rewards in recipe.reward_sections.values():
            for name, term in rewards.items():
                plugins.resolve("rewards", name, term.settings)
    if "rl" in stages:
        _check_correctness(recipe)
    if "rl" in stages and not any(term.weight for term in recipe.rewards.values()):
        raise ConfigError(
            "rewards has no term with a weight other than 0, so every episode would score 0; give a term a weight",
            key="rewards",
        )


def _check_correctness(recipe: Recipe) -> None:
    """Raise ConfigError if the advantage estimator reads correctness and a set of rewards marks no term as such.

    The marked term must have the weight 1, or rewards and correctness would have different units.
    """
    if not needs_correctness(recipe.rl.advantage):
        return
    reads = f"rl.advantage.estimator={recipe.rl.advantage.estimator} reads correctness"
    for key, rewards in recipe.reward_sections.items():
        marked = {name: term for name, term in rewards.items() if term.is_accuracy}
        if rewards and not marked:
            raise ConfigError(
                f"{reads}, and {key} marks no term as such; mark one, as in `accuracy: {{is_accuracy: true}}`",
                key=key,
                value=tuple(rewards),
            )
        for name, term in marked.items():
            if term.weight != 1:
                raise ConfigError(
                    f"{reads} in units of the reward, but {key}.{name}.weight={term.weight:g}: set it to 1, and scale "
                    "the other terms",
                    key=f"{key}.{name}.weight",
                    value=term.weight,
                )


def _check_auxiliary_data(recipe: Recipe) -> None:
    if recipe.synthetic.num_grid_images and not (recipe.sft.auxiliary_fraction or recipe.sft.auxiliary_warmup):
        raise ConfigError(
            f"synthetic.image.grid_images={recipe.synthetic.image.grid_images:g} makes images that only auxiliary "
            "demonstrations use, and SFT uses none; set sft.auxiliary_fraction or sft.auxiliary_warmup above 0, or "
            "synthetic.image.grid_images=0",
            key="synthetic.image.grid_images",
            value=recipe.synthetic.image.grid_images,
        )


def check_device(device: str) -> None:
    """Check that this machine has a device such as "cuda:1". Raises ConfigError."""
    if device == "cpu":  # torch takes seconds to import
        return
    import torch

    kind, _, number = device.partition(":")
    hint = "set model.device=cpu (and model.dtype=float32), or use a machine that has one"
    with convert_errors(ConfigError, f"model.device={device} can't be used ({hint})", key="model.device", value=device):
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no GPU on this machine")
        if kind == "cuda" and number.isdecimal() and int(number) >= torch.cuda.device_count():
            raise ValueError(f"there are {torch.cuda.device_count()} GPUs, counted from 0")
        torch.zeros(1, device=device).item()


def _find_weights(planned_run: PlannedRun) -> Path:
    return planned_run.weights or resolve_model_path(planned_run.folder, planned_run.recipe)


def _check_model(planned_run: PlannedRun) -> str:
    weights = _find_weights(planned_run)
    renderer = load_renderer(str(weights))
    check_weights(weights)
    return f"{weights}: {renderer.family}, with its tokenizer and all weights"


def _estimate_states(planned_run: PlannedRun) -> dict[str, dict[str, int]]:
    """Estimate what each process of a training stage stores per weight, by stage and kind, in bytes."""
    recipe, _ = resolve_assumptions(planned_run.recipe, PlanAssumptions(), planned_run.folder)
    sizes, optims = resolve_model_sizes(recipe), {"sft": recipe.sft.optim, "rl": recipe.rl.optim}
    processes = {"gpus": planned_run.num_processes, "nodes": planned_run.num_nodes}
    return {
        stage: estimate_state(recipe, sizes, optim, **processes)
        for stage, optim in optims.items()
        if stage in planned_run.stages
    }


def _check_memory(planned_run: PlannedRun) -> str:
    """Return the memory of each stage. Raises RunError if it exceeds the device's even without activations.

    While a checkpoint is written in the background, the CPU's memory holds a copy of what it holds.
    """
    device, memory, num_processes = planned_run.recipe.model.device, math.inf, planned_run.num_processes
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cpu":
        memory = host_memory / num_processes
    elif device.startswith("cuda"):
        import torch

        memory = torch.cuda.get_device_properties(device).total_memory
    texts, checkpoint_bytes = [], _estimate_checkpoints(planned_run)
    for stage, state in _estimate_states(planned_run).items():
        size, copy = sum(state.values()), checkpoint_bytes[stage]
        needed = f"{format_bytes(size)} plus activations" + (" in each process" if num_processes > 1 else "")
        if size > memory:
            more = "on more GPUs (--nproc), " if device != "cpu" else ""
            raise RunError(
                f"{stage} needs {needed}, and {device} has {format_bytes(memory)} for it; train {more}adapters "
                "(model.lora_rank=16), or a smaller model",
                key="model.device",
                value=device,
            )
        texts.append(f"{stage} needs {needed}")
        if not getattr(planned_run.recipe, stage).checkpoints.background:
            continue
        if copy + (num_processes * size if device == "cpu" else 0) > host_memory:
            raise RunError(
                f"{stage} copies {format_bytes(copy)} to write a checkpoint in the background, and the CPU has "
                f"{format_bytes(host_memory)}; set {stage}.checkpoints.background=false",
                key=f"{stage}.checkpoints.background",
                value=True,
            )
        texts[-1] += f", and {format_bytes(copy)} on the CPU while a checkpoint is written"
    return "; ".join(texts)


def _estimate_checkpoints(planned_run: PlannedRun) -> dict[str, int]:
    """Estimate the bytes that the processes of a node write together, by stage: several store weights in float32."""
    factor, is_sharded = 1, planned_run.num_processes * planned_run.num_nodes > 1
    if is_sharded:
        factor = DTYPE_BYTES["float32"] // DTYPE_BYTES[planned_run.recipe.model.dtype]
    recipe = planned_run.recipe.with_values({"model.device": "cpu"})  # where offloaded state counts, too
    whole = replace(planned_run, recipe=recipe, num_processes=1, num_nodes=1)
    return {
        stage: factor * state["weights"] + (0 if is_sharded else state["master_weights"]) + state["optimizer_state"]
        for stage, state in _estimate_states(whole).items()
    }


def _check_disk(planned_run: PlannedRun) -> str:
    """Check that the folder is writable and has room for the checkpoints that are still to be written."""
    recipe, total, peak = planned_run.recipe, 0, 0
    for stage, size in _estimate_checkpoints(planned_run).items():
        settings = recipe.sft if stage == "sft" else recipe.rl
        interval, num_kept = recipe.validation.every, count_kept_checkpoints(settings)
        validated = range(interval, settings.steps + 1, interval) if interval else range(0)
        num_written = sum(should_save(i, settings, is_validated=i in validated) for i in range(1, settings.steps + 1))
        num_existing = len(list_checkpoints(planned_run.folder / stage))
        count = max(1, min(num_kept + 1, num_written) - num_existing)  # one more while the last is written
        peak = max(peak, total + count * size)
        total += min(num_kept, count) * size
    folder = planned_run.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        message = f"{existing} is a file or a broken link; choose another folder with --out"
        raise RunError(message, key=str(planned_run.folder), value=str(existing))
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        raise RunError(f"{existing} is not writable; choose another folder with --out", key=str(existing))
    if peak > free:
        raise RunError(
            f"checkpoints take up to {format_bytes(peak)}, and {existing} has {format_bytes(free)} left; free some "
            "space, or choose another folder with --out",
            key=str(existing),
        )
    episodes = recipe.episodes.max_bytes if "rl" in planned_run.stages or recipe.validation.every else 0
    others = f", episodes up to {format_bytes(episodes)}" if episodes else ""
    return f"checkpoints take up to {format_bytes(peak)}{others}; {existing} has {format_bytes(free)} left"


def _list_data_files(planned_run: PlannedRun) -> list[tuple[str, str]]:
    """List the recipe's data files that the stages read, each with its key."""
    data, stages, validates = planned_run.recipe.data, planned_run.stages, planned_run.recipe.validation.every > 0
    train = [data.train] if isinstance(data.train, str) else data.train or [""]
    return [
        *([("data.demonstrations", data.demonstrations)] if "sft" in stages else []),
        *([("data.train", file) for file in train] if "rl" in stages else []),
        *([("data.validation", data.validation)] if _is_training(stages) and validates else []),
        *([("data.test", data.test)] if "eval" in stages and planned_run.uses_own_tasks else []),
    ]


def _check_file(planned_run: PlannedRun, file: str, key: str) -> str:
    item_type = Demonstration if key == "data.demonstrations" else Task
    rows = load_recipe_data(planned_run.folder, planned_run.recipe, key, file, item_type, limit=MAX_ROWS)
    num_files, num_opened = open_sample(row.task if isinstance(row, Demonstration) else row for row in rows)
    num_rows = f"the first {len(rows):,}" if len(rows) == MAX_ROWS else f"all {len(rows):,}"
    path, files = planned_run.folder / file, f"their {num_files:,} files exist, {num_opened} of them were opened"
    return f"{path}: {num_rows} rows read, {files}"


def open_sample(tasks: Iterable[Task]) -> tuple[int, int]:
    """Open an even sample of the tasks' media; return the numbers of all and of opened files. Raises MediaError."""
    files = list(dict.fromkeys(media for task in tasks for media in task.media))
    num_opened = min(len(files), MAX_OPENED_FILES)
    for index in np.linspace(0, len(files) - 1, num_opened).round().astype(int):
        open_media(files[index])
    return len(files), num_opened


def open_media(media: Media) -> None:
    """Open a video or an image. Raises MediaError."""
    (video.probe_video if media.kind is MediaKind.VIDEO else image.read_image)(media.path)


def _list_environments(planned_run: PlannedRun) -> dict[str, tuple[Recipe, str]]:
    """Return the environments in use, each as a recipe and the name that tasks select, by the name of its check."""
    recipe = evaluated = planned_run.recipe
    if "eval" in planned_run.stages:
        with contextlib.suppress(ConfigError):  # the check of the environments reports it
            evaluated = apply_evaluation_settings(recipe)
    trained = recipe if _is_training(planned_run.stages) else evaluated
    before = {"": trained.environment, **trained.environments}
    after = {"": evaluated.environment, **evaluated.environments}
    return {
        **{f"context, {name}" if name else "context": (trained, name) for name in before},
        **{
            f"context, {name}, evaluation" if name else "context, evaluation": (evaluated, name)
            for name in after
            if after[name] != before[name]
        },
    }


def _estimate_longest(folder: Path, recipe: Recipe, environment: str) -> int:
    """Return the tokens of an environment's longest conversation."""
    recipe, assumptions = resolve_assumptions(recipe, PlanAssumptions(), folder)
    return estimate_environment(recipe, resolve_model_sizes(recipe), assumptions, environment).longest.total_tokens


def _get_context_limit(recipe: Recipe, environment: str) -> int:
    """Return the context limit of an environment in tokens; 0 without one."""
    environments = TaskEnvironments.from_recipe(recipe)
    return environments.by_name.get(environment, environments.default)().max_context_tokens


def _check_context(folder: Path, recipe: Recipe, environment: str) -> str:
    limit = _get_context_limit(recipe, environment)
    context = f", in a context of {limit:,}" if limit else ""
    return f"conversations of up to {_estimate_longest(folder, recipe, environment):,} tokens{context}"


def _check_servers(planned_run: PlannedRun) -> dict[str, str | Exception]:
    """Probe the engine's servers; return a description, or an error, of each."""
    recipe, used = planned_run.recipe, _list_environments(planned_run).values()
    if uses_chat_engine(recipe):
        return {f"server {recipe.engine.settings.get('url')}": f"serves {asyncio.run(_connect_chat_engine(recipe))}"}
    engine: Any = plugins.load("engines", recipe.engine.name)
    if not isinstance(engine, ProbeableEngine):
        return {}
    try:
        renderer: ChatRenderer | None = load_renderer(str(_find_weights(planned_run)))
    except (ModelError, RunError):  # reported by the check of the model
        renderer = None
    requirements = EngineRequirements(
        model_path=str(planned_run.folder / recipe.model.path) if recipe.model.path else "",
        renderer=renderer,
        context_length=max(_get_context_limit(*use) or _estimate_longest(planned_run.folder, *use) for use in used),
        is_training="rl" in planned_run.stages,
    )
    answers = asyncio.run(engine.probe(requirements, **resolve_settings("engines", recipe.engine)))
    return {f"server {url}": answer for url, answer in answers.items()}


async def _connect_chat_engine(recipe: Recipe) -> str:
    """Return the name of the model that the recipe's chat API serves. Raises SaccadeError."""
    engine = cast(ChatEngine, RolloutComponents.from_recipe(recipe).engine)
    try:
        return await engine.connect()
    finally:
        await engine.close()


def find_isolations(*recipes: Recipe) -> list[tuple[str, sandbox.IsolationMode]]:
    """Return the name and isolation mode of each code-running tool of the recipes' environments, without repeats."""
    isolations = set()
    for config in (config for recipe in recipes for config in (recipe.environment, *recipe.environments.values())):
        for name, settings in resolve_tool_settings(resolve_settings("environments", config)).items():
            if "isolation" in settings:
                isolations.add((name, settings["isolation"]))
    return sorted(isolations)


def start_sandboxes(*recipes: Recipe) -> dict[str, str]:
    """Start the sandboxes of the recipes' tools; return their isolation. Raises ConfigError if it is too weak."""
    return {
        f"isolation of {name}, {isolation}": sandbox.get_shared_server(isolation).report.summary
        for name, isolation in find_isolations(*recipes)
    }


def _check_sandboxes(planned_run: PlannedRun) -> dict[str, str | Exception]:
    """Compare the isolation that each code-running tool requires with this machine's."""
    results: dict[str, str | Exception] = {}
    for name, isolation in find_isolations(*(used for used, _ in _list_environments(planned_run).values())):
        report = sandbox.probe_isolation()
        try:
            report.check(isolation)
            results[f"{name}, isolation"] = f"{isolation}: {report.summary}"
        except ConfigError as error:
            results[f"{name}, isolation"] = error
    return results
