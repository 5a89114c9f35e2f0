"""The code agent: it writes Python against its media, and looks at what the code prints and shows.

PyVision-RL, arXiv 2602.20739. Code stands in `<code>` blocks (see chat/parse.py) and runs in an interpreter of the
episode's own (see tools/python.py); what comes of it is told inside `<interpreter>`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from saccade.agents._loop import attempt
from saccade.agents._prompt import Plan, beside, first_video, overview, question_text, shared, subtitles_of
from saccade.ledger import Picture
from saccade.protocols import Budget, Context
from saccade.sections import Count, Span, Whole
from saccade.tools._tool import Tools
from saccade.types import Episode, MediaKind, Message, Task, ToolResult

SYSTEM = (
    "You answer questions about images and videos, and you may run Python to look closer. Write it in one block:\n"
    "<code>\n```python\n...\n```\n</code>\n"
    "It runs in an interpreter that keeps its variables. Image i is the PIL picture image_clue_i; video j is the "
    "reader video_clue_j (len, indices, get_batch, get_avg_fps; frames have asnumpy). Print what you want to read; "
    "show pictures with plt.show() or their own show(). The result comes inside <interpreter>, and each picture that "
    "was shown is the next image_clue_i. When you know, answer inside <answer>\\boxed{...}</answer>."
)
FORCED_ANSWER = "No more code can be run. Give your answer now, inside <answer>\\boxed{...}</answer>."
NOTHING = "[nothing was printed and nothing was shown]"
TOOLS: Mapping[str, Mapping[str, Any]] = {"python": {}}


async def code(
    task: Task,
    ctx: Context,
    *,
    max_turns: Whole = 4,
    max_calls: Count = 1,
    video: Literal["runtime", "overview+runtime"] = "runtime",
    think_prefix: bool = False,
    tools: Tools = TOOLS,
    overview_frames: Count = 16,
    overview_pixels: Span = (784, 50176),
    image_pixels: Span = (3136, 2_000_000),
    subtitle_tokens: Whole = 2048,
    result_tokens: Count = 2048,
    context_tokens: Count = 32768,
    system: str = SYSTEM,
    forced_answer: str = FORCED_ANSWER,
) -> Episode:
    """Attempt a task with at most `max_turns` turns of `max_calls` code blocks; further blocks of a turn are refused.

    The published environment runs the last block of a turn, or a fence outside of one; here nothing is passed over in
    silence, and a fence alone is text.

    Still pictures are shown and can be processed. Of a video the prompt holds size, length and rate alone (`runtime`)
    or frames as well (`overview+runtime`: `overview_frames`, or `ctx.frames`); those are named and bound like images.
    Subtitles stand beside frames, as in `parallel`; where there are none, all of them, thinned to `subtitle_tokens`.
    Pixels are the least and most per frame, and per still picture. `tools` holds python with its settings, and others
    beside it, called by `<tool_call>` and listed in the system turn; without any it is the control that runs nothing.
    Raises MediaError where the media can't be shown, ConfigError where this machine is too weak for python's isolation.
    """

    async def prompt(task: Task, ctx: Context, plan: Plan) -> tuple[tuple[Message, ...], int]:
        return await opening(task, ctx, plan, frames=video == "overview+runtime")

    plan = Plan(
        name="code",
        system=system,
        think_prefix=think_prefix,
        overview_frames=overview_frames,
        overview_pixels=overview_pixels,
        image_pixels=image_pixels,
        context_tokens=context_tokens,
        tools=tools,
        schemas=tuple(name for name in tools if name != "python"),  # `system` says all there is to know of that one
        result_tokens=result_tokens,
        max_turns=max_turns,
        max_calls=max_calls,
        forced_answer=forced_answer,
        subtitle_tokens=subtitle_tokens,
        prompt=prompt,
        voice=interpreter,
    )
    return await attempt(task, ctx, plan)


async def opening(task: Task, ctx: Context, plan: Plan, *, frames: bool) -> tuple[tuple[Message, ...], int]:
    """The prompt, and how many frames it shows: pictures under their names, videos by their facts, the question."""
    videos = [media.path for media in task.media if media.kind is MediaKind.VIDEO]
    shares = shared(ctx.frames or plan.overview_frames, len(videos))
    parts: list[str | Picture] = []
    number = 0  # of the next video
    for media in task.media:
        if media.kind is MediaKind.IMAGE:
            budget = Budget(min_pixels=plan.image_pixels[0], max_pixels=plan.image_pixels[1])
            parts.append(await ctx.media.image(media.path, factor=ctx.renderer.factor, budget=budget))
            continue
        clip = await ctx.media.probe(media.path)
        length = f"{clip.frames} frames, {clip.frames / max(clip.duration, 1e-9):.2f} per second, {clip.duration:.1f} s"
        parts.append(f"video_clue_{number}: {clip.width}x{clip.height} pixels, {length}\n")
        cues = await subtitles_of(task) if media is first_video(task) else ()
        parts += await overview(media.path, shares[number], ctx, plan, cues) if frames else beside([], cues, ctx, plan)
        number += 1
    shown = sum(isinstance(part, Picture) and part.time is not None for part in parts)
    system = (Message(role="system", parts=(plan.system,)),) if plan.system else ()
    return (*system, Message(role="user", parts=(*named(parts, 0), question_text(task)))), shown


def interpreter(result: ToolResult, number: int) -> tuple[str | Picture, ...]:
    """A result as the model reads it; `number` is that of its first picture."""
    text = "\n".join(part for part in (result.text, result.error) if part)
    text = text if text or result.pictures else NOTHING
    parts = [f"Text Result:\n{text}\n" if text else ""]
    parts.append("Image Result:\n" if result.pictures else "")
    return "<interpreter>\n" + "".join(parts), *named(result.pictures, number), "</interpreter>"


def named(parts: Sequence[str | Picture], number: int) -> list[str | Picture]:
    """The parts with each picture under its name, counted from `number`: `<image_clue_0>` … `</image_clue_0>`."""
    found: list[str | Picture] = []
    for part in parts:
        if isinstance(part, Picture):
            found += [f"<image_clue_{number}>", part, f"</image_clue_{number}>\n"]
            number += 1
        else:
            found.append(part)
    return found
