"""The single-turn agent that answers at once: a baseline, and the control without tools."""

from saccade.agents._loop import Plan, attempt
from saccade.protocols import Context
from saccade.types import Episode, Task

SYSTEM = (
    "You answer questions about a video. You see a few of its frames, each after its time. Give only the answer, "
    "inside <answer></answer>."
)


async def direct(
    task: Task,
    ctx: Context,
    *,
    overview_frames: int = 64,
    overview_pixels: tuple[int, int] = (784, 50176),
    context_tokens: int = 32768,
    think_prefix: bool = False,
    system: str = SYSTEM,
) -> Episode:
    """Attempt a task in one reply; `ctx.frames` overrides `overview_frames`. Raises as `parallel` does."""
    plan = Plan(
        name="reasoning" if think_prefix else "direct",
        system=system,
        think_prefix=think_prefix,
        overview_frames=overview_frames,
        overview_pixels=overview_pixels,
        context_tokens=context_tokens,
    )
    return await attempt(task, ctx, plan)
