"""The agent that speaks another system's protocol: the published prompt modes, for evaluation and `saccade ask`.

`protocol` names a prompt file (`direct`, `reasoning`, `agentic_general`, `agentic_minimal`, `agentic_videozoomer`,
`agentic_sage`, `agentic_longvt`), or is the path of your own; see docs/protocols. No reward reads these forms, so
nothing is trained with them.
"""

from dataclasses import replace

from saccade.agents._loop import attempt
from saccade.agents._prompt import Plan, first_video, opening, question_text
from saccade.agents._protocol import Named, announced, asked, protocol_named, reading, telling, without_tools
from saccade.protocols import Context
from saccade.sections import Count, Span, Whole
from saccade.tools._tool import Tools
from saccade.types import Episode, Message, Task


async def foreign(
    task: Task,
    ctx: Context,
    *,
    protocol: Named = "agentic_general",
    tools: Tools | None = None,
    max_turns: Whole | None = None,
    max_calls: Count | None = None,
    overview_frames: Count | None = None,
    overview_pixels: Span | None = None,
    image_pixels: Span = (3136, 2000000),
    result_tokens: Count = 2048,
    context_tokens: Count = 65536,
    subtitle_tokens: Whole = 2048,
) -> Episode:
    """Attempt a task as a published system would; `ctx.frames` overrides `overview_frames`. Raises as `parallel` does.

    Tools, limits and the overview are the protocol's own where they are None; `tools={}` is the control with the tools
    off. All else is as in `parallel`.
    """
    spoken, read = protocol_named(protocol)
    offered = spoken.tools if tools is None else tools
    spoken = spoken if offered else without_tools(spoken)

    async def prompt(task: Task, ctx: Context, plan: Plan) -> tuple[tuple[Message, ...], int]:
        (*before, user), shown = await opening(task, ctx, plan)
        video = first_video(task)
        clip = await ctx.media.probe(video.path) if video else None
        question = asked(spoken, question_text(task), video.path if video else "", clip)
        return (*before, replace(user, parts=(*user.parts[:-1], question))), shown

    plan = Plan(
        name="foreign",
        system=spoken.system,
        think_prefix=False,
        overview_frames=overview_frames or spoken.overview_frames,
        overview_pixels=overview_pixels or spoken.overview_pixels,
        image_pixels=image_pixels,
        context_tokens=context_tokens,
        tools=offered,
        schemas=announced(spoken),
        result_tokens=result_tokens,
        max_turns=spoken.max_turns if max_turns is None else max_turns,
        max_calls=spoken.max_calls if max_calls is None else max_calls,
        forced_answer=spoken.forced_answer,
        subtitle_tokens=subtitle_tokens,
        stamp=spoken.stamp,
        tags=True,  # as templates write them, which the systems were trained with
        prompt=prompt,
        voice=telling(spoken),
        teller=spoken.teller,
        read=reading(spoken, read),
        offered=spoken.offered,
    )
    return await attempt(task, ctx, plan)
