"""The base of environments with tools: run the calls of a reply, show their results, until an answer or a limit.

    reset ──> the prompt: system, overview frames with their times, images, question; the tools' schemas
    step  ──> calls ─┬─ call_tool 0 ── ask ── sub-agent's episode ─┐
                     ├─ call_tool 1 ── ask ── sub-agent's episode ─┤ concurrent; the slowest decides
                     └─ call_tool 2 ── refused: an error result   ─┘
                              └──> results in the order of the calls, as ONE tool turn

A failing call is a result like any other. A failure of the engine or the sandbox cancels the turn's other calls and is
raised: the runner ends the episode, which is then excluded from training instead of scored.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from saccade.config.schema import NonNegativeInt, PositiveInt
from saccade.environments.base import THINK_PREFILL, ConfiguredEnvironment, PromptSettings
from saccade.environments.prompt import (
    build_prompt,
    collect_images,
    count_frames,
    find_first_video,
    find_row_system_prompt,
    load_subtitles,
)
from saccade.errors import EngineError, ToolError
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import interleave_timestamps
from saccade.media.subtitles import Cue
from saccade.protocols import Context, Done, Environment, Observation, PixelBudget
from saccade.tools.base import EpisodeResources, FunctionTool, ToolContext, Tools, load_tool, truncate_result
from saccade.types import (
    AnswerType,
    Call,
    Demonstration,
    Episode,
    EpisodeStatus,
    FinishReason,
    MediaKind,
    Message,
    RecordedResult,
    Reply,
    Task,
    ToolResult,
)
from saccade.utils.async_utils import gather_or_cancel
from saccade.utils.hashing import derive_seed

# The limits of tools are of wall time: a demonstration that is replayed beside other work must not fail by them.
REPLAY_TIME_FACTOR = 6.0
NO_TOOLS: Mapping[str, Mapping[str, Any]] = {}


class ToolSettings(PromptSettings):
    """Settings of environments with tools."""

    tools: Tools = NO_TOOLS  # tools by name, each with its own settings
    max_tool_turns: NonNegativeInt = 3  # turns whose calls are run; one more reply follows the last one
    max_calls_per_turn: PositiveInt = 5  # calls per turn
    max_tool_result_tokens: PositiveInt = 512  # longest text of a result, tokens; the rest is truncated
    force_think: bool = True  # start every reply with <think>
    system_prompt: str = ""  # system prompt; empty = none
    final_answer_prompt: str = ""  # user's message after the last tool turn; empty = none
    # longest reply to final_answer_prompt, tokens; null = sampling.max_tokens
    max_final_answer_tokens: PositiveInt | None = None
    # the same for choice tasks, whose answer is a letter; null = max_final_answer_tokens
    max_final_choice_tokens: PositiveInt | None = None


class ToolEnvironment(ConfiguredEnvironment):
    """A conversation with tools; subclasses replace the prompt, the form of results, or a limit."""

    settings: ToolSettings  # the recipe's `environment.settings`
    tool_result_role: Literal["tool", "user"] = "tool"  # role of the messages that hold results
    tags_as_tokens = False  # whether tags such as <think> in messages are the model's special tokens

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_turns = self.num_children = 0
        self.runtime_images: tuple[ImageRef, ...] = ()  # of the task, which tools see and the prompt doesn't show
        self.prompt_images: tuple[ImageRef, ...] = ()  # those, and the images of the prompt, in order
        self.shown_images: tuple[ImageRef, ...] = ()  # those, and the images of the whole conversation, in order
        self.subtitles: tuple[Cue, ...] = ()  # of the task's first video
        self.resources = EpisodeResources()
        self.skipped_tools: frozenset[str] = frozenset()  # tools whose calls are not run and have an empty result

    async def reset(self, task: Task, ctx: Context) -> Observation:
        """Return the prompt. Raises MediaError if the task's media can't be shown."""
        self.task = task
        self.subtitles = await load_subtitles(task)
        messages = await self.build_prompt(task, ctx)
        self.prompt_images = self.shown_images = (*self.runtime_images, *collect_images(messages))
        # A published system turn lists its tools itself.
        has_schemas = "<tools>" in (find_row_system_prompt(task, self.settings) or "")
        return Observation(
            messages=messages,
            tool_schemas=() if has_schemas else self.tool_schemas,
            prefill=self.prefill,
            num_frames=count_frames(self.prompt_images),
        )

    async def step(self, reply: Reply, ctx: Context) -> Observation | Done:
        """Run the calls of a reply. Raises EngineError or SandboxError if an engine or the sandbox failed."""
        assert self.task is not None, "reset the environment before step"
        turn, self.num_turns = self.num_turns, self.num_turns + 1
        if reply.answer is not None:
            return Done(status=EpisodeStatus.ANSWERED)  # calls beside an answer are not run: no turn would show them
        if not reply.calls:
            return Done(status=EpisodeStatus.NO_ANSWER)
        if turn >= self.max_tool_turns:
            return Done(status=EpisodeStatus.MAX_TURNS)
        results, children = await self.run_calls(turn, reply.calls, ctx)
        messages = self.build_result_messages(results)
        self.shown_images += collect_images(messages)
        return Observation(
            messages=messages,
            results=results,
            children=children,
            prefill=self.prefill,
            max_reply_tokens=self.max_final_answer_tokens if self.is_answer_requested else None,
        )

    async def close(self) -> None:
        """Close what the tools opened for the episode."""
        await self.resources.aclose()

    # ---- what subclasses may replace -------------------------------------------------------------------------------

    async def build_prompt(self, task: Task, ctx: Context) -> tuple[Message, ...]:
        """Return the messages of the prompt."""
        return await build_prompt(task, ctx, self.settings, system_prompt=self.settings.system_prompt)

    def format_result(self, result: ToolResult, first_image_index: int) -> tuple[str | ImageRef, ...]:
        """Return a result as the model reads it; its first image is the conversation's image `first_image_index`."""
        parts = (result.text, f"Error: {result.error}") if result.error is not None else (result.text,)
        return "\n".join(part for part in parts if part), *interleave_timestamps(result.images)

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The JSON schemas that the system turn lists."""
        return tuple(load_tool(name).schema for name in self.settings.tools)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The tools' names in the prompt, for error results."""
        return tuple(self.tools_by_name)

    @property
    def max_tool_turns(self) -> int:
        """How many turns with calls there may be; without tools one at most, in which calls are refused."""
        return self.settings.max_tool_turns if self.settings.tools else min(self.settings.max_tool_turns, 1)

    @property
    def max_calls_per_turn(self) -> int:
        """How many calls of a turn are run."""
        return self.settings.max_calls_per_turn

    @property
    def prefill(self) -> str:
        """The start of every reply."""
        return THINK_PREFILL if self.settings.force_think else ""

    # ---- calls -----------------------------------------------------------------------------------------------------

    @property
    def tools_by_name(self) -> dict[str, tuple[FunctionTool, Mapping[str, Any]]]:
        """The tools with their settings, by the names in calls."""
        return {(tool := load_tool(name)).name: (tool, settings) for name, settings in self.settings.tools.items()}

    async def run_calls(
        self, turn: int, calls: Sequence[Call], ctx: Context
    ) -> tuple[tuple[ToolResult, ...], tuple[Episode, ...]]:
        """Run the calls of one turn concurrently; return their results and the sub-agents' episodes."""
        ctx.emit_event("calls", turn=turn, calls=calls)
        rejections = self.find_rejections(calls)
        # Children stay in the order of the calls, whichever finishes first, so that a run is reproducible.
        outcomes = await gather_or_cancel(
            [self.call_tool(turn, index, call, rejections[index], ctx) for index, call in enumerate(calls)]
        )
        results: list[ToolResult] = []
        children: list[Episode] = []
        for result, child in outcomes:
            if child is not None:
                result = replace(result, child_index=self.num_children + len(children))
                children.append(child)
            results.append(result)
        self.num_children += len(children)
        return tuple(results), tuple(children)

    def find_rejections(self, calls: Sequence[Call]) -> list[str | None]:
        """Return per call why it isn't run, or None. Malformed calls don't count toward the limit of a turn."""
        reasons: list[str | None] = []
        for call in calls:
            if call.error is not None:
                reasons.append(call.error)
            elif call.name not in self.tools_by_name:
                hint = f"there is {', '.join(self.tool_names)}" if self.settings.tools else "answer without tools"
                reasons.append(f"there is no tool {call.name[:40]!r}; {hint}")
            elif reasons.count(None) >= self.max_calls_per_turn:  # None marks a call that is run
                reasons.append(f"too many calls: {self.max_calls_per_turn} per turn, and this one was not run")
            else:
                reasons.append(None)
        return reasons

    async def call_tool(
        self, turn: int, index: int, call: Call, rejection: str | None, ctx: Context
    ) -> tuple[ToolResult, Episode | None]:
        """Run one call, or refuse it."""
        if rejection is not None:
            return ToolResult(error=rejection), None
        assert self.task is not None
        tool, tool_settings = self.tools_by_name[call.name]
        seed, video = derive_seed(ctx.seed, "child", turn, index), find_first_video(self.task)
        ask = functools.partial(
            ask_sub_agent,
            parent=self.task,
            child_id=f"{turn}.{index}",
            ctx=ctx,
            seed=seed,
            max_context_tokens=self.max_context_tokens,
        )
        tool_context = ToolContext(
            media=ctx.media,
            renderer=ctx.renderer,
            ask=ask,
            video_path=video.path if video else "",
            seed=seed,
            task_images=tuple(image for image in self.prompt_images if image.time is None),
            shown_images=self.shown_images,
            video_paths=tuple(media.path for media in self.task.media if media.kind is MediaKind.VIDEO),
            question=self.task.question,
            subtitles=self.subtitles,
            resources=self.resources,
            settings=tool_settings,
            max_result_tokens=self.settings.max_tool_result_tokens,
            time_factor=1.0 if ctx.demonstration is None else REPLAY_TIME_FACTOR,
        )
        recorded = find_recorded_result(ctx.demonstration, turn, index)
        child: Episode | None = None
        if recorded is not None:
            pixels = tool_settings.get("image_pixels", self.settings.image_pixels)
            result = truncate_result(await load_recorded_result(recorded, ctx, pixels), tool_context)
        elif tool.name in self.skipped_tools:
            result = ToolResult(was_executed=True)
        else:
            result, child = await tool(call.arguments, ctx=tool_context)
        ctx.emit_event("result", turn=turn, index=index, call=call, result=result, child=child)
        return result, child

    @property
    def is_answer_requested(self) -> bool:
        """Whether the results of the last reply are followed by the prompt for the final answer."""
        return self.num_turns >= self.max_tool_turns and bool(self.settings.final_answer_prompt)

    @property
    def max_final_answer_tokens(self) -> int | None:
        """The length limit of the reply to the prompt for the final answer; None = that of every reply."""
        is_choice = self.task is not None and self.task.answer_type == AnswerType.CHOICE
        limit = self.settings.max_final_choice_tokens if is_choice else None
        return limit or self.settings.max_final_answer_tokens

    def build_result_messages(self, results: Sequence[ToolResult]) -> tuple[Message, ...]:
        """Return one message per result, and after the last tool turn the prompt for the final answer."""
        image_index, contents = len(self.shown_images), []
        for result in results:
            contents.append((self.tool_result_role, self.format_result(result, image_index)))
            image_index += len(result.images)
        if self.is_answer_requested:
            contents.append(("user", (self.settings.final_answer_prompt,)))
        if self.tool_result_role == "user":  # consecutive messages of one role are one turn
            contents = [("user", tuple(part for _, parts in contents for part in parts))]
        return tuple(Message(role=role, parts=parts, tags_as_tokens=self.tags_as_tokens) for role, parts in contents)


# ---- demonstrations -------------------------------------------------------------------------------------------------


def find_recorded_result(demonstration: Demonstration | None, turn: int, index: int) -> RecordedResult | None:
    """Return the result of a call that a demonstration records; None if its turn's calls are run."""
    if demonstration is None or turn >= len(demonstration.results) or not demonstration.results[turn]:
        return None
    results = demonstration.results[turn]
    return results[index] if index < len(results) else RecordedResult(error="the demonstration has no result of it")


async def load_recorded_result(recorded: RecordedResult, ctx: Context, image_pixels: tuple[int, int]) -> ToolResult:
    """Return a recorded result with its images; each has a number of pixels between the two given ones.

    Raises MediaError.
    """
    budget = PixelBudget(*image_pixels)
    images = [
        await ctx.media.load_image(image.path, factor=ctx.renderer.factor, budget=budget) for image in recorded.images
    ]
    return ToolResult(
        text=recorded.text, images=tuple(images), error=recorded.error, was_executed=recorded.error is None
    )


# ---- sub-agents ----------------------------------------------------------------------------------------------------


async def ask_sub_agent(
    messages: Sequence[Message], *, parent: Task, child_id: str, ctx: Context, seed: int, max_context_tokens: int
) -> Episode:
    """Return a sub-agent's episode: one reply to the messages of a tool.

    Raises ToolError for too long messages, EngineError if the engine failed.
    """
    texts = [part for part in messages[-1].parts if isinstance(part, str)]
    task = Task(
        id=f"{parent.id}/{child_id}",
        question=texts[-1] if texts else "",
        media=parent.media,
        answer_type=AnswerType.OPEN,
        ground_truth="",
    )
    assert ctx.run_sub_agent is not None, "the runner sets run_sub_agent"
    make_environment = functools.partial(_SubAgent, tuple(messages), max_context_tokens)
    episode = await ctx.run_sub_agent(task, make_environment, seed=seed)
    if episode.status is EpisodeStatus.ABORTED:
        raise EngineError(episode.error or "the engine stopped before a sub-agent had answered")
    if not episode.turns:
        # The question is the model's own and may have any length: an error result for the model.
        raise ToolError(f"the window and its question fill the context of {max_context_tokens} tokens; ask for less")
    is_truncated = episode.status is EpisodeStatus.CONTEXT_FULL  # one reply: whichever limit it reached, it was cut off
    return replace(episode, status=EpisodeStatus.LENGTH) if is_truncated else episode


class _SubAgent(Environment):
    """One plain reply to messages: no prefill, no tools, and any complete text is an answer."""

    name = "sub_agent"
    max_context_tokens = 0
    is_truncated = False

    def __init__(self, messages: tuple[Message, ...], max_context_tokens: int) -> None:
        self.messages, self.max_context_tokens = messages, max_context_tokens

    async def reset(self, task: Task, ctx: Context) -> Observation:
        return Observation(messages=self.messages, num_frames=count_frames(collect_images(self.messages)))

    def parse_reply(self, reply: Reply, finish_reason: FinishReason) -> Reply:
        self.is_truncated = finish_reason is FinishReason.LENGTH
        return reply

    async def step(self, reply: Reply, ctx: Context) -> Done:
        return Done(status=EpisodeStatus.LENGTH if self.is_truncated else EpisodeStatus.ANSWERED)
