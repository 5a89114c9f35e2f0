"""The single-turn agent that answers at once: a baseline, and the control without tools."""

from saccade.agents._loop import attempt
from saccade.agents._prompt import Plan
from saccade.protocols import Context
from saccade.sections import Count, Span, Whole
from saccade.types import Episode, Task

SYSTEM = (
    "You answer questions about a video or about pictures. Of a video you see a few frames, each after its time. Give "
    "only the answer, inside <answer></answer>."
)


async def direct(
    task: Task,
    ctx: Context,
    *,
    overview_frames: Count = 64,
    overview_pixels: Span = (784, 50176),
    image_pixels: Span = (3136, 2000000),
    subtitle_tokens: Whole = 2048,
    context_tokens: Count = 32768,
    think_prefix: bool = False,
    system: str = SYSTEM,
) -> Episode:
    """Attempt a task in one reply; `ctx.frames` overrides `overview_frames`. Raises as `parallel` does.

    Pixels are the least and most per frame of a video, and per still picture; subtitles as in `parallel`.
    """
    plan = Plan(
        name="reasoning" if think_prefix else "direct",
        system=system,
        think_prefix=think_prefix,
        overview_frames=overview_frames,
        overview_pixels=overview_pixels,
        image_pixels=image_pixels,
        subtitle_tokens=subtitle_tokens,
        context_tokens=context_tokens,
    )
    return await attempt(task, ctx, plan)
