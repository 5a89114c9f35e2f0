"""Everything a rollout needs, made from a recipe: the same for training, evaluation and `saccade ask`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from saccade import plugins
from saccade.config import Recipe
from saccade.errors import ConfigError, boundary
from saccade.media.cache import Library
from saccade.model.backbone import Backbone
from saccade.protocols import UNTRAINABLE, Agent, Context, Engine, Renderer, Scorer, TextEngine
from saccade.rewards._compose import compose
from saccade.types import Sampling
from saccade.waiting import PausableClock

Watch = Callable[[str, Mapping[str, Any]], None]


def context_of(agent: Agent) -> int:
    """How many tokens a conversation of a bound agent may have, by its setting `context_tokens`; 0: it doesn't say.

    >>> context_of(plugins.bind("agents", "direct", {"context_tokens": 512}))
    512
    """
    setting = inspect.signature(agent).parameters.get("context_tokens")
    return 0 if setting is None else int(setting.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStage:
    """The media, the engine, the agent and the rewards of a recipe: enough to attempt and to grade."""

    recipe: Recipe
    renderer: Renderer
    media: Library
    engine: Engine
    agent: Agent
    score: Scorer
    clock: PausableClock = field(default_factory=PausableClock)  # of the deadlines of all its episodes

    @staticmethod
    def of(recipe: Recipe) -> "RolloutStage":
        """Bind the plugins; no model is loaded where the engine asks its server in words. Errors as `Stage.of`'s."""
        if not takes_text(recipe):
            return Stage.of(recipe)
        agent, score = _acting(recipe)
        media = Library()
        engine = _engine(recipe, media=media, context=context_of(agent))
        return RolloutStage(
            recipe=recipe, renderer=engine.renderer, media=media, engine=engine, agent=agent, score=score
        )

    def context(
        self, *, seed: int, frames: int | None = None, temperature: float | None = None, watch: Watch | None = None
    ) -> Context:
        """What one episode is given; `frames` is its budget K, `temperature` replaces the recipe's."""
        renderer, settings = self.renderer, self.recipe.sampling
        sampling = Sampling(
            temperature=settings.temperature if temperature is None else temperature,
            max_tokens=settings.max_tokens,
            seed=seed,
            stop_ids=renderer.stop_ids,
            forbidden_ids=renderer.forbidden_ids,
        )
        return Context(
            engine=self.engine,
            renderer=renderer,
            media=self.media,
            sampling=sampling,
            seed=seed,
            frames=frames,
            seconds=settings.episode_seconds or None,
            clock=self.clock,
            watch=watch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(RolloutStage):
    """The same with the model itself, which can be trained."""

    backbone: Backbone

    @staticmethod
    def of(recipe: Recipe) -> "Stage":
        """Load the model and bind the plugins; ConfigError or ModelError name what can't be used."""
        agent, score = _acting(exact(recipe))
        torch.set_num_threads(recipe.model.threads)
        backbone = Backbone(recipe.model)
        media = Library(workers=0 if backbone.device.type == "cpu" else 4)
        engine = _engine(recipe, backbone=backbone, media=media, context=context_of(agent))
        return Stage(
            recipe=recipe,
            renderer=backbone.renderer,
            backbone=backbone,
            media=media,
            engine=engine,
            agent=agent,
            score=score,
        )


def _acting(recipe: Recipe) -> tuple[Agent, Scorer]:
    agent = plugins.bind("agents", recipe.agent.name, recipe.agent.settings)
    return agent, compose(recipe.rewards)


def _engine(recipe: Recipe, **given: Any) -> Any:
    made = plugins.bind("engines", recipe.engine.name, recipe.engine.settings, **given)
    with boundary(ConfigError, f"the engine {recipe.engine.name} can't be made from a recipe"):
        return made()


def takes_text(recipe: Recipe) -> bool:
    """Whether the recipe's engine is asked in words, and so needs no model here."""
    engine = plugins.load("engines", recipe.engine.name)
    return inspect.isclass(engine) and issubclass(engine, TextEngine)


def exact(recipe: Recipe) -> Recipe:
    """The recipe, if its engine says which tokens it samples. Raises ConfigError for one that is asked in words."""
    if takes_text(recipe):
        raise ConfigError(f"engine.name: {recipe.engine.name} {UNTRAINABLE}")
    return recipe


def examined(recipe: Recipe) -> Recipe:
    """The recipe as evaluation uses it: the agent with the settings that evaluation has otherwise."""
    settings = {**recipe.agent.settings, **recipe.evaluation.agent}
    return recipe.model_copy(update={"agent": recipe.agent.model_copy(update={"settings": settings})})


def trainable(recipe: Recipe) -> Recipe:
    """The recipe, if its agent can be trained, with its engine. Raises ConfigError where one of them can't.

    The ledgers of an agent that speaks another system's protocol are as exact as any, but no reward, anchor or metric
    of format knows its tags.
    """
    name = recipe.agent.name
    if "protocol" in inspect.signature(plugins.load("agents", name)).parameters:
        told = "rewards don't know the form of, so it can be evaluated and asked but not trained"
        raise ConfigError(f"agent.name: {name} speaks a protocol that {told}; train with parallel, for example")
    return exact(recipe)
