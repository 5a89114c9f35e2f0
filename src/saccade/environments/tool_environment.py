"""How a task is attempted: look at an overview, then reply, call, observe, until an answer or a limit.

    attempt ── open ──> prompt: system, overview frames with their times, still pictures, question
       │
       └─ take_turn ──> say ········ engine.generate(ledger) ······ waits for the engine alone
             ▲            │
             │          call_tools ─┬─ call_tool 0 ── ask ── engine.generate(child's ledger)
             │            │         ├─ call_tool 1 ── ask ── engine.generate(child's ledger)    all at once;
             │            │         └─ call_tool 2 ── an error result, at once                  waits for the slowest
             └─ observe <─┘ the results, in the order of the calls, as ONE tool turn

The calls of a turn run together; a failing one is a result like any other. Only the engine's failure stops its
siblings: it ends the episode, which is then left out of training rather than scored. The same holds for an episode that
passes its deadline: whatever it waits for is cancelled, and what was said until then is kept.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from saccade.agents._prompt import Plan, first_video, opening, render_opening, subtitles_of
from saccade.errors import EngineError, SandboxError, ToolError
from saccade.ledger import Ledger, Origin, Picture, Segment
from saccade.media.picks import timed
from saccade.media.subtitles import Cue
from saccade.protocols import Context
from saccade.tools._tool import FunctionTool, Shelf, ToolContext, tool_named
from saccade.types import (
    Call,
    Completion,
    End,
    Episode,
    Kind,
    MediaKind,
    Message,
    Reply,
    Sampling,
    Stop,
    Task,
    ToolResult,
    Turn,
    Usage,
    seed_of,
)
from saccade.waiting import together

THINK = "<think>\n"


async def attempt(task: Task, ctx: Context, plan: Plan) -> Episode:
    """Attempt a task once. Raises MediaError where its media can't be shown; all else is an `end`."""
    talk = Talk(task=task, ctx=ctx, plan=plan)
    try:
        async with ctx.clock.timeout_at(ctx.deadline) as limit, talk.shelf:
            await talk.open()
            while talk.end is None:
                await talk.take_turn()
    except TimeoutError:
        if not limit.expired():
            raise
        talk.end, talk.error = End.ABORTED, "the episode's deadline passed before it had ended"
    episode = talk.episode()
    talk.tell("end", episode=episode)
    return episode


@dataclass(slots=True, kw_only=True)
class Talk:
    """One conversation on its way to an episode."""

    task: Task
    ctx: Context
    plan: Plan
    ledger: Ledger = field(default_factory=Ledger)
    turns: list[Turn] = field(default_factory=list)
    children: list[Episode] = field(default_factory=list)
    frames: int | None = None
    subtitles: tuple[Cue, ...] = ()
    end: End | None = None
    error: str | None = None
    shelf: Shelf = field(default_factory=Shelf)
    started: float = field(default_factory=time.perf_counter)

    def tell(self, event: str, **data: Any) -> None:
        """Tell whoever watches."""
        if self.ctx.watch is not None:
            self.ctx.watch(event, data)

    async def open(self) -> None:
        """Render the prompt: it shows min(K, frames in the video) frames."""
        self.subtitles = await subtitles_of(self.task)
        messages, self.frames = await (self.plan.prompt or opening)(self.task, self.ctx, self.plan)
        segment = render_opening(self.ctx.renderer, messages, self.plan.schemas)
        self.observe(segment)

    def observe(self, segment: Segment) -> None:
        """Append a segment as a whole and the forced prefix, or end the conversation where no reply would fit."""
        ledger = Ledger(segments=(*self.ledger.segments, segment)).force(self.forced)
        if len(ledger) < self.plan.context_tokens:
            self.ledger = ledger
            return
        # Budgets are spent on whole segments: nothing is ever cut through a picture.
        self.end = End.CONTEXT_FULL
        self.error = f"{len(ledger)} tokens leave no room for a reply in a context of {self.plan.context_tokens}"

    @property
    def forced(self) -> tuple[int, ...]:
        """The prefix of every reply."""
        return self.ctx.renderer.encode(THINK) if self.plan.think_prefix else ()

    async def take_turn(self) -> None:
        """One reply, and what it causes."""
        self.tell("turn", turn=len(self.turns))
        try:
            reply, self.end = await self.say()
        except EngineError as error:
            self.end, self.error = End.ABORTED, str(error)
            return
        self.turns.append(Turn(reply=reply))  # whatever stops the tools, this was said
        self.tell("reply", turn=len(self.turns) - 1, reply=reply)
        if self.end is not None:
            return
        try:
            results = await self.call_tools(reply.calls)
        except (EngineError, SandboxError) as error:  # the main agent is not to blame
            self.end, self.error = End.TOOL_BROKEN, str(error)
            return
        self.turns[-1] = Turn(reply=reply, results=results)
        self.tell("results", turn=len(self.turns) - 1, results=results)
        self.observe(self.render_results(results))

    async def say(self) -> tuple[Reply, End | None]:
        """Sample a reply; the episode's end, if this is it."""
        room = self.plan.context_tokens - len(self.ledger)
        completion = await generate(self.ctx, self.ledger, seed_of(self.ctx.seed, len(self.turns)), room)
        self.ledger = act(self.ledger, completion)
        reply = self.ctx.renderer.parse(completion.tokens, forced=self.forced)
        if self.plan.read is not None:
            reply = self.plan.read(reply, completion.stop)
        return reply, self.verdict(reply, completion.stop, cramped=room < self.ctx.sampling.max_tokens)

    def verdict(self, reply: Reply, stop: Stop, *, cramped: bool) -> End | None:
        """Why the episode ends with this reply, or None where it goes on with the reply's calls."""
        if stop is Stop.ABORTED:
            return End.ABORTED
        if reply.answer is not None:
            return End.ANSWERED  # calls beside an answer are not run: nobody would read their results
        if stop is Stop.LENGTH:
            return End.CONTEXT_FULL if cramped else End.LENGTH
        if not reply.calls:
            return End.NO_ANSWER
        return End.MAX_TURNS if len(self.turns) >= self.tool_turns else None

    @property
    def tool_turns(self) -> int:
        """How many tool turns there may be; with the tools off, one, in which the model is told so."""
        return self.plan.max_turns if self.plan.tools else min(self.plan.max_turns, 1)

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def call_tools(self, calls: Sequence[Call]) -> tuple[ToolResult, ...]:
        """Serve the calls of one turn together. Raises EngineError where a sub-agent's engine failed."""
        self.tell("calls", turn=len(self.turns) - 1, calls=calls)
        refusals = self.refusals(calls)
        # Children are kept in the order of the calls, whoever finishes first: a run is the same every time.
        served = await together([self.call_tool(i, calls[i], refusals[i]) for i in range(len(calls))])
        results = []
        for result, child in served:
            if child is not None:
                result = replace(result, child=len(self.children))
                self.children.append(child)
            results.append(result)
        return tuple(results)

    @property
    def tools(self) -> dict[str, tuple[FunctionTool, Mapping[str, Any]]]:
        """The tools that are offered, by the names that the model calls them, with their settings."""
        return {(found := tool_named(name)).name: (found, settings) for name, settings in self.plan.tools.items()}

    def refusals(self, calls: Sequence[Call]) -> list[str | None]:
        """Per call, why it isn't run, or None. Malformed calls don't count towards the limit of a turn."""
        limit = 1 if self.plan.one_call else self.plan.max_calls
        # `None` marks a call that is run, so its count is the number of places taken.
        reasons: list[str | None] = []
        for call in calls:
            if call.error is not None:
                reasons.append(call.error)
            elif call.name not in self.tools:
                known = self.plan.offered or tuple(self.tools)
                hint = f"there is {', '.join(known)}" if self.tools else "answer without tools"
                reasons.append(f"there is no tool {call.name[:40]!r}; {hint}")
            elif reasons.count(None) >= limit:
                reasons.append(f"too many calls: {limit} per turn, and this one was not run")
            else:
                reasons.append(None)
        return reasons

    async def call_tool(self, index: int, call: Call, refusal: str | None) -> tuple[ToolResult, Episode | None]:
        """Serve one call, or refuse it."""
        if refusal is not None:
            return ToolResult(error=refusal), None
        found, settings = self.tools[call.name]
        turn, video = len(self.turns) - 1, first_video(self.task)
        seed = seed_of(self.ctx.seed, "child", turn, index)

        async def ask(messages: Sequence[Message]) -> Episode:
            task = child_task(self.task, f"{turn}.{index}", messages)
            return await answer_messages(task, messages, replace(self.ctx, seed=seed), self.plan.context_tokens)

        ctx = ToolContext(
            media=self.ctx.media,
            renderer=self.ctx.renderer,
            ask=ask,
            path=video.path if video else "",
            seed=seed,
            images=tuple(picture for picture in self.pictures if picture.time is None),
            pictures=self.ledger.pictures(),
            videos=tuple(media.path for media in self.task.media if media.kind is MediaKind.VIDEO),
            subtitles=self.subtitles,
            shelf=self.shelf,
            settings=settings,
            result_tokens=self.plan.result_tokens,
        )
        result, child = await found(call.arguments, ctx=ctx)
        self.tell("result", turn=turn, index=index, call=call, result=result, child=child)
        return result, child

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """What the prompt shows: frames and still pictures, in order."""
        return self.ledger.fork(1).pictures()

    def render_results(self, results: Sequence[ToolResult]) -> Segment:
        """One turn with one response per call; after the last one allowed, the order to answer."""
        voice, number, messages = self.plan.voice or said, len(self.ledger.pictures()), []
        for result in results:
            messages.append(Message(role=self.plan.teller, parts=voice(result, number), tags=self.plan.tags))
            number += len(result.pictures)
        if len(self.turns) >= self.tool_turns and self.plan.forced_answer:
            messages.append(Message(role="user", parts=(self.plan.forced_answer,), tags=self.plan.tags))
        if self.plan.teller == "user":  # one voice, one turn
            messages = [replace(messages[0], parts=tuple(part for message in messages for part in message.parts))]
        return replace(self.ctx.renderer.render(self.ledger, messages), origin=Origin.TOOL)

    def episode(self) -> Episode:
        """What happened."""
        assert self.end is not None
        return Episode(
            task=self.task,
            agent=self.plan.name,
            ledger=self.ledger,
            turns=tuple(self.turns),
            end=self.end,
            children=tuple(self.children),
            usage=usage(self.ledger, self.children, time.perf_counter() - self.started),
            frames=self.frames,
            error=self.error,
        )


def said(result: ToolResult, number: int) -> tuple[str | Picture, ...]:
    """A result as the model reads it, frames after their times; its first picture is the conversation's picture
    `number`, counted from 0.
    """
    parts = (result.text, f"Error: {result.error}") if result.error is not None else (result.text,)
    return "\n".join(part for part in parts if part), *timed(result.pictures)


# ---- sub-agents ----------------------------------------------------------------------------------------------------


def child_task(task: Task, place: str, messages: Sequence[Message]) -> Task:
    """What a sub-agent is asked, as a task of its own; it has no gold answer."""
    asked = [part for part in messages[-1].parts if isinstance(part, str)]
    question = asked[-1] if asked else ""
    return Task(id=f"{task.id}/{place}", question=question, media=task.media, kind=Kind.OPEN, gold="")


async def answer_messages(task: Task, messages: Sequence[Message], ctx: Context, context_tokens: int) -> Episode:
    """A sub-agent's episode: one plain reply to messages, no prefix and no tools. Raises EngineError."""
    started = time.perf_counter()
    ledger = Ledger(segments=(render_opening(ctx.renderer, tuple(messages), ()),))
    room = context_tokens - len(ledger)
    if room < 1:
        # The question is the model's own and may be of any length: an error for it to read.
        raise ToolError(f"the window and its question fill the context of {context_tokens} tokens; ask for less")
    completion = await generate(ctx, ledger, ctx.seed, room)
    if completion.stop is Stop.ABORTED:
        raise EngineError("the engine stopped before a sub-agent had answered")
    ledger, closed = act(ledger, completion), completion.stop is Stop.STOP
    reply = ctx.renderer.parse(completion.tokens)
    return Episode(
        task=task,
        agent="sub",
        ledger=ledger,
        turns=(Turn(reply=reply),),
        end=End.ANSWERED if closed else End.LENGTH,
        usage=usage(ledger, (), time.perf_counter() - started),
        frames=len(ledger.pictures()),
    )


# ---- the engine ----------------------------------------------------------------------------------------------------


async def generate(ctx: Context, ledger: Ledger, seed: int, room: int) -> Completion:
    """Sample a reply of at most `room` tokens. Raises EngineError for a failure or a forbidden id."""
    renderer = ctx.renderer
    sampling = Sampling(
        temperature=ctx.sampling.temperature,
        max_tokens=min(ctx.sampling.max_tokens, room),
        seed=seed,
        stop_ids=renderer.stop_ids,
        forbidden_ids=renderer.forbidden_ids,
    )
    completion = await ctx.engine.generate(ledger, sampling)
    if not set(renderer.forbidden_ids).isdisjoint(completion.tokens):
        raise EngineError("the engine sampled a placeholder of pictures, which is forbidden")
    return completion


def act(ledger: Ledger, completion: Completion) -> Ledger:
    """The ledger with what was sampled: one segment per version of the weights."""
    start = 0
    for version, run in groupby(completion.versions or (completion.version,) * len(completion.tokens)):
        part = slice(start, start + len(list(run)))
        ledger = ledger.act(completion.tokens[part], logprobs=completion.logprobs[part], version=version)
        start = part.stop
    return ledger


def usage(ledger: Ledger, children: Sequence[Episode], seconds: float) -> Usage:
    """What a conversation cost with its children; the seconds are its own, since children run within them."""
    sampled = sum(len(segment.tokens) for segment in ledger.segments if segment.sampled)
    visual = sum(slot.tokens for segment in ledger.segments for slot in segment.slots)
    return Usage(
        prompt_tokens=len(ledger) - sampled + sum(child.usage.prompt_tokens for child in children),
        sampled_tokens=sampled + sum(child.usage.sampled_tokens for child in children),
        visual_tokens=visual + sum(child.usage.visual_tokens for child in children),
        seconds=seconds,
    )
