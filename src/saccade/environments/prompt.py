"""How an agent is set up, and the prompt that it begins with."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from saccade.errors import MediaError
from saccade.ledger import Ledger, Picture, Segment
from saccade.media.picks import STAMP, uniform_times
from saccade.media.subtitles import Cue, read_cues, seen, subtitles_path, thinned, woven
from saccade.protocols import Budget, Context, Renderer
from saccade.tools._tool import tool_named
from saccade.types import Media, MediaKind, Message, Reply, Stop, Task, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of an agent: what it sees first, what it may call, and its limits."""

    name: str
    system: str
    think_prefix: bool
    overview_frames: int  # of all videos together
    overview_pixels: tuple[int, int]  # least and most per frame
    image_pixels: tuple[int, int]  # least and most per still picture
    context_tokens: int  # expanded tokens of one conversation, replies included
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # those that are offered, with their settings
    schemas: tuple[str, ...] = ()  # the tools that the system turn lists, by name or as JSON
    result_tokens: int = 512
    max_turns: int = 0  # tool turns
    max_calls: int = 5  # per turn
    one_call: bool = False  # serve the first call of a turn only, and say so
    forced_answer: str = ""  # said after the last tool turn
    subtitle_tokens: int = 0  # of the lines beside the overview, at most
    stamp: str = STAMP  # what goes before a frame
    tags: bool = False  # whether tags in what is said to the model are their tokens
    prompt: "Prompt | None" = None  # another way to begin than `opening`
    voice: "Voice | None" = None  # another way to put a result into words than the loop's
    teller: Literal["tool", "user"] = "tool"  # in whose turn the results come
    read: "Read | None" = None  # another way to read a reply than the renderer's
    offered: tuple[str, ...] = ()  # the tools by the names that the model knows, where they aren't ours


Prompt = Callable[[Task, Context, Plan], Awaitable[tuple[tuple[Message, ...], int]]]
Voice = Callable[[ToolResult, int], tuple[str | Picture, ...]]
Read = Callable[[Reply, Stop], Reply]  # a reply as the renderer reads it, and why it ended


async def opening(task: Task, ctx: Context, plan: Plan) -> tuple[tuple[Message, ...], int]:
    """The messages of the prompt, and how many frames they show: min(K, frames in the videos).

    Media are shown in their order: of a video its overview, each frame after its time; a still picture alone. Several
    videos share the K frames. The lines of subtitles that a frame falls into stand between the frames.
    """
    videos = sum(media.kind is MediaKind.VIDEO for media in task.media)
    shares = iter(shared(ctx.frames or plan.overview_frames, videos))
    parts: list[str | Picture] = []
    for media in task.media:
        if media.kind is MediaKind.IMAGE:
            budget = Budget(min_pixels=plan.image_pixels[0], max_pixels=plan.image_pixels[1])
            parts.append(await ctx.media.image(media.path, factor=ctx.renderer.factor, budget=budget))
        else:
            cues = await subtitles_of(task) if media is first_video(task) else ()
            parts += await overview(media.path, next(shares), ctx, plan, cues)
    system = (Message(role="system", parts=(plan.system,), tags=plan.tags),) if plan.system else ()
    shown = sum(isinstance(part, Picture) and part.time is not None for part in parts)
    return (*system, Message(role="user", parts=(*parts, question_text(task)), tags=plan.tags)), shown


async def overview(path: str, frames: int, ctx: Context, plan: Plan, cues: tuple[Cue, ...] = ()) -> list[str | Picture]:
    """At most `frames` frames of a video, each after its time, with what is said at them."""
    clip = await ctx.media.probe(path)
    # A short video has fewer frames than the budget. Where its rate varies, two times may still fall on one frame.
    times = uniform_times(clip.duration, min(frames, clip.frames))
    budget = Budget(min_pixels=plan.overview_pixels[0], max_pixels=plan.overview_pixels[1])
    return beside(await ctx.media.frames(path, times, factor=ctx.renderer.factor, budget=budget), cues, ctx, plan)


def beside(shown: list[Picture], cues: tuple[Cue, ...], ctx: Context, plan: Plan) -> list[str | Picture]:
    """Frames, each after its time, and what is said at them; without frames, all that is said and has room."""
    said = seen(cues, [picture.time for picture in shown if picture.time is not None])
    return woven(shown, thinned(said, plan.subtitle_tokens, lambda line: len(ctx.renderer.encode(line))), plan.stamp)


def first_video(task: Task) -> Media | None:
    """The video that tools look at and that subtitles belong to."""
    return next((media for media in task.media if media.kind is MediaKind.VIDEO), None)


async def subtitles_of(task: Task) -> tuple[Cue, ...]:
    """The lines of the first video: of the file that `extras["subtitles"]` names, from the video's own folder.

    `extras["subtitles_offset"]` (seconds) is taken off their times. Raises MediaError where the file can't be read.
    """
    path = subtitles_path(task)
    if path is None:
        return ()
    offset = task.extras.get("subtitles_offset") or 0.0
    if not isinstance(offset, int | float):
        raise MediaError(f"task {task.id}: extras.subtitles_offset must be a number of seconds, not {offset!r}")
    return await asyncio.to_thread(read_cues, path, float(offset))


def shared(frames: int, videos: int) -> list[int]:
    """A frame budget shared evenly by some videos, the first ones getting what is left over; each gets one at least.

    >>> shared(8, 3), shared(2, 3)
    ([3, 3, 2], [1, 1, 1])
    """
    return [max(1, frames // videos + (place < frames % videos)) for place in range(videos)]


def question_text(task: Task) -> str:
    r"""The question, and its options by letter.

    >>> from saccade.types import Kind
    >>> question_text(Task(id="q", question="Which?", media=(), kind=Kind.CHOICE, gold="A", choices=("red", "blue")))
    'Which?\nA. red\nB. blue'
    """
    return "\n".join((task.question, *(f"{chr(65 + i)}. {choice}" for i, choice in enumerate(task.choices))))


def render_opening(renderer: Renderer, messages: tuple[Message, ...], tools: tuple[str, ...]) -> Segment:
    """A prompt as tokens; rendered once for all attempts of a group, and for equal windows of sub-agents."""
    return _rendered(cast(Hashable, renderer), messages, tools)


@functools.lru_cache(maxsize=1024)
def _rendered(renderer: Any, messages: tuple[Message, ...], tools: tuple[str, ...]) -> Segment:
    schemas = [json.loads(name) if name.startswith("{") else tool_named(name).schema for name in tools]
    segment: Segment = renderer.render(Ledger(), messages, tools=schemas)
    return segment
