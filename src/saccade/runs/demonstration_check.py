"""Check a file of demonstrations before a run: which of them can be replayed completely, and why not the others."""

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade import plugins
from saccade.chat.message_renderer import MessageRenderer
from saccade.chat.parser import parse_reply
from saccade.chat.renderer import load_renderer
from saccade.config.load import load_recipe
from saccade.config.schema import Recipe
from saccade.data.dataset import detect_item_type, parse_item, resolve_media_paths
from saccade.data.source_row import iterate_rows_with_errors
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import DataError
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context, Renderer
from saccade.rollouts.components import apply_sft_settings
from saccade.training.demonstrations import DemonstrationReport, ReplayEngine, check_demonstrations
from saccade.types import Demonstration, SamplingParams

TOKEN_PIXELS = 28  # pixels per side of a visual token, if no model says: Qwen2.5-VL's


def check_demonstration_file(
    path: Path,
    *,
    recipe: str | None = None,
    model: Path | None = None,
    media_root: Path | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> DemonstrationReport | None:
    """Replay the demonstrations of a file in a recipe's environments; None for a file of tasks.

    `recipe` defaults to the published SFT recipe that suits the replies: with code, or with tool calls, to which it
    offers every packaged tool that they call. Without a `model` no limit of tokens is checked. Rows that can't be read,
    or whose media are missing, are left out. Raises ConfigError for an unusable recipe, ModelError for an unusable
    model.
    """
    if detect_item_type(path) is not Demonstration:
        return None
    demonstrations = _read_demonstrations(path, media_root or path.parent)
    loaded = load_recipe(recipe, []) if recipe else build_default_recipe(demonstrations.values())
    if recipe is None:  # names of another recipe's environments
        demonstrations = {
            row: item
            if item.task.environment in loaded.environments
            else replace(item, task=replace(item.task, environment=None))
            for row, item in demonstrations.items()
        }
    renderer: Renderer = load_renderer(str(model)) if model else MessageRenderer(TOKEN_PIXELS)
    ctx = Context(
        engine=ReplayEngine(renderer=renderer, replies_by_seed={}),
        renderer=renderer,
        media=CachingMediaLoader(pairs_frames=loaded.media.frame_pairs),
        sampling=SamplingParams(max_tokens=loaded.sampling.max_tokens),
        seed=loaded.seed,
    )
    check = check_demonstrations(
        demonstrations,
        TaskEnvironments.from_recipe(apply_sft_settings(loaded)),
        ctx,
        accept_recorded_errors=loaded.sft.accept_recorded_errors,
        run_code=True,
        on_progress=on_progress,
    )
    return asyncio.run(check)


def build_default_recipe(demonstrations: Collection[Demonstration]) -> Recipe:
    """Return the published SFT recipe that suits the replies, with all packaged tools that they call.

    It begins replies with a thought only if some reply has one.
    """
    names = {
        call.name for item in demonstrations for reply in item.replies for call in parse_reply(reply).calls if call.ok
    }
    recipe = load_recipe("pyvision/sft" if "python" in names else "paravt/sft", [])
    tools = recipe.environment.settings["tools"]
    others: dict[str, Any] = {name: {} for name in sorted(names & {*plugins.list_plugins("tools")} - tools.keys())}
    settings = {**recipe.environment.settings, "tools": {**tools, **others}}
    if not any(reply.lstrip().startswith("<think>") for item in demonstrations for reply in item.replies):
        settings["force_think"] = False
    return recipe.with_values({"environment.settings": settings})


def _read_demonstrations(path: Path, folder: Path) -> dict[int, Demonstration]:
    demonstrations = {}
    for number, row in enumerate(iterate_rows_with_errors(path), start=1):
        if isinstance(row, DataError):
            continue
        try:
            item = resolve_media_paths(parse_item(row, Demonstration), folder)
        except DataError:
            continue
        if all(os.path.isfile(media.path) for media in item.media):
            demonstrations[number] = item
    return demonstrations
