"""The parallel agent: an overview, then crops of the video that sub-agents answer at the same time.

ParaVT, arXiv 2605.20342. `dispatch="sequential"` is the LongVT baseline, `tools=()` the control with the same weights
and the tools off.
"""

from typing import Literal

from saccade.agents._loop import Plan, attempt
from saccade.protocols import Context
from saccade.tools.crop_video import QUESTION
from saccade.types import Episode, Task

SYSTEM = (
    "You answer questions about a video. You see a few of its frames, each after its time. Think first, inside "
    "<think></think>. To look closer, call tools, each call inside <tool_call></tool_call>; calls of one reply run at "
    "the same time. Give the final answer inside <answer></answer>."
)
FORCED_ANSWER = "No more calls are possible. Give your answer now, inside <answer></answer>."


async def parallel(
    task: Task,
    ctx: Context,
    *,
    max_turns: int = 3,
    max_calls: int = 5,
    dispatch: Literal["parallel", "sequential"] = "parallel",
    think_prefix: bool = True,
    tools: tuple[str, ...] = ("crop_video",),
    tool_schemas: bool = True,
    overview_frames: int = 64,
    overview_pixels: tuple[int, int] = (784, 50176),
    crop_fps: float = 1.0,
    crop_frames: tuple[int, int] = (1, 16),
    crop_pixels: tuple[int, int] = (784, 50176),
    crop_question: str = QUESTION,
    result_tokens: int = 512,
    context_tokens: int = 32768,
    system: str = SYSTEM,
    forced_answer: str = FORCED_ANSWER,
) -> Episode:
    """Attempt a task with at most `max_turns` tool turns of `max_calls` calls; `ctx.frames` overrides the overview's.

    Pixels are the least and most per frame, `crop_frames` the least and most frames of a window at `crop_fps`. Results
    are cut to `result_tokens`; a conversation that would outgrow `context_tokens` ends. An empty `system` or
    `forced_answer` is left out. Raises MediaError or DataError where the task's media can't be shown.
    """
    plan = Plan(
        name="parallel",
        system=system,
        think_prefix=think_prefix,
        overview_frames=overview_frames,
        overview_pixels=overview_pixels,
        context_tokens=context_tokens,
        tools=tools,
        tool_schemas=tool_schemas,
        # A tool takes those of these that its signature names.
        tool_settings={
            "crop_fps": crop_fps,
            "crop_frames": crop_frames,
            "crop_pixels": crop_pixels,
            "crop_question": crop_question,
        },
        result_tokens=result_tokens,
        max_turns=max_turns,
        max_calls=max_calls,
        one_call=dispatch == "sequential",
        forced_answer=forced_answer,
    )
    return await attempt(task, ctx, plan)
