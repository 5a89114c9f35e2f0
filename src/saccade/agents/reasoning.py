"""The single-turn agent that thinks before it answers: `direct` with a forced `<think>`."""

from saccade.agents.direct import direct
from saccade.protocols import Context
from saccade.sections import Count, Span, Whole
from saccade.types import Episode, Task

SYSTEM = (
    "You answer questions about a video or about pictures. Of a video you see a few frames, each after its time. Think "
    "first, inside <think></think>, then give the answer inside <answer></answer>."
)


async def reasoning(
    task: Task,
    ctx: Context,
    *,
    overview_frames: Count = 64,
    overview_pixels: Span = (784, 50176),
    image_pixels: Span = (3136, 2000000),
    context_tokens: Count = 32768,
    think_prefix: bool = True,
    system: str = SYSTEM,
    subtitle_tokens: Whole = 2048,
) -> Episode:
    """Attempt a task in one reply that thinks first; `ctx.frames` overrides `overview_frames`."""
    return await direct(
        task,
        ctx,
        overview_frames=overview_frames,
        overview_pixels=overview_pixels,
        image_pixels=image_pixels,
        subtitle_tokens=subtitle_tokens,
        context_tokens=context_tokens,
        think_prefix=think_prefix,
        system=system,
    )
