"""Build prompts: the media of a task as frames and images, subtitles beside the frames, and the question."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePath

from saccade.environments.base import PromptSettings
from saccade.errors import MediaError
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import TIMESTAMP_FORMAT, sample_uniform_times, sample_window_times
from saccade.media.subtitles import Cue, find_subtitles, interleave_cues, read_cues, select_cues_at, subsample_cues
from saccade.protocols import Context, PixelBudget
from saccade.types import Media, MediaKind, Message, Task
from saccade.utils.numbers import to_finite
from saccade.utils.templates import fill_template

TEMPLATE_FACTS = ("width", "height", "num_frames", "fps", "duration", "file")
# A video's path, its share of the frame budget, and the subtitles to show with it: what the prompt shows of it.
LoadVideo = Callable[[str, int, tuple[Cue, ...]], Awaitable[list[str | ImageRef]]]


async def build_prompt(
    task: Task,
    ctx: Context,
    settings: PromptSettings,
    *,
    system_prompt: str,
    timestamp_format: str = TIMESTAMP_FORMAT,
    tags_as_tokens: bool = False,
) -> tuple[Message, ...]:
    """Return the messages of the prompt; they show min(K, frames in the videos) video frames.

    Media are shown in order: of a video its overview, each frame after its timestamp; an image alone. Several videos
    share the K frames. An empty `system_prompt` is left out; the settings decide whether the task's own system turn
    replaces it. Raises MediaError if the media can't be shown.
    """

    async def load_video(path: str, max_frames: int, cues: tuple[Cue, ...]) -> list[str | ImageRef]:
        return await load_overview(path, max_frames, ctx, settings, cues, timestamp_format)

    parts = await load_media(task, ctx, settings, load_video)
    user = Message(role="user", parts=(*parts, await fill_question(task, ctx, settings)), tags_as_tokens=tags_as_tokens)
    own_system = find_row_system_prompt(task, settings)
    return with_system(system_prompt if own_system is None else own_system, user, tags_as_tokens=tags_as_tokens)


def find_row_system_prompt(task: Task, settings: PromptSettings) -> str | None:
    """Return the system turn of the task's row, `extras.system`, which may be empty; None if the settings ignore it."""
    own = task.extras.get("system") if settings.system_prompt_source == "row" else None
    return own if isinstance(own, str) else None


async def fill_question(task: Task, ctx: Context, settings: PromptSettings) -> str:
    """Return the question in its template, or alone under the row's own system turn. Raises MediaError."""
    if find_row_system_prompt(task, settings) is not None:
        return format_question(task)
    return await fill_question_template(settings.question_template, task, ctx)


async def fill_question_template(template: str, task: Task, ctx: Context) -> str:
    """Return the question in its template, with facts about the task's first image or video. Raises MediaError."""
    names = [name for name in TEMPLATE_FACTS if f"{{{name}}}" in template]
    facts: dict[str, str] = {}
    if names and task.media:
        media = task.media[0]
        facts["file"] = PurePath(media.path).name
        if media.kind is MediaKind.IMAGE:
            width, height = await ctx.media.get_image_size(media.path)
            facts |= {"width": str(width), "height": str(height)}
        else:
            info = await ctx.media.probe(media.path)
            facts |= {"width": str(info.width), "height": str(info.height), "num_frames": str(info.num_frames)}
            facts |= {"duration": f"{info.duration:.1f}", "fps": f"{info.num_frames / max(info.duration, 1e-9):.2f}"}
    values = {**dict.fromkeys(names, ""), **facts, "question": format_question(task)}
    return fill_template(template, values)


def with_system(system: str, user: Message, *, tags_as_tokens: bool = False) -> tuple[Message, ...]:
    """Return the user's message after the system prompt, or alone if that is empty."""
    if not system:
        return (user,)
    return Message(role="system", parts=(system,), tags_as_tokens=tags_as_tokens), user


def collect_images(messages: Sequence[Message]) -> tuple[ImageRef, ...]:
    """Return the images of messages, in order."""
    return tuple(part for message in messages for part in message.parts if isinstance(part, ImageRef))


def count_frames(images: Sequence[ImageRef]) -> int:
    """Return how many of the images are frames of a video."""
    return sum(len(image.frames) for image in images if image.time is not None)


async def load_media(task: Task, ctx: Context, settings: PromptSettings, load_video: LoadVideo) -> list[str | ImageRef]:
    """Return the task's media in order: each image, and of each video what `load_video` returns."""
    num_videos = sum(media.kind is MediaKind.VIDEO for media in task.media)
    shares = iter(split_frame_budget(ctx.frame_budget or settings.num_frames, num_videos))
    budget = PixelBudget(*settings.image_pixels)
    parts: list[str | ImageRef] = []
    for media in task.media:
        if media.kind is MediaKind.IMAGE:
            parts.append(await ctx.media.load_image(media.path, factor=ctx.renderer.factor, budget=budget))
        else:
            cues = await load_subtitles(task) if media is find_first_video(task) else ()
            parts += await load_video(media.path, next(shares), cues)
    return parts


async def load_overview(
    path: str,
    max_frames: int,
    ctx: Context,
    settings: PromptSettings,
    cues: tuple[Cue, ...] = (),
    timestamp_format: str = TIMESTAMP_FORMAT,
) -> list[str | ImageRef]:
    """Return at most `max_frames` frames of a video, each after its timestamp, with the subtitles at them.

    They are spread evenly, or have the rate `overview_fps` if that takes fewer of them.
    """
    clip = await ctx.media.probe(path)
    # A short video has fewer frames than the budget. In a video of variable frame rate two times may share a frame.
    max_frames = min(max_frames, clip.num_frames)
    if settings.overview_fps is None:
        times = sample_uniform_times(clip.duration, max_frames)
    else:
        times = sample_window_times(0.0, clip.duration, fps=settings.overview_fps, max_frames=max_frames)
    budget = PixelBudget(*settings.frame_pixels)
    frames = await ctx.media.load_frames(path, times, factor=ctx.renderer.factor, budget=budget)
    return interleave_subtitles(frames, cues, ctx, settings, timestamp_format)


def interleave_subtitles(
    frames: list[ImageRef],
    cues: tuple[Cue, ...],
    ctx: Context,
    settings: PromptSettings,
    timestamp_format: str = TIMESTAMP_FORMAT,
) -> list[str | ImageRef]:
    """Return frames after their timestamps, between the subtitles that they fall into.

    Without frames: all subtitles, subsampled to `max_subtitle_tokens`.
    """
    times = [frame.time for image in frames for frame in image.frames if frame.time is not None]
    cues_at_frames = select_cues_at(cues, times)
    shown = subsample_cues(cues_at_frames, settings.max_subtitle_tokens, lambda line: len(ctx.renderer.encode(line)))
    return interleave_cues(frames, shown, timestamp_format)


def find_first_video(task: Task) -> Media | None:
    """Return the video that tools load and that subtitles belong to."""
    return next((media for media in task.media if media.kind is MediaKind.VIDEO), None)


async def load_subtitles(task: Task) -> tuple[Cue, ...]:
    """Return the subtitles of the first video, from the file `extras["subtitles"]`, relative to the video's folder.

    `extras["subtitles_offset"]` (seconds) is subtracted from their times. Raises MediaError if the file can't be read.
    """
    path = find_subtitles(task)
    if path is None:
        return ()
    value = task.extras.get("subtitles_offset")
    offset = to_finite(value) if value else 0.0
    if offset is None:
        raise MediaError(
            f"task {task.id}: extras.subtitles_offset must be a number of seconds, not {value!r:.60}",
            key="extras.subtitles_offset",
            value=value,
        )
    return await asyncio.to_thread(read_cues, path, offset)


def split_frame_budget(num_frames: int, num_videos: int) -> list[int]:
    """Return each video's share of a frame budget: an even split, at least one each, the remainder to the first ones.

    >>> split_frame_budget(8, 3), split_frame_budget(2, 3)
    ([3, 3, 2], [1, 1, 1])
    """
    return [max(1, num_frames // num_videos + (index < num_frames % num_videos)) for index in range(num_videos)]


def format_question(task: Task) -> str:
    r"""Return the question, and its options by letter.

    >>> from saccade.types import AnswerType
    >>> kind = AnswerType.CHOICE
    >>> task = Task(id="q", question="Which?", media=(), answer_type=kind, ground_truth="A", options=("red", "blue"))
    >>> format_question(task)
    'Which?\nA. red\nB. blue'
    """
    return "\n".join((task.question, *(f"{chr(65 + index)}. {option}" for index, option in enumerate(task.options))))
