"""What RL requires of a recipe, checked without torch."""

from saccade import plugins
from saccade.algorithms.group_advantages import check_estimator_settings
from saccade.algorithms.group_filter import resolve_filters
from saccade.config.schema import Recipe, RlConfig
from saccade.errors import ConfigError


def check_staleness(recipe: Recipe, has_separate_weights: bool) -> None:
    """Raise ConfigError if `rl.max_staleness` is set and the engine shares the trainer's weights."""
    max_staleness = recipe.rl.max_staleness
    if max_staleness and not has_separate_weights:
        raise ConfigError(
            f"rl.max_staleness={max_staleness} needs rollouts with their own weights, and {recipe.engine.name} shares "
            "the trainer's. Set rollouts.executor=processes, an engine with servers (vllm or sglang), or "
            "rl.max_staleness=0",
            key="rl.max_staleness",
            value=max_staleness,
        )


def check_algorithms(settings: RlConfig) -> None:
    """Raise ConfigError if the estimator, the loss or a filter is unknown or has an invalid setting."""
    check_estimator_settings(settings.advantage)
    plugins.check_settings("algorithms.losses", settings.loss.name, settings.loss.settings)
    resolve_filters(settings.active_filters)
