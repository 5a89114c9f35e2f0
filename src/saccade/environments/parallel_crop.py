"""The parallel agent: an overview, then closer looks, several at the same time.

With `tools={"crop_video": {}}` windows of the video that sub-agents answer (ParaVT, arXiv 2605.20342);
`dispatch="sequential"` is the LongVT baseline. With `tools={"zoom_image": {}}` boxes of still pictures, shown to the
agent itself. `tools={}` is the control with the same weights and the tools off.
"""

from collections.abc import Mapping
from typing import Any, Literal

from saccade.agents._loop import attempt
from saccade.agents._prompt import Plan
from saccade.protocols import Context
from saccade.sections import Count, Span, Whole
from saccade.tools._tool import Tools
from saccade.types import Episode, Task

SYSTEM = (
    "You answer questions about a video or about pictures. Of a video you see a few frames, each after its time. Think "
    "first, inside <think></think>. To look closer, call tools, each call inside <tool_call></tool_call>; calls of one "
    "reply run at the same time. Give the final answer inside <answer></answer>."
)
TOOLS: Mapping[str, Mapping[str, Any]] = {"crop_video": {}}
FORCED_ANSWER = "No more calls are possible. Give your answer now, inside <answer></answer>."


async def parallel(
    task: Task,
    ctx: Context,
    *,
    max_turns: Whole = 3,
    max_calls: Count = 5,
    dispatch: Literal["parallel", "sequential"] = "parallel",
    think_prefix: bool = True,
    tools: Tools = TOOLS,
    tool_schemas: bool = True,
    overview_frames: Count = 64,
    overview_pixels: Span = (784, 50176),
    image_pixels: Span = (3136, 2000000),
    subtitle_tokens: Whole = 2048,
    result_tokens: Count = 512,
    context_tokens: Count = 32768,
    system: str = SYSTEM,
    forced_answer: str = FORCED_ANSWER,
) -> Episode:
    """Attempt a task with at most `max_turns` tool turns of `max_calls` calls; `ctx.frames` overrides the overview's.

    `tools` are offered by name, each with its own settings. Pixels are the least and most per frame or still picture.
    Of a video with subtitles those that a frame falls into stand between the frames, `subtitle_tokens` at most.
    Results are cut to `result_tokens`; a conversation that would outgrow `context_tokens` ends. An empty `system` or
    `forced_answer` is left out. Raises MediaError where the task's media can't be shown.
    """
    plan = Plan(
        name="parallel",
        system=system,
        think_prefix=think_prefix,
        overview_frames=overview_frames,
        overview_pixels=overview_pixels,
        image_pixels=image_pixels,
        subtitle_tokens=subtitle_tokens,
        context_tokens=context_tokens,
        tools=tools,
        schemas=tuple(tools) if tool_schemas else (),
        result_tokens=result_tokens,
        max_turns=max_turns,
        max_calls=max_calls,
        one_call=dispatch == "sequential",
        forced_answer=forced_answer,
    )
    return await attempt(task, ctx, plan)
