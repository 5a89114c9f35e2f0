"""The single-turn agent that thinks before it answers: `direct` with a forced `<think>`."""

from saccade.agents.direct import direct
from saccade.protocols import Context
from saccade.types import Episode, Task

SYSTEM = (
    "You answer questions about a video. You see a few of its frames, each after its time. Think first, inside "
    "<think></think>, then give the answer inside <answer></answer>."
)


async def reasoning(
    task: Task,
    ctx: Context,
    *,
    overview_frames: int = 64,
    overview_pixels: tuple[int, int] = (784, 50176),
    context_tokens: int = 32768,
    think_prefix: bool = True,
    system: str = SYSTEM,
) -> Episode:
    """Attempt a task in one reply that thinks first; `ctx.frames` overrides `overview_frames`."""
    return await direct(
        task,
        ctx,
        overview_frames=overview_frames,
        overview_pixels=overview_pixels,
        context_tokens=context_tokens,
        think_prefix=think_prefix,
        system=system,
    )
