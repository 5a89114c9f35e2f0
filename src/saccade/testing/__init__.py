"""Check that a plugin fulfills its contract: Saccade's own plugins and yours.

    await check_tool(tool, renderer)            wrong arguments and unreadable media give error results, not exceptions
    await check_engine(engine, renderer)        tokens have logprobs; the seed, not other requests, decides the sample
    check_tool_format(parse)                    any text parses to a reply with valid or failed calls
    check_family(renderer)                      turns append, special tokens can't be forged, image lengths are exact
    await check_reward(reward)                  the reward is deterministic and finite for every episode status
    await check_answer_type(name)               its example is valid and right, any answer scores in [0, 1]
    check_estimator(estimator)                  advantages are finite, and grow with the reward
    check_loss(loss)                            tokens have finite losses, better actions become likelier
    await check_environment(factory, renderer)  every model gives an episode with exactly the engine's tokens
    check_importer(importer, row)               a row becomes valid tasks; a bad one raises an error with row and field
    check_benchmark(benchmark, tasks)           both rules accept any answer; failed episodes are counted, not graded

Each raises AssertionError with one sentence. No test framework is needed.
"""

import asyncio
import inspect
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from saccade import plugins
from saccade.chat.renderer import ChatRenderer
from saccade.engines.scripted import Scripted
from saccade.environments.prompt import count_frames
from saccade.errors import ConfigError, EngineError, MediaError
from saccade.ledger import Box, ImageRef, Ledger, Origin
from saccade.protocols import (
    ChatEngine,
    Context,
    Engine,
    Environment,
    EnvironmentFactory,
    MediaLoader,
    PixelBudget,
    Renderer,
    VideoInfo,
    WeightSource,
)
from saccade.rewards.answer_types.base import get_answer_type, register_file
from saccade.rollouts.runner import run_episode
from saccade.testing.algorithm_contracts import check_estimator, check_loss
from saccade.testing.data_contracts import check_benchmark, check_importer
from saccade.tools.base import FunctionTool, ToolContext
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Completion,
    Episode,
    EpisodeStatus,
    FinishReason,
    GenerationRequest,
    Group,
    Media,
    Message,
    Reply,
    SamplingParams,
    Score,
    ScoredEpisode,
    Task,
    ToolResult,
    Turn,
    Ungraded,
)
from saccade.utils.async_utils import maybe_await
from saccade.utils.hashing import compute_digest

__all__ = [
    "FakeMediaLoader",
    "build_example_episodes",
    "check_answer_type",
    "check_benchmark",
    "check_engine",
    "check_environment",
    "check_estimator",
    "check_family",
    "check_importer",
    "check_loss",
    "check_reward",
    "check_tool",
    "check_tool_format",
]


class FakeMediaLoader:
    """A media loader without files: each path is a video of `duration` seconds with frames of one color."""

    pairs_frames = False  # whether `load_frames` returns pairs of frames

    def __init__(self, *, duration: float = 64.0, fps: float = 4.0) -> None:
        self.duration, self.fps = duration, fps

    async def probe(self, path: str) -> VideoInfo:
        """Return metadata; a path containing "missing" raises MediaError."""
        if "missing" in path:
            raise MediaError(f"there is no file {path}", key=path)
        num_frames = int(self.duration * self.fps)
        return VideoInfo(
            path=path, digest=f"painted {path}", duration=self.duration, num_frames=num_frames, width=32, height=32
        )

    async def load_frames(
        self, path: str, times: Sequence[float], *, factor: int, budget: PixelBudget
    ) -> list[ImageRef]:
        """Return one image of one visual token per time."""
        digest = (await self.probe(path)).digest
        return [ImageRef(path=path, digest=digest, time=time, width=factor, height=factor) for time in times]

    async def get_image_size(self, path: str) -> tuple[int, int]:
        """Return the size of a video's frames."""
        info = await self.probe(path)
        return info.width, info.height

    async def load_image(self, path: str, *, factor: int, budget: PixelBudget, box: Box | None = None) -> ImageRef:
        """Return an image of one visual token, without a time."""
        return replace((await self.load_frames(path, [0.0], factor=factor, budget=budget))[0], time=None, box=box)

    async def save_image(self, pixels: Any, *, factor: int, budget: PixelBudget) -> ImageRef:
        """Return an image of one visual token, with the digest of the pixels."""
        digest = compute_digest(pixels.tolist())[:32]
        return ImageRef(path="made.png", digest=digest, time=None, width=factor, height=factor)

    def load_pixels(self, image: ImageRef) -> Any:
        """Return uint8 [height, width, 3] of one color, which depends on the time."""
        red = int(image.time or 0) % 256
        return np.full((image.height, image.width, 3), (red, 255 - red, 128), dtype=np.uint8)

    def load_all_pixels(self, images: Collection[ImageRef]) -> Mapping[str, Any]:
        """Return the pixels of each image by its key."""
        return {image.key: self.load_pixels(image) for image in images}


# ---- tools ---------------------------------------------------------------------------------------------------------


async def check_tool(tool: FunctionTool, renderer: Renderer) -> None:
    """Check that the schema describes every argument, and that invalid calls and unreadable media give errors."""
    function = tool.schema["function"]
    parameters = function["parameters"]
    assert function["name"] == tool.name, f"{tool.name}: the schema has the name {function['name']!r}"
    assert function["description"], f"{tool.name}: the docstring must describe the tool"
    undescribed = [name for name, schema in parameters["properties"].items() if not schema.get("description")]
    assert not undescribed, f"{tool.name}: annotate {undescribed} with a description"
    valid: dict[str, Any] = {}
    for name, schema in parameters["properties"].items():
        minimum = schema.get("minimum", 1)
        by_type = {"number": float(minimum), "integer": int(minimum), "string": "what?", "boolean": True}
        valid[name] = by_type[schema["type"]]
    # One mistake at a time: too many positional arguments, too few, the wrong types, numbers that aren't finite.
    invalid: list[Mapping[str, Any]] = [{**valid, str(len(valid)): 1}]
    invalid += [{key: value for key, value in valid.items() if key != name} for name in parameters["required"]]
    wrong_types: tuple[Any, ...] = (None, [], {"a": 1})
    invalid += [{**valid, name: value} for name in valid for value in wrong_types]
    numbers = [name for name, schema in parameters["properties"].items() if schema["type"] == "number"]
    invalid += [{**valid, name: value} for name in numbers for value in (math.nan, math.inf, True, "one")]
    for arguments in invalid:
        result, _ = await tool(arguments, ctx=_build_tool_context(renderer, "clip.mp4"))
        assert result.error, f"{tool.name}: {dict(arguments)} must be an error result"
        assert not result.was_executed, f"{tool.name}: {dict(arguments)} must not be executed"
    result, _ = await tool({**valid, "no_such_argument": 1}, ctx=_build_tool_context(renderer, "clip.mp4"))
    assert result.error or "no_such_argument" in result.text, f"{tool.name}: a result must name ignored arguments"
    result, _ = await tool(valid, ctx=_build_tool_context(renderer, "missing.mp4"))
    assert result.ok or result.error, f"{tool.name}: an unreadable file must give an error result"


def _build_tool_context(renderer: Renderer, path: str) -> ToolContext:
    async def answer_question(messages: Sequence[Message]) -> Episode:
        return build_example_episodes()[0]

    return ToolContext(
        media=FakeMediaLoader(), renderer=renderer, ask=answer_question, video_path=path, seed=0, max_result_tokens=64
    )


TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<json>", "</json>", "```json")
CALL_TEXTS = ("{}", "[1]", '{"name": "crop_video"', '{"a": NaN}', "crop_video(1, 2)", "start=1 end=2", "{" * 999)


def check_tool_format(parse_reply: Callable[..., Reply]) -> None:
    """Check that any text parses to a reply with the whole text, whose calls have plain JSON arguments or an error."""
    for opening, body, closing in itertools.product(("", *TAGS), ("", "B", "\ud800", *CALL_TEXTS), ("", *TAGS)):
        text, prefill = f"{opening}{body}{closing}", len(opening)
        reply = parse_reply(text, prefill)
        assert (reply.text, reply.prefill) == (text, text[:prefill]), f"{text!r} was parsed as {reply.text!r}"
        assert reply == parse_reply(text, prefill), f"{text!r} was parsed in two ways"
        for call in reply.calls:
            assert call.error or call.name, f"a call in {text!r} has neither a name nor an error"
            json.dumps(dict(call.arguments), allow_nan=False)


# ---- engines -------------------------------------------------------------------------------------------------------


async def check_engine(engine: Engine, renderer: Renderer, weights: WeightSource | None = None) -> None:
    """Check tokens and logprobs, finish reasons, seeds, cancellation and weight versions.

    `weights` are synced to the engine, unless it has none. For a `ChatEngine`, pass its own renderer; its completions
    must have no logprobs, and it must reject new weights. The engine is closed at the end.
    """
    assert isinstance(engine.has_separate_weights, bool), "has_separate_weights must be a bool"
    prompts = [(Message(role="user", parts=(f"What is shown at second {number}?",)),) for number in range(6)]
    ledgers = [Ledger(segments=(renderer.render(Ledger(), messages),)) for messages in prompts]
    sampling = SamplingParams(
        temperature=1.0, max_tokens=12, seed=3, stop_ids=renderer.stop_ids, forbidden_ids=renderer.forbidden_ids
    )
    requests = [(ledger, replace(sampling, seed=seed)) for seed, ledger in enumerate(ledgers)]
    alone = [await _generate_and_check(engine, *request) for request in requests]
    concurrent = await asyncio.gather(*(_generate_and_check(engine, *request) for request in requests))
    assert alone == concurrent, "the same ledger and seed gave other tokens in concurrent requests than alone"
    # A high temperature makes forbidden ids likely if they aren't masked; servers accept 2 at most.
    hot = [_generate_and_check(engine, ledgers[0], replace(sampling, temperature=2.0, seed=seed)) for seed in range(8)]
    await asyncio.gather(*hot)
    await _generate_and_check(engine, ledgers[0], replace(sampling, max_tokens=1))
    await _check_cancel(engine, ledgers[0], sampling, alone)
    try:
        await engine.sync_weights(cast(WeightSource, weights), engine.version + 1)
        has_updated = True
    except ConfigError:
        has_updated = False
    assert has_updated != isinstance(engine, ChatEngine), "an engine must load new weights unless it is a ChatEngine"
    completion = await engine.generate(GenerationRequest(ledgers[0], sampling))
    version = engine.version if has_updated else None
    assert completion.version == version, "a completion must have the version of the newest weights"
    await engine.close()


async def _generate_and_check(engine: Engine, ledger: Ledger, sampling: SamplingParams) -> tuple[int, ...] | str:
    completion = await engine.generate(GenerationRequest(ledger, sampling))
    tokens = completion.tokens
    if isinstance(engine, ChatEngine):
        assert (tokens, completion.logprobs, completion.version) == ((), (), None), (
            "a ChatEngine's completion must have no tokens, no logprobs and no version"
        )
        assert completion.text is not None, "a ChatEngine's completion must have a text"
        assert 1 <= completion.num_text_tokens <= sampling.max_tokens, "num_text_tokens must be within max_tokens"
        return completion.text
    assert 1 <= len(tokens) <= sampling.max_tokens, f"{len(tokens)} tokens were sampled, not 1 to {sampling.max_tokens}"
    assert len(completion.logprobs) == len(tokens), "there must be one logprob per token"
    assert all(-math.inf < value <= 1e-6 for value in completion.logprobs), "logprobs must be finite and at most 0"
    assert set(sampling.forbidden_ids).isdisjoint(tokens), "a forbidden id was sampled"
    assert set(sampling.stop_ids).isdisjoint(tokens[:-1]), "sampling continued after a stop id"
    has_stopped = tokens[-1] in sampling.stop_ids
    assert (completion.finish_reason is FinishReason.STOP) == has_stopped, (
        f"the finish reason {completion.finish_reason} contradicts the last id"
    )
    assert has_stopped or len(tokens) == sampling.max_tokens, "a reply without a stop id must fill max_tokens"
    return tokens


async def _check_cancel(
    engine: Engine, ledger: Ledger, sampling: SamplingParams, expected: Sequence[tuple[int, ...] | str]
) -> None:
    tasks = [
        asyncio.ensure_future(engine.generate(GenerationRequest(ledger, replace(sampling, seed=seed))))
        for seed in range(4)
    ]
    await asyncio.sleep(0)
    # The first request continues: cancelling the others must not disturb it.
    for task in tasks[1:]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [isinstance(result, asyncio.CancelledError) for result in results[1:]]
    assert all(cancelled), "a cancelled request must raise CancelledError"
    again = await asyncio.wait_for(_generate_and_check(engine, ledger, replace(sampling, seed=0)), timeout=60)
    assert again == expected[0], "after a cancellation the same request gave other tokens"


# ---- chat families -------------------------------------------------------------------------------------------------


def check_family(renderer: ChatRenderer) -> None:
    """Check the renderer of a family, with any checkpoint: special ids, turns, images, and parsing of any ids."""
    special_ids = {*renderer.stop_ids, *renderer.forbidden_ids}
    assert renderer.stop_ids, "a family must have an id that ends a turn"
    num_ids = len(renderer.stop_ids) + len(renderer.forbidden_ids)
    assert len(special_ids) == num_ids, "an id is both a stop id and a forbidden id"
    width, height = renderer.factor * 2, renderer.factor
    frames = [ImageRef(path="a", digest="d", time=time, width=width, height=height) for time in (0.5, 1.5)]
    special_text = "".join(renderer.decode([token]) for token in sorted(special_ids))
    for text in ("What is shown?", special_text, "", "<think>\n ünïcode"):
        system, question = Message(role="system", parts=(text,)), Message(role="user", parts=(frames[0], text))
        ledger = Ledger(segments=(renderer.render(Ledger(), (system, question)),))
        plain = Ledger(segments=(renderer.render(Ledger(), (replace(system, parts=("a",)), question)),))
        counts = [sum(token in special_ids for token in prompt.unexpanded_ids()) for prompt in (ledger, plain)]
        assert counts[0] == counts[1], f"the text {text!r} became a turn or image token"
        assert len(ledger.slots()) == 1, "each image needs exactly one slot, and nothing else may have one"
        assert len(ledger) - len(ledger.unexpanded_ids()) == renderer.count_visual_tokens(frames[0]) - 1
        assert renderer.compute_position_ids(ledger).shape == (3, len(ledger)), "positions must be [3, tokens]"
        reply = (*renderer.encode(text), renderer.stop_ids[0])
        turn = ledger.append_completion(reply, logprobs=[-1.0] * len(reply), version=0)
        segment = renderer.render(turn, (Message(role="tool", parts=(text, frames[1])),))
        assert segment.origin is Origin.OBSERVATION, "a tool result must have the origin OBSERVATION"
        assert [slot.image for slot in segment.slots] == frames[1:], "only new messages may be rendered"
    if renderer.supports_frame_pairs:
        pair = replace(frames[0], second_time=frames[1].time)
        segment = renderer.render(Ledger(), (Message(role="user", parts=(frames[0], pair)),))
        assert [slot.image for slot in segment.slots] == [frames[0], pair], "a pair of frames needs exactly one slot"
        placeholders = [segment.tokens[slot.index] for slot in segment.slots]
        assert placeholders == [*renderer.visual_ids], "an image and a pair of frames need placeholders of their own"
        assert special_ids.issuperset(placeholders), "placeholders must be forbidden"
    parsed = renderer.parse(renderer.encode('<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>'))
    assert [(call.name, call.arguments) for call in parsed.calls] == [("a", {"b": 1})], "a call must be parsed"
    assert renderer.parse(renderer.encode("<answer>red</answer>")).answer == "red", "an answer must be parsed"
    for start in range(0, 256, 16):  # arbitrary ids
        renderer.parse(tuple(range(start, start + 16)), prefill=tuple(range(start)))


# ---- rewards -------------------------------------------------------------------------------------------------------


async def check_reward(reward: Callable[..., Any], answer_types: Sequence[str] = tuple(AnswerType)) -> None:
    """Check that the reward is finite and deterministic for every status and for the given answer types.

    A reward with the parameter `correct` is called with 0, 0.5 and 1; a group reward must return one value per episode,
    in groups of several and of one. `Ungraded` results are ignored.
    """
    parameters = list(inspect.signature(reward).parameters)
    if parameters[:1] == ["group"]:
        await _check_group_reward(reward, answer_types)
        return
    variants: list[dict[str, float]] = [{}]
    if "correct" in parameters:
        variants = [{"correct": correct} for correct in (0.0, 0.5, 1.0)]
    for episode in build_example_episodes(answer_types):
        for dependencies in variants:
            result = await _call_twice(partial(reward, episode, **dependencies), f"the status {episode.status}")
            if not isinstance(result, Ungraded):
                values = [result.value, result.total, *result.parts.values()] if isinstance(result, Score) else [result]
                assert all(map(math.isfinite, values)), f"the status {episode.status} got the reward {result}"


async def _check_group_reward(reward: Callable[..., Any], answer_types: Sequence[str]) -> None:
    for answer_type in answer_types:
        scored = tuple(
            ScoredEpisode(episode=episode, score=Score(value=float(index % 2), correct=float(index % 2)))
            for index, episode in enumerate(build_example_episodes([answer_type]))
        )
        for members in (scored, scored[:1]):
            group = Group(task=members[0].episode.task, scored_episodes=members)
            rewards = await _call_twice(partial(reward, group), "a group")
            if not isinstance(rewards, Ungraded):
                assert len(rewards) == len(members), f"{len(members)} episodes got {len(rewards)} rewards"
                assert all(map(math.isfinite, rewards)), f"a group got the rewards {rewards}"


async def check_answer_type(answer_type: str) -> None:
    """Check an answer type, by its name or file: its example is valid and scores 1.0, anything scores in [0, 1].

    A published row that writes the example's ground truth must be read as the same, unless the type reads none.
    """
    plugin = register_file(answer_type) if plugins.get_file(answer_type) else get_answer_type(answer_type)
    answer_type = plugin.names[0]
    ground_truth, answer = plugin.example
    score = plugin()
    for body, expected in ((answer, 1.0), ("", 0.0), ("\x00 neither {1 nor <2", None)):
        block = Block(kind=BlockKind.ANSWER, body=body, is_closed=True)
        episode = _build_episode(answer_type, EpisodeStatus.ANSWERED, (Turn(reply=_build_reply(block)),))
        assert plugin.find_problem(episode.task) is None, f"the example of {answer_type} is not a valid task"
        value = await maybe_await(score(episode))
        assert isinstance(value, Ungraded) or expected in (None, value), f"the answer {body!r} scores {value}"
        assert isinstance(value, Ungraded | float), f"the answer {body!r} scores {value!r}, not a float"
        assert isinstance(value, Ungraded) or 0.0 <= value <= 1.0, f"the answer {body!r} scores {value}"
    problem = plugin.find_problem(replace(episode.task, ground_truth=("none", "of", "any")))  # type: ignore[arg-type]
    assert problem is not None, f"{answer_type} accepts any ground truth"
    published = plugin.parse_ground_truth(ground_truth)
    assert published in (None, ground_truth), f"the published ground truth {ground_truth!r} is read as {published!r}"


async def _call_twice(reward: Callable[[], Any], what: str) -> Any:
    """Return a reward's result, or Ungraded if one of two calls returned that."""
    first, second = await maybe_await(reward()), await maybe_await(reward())
    if isinstance(first, Ungraded) or isinstance(second, Ungraded):
        return first if isinstance(first, Ungraded) else second
    assert first == second, f"{what} got two rewards, {first} and {second}"
    return first


def build_example_episodes(answer_types: Sequence[str] = tuple(AnswerType)) -> list[Episode]:
    """Return episodes of every answer type and status, with executed, failed and malformed calls."""
    return [
        _build_episode(answer_type, status, turns)
        for answer_type in answer_types
        for status, turns in _build_endings(get_answer_type(answer_type).example[1])
    ]


def _build_endings(answer: str) -> list[tuple[EpisodeStatus, tuple[Turn, ...]]]:
    think = Block(kind=BlockKind.THINK, body="\nIt was at second 4.", is_closed=True)
    valid = Call(name="crop_video", arguments={"start_time": 3, "end_time": 9}, call_format=CallFormat.NATIVE)
    malformed = Call(name="", arguments={}, call_format=CallFormat.PYTHON_STYLE, error="the call is not closed")
    calls = tuple(Block(kind=BlockKind.CALL, body="{}", is_closed=call.ok, call=call) for call in (valid, malformed))
    results = (ToolResult(text="red at 4", was_executed=True), ToolResult(error="the call is not closed"))
    called = Turn(reply=_build_reply(think, *calls), results=results)
    answered = Turn(reply=_build_reply(think, Block(kind=BlockKind.ANSWER, body=answer, is_closed=True)))
    unclosed = Turn(reply=_build_reply(Block(kind=BlockKind.THINK, body="", is_closed=False)))
    return [
        (EpisodeStatus.ANSWERED, (answered,)),
        (EpisodeStatus.ANSWERED, (called, answered)),
        (EpisodeStatus.MAX_TURNS, (called, Turn(reply=called.reply))),
        (EpisodeStatus.LENGTH, (unclosed,)),
        (EpisodeStatus.NO_ANSWER, (Turn(reply=_build_reply()),)),
        (EpisodeStatus.CONTEXT_FULL, (called,)),
        (EpisodeStatus.ENVIRONMENT_ERROR, (Turn(reply=called.reply),)),
        (EpisodeStatus.ABORTED, ()),
    ]


def _build_reply(*blocks: Block) -> Reply:
    return Reply(text="".join(block.body for block in blocks), blocks=blocks)


def _build_episode(answer_type: str, status: EpisodeStatus, turns: tuple[Turn, ...]) -> Episode:
    task = Task(
        id=f"check-{answer_type}",
        question="?",
        media=(),
        answer_type=answer_type,
        ground_truth=get_answer_type(answer_type).example[0],
        options=get_answer_type(answer_type).example_options,
    )
    ledger = Ledger().observe((1, 2)).prefill((3,)).append_completion((5, 7), logprobs=(-0.1, -2.0), version=0)
    return Episode(task=task, environment="check", ledger=ledger, turns=turns, status=status)


# ---- environments --------------------------------------------------------------------------------------------------

_CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 3, "end_time": 9}}</tool_call>'
_SCRIPTS: Mapping[str, Callable[[Ledger], str]] = {
    "answers immediately": lambda ledger: "I see it.</think><answer>red</answer>",
    "generates nothing": lambda ledger: "",
    "calls forever": lambda ledger: f"I look.</think>{_CALL}{_CALL}",
    "generates malformed text": lambda ledger: "</answer><tool_call>{<tool_call></tool_call><answer><think>",
    "never stops": lambda ledger: "so " * 400,
}


async def check_environment(
    make_environment: EnvironmentFactory,
    renderer: Renderer,
    media: MediaLoader | None = None,
    task: Task | None = None,
) -> None:
    """Check an environment in the runner, with scripted replies; `task` defaults to a question about a video.

    Any replies give an episode; only the runner samples tokens; the prompt shows K frames of videos or none; the same
    seed gives the same episode; each episode has an environment of its own; `step` before `reset` raises; `close` can
    be repeated; an engine's failure aborts the episode; a cancelled episode leaves nothing running and is closed.
    """
    media = media or FakeMediaLoader()
    video = (Media(path="clip.mp4"),)
    task = task or Task(id="check", question="?", media=video, answer_type=AnswerType.OPEN, ground_truth="red")
    for name, script in _SCRIPTS.items():
        engine = Scripted(renderer, replies=script)
        episode = await run_episode(task, make_environment, _build_context(engine, renderer, media))
        assert episode.ledger.segments, f"a model that {name}: the episode has no prompt: {episode.error}"
        _check_tokens(episode, engine, f"a model that {name}")
        num_frames = count_frames([slot.image for slot in episode.ledger.segments[0].slots])
        # An environment whose tools load all frames on demand has none in its prompt.
        assert num_frames in (0, 4), f"the frame budget is 4, the prompt has {num_frames} frames"
        assert (episode.frame_budget or 0) == num_frames, (
            f"the prompt has {num_frames} frames, the episode's frame_budget is {episode.frame_budget}"
        )
        again = await run_episode(
            task, make_environment, _build_context(Scripted(renderer, replies=script), renderer, media)
        )
        assert again.ledger == episode.ledger, f"a model that {name}: the same seed gave another episode"
    failing = _build_context(Scripted(renderer, replies=()), renderer, media)
    status = (await run_episode(task, make_environment, failing)).status
    assert status is EpisodeStatus.ABORTED, f"a failing engine must abort the episode, but its status is {status}"
    await _check_lifetime(make_environment, task, failing)
    await _check_cancellation(make_environment, task, _build_context(_HangingEngine(renderer), renderer, media))


def _build_context(engine: Engine, renderer: Renderer, media: MediaLoader) -> Context:
    sampling = SamplingParams(max_tokens=64)
    return Context(engine=engine, renderer=renderer, media=media, sampling=sampling, seed=7, frame_budget=4)


async def _check_lifetime(make_environment: EnvironmentFactory, task: Task, ctx: Context) -> None:
    environment = make_environment()
    assert environment is not make_environment(), "each episode needs an environment of its own"
    assert environment.max_context_tokens > 0, "max_context_tokens must be positive"
    (outcome,) = await asyncio.gather(environment.step(Reply(text="red"), ctx), return_exceptions=True)
    assert isinstance(outcome, Exception), "step before reset must raise an error"
    await environment.close()  # also without a reset, and twice
    await environment.close()
    environment = make_environment()
    observation = await environment.reset(task, ctx)
    assert observation.messages, "reset must return a prompt"
    await environment.close()
    await environment.close()


async def _check_cancellation(make_environment: EnvironmentFactory, task: Task, ctx: Context) -> None:
    events: list[str] = []

    def make_recorded() -> Environment:
        environment = make_environment()
        close = environment.close

        async def record_close() -> None:
            events.append("close")
            await close()

        environment.close = record_close  # type: ignore[method-assign]
        return environment

    tasks_before = asyncio.all_tasks()
    episode = asyncio.ensure_future(run_episode(task, make_recorded, ctx))
    while not (hasattr(ctx.engine, "num_requests") and ctx.engine.num_requests) and not episode.done():
        await asyncio.sleep(0.001)
    assert not episode.done(), "the episode ended before its engine had replied"
    episode.cancel()
    await asyncio.wait([episode])
    assert episode.cancelled(), "a cancelled episode must end as cancelled"
    await asyncio.sleep(0)
    running = asyncio.all_tasks() - tasks_before - {episode}
    assert not running, f"a cancelled episode left {len(running)} tasks running"
    assert events == ["close"], f"a cancelled episode must close its environment once, not {len(events)} times"


class _HangingEngine(Scripted):
    """An engine that never replies."""

    num_requests = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.num_requests += 1
        await asyncio.Event().wait()
        raise EngineError("unreachable")


def _check_tokens(episode: Episode, engine: Scripted, model_description: str) -> None:
    # Equal hashes mean equal prefixes, images included: each turn must continue exactly the engine's input.
    num_sampled = sum(segment.is_sampled for member in episode.walk() for segment in member.ledger.segments)
    assert len(engine.history) == num_sampled, f"{model_description}: the environment itself sampled from the engine"
    completions = {ledger.prefix_hashes()[-1]: completion for ledger, completion in engine.history}
    for conversation in episode.walk():
        ledger = conversation.ledger
        for index, segment in enumerate(ledger.segments):
            if not segment.is_sampled:
                continue
            completion = completions.get(ledger.prefix(index).prefix_hashes()[-1])
            assert completion is not None, f"{model_description}: a turn's prompt differs from the engine's input"
            assert completion.tokens == segment.tokens, f"{model_description}: sampled tokens differ from the engine's"
