"""Select each task's environment: the one it names, or the recipe's default."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from saccade import plugins
from saccade.config.schema import Recipe
from saccade.errors import ConfigError, DataError
from saccade.protocols import Environment, EnvironmentFactory
from saccade.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnvironments:
    """The environments of a recipe, each bound to its settings; call it with a task to select one."""

    default: functools.partial[Environment]
    by_name: Mapping[str, functools.partial[Environment]] = field(default_factory=dict)

    @staticmethod
    def from_recipe(recipe: Recipe) -> "TaskEnvironments":
        """Bind the plugins. Raises ConfigError for an unknown plugin, setting or value."""
        default = plugins.resolve("environments", recipe.environment.name, recipe.environment.settings)
        by_name = {}
        for name, config in recipe.environments.items():
            try:
                by_name[name] = plugins.resolve("environments", config.name, config.settings)
            except ConfigError as error:  # `resolve` writes the key of the default environment
                error.key = re.sub(r"^environment\.", f"environments.{name}.", error.key)
                raise
        return TaskEnvironments(default=default, by_name=by_name)

    def __call__(self, task: Task) -> EnvironmentFactory:
        """Return the environment of a task. Raises DataError if the task names one that isn't configured."""
        if task.environment is None:
            return self.default
        if task.environment not in self.by_name:
            suggestion = plugins.suggest(task.environment, self.by_name)
            raise DataError(
                f"task {task.id} names the environment {task.environment!r}, which isn't configured: add "
                f"environments.{task.environment} to the recipe, or leave the task's environment out; {suggestion}",
                key="environment",
                value=task.environment,
            )
        return self.by_name[task.environment]

    @property
    def max_context_tokens(self) -> int:
        """Tokens of the longest conversation."""
        return max(make().max_context_tokens for make in (self.default, *self.by_name.values()))
