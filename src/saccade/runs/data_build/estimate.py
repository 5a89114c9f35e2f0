"""What a build costs at most: requests and tokens of each stage, from the scenes and the settings alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from saccade.config.schema import PriceConfig, Recipe
from saccade.environments.base import PromptSettings
from saccade.environments.task_environments import TaskEnvironments
from saccade.environments.tool_environment import ToolEnvironment
from saccade.media.image import fit_size
from saccade.media.scenes import Scene
from saccade.protocols import PixelBudget
from saccade.rollouts.components import resolve_tool_settings
from saccade.runs.data_build import captions, demonstrations, filters, questions
from saccade.runs.data_build.clips import Clip
from saccade.runs.data_build.journal import StageUsage

_BYTES_PER_TOKEN = 4  # as `chat.message_renderer` estimates texts
_TIMESTAMP_TOKENS = 5
_SYSTEM_TOKENS = 512  # system prompt and tool schemas of the environment
_QUESTION_TOKENS = questions.MAX_QUESTION_CHARS // _BYTES_PER_TOKEN + 128  # with options and the instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """The scenes, pairs of scenes and questions of a clip."""

    scenes: int
    pairs: int
    questions: int


def estimate_usage(clips: Sequence[Clip], recipe: Recipe, *, image_token_size: int) -> dict[str, StageUsage]:
    """Return the largest usage of each stage, as if every reply had full length and every question stayed.

    `image_token_size` is the side of the teacher's visual token, in pixels.
    """
    usage = dict.fromkeys((captions.STAGE, questions.STAGE, *filters.STAGES, demonstrations.STAGE), StageUsage())
    for clip in clips:
        for stage, added in _estimate_clip(clip, recipe, image_token_size).items():
            usage[stage] = add_usage(usage[stage], added)
    return usage


def compute_cost(usage: StageUsage, price: PriceConfig) -> float | None:
    """Return the price of a usage; None if a price is unknown."""
    if price.prompt is None or price.completion is None:
        return None
    return (usage.prompt_tokens * price.prompt + usage.completion_tokens * price.completion) / 1e6


def add_usage(first: StageUsage, second: StageUsage) -> StageUsage:
    """Return the sum of two usages."""
    return StageUsage(
        requests=first.requests + second.requests,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
    )


def _estimate_clip(clip: Clip, recipe: Recipe, image_token_size: int) -> dict[str, StageUsage]:
    settings, scenes = recipe.data_build, clip.record.scenes
    counts = _count(clip, recipe)
    frame = _count_frame_tokens(clip, settings.captions.frame_pixels, image_token_size)
    frames = [len(captions.sample_scene_times(scene, settings.captions)) for scene in scenes]
    caption_texts = settings.captions.max_tokens * (counts.scenes + 2 * counts.pairs)
    prompts = {
        captions.STAGE: sum(frames) * frame + len(scenes) * len(captions.PROMPT) // _BYTES_PER_TOKEN,
        questions.STAGE: caption_texts + (counts.scenes + counts.pairs) * len(questions.PROMPT) // _BYTES_PER_TOKEN,
    }
    num_units = (counts.scenes if settings.questions.num_per_scene else 0) + counts.pairs
    requests = {captions.STAGE: counts.scenes, questions.STAGE: num_units}
    longest = {captions.STAGE: settings.captions.max_tokens, questions.STAGE: settings.questions.max_tokens}
    votes = {
        filters.NO_VIDEO: settings.filters.no_video_votes,
        filters.FEW_FRAMES: settings.filters.few_frames_votes,
        filters.AGREEMENT: settings.filters.agreement_votes,
    }
    shown: tuple[Scene, ...] = tuple(sorted(scenes, key=lambda scene: scene.end - scene.start)[-2:])
    for stage, num_votes in votes.items():
        times = filters.sample_vote_times(stage, shown, clip.record.duration, settings.filters, settings.captions)
        requests[stage] = counts.questions * num_votes
        prompts[stage] = requests[stage] * (_QUESTION_TOKENS + len(times) * frame)
        longest[stage] = settings.filters.max_tokens
    usage = {
        stage: StageUsage(
            requests=requests[stage],
            prompt_tokens=prompts[stage],
            completion_tokens=requests[stage] * longest[stage],
        )
        for stage in requests
    }
    num_episodes = counts.questions * settings.demonstrations.attempts
    return {**usage, demonstrations.STAGE: _estimate_episodes(clip, recipe, image_token_size, num_episodes)}


def _count(clip: Clip, recipe: Recipe) -> _Counts:
    settings, num_scenes = recipe.data_build.questions, len(clip.record.scenes)
    num_pairs = min(comb(num_scenes, 2), settings.pairs_per_video) if settings.num_per_pair else 0
    num_questions = num_scenes * settings.num_per_scene + num_pairs * settings.num_per_pair
    return _Counts(scenes=num_scenes, pairs=num_pairs, questions=num_questions)


def _estimate_episodes(clip: Clip, recipe: Recipe, image_token_size: int, num_episodes: int) -> StageUsage:
    """Return the largest usage of episodes in the recipe's default environment."""
    environment = TaskEnvironments.from_recipe(recipe).default()
    limit, max_reply = environment.max_context_tokens, recipe.sampling.max_tokens
    settings = environment.settings if isinstance(environment, ToolEnvironment) else PromptSettings()
    num_turns = environment.max_turns if isinstance(environment, ToolEnvironment) else 0
    num_calls = environment.max_calls if isinstance(environment, ToolEnvironment) else 0
    max_result = environment.settings.max_tool_result_tokens if isinstance(environment, ToolEnvironment) else 0
    num_frames = min(max(recipe.frame_budgets, default=settings.num_frames), clip.record.num_frames)
    prompt = _SYSTEM_TOKENS + num_frames * _count_frame_tokens(clip, settings.frame_pixels, image_token_size)
    per_turn = max_reply + num_calls * max_result
    prompt_tokens = sum(min(prompt + turn * per_turn, limit) for turn in range(num_turns + 1))
    requests = num_turns + 1
    tools = resolve_tool_settings(environment.settings.model_dump()) if isinstance(environment, ToolEnvironment) else {}
    if crop := tools.get("crop_video"):
        frame = _count_frame_tokens(clip, crop["frame_pixels"], image_token_size)
        num_children = num_turns * num_calls
        requests += num_children
        window = crop["frame_range"][1] * frame + max_reply + crop["max_subtitle_tokens"]
        prompt_tokens += num_children * min(window, limit)
    return StageUsage(
        requests=num_episodes * requests,
        prompt_tokens=num_episodes * prompt_tokens,
        completion_tokens=num_episodes * requests * max_reply,
    )


def _count_frame_tokens(clip: Clip, pixels: tuple[int, int], image_token_size: int) -> int:
    """Return the tokens of a frame of a clip with its timestamp; `pixels` are the minimum and maximum area."""
    budget = PixelBudget(min_pixels=pixels[0], max_pixels=pixels[1])
    width, height = fit_size(clip.record.width, clip.record.height, image_token_size, budget)
    return width * height // image_token_size**2 + _TIMESTAMP_TOKENS
