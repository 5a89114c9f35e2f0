"""What a build costs at most: requests and tokens of each stage, from the scenes and the settings alone.

The limits hold by construction, whatever the teacher replies: the journal truncates replies, questions and options have
a maximum length, and the runner ends an episode whose context is full.
"""

import sys
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

from saccade.chat.message_renderer import BYTES_PER_TOKEN, TOKENS_PER_MESSAGE
from saccade.config.schema import DataBuildRecipe, PriceConfig
from saccade.environments.single_turn import SingleTurn
from saccade.environments.task_environments import TaskEnvironments
from saccade.environments.tool_environment import ToolEnvironment
from saccade.media.image import fit_size
from saccade.media.scenes import Scene
from saccade.protocols import PixelBudget
from saccade.rollouts.components import resolve_tool_settings
from saccade.runs.data_build import captions, demonstrations, filters, questions
from saccade.runs.data_build.clips import Clip
from saccade.runs.data_build.journal import MAX_BYTES_PER_TOKEN, StageUsage
from saccade.tools.base import load_tool

_TIMESTAMP_TOKENS = 5
_FRAME_NAME_TOKENS = 12  # of tags around a frame, as the environment `python` writes them
_TEMPLATE_TOKENS = 256  # of a packaged system prompt, the instruction around tool schemas, and facts about the video
_SCENE_HEADER_TOKENS = 16  # of a scene's captions in the request for questions
_EXPANSION = MAX_BYTES_PER_TOKEN // BYTES_PER_TOKEN  # estimated tokens of a reply's text per token of the server


def estimate_usage(clips: Sequence[Clip], recipe: DataBuildRecipe, *, image_token_size: int) -> dict[str, StageUsage]:
    """Return the largest usage of each stage, as if every reply had full length and every question stayed.

    `image_token_size` is the side of the teacher's visual token, in pixels.
    """
    usage = dict.fromkeys((captions.STAGE, questions.STAGE, *filters.STAGES, demonstrations.STAGE), StageUsage())
    for clip in clips:
        for stage, added in _estimate_clip(clip, recipe, image_token_size).items():
            usage[stage] += added
    return usage


def compute_cost(usage: StageUsage, price: PriceConfig) -> float | None:
    """Return the price of a usage; None if a price is unknown."""
    if price.prompt is None or price.completion is None:
        return None
    return (usage.prompt_tokens * price.prompt + usage.completion_tokens * price.completion) / 1e6


def _estimate_clip(clip: Clip, recipe: DataBuildRecipe, image_token_size: int) -> dict[str, StageUsage]:
    settings, scenes = recipe.data_build, clip.record.scenes
    num_scenes, scene_questions, pair_questions = (
        len(scenes),
        settings.questions.num_per_scene,
        settings.questions.num_per_pair,
    )
    num_pairs = min(comb(num_scenes, 2), settings.questions.pairs_per_video) if pair_questions else 0
    num_questions = num_scenes * scene_questions + num_pairs * pair_questions
    frame = _count_frame_tokens(clip, settings.captions.frame_pixels, image_token_size)
    frames = [len(captions.sample_scene_times(scene, settings.captions)) for scene in scenes]
    num_units = (num_scenes if scene_questions else 0) + num_pairs
    num_described = (num_scenes if scene_questions else 0) + 2 * num_pairs
    description = _EXPANSION * settings.captions.max_tokens + _SCENE_HEADER_TOKENS
    types = "grounding, " * max(scene_questions, pair_questions)
    instruction = (questions.PROMPT, questions.RELATION, *questions.RULES.values(), types)
    prompts = {
        captions.STAGE: sum(frames) * frame + num_scenes * _count_text_tokens(captions.PROMPT),
        questions.STAGE: num_described * description + num_units * _count_text_tokens(*instruction),
    }
    requests = {captions.STAGE: num_scenes, questions.STAGE: num_units}
    longest = {captions.STAGE: settings.captions.max_tokens, questions.STAGE: settings.questions.max_tokens}
    shown: tuple[Scene, ...] = tuple(sorted(scenes, key=lambda scene: scene.end - scene.start)[-2:])
    instruction = (filters.NO_VIDEO_PROMPT, filters.PROMPT, filters.ANSWER_PROMPT)
    vote = _count_question_tokens(recipe) + _count_text_tokens(*instruction) + _count_text_tokens("")
    for stage in filters.STAGES:
        times = filters.sample_vote_times(stage, shown, clip.record.duration, settings.filters, settings.captions)
        requests[stage] = num_questions * filters.count_votes(stage, settings.filters)
        prompts[stage] = requests[stage] * (vote + len(times) * frame)
        longest[stage] = settings.filters.max_tokens
    usage = {
        stage: StageUsage(
            requests=requests[stage],
            prompt_tokens=prompts[stage],
            completion_tokens=requests[stage] * longest[stage],
        )
        for stage in requests
    }
    num_episodes = num_questions * settings.demonstrations.attempts
    return {**usage, demonstrations.STAGE: _estimate_episodes(clip, recipe, image_token_size, num_episodes)}


def _estimate_episodes(clip: Clip, recipe: DataBuildRecipe, image_token_size: int, num_episodes: int) -> StageUsage:
    """Return the largest usage of episodes in the recipe's default environment: one that ends, or one with tools.

    What follows the prompt is bounded by the context limit alone: a reply may hold hundreds of calls that are refused.
    """
    environment = TaskEnvironments.from_recipe(recipe).default()
    limit = environment.max_context_tokens
    prompt, num_turns, num_sub_agents, window = limit, 0, 0, 0
    if isinstance(environment, ToolEnvironment | SingleTurn):
        prompt = min(_count_prompt_tokens(clip, recipe, environment, image_token_size), limit)
    if isinstance(environment, ToolEnvironment):
        num_turns = environment.max_tool_turns
        tools = resolve_tool_settings({"tools": environment.settings.tools})
        if asking := [tool for name, tool in tools.items() if load_tool(name).may_run_sub_agent]:
            num_sub_agents = num_turns * environment.max_calls_per_turn
            window = max(min(_count_window_tokens(clip, recipe, tool, image_token_size), limit) for tool in asking)
    requests = num_episodes * (1 + num_turns + num_sub_agents)
    return StageUsage(
        requests=requests,
        prompt_tokens=num_episodes * (prompt + num_turns * limit + num_sub_agents * window),
        completion_tokens=requests * recipe.sampling.max_tokens,
    )


def _count_prompt_tokens(
    clip: Clip, recipe: DataBuildRecipe, environment: ToolEnvironment | SingleTurn, image_token_size: int
) -> int:
    """Return the most tokens of an episode's prompt."""
    settings = environment.settings
    schemas = str(environment.tool_schemas) if isinstance(environment, ToolEnvironment) else ""
    texts = (settings.system_prompt or "", schemas, settings.question_template)
    num_frames = min(max(recipe.frame_budgets, default=settings.num_frames), clip.record.num_frames)
    frame = _count_frame_tokens(clip, settings.frame_pixels, image_token_size) + _FRAME_NAME_TOKENS
    question = settings.question_template.count("{question}") * _count_question_tokens(recipe)
    return _TEMPLATE_TOKENS + _count_text_tokens(*texts) + question + num_frames * frame


def _count_window_tokens(clip: Clip, recipe: DataBuildRecipe, tool: Mapping[str, Any], image_token_size: int) -> int:
    """Return the most tokens of a sub-agent's prompt, from the settings of its tool: frames and a question."""
    if "frame_range" not in tool:  # one of the user's own
        return sys.maxsize
    frames = tool["frame_range"][1] * _count_frame_tokens(clip, tool["frame_pixels"], image_token_size)
    template = tool.get("prompt_template", "{question}")
    question = max(_EXPANSION * recipe.sampling.max_tokens, _count_text_tokens(tool.get("default_question", "")))
    return frames + _count_text_tokens(template) + template.count("{question}") * question


def _count_question_tokens(recipe: DataBuildRecipe) -> int:
    """Return the most tokens of a question with its options: a character has at most the bytes of one token."""
    num_options = recipe.data_build.questions.num_options
    return questions.MAX_QUESTION_CHARS + num_options * (questions.MAX_OPTION_CHARS + 1)


def _count_text_tokens(*texts: str) -> int:
    """Return the most tokens of a message with these texts."""
    text = "".join(texts)
    return len(text.encode()) // BYTES_PER_TOKEN + 1 + TOKENS_PER_MESSAGE


def _count_frame_tokens(clip: Clip, pixels: tuple[int, int], image_token_size: int) -> int:
    """Return the tokens of a frame of a clip with its timestamp; `pixels` are the minimum and maximum area."""
    budget = PixelBudget(min_pixels=pixels[0], max_pixels=pixels[1])
    width, height = fit_size(clip.record.width, clip.record.height, image_token_size, budget)
    return width * height // image_token_size**2 + _TIMESTAMP_TOKENS
