"""Tool environments, by the example of tool_calling: turns, calls, limits, statuses, seeds, live events."""

import asyncio
import functools
from types import SimpleNamespace

import pytest
from error_cases import raises
from virtual_time import run_in_virtual_time

from saccade.engines.scripted import Scripted
from saccade.environments.single_turn import SingleTurn
from saccade.environments.tool_calling import FINAL_ANSWER_PROMPT, ToolCalling
from saccade.errors import ConfigError
from saccade.ledger import Ledger, Origin
from saccade.protocols import Context
from saccade.rollouts.runner import DEADLINE_ERROR, run_episode
from saccade.testing import FakeMediaLoader
from saccade.tools import base
from saccade.tools.crop_video import crop_video
from saccade.types import AnswerType, Completion, EpisodeStatus, FinishReason, Media, SamplingParams, Task
from saccade.utils.hashing import derive_seed

TASK = Task(
    id="t", question="What is it?", media=(Media(path="clip.mp4"),), answer_type=AnswerType.OPEN, ground_truth="red"
)
ANSWER = "I know.</think><answer>red</answer>"


def call(start, end=None, name="crop_video"):
    arguments = f'{{"start_time": {start}, "end_time": {start + 4 if end is None else end}}}'
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def is_child(ledger):
    return all(segment.origin is Origin.PROMPT for segment in ledger.segments)


def script(renderer, *replies, child="nothing"):
    """The main agent says `replies` in turn, every sub-agent `child` (a text, or a function of its ledger)."""

    def say(ledger):
        if is_child(ledger):
            return child(ledger) if callable(child) else child
        return replies[sum(segment.is_sampled for segment in ledger.segments)]

    return Scripted(renderer, replies=say)


def run(renderer, engine, environment=ToolCalling, task=TASK, run_coroutine=asyncio.run, **settings):
    changes = {key: settings.pop(key) for key in ("frame_budget", "on_event", "seed") if key in settings}
    sampling = SamplingParams(max_tokens=settings.pop("max_tokens", 200))
    given = {"engine": engine, "renderer": renderer, "media": FakeMediaLoader(), "sampling": sampling, "seed": 5}
    ctx = Context(**{**given, **changes})
    return run_coroutine(run_episode(task, functools.partial(environment, **settings), ctx))


def text(renderer, segment):
    return renderer.decode(segment.tokens)


def test_an_answer_ends_it(renderer):
    episode = run(renderer, script(renderer, ANSWER))
    assert (episode.status, episode.answer, episode.environment) == (EpisodeStatus.ANSWERED, "red", "tool_calling")
    prompt, forced, completion = episode.ledger.segments
    assert (forced.origin, text(renderer, forced)) == (Origin.PREFILL, "<think>\n")
    assert episode.turns[0].reply.prefill == "<think>\n"
    assert completion.tokens[-1] in renderer.stop_ids
    assert "crop_video" in text(renderer, prompt)


@pytest.mark.parametrize(("frames", "shown"), [(None, 64), (4, 4), (8, 8), (1000, 256)])
def test_the_prompt_shows_min_of_k_and_the_videos_frames(renderer, frames, shown):
    episode = run(renderer, script(renderer, ANSWER), frame_budget=frames)
    assert len(episode.ledger.images()) == episode.frame_budget == shown
    prompt = text(renderer, episode.ledger.segments[0])
    assert prompt.count(" seconds><|vision_start|>") == shown
    assert prompt.index("<|vision_end|>What is it?") > 0


def test_calls_of_a_turn_are_answered_in_order_in_one_tool_turn(renderer):
    def child(ledger):
        return f"seen {ledger.images()[0].time}"

    engine = script(renderer, f"Look.</think>{call(40)}{call(8)}{call(20)}", ANSWER, child=child)
    episode = run(renderer, engine)
    results = episode.turns[0].results
    assert [result.text for result in results] == ["seen 40.5", "seen 8.5", "seen 20.5"]
    assert [result.child_index for result in results] == [0, 1, 2]
    assert [one.ledger.images()[0].time for one in episode.children] == [40.5, 8.5, 20.5]
    tool_turns = [segment for segment in episode.ledger.segments if segment.origin is Origin.OBSERVATION]
    assert len(tool_turns) == 1
    assert text(renderer, tool_turns[0]).count("<tool_response>") == 3
    assert [one.origin.value for one in episode.ledger.segments] == [
        *("prompt", "prefill", "sampled", "observation", "prefill", "sampled")
    ]


def test_calls_run_at_the_same_time(renderer):
    async def waits(request):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        running -= 1
        return await plain(request)

    running = most = 0
    engine = script(renderer, f"</think>{call(0)}{call(8)}{call(16)}{call(24)}", ANSWER)
    plain, engine.generate = engine.generate, waits
    run(renderer, engine, run_coroutine=run_in_virtual_time)
    assert most == 4


def test_results_do_not_depend_on_the_order_of_completion(renderer):
    def slow_first(order):
        engine = script(renderer, f"</think>{call(0)}{call(8)}", ANSWER, child=lambda led: f"{led.images()[0].time}")
        plain = engine.generate

        async def generate(request):
            if is_child(request.ledger):
                await asyncio.sleep(0.02 * order[int(request.ledger.images()[0].time // 8)])
            return await plain(request)

        engine.generate = generate
        return run(renderer, engine, run_coroutine=run_in_virtual_time)

    assert slow_first([1, 0]).ledger == slow_first([0, 1]).ledger


def test_too_many_calls_are_answered_not_dropped(renderer):
    engine = script(renderer, "</think>" + "".join(call(8 * n) for n in range(7)), ANSWER)
    results = run(renderer, engine, max_calls_per_turn=5).turns[0].results
    assert [result.ok for result in results] == [True] * 5 + [False] * 2
    assert all("5" in result.error.split() for result in results[5:])


def test_a_malformed_call_voids_nothing(renderer):
    reply = f"</think><tool_call>{{oops</tool_call>{call(0)}<tool_call>{call(8)}{call(9, name='zoom')}{call(9, 3)}"
    episode = run(renderer, script(renderer, reply, ANSWER), max_calls_per_turn=2)
    (turn, *_), errors = episode.turns, [result.error for result in episode.turns[0].results]
    assert [error is None for error in errors] == [False, True, False, True, False, False]
    # The parser rejects the unreadable and the unclosed call, the environment the last two.
    assert errors[:4] == [parsed.error for parsed in turn.reply.calls[:4]]
    assert [parsed.ok for parsed in turn.reply.calls[4:]] == [True, True]
    assert "'zoom'" in errors[4]
    assert "2" in errors[5].split()
    assert episode.status is EpisodeStatus.ANSWERED
    shown = text(renderer, episode.ledger.segments[3])
    assert shown.count("Error: ") == 4


def test_the_python_style_runs_too(renderer):
    reply = "</think><tool_code>print(crop_video(3, end_time=9))</tool_code>"
    episode = run(renderer, script(renderer, reply, ANSWER, child="red"))
    assert [result.text for result in episode.results] == ["red"]


def test_sequential_dispatch_serves_one_call_per_turn(renderer):
    engine = script(renderer, f"</think>{call(0)}{call(8)}", f"</think>{call(8)}", ANSWER)
    episode = run(renderer, engine, parallel_tool_calls=False)
    first, second, _ = episode.turns
    assert [result.ok for result in first.results] == [True, False]
    assert "1" in first.results[1].error.split()
    assert second.results[0].ok


def test_an_answer_beside_calls_ends_it_and_the_calls_are_not_run(renderer):
    episode = run(renderer, script(renderer, f"</think>{call(0)}<answer>red</answer>"))
    assert (episode.status, episode.results, episode.children) == (EpisodeStatus.ANSWERED, (), ())


def test_after_the_last_tool_turn_an_answer_is_demanded(renderer):
    look = f"</think>{call(0)}"
    episode = run(renderer, script(renderer, look, look, look), max_tool_turns=2)
    assert episode.status is EpisodeStatus.MAX_TURNS
    assert [len(turn.results) for turn in episode.turns] == [1, 1, 0]
    first, second = [text(renderer, one) for one in episode.ledger.segments if one.origin is Origin.OBSERVATION]
    assert FINAL_ANSWER_PROMPT not in first
    assert FINAL_ANSWER_PROMPT in second


def test_with_the_tools_off_the_prompt_has_no_schemas_and_calls_fail(renderer):
    episode = run(renderer, script(renderer, f"</think>{call(0)}", ANSWER), tools={})
    assert "<tools>" not in text(renderer, episode.ledger.segments[0])
    assert "'crop_video'" in episode.results[0].error
    assert (episode.status, episode.children) == (EpisodeStatus.ANSWERED, ())
    hidden = run(renderer, script(renderer, ANSWER), show_tool_schemas=False)
    assert hidden.ledger == run(renderer, script(renderer, ANSWER), tools={}).ledger


@pytest.mark.parametrize(
    ("reply", "changes", "end"),
    [
        ("I give up.", {}, EpisodeStatus.NO_ANSWER),
        ("so " * 99, {"max_tokens": 9}, EpisodeStatus.LENGTH),
        (f"{ANSWER} and so on", {"max_tokens": 30}, EpisodeStatus.ANSWERED),
        ("so " * 400, {"max_context_tokens": 700}, EpisodeStatus.CONTEXT_FULL),
        (ANSWER, {"max_context_tokens": 100}, EpisodeStatus.CONTEXT_FULL),
    ],
)
def test_ends(renderer, reply, changes, end):
    max_tokens = changes.pop("max_tokens", 4000)
    episode = run(renderer, script(renderer, reply), frame_budget=4, max_tokens=max_tokens, **changes)
    assert episode.status is end
    assert len(episode.ledger) <= changes.get("max_context_tokens", 10**6)


def test_a_tool_turn_that_does_not_fit_is_omitted(renderer):
    engine = script(renderer, f"</think>{call(0)}", ANSWER, child="word " * 60)
    whole = run(renderer, engine, frame_budget=4)
    lengths = [sum(segment.repeat_counts) for segment in whole.ledger.segments]
    limit = sum(lengths[:4])  # room for the results, none for a reply
    episode = run(renderer, engine, frame_budget=4, max_context_tokens=limit)
    assert episode.status is EpisodeStatus.CONTEXT_FULL
    assert episode.ledger.segments == whole.ledger.segments[:3]
    assert episode.results == episode.turns[0].results != ()


class Broken(Scripted):
    """Fails, or stops, from its nth reply on."""

    def __init__(self, renderer, after, stop=None):
        super().__init__(renderer, replies=lambda led: "seen" if is_child(led) else f"</think>{call(0)}{call(8)}")
        self.left, self.stop = after, stop

    async def generate(self, request):
        self.left -= 1
        if self.left < 0 and self.stop:
            return Completion(tokens=(), logprobs=(), version=0, finish_reason=self.stop)
        return await super().generate(request) if self.left >= 0 else self._next_fails()

    def _next_fails(self):
        self._is_closed = True
        return self._take_next_reply(Ledger())


@pytest.mark.parametrize(
    ("after", "stop", "end"),
    [
        (0, None, EpisodeStatus.ABORTED),
        (0, FinishReason.ABORTED, EpisodeStatus.ABORTED),
        (2, None, EpisodeStatus.ENVIRONMENT_ERROR),
        (2, FinishReason.ABORTED, EpisodeStatus.ENVIRONMENT_ERROR),
        (3, None, EpisodeStatus.ABORTED),
    ],
)
def test_a_failure_of_the_engine_is_not_the_policys_fault(renderer, after, stop, end):
    episode = run(renderer, Broken(renderer, after, stop))
    assert episode.status is end
    assert bool(episode.error) == (after > 0 or stop is None)


def test_a_forbidden_id_aborts(renderer):
    class Sees(Scripted):
        async def generate(self, request):
            return Completion(
                tokens=renderer.forbidden_ids[:1], logprobs=(-1.0,), version=0, finish_reason=FinishReason.LENGTH
            )

    episode = run(renderer, Sees(renderer))
    assert episode.status is EpisodeStatus.ABORTED
    assert episode.error
    assert not any(segment.is_sampled for segment in episode.ledger.segments)


def under_deadline(renderer, engine, *, media=None, seconds=0.05):
    async def body():
        given = {
            "engine": engine,
            "renderer": renderer,
            "media": media or FakeMediaLoader(),
            "sampling": SamplingParams(),
        }
        soon = asyncio.get_running_loop().time() + seconds
        return await run_episode(TASK, ToolCalling, Context(**given, seed=5, deadline=soon))

    return run_in_virtual_time(body())


@pytest.mark.parametrize("slow", ["reply", "sub-agent", "media"])
def test_whatever_an_episode_waits_for_it_ends_at_its_deadline(renderer, slow):
    cancelled = []

    async def sleep():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(slow)

    class Slow(Scripted):
        async def generate(self, request):
            if slow == ("sub-agent" if is_child(request.ledger) else "reply"):
                await sleep()
            return await super().generate(request)

    class Stuck(FakeMediaLoader):
        async def load_frames(self, *given, **settings):
            await (sleep() if slow == "media" else asyncio.sleep(0))
            return await super().load_frames(*given, **settings)

    engine = Slow(renderer, replies=lambda ledger: f"</think>{call(0)}{call(8)}")
    episode = under_deadline(renderer, engine, media=Stuck())
    assert (episode.status, episode.error) == (EpisodeStatus.ABORTED, DEADLINE_ERROR)
    assert set(cancelled) == {slow}
    num_replies = {"reply": 0, "sub-agent": 1, "media": 0}[slow]  # earlier turns are kept
    assert len(episode.turns) == sum(segment.is_sampled for segment in episode.ledger.segments) == num_replies


def test_a_time_out_inside_is_not_taken_for_the_deadline(renderer):
    class Late(Scripted):
        async def generate(self, request):
            raise TimeoutError

    with raises(ConfigError, key="environment.name", value="tool_calling"):
        run(renderer, Late(renderer))
    with raises(ConfigError, key="environment.name", value="tool_calling"):
        under_deadline(renderer, Late(renderer), seconds=30)


def test_a_sub_agent_that_queues_behind_others_is_waited_for(renderer, monkeypatch):
    """The tool has less time than the engine takes: that the engine is busy is not the tool's fault."""
    monkeypatch.setattr(crop_video, "timeout", 0.2)
    virtual_clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(base, "time", virtual_clock)

    class Queue(Scripted):
        async def generate(self, request):
            await asyncio.sleep(0.5 * is_child(request.ledger))
            return await super().generate(request)

    replies = (f"</think>{call(0)}{call(8)}", "seen", "seen", ANSWER)
    episode = run(renderer, Queue(renderer, replies=replies), run_coroutine=run_in_virtual_time)
    assert [result.error for result in episode.results] == [None, None]
    assert all(result.seconds > 0.4 for result in episode.results)


def test_seeds_are_derived_from_turn_and_index(renderer):
    seeds = []

    class Notes(Scripted):
        async def generate(self, request):
            seeds.append(request.sampling.seed)
            assert request.sampling.stop_ids == renderer.stop_ids
            assert request.sampling.forbidden_ids == renderer.forbidden_ids
            return await super().generate(request)

    replies = (f"</think>{call(0)}<tool_call>oops</tool_call>{call(8)}", "seen", "seen", ANSWER)
    run(renderer, Notes(renderer, replies=replies), seed=9)
    assert seeds == [derive_seed(9, 0), derive_seed(9, "child", 0, 0), derive_seed(9, "child", 0, 2), derive_seed(9, 1)]


def test_children_are_plain_episodes(renderer):
    episode = run(renderer, script(renderer, f"</think>{call(0)}", ANSWER, child="red at 3"))
    (child,) = episode.children
    assert (child.task.id, child.environment, child.status, child.frame_budget) == (
        "t/0.0",
        "sub_agent",
        EpisodeStatus.ANSWERED,
        4,
    )
    assert [segment.origin for segment in child.ledger.segments] == [Origin.PROMPT, Origin.SAMPLED]
    whole = episode.usage
    assert whole.sampled_tokens == sum(len(one.ledger.sampled_tokens()) for one in episode.walk())
    assert whole.visual_tokens == sum(slot.num_tokens for one in episode.walk() for slot in one.ledger.slots())
    assert whole.unsampled_tokens + whole.sampled_tokens == sum(len(one.ledger) for one in episode.walk())


def test_events_have_the_order_of_the_episode(renderer):
    events = []
    run(
        renderer,
        script(renderer, f"</think>{call(0)}{call(8)}", ANSWER),
        on_event=lambda event, data: events.append((event, data)),
    )
    names = [event for event, _ in events]
    assert names == ["turn", "reply", "calls", "result", "result", "results", "turn", "reply", "end"]
    served = [data for event, data in events if event == "result"]
    assert [(data["index"], data["call"].arguments["start_time"]) for data in served] == [(0, 0), (1, 8)]


def test_options_are_shown_by_letter(renderer):
    task = Task(
        id="c", question="Which?", media=(), answer_type=AnswerType.CHOICE, ground_truth="A", options=("red", "blue")
    )
    episode = run(renderer, script(renderer, ANSWER), task=task)
    assert "Which?\nA. red\nB. blue" in text(renderer, episode.ledger.segments[0])
    assert episode.frame_budget == 0


def test_media_that_cannot_be_shown_abort_the_episode(renderer):
    missing = Task(
        id="t", question="?", media=(Media(path="missing.mp4"),), answer_type=AnswerType.OPEN, ground_truth=""
    )
    episode = run(renderer, script(renderer, ANSWER), task=missing, frame_budget=4)
    assert (episode.status, episode.frame_budget, episode.ledger) == (EpisodeStatus.ABORTED, 4, Ledger())
    assert "missing.mp4" in episode.error


@pytest.mark.parametrize(("force_think", "prefill"), [(False, ""), (True, "<think>\n")])
def test_single_turn(renderer, force_think, prefill):
    environment = functools.partial(SingleTurn, force_think=force_think)
    episode = run(
        renderer, Scripted(renderer, replies=("<answer>red</answer>",)), environment=environment, frame_budget=4
    )
    assert (episode.status, episode.environment, episode.frame_budget) == (EpisodeStatus.ANSWERED, "single_turn", 4)
    assert episode.turns[0].reply.prefill == prefill
    calls = run(renderer, Scripted(renderer, replies=(call(0),)), environment=environment)
    assert (calls.status, calls.results) == (EpisodeStatus.MAX_TURNS, ())


def test_an_empty_system_text_is_left_out(renderer):
    plain = functools.partial(ToolCalling, system_prompt="", show_tool_schemas=False)
    episode = run(renderer, script(renderer, ANSWER), environment=plain, frame_budget=4)
    assert text(renderer, episode.ledger.segments[0]).startswith("<|im_start|>user\n<8.0 seconds>")


def test_a_window_too_large_for_the_context_is_an_error_to_read(renderer):
    wide = {"crop_video": {"frame_range": (200, 200)}}
    small = functools.partial(
        ToolCalling, system_prompt="", show_tool_schemas=False, tools=wide, max_context_tokens=800
    )
    episode = run(renderer, script(renderer, f"</think>{call(0, 16)}", ANSWER), environment=small, frame_budget=1)
    assert "800" in episode.results[0].error
    assert episode.status is EpisodeStatus.ANSWERED
    assert len(episode.ledger) <= 800


@pytest.mark.parametrize("reply", ["word " * 300, "<answer>red</answer>" + " word" * 300])
def test_a_truncated_sub_agent_has_the_status_length(renderer, reply):
    engine = script(renderer, f"</think>{call(0)}", ANSWER, child=reply)
    (whole,) = run(renderer, engine, frame_budget=1, max_tokens=2000).children
    assert whole.status is EpisodeStatus.ANSWERED
    limit = sum(sum(segment.repeat_counts) for segment in whole.ledger.segments) - 8
    for changes in (
        {"max_tokens": 150},
        {"max_tokens": 2000, "max_context_tokens": limit},
    ):  # its own limit, and that of the context
        (child,) = run(renderer, engine, frame_budget=1, **changes).children
        assert child.status is EpisodeStatus.LENGTH
