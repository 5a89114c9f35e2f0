"""Build what rollouts need from a recipe: the same for training, evaluation and `saccade ask`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from saccade import plugins
from saccade.chat.renderer import load_renderer
from saccade.config.schema import ModelConfig, PluginConfig, Recipe, RewardTerm
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import ConfigError, convert_errors
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import NOT_TRAINABLE_MESSAGE, ChatEngine, Context, Engine, Renderer, ScoreFn
from saccade.rewards.compose import compose_rewards, select_episode_rewards
from saccade.rollouts.collect import RolloutExecutor
from saccade.types import SamplingParams
from saccade.utils.async_utils import PausableClock

# What engines receive besides their settings, each if its signature names it.
ENGINE_DEPENDENCIES = ("vlm", "renderer", "load_weights", "media", "context_length")

if TYPE_CHECKING:  # it imports torch, which a rollout worker without weights doesn't need
    from saccade.models.vlm import VisionLanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutComponents:
    """The media loader, engine, environments and rewards of a recipe: enough to run episodes and to score them."""

    recipe: Recipe  # what they were made from
    renderer: Renderer  # of the recipe's model
    media: CachingMediaLoader  # decodes and caches videos and images
    engine: Engine  # samples
    environments: TaskEnvironments  # called with a task: what makes its environments
    score_fn: ScoreFn  # scores the episodes of a task
    clock: PausableClock = field(default_factory=PausableClock)  # for the deadlines of all episodes
    executor: RolloutExecutor | None = None  # where episodes run; None: in this process

    @staticmethod
    def from_recipe(recipe: Recipe, *, verifies_weights: bool = True) -> "RolloutComponents":
        """Bind the plugins; load the model only if the engine runs it here, or to compare servers' weights with it.

        Without `verifies_weights` servers' weights aren't compared, because another process does it. Raises what
        `TrainingComponents.from_recipe` raises.
        """
        check_frame_pairs(recipe)
        if runs_model_here(recipe):
            return TrainingComponents.from_recipe(recipe)
        environments, score_fn = TaskEnvironments.from_recipe(recipe), compose_task_rewards(recipe)
        media = CachingMediaLoader.from_config(recipe.media, is_shared=recipe.rollouts.executor == "ray")
        dependencies: dict[str, Any] = {"media": media, "context_length": environments.max_context_tokens}
        if uses_chat_engine(recipe):
            engine = _build_engine(recipe, **dependencies)
            renderer = engine.renderer
        else:
            renderer = load_renderer(recipe.model.path)
            load_weights = functools.partial(_load_vlm, recipe.model) if verifies_weights else None
            engine = _build_engine(recipe, renderer=renderer, load_weights=load_weights, **dependencies)
        return RolloutComponents(
            recipe=recipe, renderer=renderer, media=media, engine=engine, environments=environments, score_fn=score_fn
        )

    def build_context(
        self,
        *,
        seed: int,
        frame_budget: int | None = None,
        temperature: float | None = None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> Context:
        """Return the context of one episode; `frame_budget` is its K, `temperature` replaces the recipe's."""
        settings = self.recipe.sampling
        sampling = SamplingParams(
            temperature=settings.temperature if temperature is None else temperature,
            max_tokens=settings.max_tokens,
            seed=seed,
        )
        return Context(
            engine=self.engine,
            renderer=self.renderer,
            media=self.media,
            sampling=sampling,
            seed=seed,
            frame_budget=frame_budget,
            episode_timeout=settings.episode_timeout or None,
            clock=self.clock,
            on_event=on_event,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingComponents(RolloutComponents):
    """What a recipe's training needs: the model, the media loader, the engine, the environments and the rewards."""

    vlm: "VisionLanguageModel"  # the model that is trained

    @staticmethod
    def from_recipe(  # type: ignore[override]
        recipe: Recipe, load_vlm: "Callable[[ModelConfig], VisionLanguageModel] | None" = None
    ) -> "TrainingComponents":
        """Load the model and bind the plugins. Raises ConfigError or ModelError for what can't be used.

        `load_vlm` loads the model with its weights divided among processes (None: it is loaded whole). An engine that
        samples here then gets a copy; with rollouts.executor=processes it only follows weight syncs and needs none.
        """
        import torch

        recipe = require_token_engine(recipe)
        check_frame_pairs(recipe)
        environments, score_fn = TaskEnvironments.from_recipe(recipe), compose_task_rewards(recipe)
        torch.set_num_threads(recipe.model.num_threads)
        vlm = (load_vlm or _load_vlm)(recipe.model)
        if recipe.media.frame_pairs and not vlm.renderer.supports_frame_pairs:
            raise ConfigError(
                f"media.frame_pairs=true, but the model family {vlm.renderer.family} takes no pairs of frames; "
                "set media.frame_pairs=false",
                key="media.frame_pairs",
                value=True,
            )
        has_model = runs_model_here(recipe)
        needs_copy = load_vlm is not None and has_model and recipe.rollouts.executor != "processes"
        is_inline = has_model and vlm.device.type == "cpu"
        uses_ray = recipe.rollouts.executor == "ray"
        media = CachingMediaLoader.from_config(recipe.media, is_inline=is_inline, is_shared=uses_ray)
        engine = _build_engine(
            recipe,
            vlm=_load_vlm(recipe.model) if needs_copy else vlm,
            renderer=vlm.renderer,
            load_weights=lambda: vlm,
            media=media,
            context_length=_find_context_length(recipe, environments),
        )
        return TrainingComponents(
            recipe=recipe,
            renderer=vlm.renderer,
            vlm=vlm,
            media=media,
            engine=engine,
            environments=environments,
            score_fn=score_fn,
        )


def _find_context_length(recipe: Recipe, environments: TaskEnvironments) -> int:
    """Return the longest conversation of a training and its validation, tokens."""
    lengths = [environments.max_context_tokens]
    if recipe.validation.every and recipe.validation.environment_settings:
        lengths.append(TaskEnvironments.from_recipe(apply_validation_settings(recipe)).max_context_tokens)
    return max(lengths)


def _load_vlm(model: ModelConfig) -> "VisionLanguageModel":
    from saccade.models.vlm import VisionLanguageModel

    return VisionLanguageModel(model)


def compose_task_rewards(recipe: Recipe) -> ScoreFn:
    """Return a function that scores episodes by the rewards of their task's environment, else by the recipe's.

    Raises what `compose_rewards` raises.
    """
    default = compose_rewards(recipe.rewards)
    by_name = {name: compose_rewards(config.rewards) for name, config in recipe.environments.items() if config.rewards}
    if not by_name:
        return default
    return lambda episodes, *graded: by_name.get(episodes[0].task.environment or "", default)(episodes, *graded)


def _build_engine(recipe: Recipe, **dependencies: Any) -> Any:
    build = plugins.resolve("engines", recipe.engine.name, recipe.engine.settings, **dependencies)
    with convert_errors(
        ConfigError,
        f"the engine {recipe.engine.name} can't be built from a recipe",
        key="engine.name",
        value=recipe.engine.name,
    ):
        return build()


def resolve_settings(folder: str, plugin: PluginConfig) -> dict[str, Any]:
    """Return all settings of a plugin: the given ones, checked and converted, and the defaults of its signature."""
    parameters = plugins.get_signature(folder, plugin.name).parameters
    defaults = {name: value.default for name, value in parameters.items() if value.default is not value.empty}
    return {**defaults, **plugins.check_settings(folder, plugin.name, plugin.settings)}


def resolve_tool_settings(environment_settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each tool in an environment's `tools`, by the tool's name."""
    tools = environment_settings.get("tools", {})
    return {name: resolve_settings("tools", PluginConfig(name=name, settings=dict(own))) for name, own in tools.items()}


def uses_chat_engine(recipe: Recipe) -> bool:
    """Return whether the recipe's engine is a chat API, which needs no model here."""
    return plugins.is_subclass("engines", recipe.engine.name, ChatEngine)


def runs_model_here(recipe: Recipe) -> bool:
    """Return whether the recipe's engine samples from a model in this process, without a server."""
    return "vlm" in plugins.get_signature("engines", recipe.engine.name).parameters


def check_frame_pairs(recipe: Recipe) -> None:
    """Raise ConfigError if frames are to be paired and the engine's servers would receive them as single images."""
    if recipe.media.frame_pairs and not runs_model_here(recipe):
        raise ConfigError(
            f"media.frame_pairs=true needs an engine that runs the model in this process: {recipe.engine.name} takes "
            "single images. Set engine.name=local, or media.frame_pairs=false",
            key="media.frame_pairs",
            value=recipe.engine.name,
        )


def require_token_engine(recipe: Recipe) -> Recipe:
    """Return the recipe. Raises ConfigError if its engine doesn't report the tokens it samples."""
    if uses_chat_engine(recipe):
        raise ConfigError(
            f"engine.name: {recipe.engine.name} {NOT_TRAINABLE_MESSAGE}", key="engine.name", value=recipe.engine.name
        )
    return recipe


def apply_evaluation_settings(recipe: Recipe) -> Recipe:
    """Return the recipe with `evaluation.environment_settings` in effect, in named environments too."""
    return _change_environments(recipe, recipe.evaluation.environment_settings)


def apply_sft_settings(recipe: Recipe) -> Recipe:
    """Return the recipe with `sft.environment_settings` in effect, in named environments too."""
    return _change_environments(recipe, recipe.sft.environment_settings)


def apply_validation_settings(recipe: Recipe) -> Recipe:
    """Return the recipe with `validation.environment_settings` in effect, in named environments too."""
    return _change_environments(recipe, recipe.validation.environment_settings)


def _change_environments(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with settings of its environments replaced; a named one ignores those that it doesn't have."""
    environments = {}
    for name, config in recipe.environments.items():
        parameters = inspect.signature(plugins.load("environments", config.name)).parameters
        own = {key: value for key, value in changes.items() if key in parameters}
        environments[name] = config.with_values({"settings": {**config.settings, **own}})
    default = {**recipe.environment.settings, **changes}
    return recipe.with_values({"environment.settings": default, "environments": environments})


def remove_rewards(recipe: Recipe) -> Recipe:
    """Return the recipe without rewards, for whatever grades nothing and so needs no judge: SFT, `saccade ask`."""
    return _change_rewards(recipe, lambda rewards: {})


def remove_group_rewards(recipe: Recipe) -> Recipe:
    """Return the recipe with the rewards of single episodes alone. Raises ConfigError for a bad name or setting."""
    return _change_rewards(recipe, select_episode_rewards)


def _change_rewards(recipe: Recipe, change: Callable[[Mapping[str, RewardTerm]], dict[str, RewardTerm]]) -> Recipe:
    environments = {
        name: config.with_values({"rewards": change(config.rewards)}) for name, config in recipe.environments.items()
    }
    return recipe.with_values({"rewards": change(recipe.rewards), "environments": environments})


def require_trainable(recipe: Recipe) -> Recipe:
    """Return the recipe. Raises ConfigError if one of its environments or its engine can't be used for training.

    The ledgers of another system's prompt format are exact too, but no reward, anchor or format metric reads its tags.
    """
    used = {"environment": recipe.environment}
    used |= {f"environments.{name}": config for name, config in recipe.environments.items()}
    for section, config in used.items():
        if "prompt_format" in inspect.signature(plugins.load("environments", config.name)).parameters:
            raise ConfigError(
                f"{section}.name: {config.name} uses a prompt format that rewards can't read, so it can be evaluated "
                "but not trained; train with tool_calling, for example",
                key=f"{section}.name",
                value=config.name,
            )
    return require_token_engine(recipe)
