"""Connect a run's components to the executor of its recipe."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from saccade import plugins
from saccade.config.schema import Recipe
from saccade.errors import ConfigError
from saccade.protocols import SharedServersEngine
from saccade.rollouts.components import RolloutComponents, runs_model_here
from saccade.rollouts.processes import ProcessEngine, ProcessExecutor
from saccade.rollouts.ray.executor import RayEngine, RayExecutor

C = TypeVar("C", bound=RolloutComponents)


def connect_executor(components: C, folder: Path, *, has_rewards: bool = True) -> C:
    """Return the components with the executor of their recipe, for a run in `folder`.

    With an executor that has workers, the engine's `sync_weights` syncs them, too, and its `close` ends them. Without
    `has_rewards` the episodes are scored by other functions than the recipe's rewards, so workers score nothing. Raises
    ConfigError if the recipe can't be run by its executor.
    """
    recipe, folder = components.recipe, folder.resolve()
    check_executor(recipe)
    if recipe.rollouts.executor == "local":
        return components
    engine: Any
    executor: ProcessExecutor | RayExecutor
    if recipe.rollouts.executor == "processes":
        executor = ProcessExecutor(components, folder, has_rewards=has_rewards)
        engine = ProcessEngine(components.engine, executor, is_overlapped=recipe.rl.max_staleness > 0)
    else:
        executor = RayExecutor(components, folder, has_rewards=has_rewards)
        engine = RayEngine(components.engine, executor)
        if isinstance(components.engine, SharedServersEngine):
            components.engine.set_switch_guard(executor.pause)
    return replace(components, engine=engine, executor=executor)


def check_executor(recipe: Recipe) -> None:
    """Raise ConfigError if the recipe's executor can't be used with its engine, or needs a missing package."""
    name = recipe.engine.name
    if recipe.rollouts.executor == "processes" and not runs_model_here(recipe):
        raise ConfigError(
            "rollouts.executor=processes needs an engine that runs the model in the trainer's process, such as local, "
            f"since each process has a copy of it; engine.name={name} has servers. Set rollouts.executor=local or ray",
            key="rollouts.executor",
            value=name,
        )
    if recipe.rollouts.executor != "ray":
        return
    if not plugins.get_attribute("engines", name, "has_separate_weights"):
        raise ConfigError(
            f"rollouts.executor=ray needs an engine with servers (vllm, sglang or chat_completions), since its workers "
            f"have no weights; engine.name={name} runs the model in the trainer. Set rollouts.executor=local, or "
            "processes for workers with copies of the weights on this machine",
            key="rollouts.executor",
            value=name,
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "rollouts.executor=ray needs the package ray; install it: pip install 'saccade[ray]'",
            key="rollouts.executor",
            value="ray",
        )


def has_separate_weights(recipe: Recipe) -> bool:
    """Return whether rollouts sample from weights that the trainer doesn't change meanwhile."""
    is_copied = recipe.rollouts.executor == "processes"
    return is_copied or bool(plugins.get_attribute("engines", recipe.engine.name, "has_separate_weights"))
