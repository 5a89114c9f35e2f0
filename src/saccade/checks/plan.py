"""Before anything is made or loaded: whether a recipe's settings, its model and its device can be used here."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from saccade import plugins
from saccade.chat.render import ChatRenderer, load_renderer
from saccade.config import Recipe
from saccade.engines._distribution import check_neutral
from saccade.errors import ConfigError, boundary
from saccade.model._adapters import check_adapters
from saccade.model.files import check_weights
from saccade.planning.talks import settings_of, tools_of
from saccade.rewards._compose import compose
from saccade.rollouts.stage import examined
from saccade.tools._sandbox import server
from saccade.tools._sandbox.limits import Isolation
from saccade.trackers._tell import check_trackers
from saccade.training import rl as rl_training


def check(recipe: Recipe, *, graded: bool = True) -> None:
    """See that the recipe's plugins and their settings can be used, before anything is made. Raises ConfigError.

    Where nothing is `graded` yet, what rewards need of their surroundings, such as a judge's key, may still be missing.
    """
    for look in checks(recipe, graded=graded).values():
        look()


def checks(recipe: Recipe, *, graded: bool = True) -> dict[str, Callable[[], object]]:
    """What `check` looks at, by name: each raises a ConfigError of its own."""
    return {
        "agent": functools.partial(_check_agents, recipe),
        "engine": functools.partial(_check_engine, recipe, graded=graded),
        "rewards": functools.partial(_check_rewards, recipe, graded=graded),
        "family": functools.partial(_check_family, recipe.model.family),
        "adapters": functools.partial(check_adapters, recipe.model.lora_rank),
        "practice": functools.partial(_check_practice, recipe),
        "trackers": functools.partial(check_trackers, recipe.track),
    }


def _check_agents(recipe: Recipe) -> None:
    for each in (recipe, examined(recipe)):
        plugins.bind("agents", each.agent.name, each.agent.settings)


def _check_engine(recipe: Recipe, *, graded: bool) -> None:
    made = plugins.bind("engines", recipe.engine.name, recipe.engine.settings, backbone=None, media=None, context=0)
    kind: Any = made.func  # a class
    if graded:  # what is not to be trained on may be sampled in any way
        rl_training.check_engine(recipe, kind)
        check_neutral(made.keywords)


def _check_rewards(recipe: Recipe, *, graded: bool) -> None:
    if graded:
        compose(recipe.rewards)
        if not any(term.weight for term in recipe.rewards.values()):
            raise ConfigError("rewards holds no term with a weight other than 0, so every attempt would be worth 0")
    else:
        for name, term in recipe.rewards.items():
            plugins.bind("rewards", name, term.settings)


def _check_family(family: str) -> None:
    families = plugins.names("chat.families")
    if family not in families:
        raise ConfigError(f"model.family: there is no family {family!r}; {plugins.nearest(family, families)}")


def _check_practice(recipe: Recipe) -> None:
    if recipe.world.charts and not (recipe.sft.practice or recipe.sft.practice_first):
        mend = "give sft.practice or sft.practice_first a share, or set world.image.charts to 0"
        raise ConfigError(f"the world's charts are for practice, and there is none: {mend}")


def check_model(weights: Path) -> ChatRenderer:
    """See that a checkpoint is whole: family, tokenizer, processor, all of its weights. Raises ModelError."""
    renderer = load_renderer(str(weights))
    check_weights(weights)
    return renderer


def check_device(device: str) -> None:
    """See that this machine has a device such as "cuda:1". Raises ConfigError."""
    kind, _, number = device.partition(":")
    mend = "set model.device=cpu (and model.dtype=float32), or go where there is one"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device={device}: torch finds no GPU that it can use here; {mend}")
    if kind == "cuda" and number.isdecimal() and int(number) >= torch.cuda.device_count():
        raise ConfigError(f"model.device={device}: there are {torch.cuda.device_count()} GPUs, counted from 0; {mend}")
    with boundary(ConfigError, f"model.device={device} can't be used ({mend})"):
        torch.zeros(1, device=device).item()


def isolations(recipe: Recipe) -> Iterator[tuple[str, Isolation]]:
    """The tools of a recipe's agent that run code, by name, and which isolation each wants."""
    for name, settings in tools_of(settings_of("agents", recipe.agent)).items():
        if "isolation" in settings:
            yield name, settings["isolation"]


def jails(*recipes: Recipe) -> dict[str, str]:
    """For each tool of the recipes' agents that runs code, what jails its code here, in words.

    The jail of this process is started for it. Raises ConfigError where the machine is weaker than a recipe wants.
    """
    wanted = {pair for recipe in recipes for pair in isolations(recipe)}
    return {
        f"jail of {name}, {isolation}": server.shared(isolation).report.sentence for name, isolation in sorted(wanted)
    }
