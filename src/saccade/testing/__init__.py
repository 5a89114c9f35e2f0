"""Contracts as checks: what a tool, an engine, a reward or an agent must do, for your own files as for ours.

    await check_tool(tool, renderer)            wrong arguments and unreadable media are results that the model can read
    await check_engine(engine, renderer)        what is sampled is what is returned; a seed decides, company doesn't
    check_syntax(read)                          any text is a reply, whose calls our tools could be given
    check_family(renderer)                      turns extend, marks can't be spoken, a picture is as long as it says
    await check_reward(reward)                  steady, finite, and at ease with every way an episode can end
    await check_agent(agent, renderer)          every script ends in an episode whose tokens are the engine's own
    check_source(source, row)                   a row becomes sound tasks; a bad one, a sentence with row and field
    check_benchmark(benchmark, tasks)           both rules take any answer; what fails is counted and never marked

Each raises AssertionError with one sentence. No test framework is needed.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.chat.render import ChatRenderer
from saccade.engines.scripted import scripted
from saccade.errors import ConfigError, EngineError, MediaError
from saccade.ledger import Box, Ledger, Origin, Picture
from saccade.protocols import (
    Agent,
    Budget,
    Clip,
    Context,
    Engine,
    Grade,
    MediaLibrary,
    Renderer,
    Reward,
    TextEngine,
)
from saccade.testing._data import check_benchmark, check_source
from saccade.testing._syntax import check_syntax
from saccade.tools._tool import FunctionTool, ToolContext
from saccade.types import (
    Block,
    BlockKind,
    Call,
    End,
    Episode,
    Form,
    Kind,
    Media,
    Message,
    Reply,
    Sampling,
    Score,
    Stop,
    Task,
    ToolResult,
    Turn,
    Ungraded,
    digest_of,
)

__all__ = [
    "PaintedMedia",
    "check_agent",
    "check_benchmark",
    "check_engine",
    "check_family",
    "check_reward",
    "check_source",
    "check_syntax",
    "check_tool",
    "example_episodes",
]
from saccade.waiting import settled


class PaintedMedia:
    """A media library without files: every path is a clip of `seconds` at `fps`, its frames squares of one colour."""

    def __init__(self, *, seconds: float = 64.0, fps: float = 4.0) -> None:
        self.seconds, self.fps = seconds, fps

    async def probe(self, path: str) -> Clip:
        """A clip; a path with "missing" in it raises MediaError."""
        if "missing" in path:
            raise MediaError(f"there is no file {path}")
        frames = int(self.seconds * self.fps)
        return Clip(path=path, digest=f"painted {path}", duration=self.seconds, frames=frames, width=32, height=32)

    async def frames(self, path: str, times: Sequence[float], *, factor: int, budget: Budget) -> list[Picture]:
        """One square per time, of one visual token each."""
        digest = (await self.probe(path)).digest
        return [Picture(path=path, digest=digest, time=time, width=factor, height=factor) for time in times]

    async def size(self, path: str) -> tuple[int, int]:
        """Every picture has as many pixels as a clip's frames."""
        clip = await self.probe(path)
        return clip.width, clip.height

    async def image(self, path: str, *, factor: int, budget: Budget, box: Box | None = None) -> Picture:
        """One square of one visual token, without a time."""
        return replace((await self.frames(path, [0.0], factor=factor, budget=budget))[0], time=None, box=box)

    async def keep(self, pixels: Any, *, factor: int, budget: Budget) -> Picture:
        """One square of one visual token, known by the pixels that were given."""
        digest = digest_of(pixels.tolist())[:32]
        return Picture(path="made.png", digest=digest, time=None, width=factor, height=factor)

    def pixels(self, picture: Picture) -> Any:
        """uint8 [height, width, 3], all of the colour that the time stands for."""
        shade = int(picture.time or 0) % 256
        return np.full((picture.height, picture.width, 3), (shade, 255 - shade, 128), dtype=np.uint8)


# ---- tools ---------------------------------------------------------------------------------------------------------


async def check_tool(tool: FunctionTool, renderer: Renderer) -> None:
    """The schema says what the tool takes; wrong arguments and unreadable media are errors the model can read."""
    function = tool.schema["function"]
    parameters = function["parameters"]
    assert function["name"] == tool.name, f"{tool.name}: the schema bears another name"
    assert function["description"], f"{tool.name}: the docstring must say what the tool does"
    untold = [name for name, schema in parameters["properties"].items() if not schema.get("description")]
    assert not untold, f"{tool.name}: annotate {untold} with a text that says what they are"
    fair = {name: _example(schema) for name, schema in parameters["properties"].items()}
    # One mistake at a time: too many arguments, too few, the wrong types, numbers that are none.
    wrong: list[Mapping[str, Any]] = [{**fair, "no_such_argument": 1}, {**fair, str(len(fair)): 1}]
    wrong += [{key: value for key, value in fair.items() if key != name} for name in parameters["required"]]
    nothings: tuple[Any, ...] = (None, [], {"a": 1})
    wrong += [{**fair, name: value} for name in fair for value in nothings]
    numbers = [name for name, schema in parameters["properties"].items() if schema["type"] == "number"]
    wrong += [{**fair, name: value} for name in numbers for value in (math.nan, math.inf, True, "1")]
    for arguments in wrong:
        result, _ = await tool(arguments, ctx=_tool_context(renderer, "clip.mp4"))
        assert result.error, f"{tool.name}: {dict(arguments)} must be an error result"
        assert not result.executed, f"{tool.name}: {dict(arguments)} must not be executed"
    result, _ = await tool(fair, ctx=_tool_context(renderer, "missing.mp4"))
    assert result.ok or result.error, f"{tool.name}: a file that can't be read must be an error result"


def _tool_context(renderer: Renderer, path: str) -> ToolContext:
    async def ask(messages: Sequence[Message]) -> Episode:
        return example_episodes()[0]

    return ToolContext(media=PaintedMedia(), renderer=renderer, ask=ask, path=path, seed=0, result_tokens=64)


def _example(schema: Mapping[str, Any]) -> Any:
    least = schema.get("minimum", 1)
    return {"number": float(least), "integer": int(least), "string": "what?", "boolean": True}[schema["type"]]


# ---- engines -------------------------------------------------------------------------------------------------------


async def check_engine(engine: Engine, renderer: Renderer) -> None:
    """Ids and logprobs match, stops are told apart, seeds decide, cancelling frees, new versions are stamped.

    Of a `TextEngine`, whose own renderer must be given, no completion says more than is known, and nothing can be
    published to it. The engine is used up: it is closed at the end.
    """
    assert isinstance(engine.own_weights, bool), "own_weights says whether the trainer may change its own meanwhile"
    ledgers = [_prompt(renderer, f"What is shown at second {number}?") for number in range(6)]
    sampling = Sampling(
        temperature=1.0, max_tokens=12, seed=3, stop_ids=renderer.stop_ids, forbidden_ids=renderer.forbidden_ids
    )
    alone = [await _checked(engine, ledger, replace(sampling, seed=seed)) for seed, ledger in enumerate(ledgers)]
    company = await asyncio.gather(
        *(_checked(engine, ledger, replace(sampling, seed=seed)) for seed, ledger in enumerate(ledgers))
    )
    assert alone == company, "the same ledger and seed gave other tokens in company than alone"
    # At a high temperature every allowed id comes up sooner or later; servers take 2 at most.
    hot = [_checked(engine, ledgers[0], replace(sampling, temperature=2.0, seed=seed)) for seed in range(8)]
    await asyncio.gather(*hot)
    only = await _checked(engine, ledgers[0], replace(sampling, max_tokens=1))
    assert len(only) == 1, f"max_tokens=1 gave {len(only)} tokens"
    await _check_cancel(engine, ledgers[0], sampling, alone)
    try:
        await engine.publish(None, engine.version + 1)
        taken = True
    except ConfigError:
        taken = False
    assert taken != isinstance(engine, TextEngine), "an engine takes new weights unless it is asked in words"
    completion = await engine.generate(ledgers[0], sampling)
    version = engine.version if taken else None
    assert completion.version == version, "a completion must bear the version that was published"
    await engine.close()


async def _checked(engine: Engine, ledger: Ledger, sampling: Sampling) -> tuple[int, ...]:
    completion = await engine.generate(ledger, sampling)
    tokens = completion.tokens
    assert 1 <= len(tokens) <= sampling.max_tokens, f"{len(tokens)} tokens were sampled, not 1 to {sampling.max_tokens}"
    if isinstance(engine, TextEngine):
        assert (completion.logprobs, completion.version) == ((), None), "of what came as text no logprob is known"
    else:
        assert len(completion.logprobs) == len(tokens), "there must be one logprob per token"
    assert all(-math.inf < value <= 1e-6 for value in completion.logprobs), "logprobs must be finite and at most 0"
    assert set(sampling.forbidden_ids).isdisjoint(tokens), "a forbidden id was sampled"
    assert set(sampling.stop_ids).isdisjoint(tokens[:-1]), "sampling went on after a stop id"
    stopped = tokens[-1] in sampling.stop_ids
    assert (completion.stop is Stop.STOP) == stopped, f"the reply ends as {completion.stop}, its last id says otherwise"
    assert stopped or len(tokens) == sampling.max_tokens, "a reply without a stop id must fill max_tokens"
    return tokens


async def _check_cancel(engine: Engine, ledger: Ledger, sampling: Sampling, alone: Sequence[tuple[int, ...]]) -> None:
    waiting = [asyncio.ensure_future(engine.generate(ledger, replace(sampling, seed=seed))) for seed in range(4)]
    await asyncio.sleep(0)
    # The first goes on: its neighbours' leaving must not disturb it.
    for task in waiting[1:]:
        task.cancel()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends[1:]), "a cancelled request must end as cancelled"
    again = await asyncio.wait_for(_checked(engine, ledger, replace(sampling, seed=0)), timeout=60)
    assert again == alone[0], "after a cancellation the same request gave other tokens"


def _prompt(renderer: Renderer, text: str) -> Ledger:
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=(text,)),)),))


# ---- chat families -------------------------------------------------------------------------------------------------


def check_family(renderer: ChatRenderer) -> None:
    """A family's renderer with any checkpoint: ids, turns, pictures, and replies of any shape."""
    marks = {*renderer.stop_ids, *renderer.forbidden_ids}
    assert renderer.stop_ids, "a family must have an id that ends a turn"
    assert len(marks) == len(renderer.stop_ids) + len(renderer.forbidden_ids), "an id both ends turns and is forbidden"
    sides = renderer.factor * 2, renderer.factor
    frames = [Picture(path="a", digest="d", time=at, width=sides[0], height=sides[1]) for at in (0.5, 1.5)]
    for text in ("What is shown?", "".join(renderer.decode([mark]) for mark in sorted(marks)), "", "<think>\n ünïcode"):
        system, asked = Message(role="system", parts=(text,)), Message(role="user", parts=(frames[0], text))
        ledger = Ledger(segments=(renderer.render(Ledger(), (system, asked)),))
        plain = Ledger(segments=(renderer.render(Ledger(), (replace(system, parts=("a",)), asked)),))
        said = [sum(token in marks for token in each.compact()) for each in (ledger, plain)]
        assert said[0] == said[1], f"the text {text!r} became a mark of a turn or of a picture"
        assert len(ledger.slots()) == 1, "each picture needs one place, and nothing else may have one"
        assert len(ledger) - len(ledger.compact()) == renderer.visual_tokens(frames[0]) - 1
        assert renderer.positions(ledger).shape == (3, len(ledger)), "positions must be [3, tokens]"
        reply = (*renderer.encode(text), renderer.stop_ids[0])
        turn = ledger.act(reply, logprobs=[-1.0] * len(reply), version=0)
        told = renderer.render(turn, (Message(role="tool", parts=(text, frames[1])),))
        assert told.origin is Origin.TOOL, "what a tool says must bear the origin TOOL"
        assert [slot.picture for slot in told.slots] == frames[1:], "only the new is rendered"
    called = renderer.parse(renderer.encode('<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>'))
    assert [(call.name, call.arguments) for call in called.calls] == [("a", {"b": 1})], "a call must be parsed"
    assert renderer.parse(renderer.encode("<answer>red</answer>")).answer == "red", "an answer must be parsed"
    for start in range(0, 256, 16):  # any ids at all
        renderer.parse(tuple(range(start, start + 16)), forced=tuple(range(start)))


# ---- rewards -------------------------------------------------------------------------------------------------------


async def check_reward(reward: Reward, kinds: Sequence[Kind] = tuple(Kind)) -> None:
    """The same episode has the same finite reward, however it ended, for tasks of the kinds that it judges.

    A reward that takes `accuracy` is asked with 0, 0.5 and 1. `Ungraded` is no value: it may be another the next time.
    """
    given: list[dict[str, float]] = [{}]
    if "accuracy" in inspect.signature(reward).parameters:
        given = [{"accuracy": right} for right in (0.0, 0.5, 1.0)]
    for episode in example_episodes(kinds):
        for known in given:
            first, second = await _twice(reward, episode, known)
            if isinstance(first, Ungraded) or isinstance(second, Ungraded):
                continue
            values = [first.value, *first.parts.values()] if isinstance(first, Score) else [first]
            assert all(map(math.isfinite, values)), f"an episode that ended as {episode.end} got the reward {first}"
            assert first == second, f"an episode that ended as {episode.end} got two rewards, {first} and {second}"


async def _twice(reward: Reward, episode: Episode, known: Mapping[str, float]) -> tuple[Grade, Grade]:
    first: Grade = await settled(reward(episode, episode.task, **known))
    second: Grade = await settled(reward(episode, episode.task, **known))
    return first, second


def example_episodes(kinds: Sequence[Kind] = tuple(Kind)) -> list[Episode]:
    """Episodes of every kind and every end: answered, silent, with calls that ran, failed or were malformed."""
    return [_episode(kind, end, turns) for kind in kinds for end, turns in _endings(str(_GOLDS[kind][1]))]


_GOLDS: Mapping[Kind, tuple[Any, Any]] = {
    Kind.CHOICE: ("A", "A"),
    Kind.OPEN: ("red", "red"),
    Kind.GROUNDING: ((3.0, 5.0), "3.0-5.0"),
    Kind.NUMBER: (2.0, 2),
    Kind.MATH: ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}}"),
    Kind.BOX: ((0.25, 0.25, 0.75, 0.5), "[0.25, 0.25, 0.75, 0.5]"),
    Kind.POINT: ((0.25, 0.25, 0.75, 0.5), "(0.5, 0.3)"),
}


def _endings(answer: str) -> list[tuple[End, tuple[Turn, ...]]]:
    think = Block(kind=BlockKind.THINK, body="\nIt was at second 4.", closed=True)
    good = Call(name="crop_video", arguments={"start_time": 3, "end_time": 9}, form=Form.TRAINED)
    bad = Call(name="", arguments={}, form=Form.LEAKED, error="the call is not closed")
    calls = tuple(Block(kind=BlockKind.CALL, body="{}", closed=call.ok, call=call) for call in (good, bad))
    results = (ToolResult(text="red at 4", executed=True), ToolResult(error="the call is not closed"))
    looked = Turn(reply=_reply(think, *calls), results=results)
    answered = Turn(reply=_reply(think, Block(kind=BlockKind.ANSWER, body=answer, closed=True)))
    opened = Turn(reply=_reply(Block(kind=BlockKind.THINK, body="", closed=False)))
    return [
        (End.ANSWERED, (answered,)),
        (End.ANSWERED, (looked, answered)),
        (End.MAX_TURNS, (looked, Turn(reply=looked.reply))),
        (End.LENGTH, (opened,)),
        (End.NO_ANSWER, (Turn(reply=_reply()),)),
        (End.CONTEXT_FULL, (looked,)),
        (End.TOOL_BROKEN, (Turn(reply=looked.reply),)),
        (End.ABORTED, ()),
    ]


def _reply(*blocks: Block) -> Reply:
    return Reply(text="".join(block.body for block in blocks), blocks=blocks)


def _episode(kind: Kind, end: End, turns: tuple[Turn, ...]) -> Episode:
    choices = ("red", "blue") if kind is Kind.CHOICE else ()
    task = Task(id=f"check-{kind}", question="?", media=(), kind=kind, gold=_GOLDS[kind][0], choices=choices)
    ledger = Ledger().observe((1, 2)).force((3,)).act((5, 7), logprobs=(-0.1, -2.0), version=0)
    return Episode(task=task, agent="check", ledger=ledger, turns=turns, end=end)


# ---- agents --------------------------------------------------------------------------------------------------------

_CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 3, "end_time": 9}}</tool_call>'
_SCRIPTS: Mapping[str, Callable[[Ledger], str]] = {
    "answers at once": lambda ledger: "I see it.</think><answer>red</answer>",
    "says nothing": lambda ledger: "",
    "calls for ever": lambda ledger: f"I look.</think>{_CALL}{_CALL}",
    "is malformed": lambda ledger: "</answer><tool_call>{<tool_call></tool_call><answer><think>",
    "never ends": lambda ledger: "so " * 400,
}


async def check_agent(agent: Agent, renderer: Renderer, media: MediaLibrary | None = None) -> None:
    """Whatever the model says there is an episode; what was sampled is the engine's own; K frames or none are shown."""
    task = Task(id="check", question="?", media=(Media(path="clip.mp4"),), kind=Kind.OPEN, gold="red")
    for name, script in _SCRIPTS.items():
        engine = scripted(renderer, replies=script)
        ctx = Context(
            engine=engine,
            renderer=renderer,
            media=media or PaintedMedia(),
            sampling=Sampling(max_tokens=64),
            seed=7,
            frames=4,
        )
        episode = await agent(task, ctx)
        _check_tokens(episode, engine, f"a model that {name}")
        shown = len(episode.ledger.segments[0].slots)
        # An agent that looks on demand shows none to begin with.
        assert shown in (0, 4), f"the frame budget is 4, the prompt shows {shown}"
        assert episode.frames == shown, f"the prompt shows {shown} frames, the episode says {episode.frames}"
    assert (await agent(task, ctx)).ledger == episode.ledger, "the same seed gave another episode"
    # An agent may end the episode itself or let the error through: `run_episode` makes an end of it.
    spent = scripted(renderer, replies=())
    try:
        end = (await agent(task, replace(ctx, engine=spent))).end
    except EngineError:
        end = End.ABORTED
    assert end is End.ABORTED, f"an engine that fails must abort the episode, not end it as {end}"


def _check_tokens(episode: Episode, engine: scripted, who: str) -> None:
    # Equal keys mean equal prefixes, pictures included: each turn must continue just what the engine was given.
    said = {ledger.keys()[-1]: completion for ledger, completion in engine.served}
    for conversation in episode.walk():
        ledger = conversation.ledger
        for place, segment in enumerate(ledger.segments):
            if not segment.sampled:
                continue
            completion = said.get(ledger.fork(place).keys()[-1])
            assert completion is not None, f"{who}: a turn's prompt is not what the engine was given"
            assert completion.tokens == segment.tokens, f"{who}: sampled tokens differ from the engine's"
