"""Demonstrations become exact ledgers: the written replies are trained, in both roles, and nothing else is."""

import asyncio
import itertools
import json
from dataclasses import replace

import pytest
from error_cases import raises
from virtual_time import run_in_virtual_time

from saccade.data.synthetic import text_templates
from saccade.errors import DataError
from saccade.ledger import Origin
from saccade.testing import FakeMediaLoader
from saccade.tools.base import truncate
from saccade.training.demonstrations import replay_demonstration
from saccade.training.packing import pack
from saccade.types import AnswerType, Demonstration, Media, RecordedResult, Task, TrainingSample

THINK = "<think>\n"  # prefilled, so it is never trained
LOOK = text_templates.format_tool_call_reply("I look.", [(0, 4, "When red?"), (4, 8, "When red?")]).removeprefix(THINK)
ANSWER = text_templates.format_answer_reply("I see: 4-6", "4-6").removeprefix(THINK)
MALFORMED = "I look.</think><tool_call>{</tool_call>"
LATE = text_templates.format_tool_call_reply("I look.", [(90, 99, "When red?")]).removeprefix(THINK)
TASK = Task(
    id="t-1",
    question="When?",
    media=(Media(path="clip.mp4"),),
    answer_type=AnswerType.GROUNDING,
    ground_truth=(4.0, 6.0),
)
DEMONSTRATION = Demonstration(
    task=TASK, frame_budget=2, replies=(THINK + LOOK, THINK + ANSWER), children=(("none", "4-6"),)
)


@pytest.fixture(scope="module")
def components(workspace):
    return replace(workspace.load_components(), media=FakeMediaLoader(duration=16, fps=2))


def replay(components, **changes) -> list[TrainingSample]:
    demonstration = replace(DEMONSTRATION, **changes)
    make_environment = components.environments(demonstration.task)
    return asyncio.run(replay_demonstration(demonstration, make_environment, components.build_context(seed=0)))


def get_trained_texts(components, sample) -> list[str]:
    """Return the text of each contiguous span that the sample trains."""
    ids, mask = sample.ledger.input_ids(), [value != 0 for value in sample.advantages]
    edges = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
    return [components.vlm.renderer.decode(ids[low:high]) for low, high in itertools.pairwise(edges) if mask[low]]


def test_exactly_the_replies_of_both_roles_are_trained(components):
    main, *children = replay(components)
    assert get_trained_texts(components, main) == [LOOK + "<|im_end|>", ANSWER + "<|im_end|>"]
    assert [get_trained_texts(components, child) for child in children] == [["none<|im_end|>"], ["4-6<|im_end|>"]]
    untrained = {segment.origin for segment in main.ledger.segments if not segment.is_sampled}
    assert untrained == {Origin.PROMPT, Origin.PREFILL, Origin.OBSERVATION}
    assert set(main.advantages) == {0.0, 1.0}


def test_the_main_conversation_holds_the_sub_agents_replies(components):
    results = [segment for segment in replay(components)[0].ledger.segments if segment.origin is Origin.OBSERVATION]
    text = components.vlm.renderer.decode(results[0].tokens)
    assert len(results) == 1
    assert text.index("none") < text.index("4-6")


def test_without_a_prefill_the_whole_reply_is_trained(workspace, components):
    environments = workspace.load_components("environment.settings.force_think=false").environments
    without_prefill = replace(components, environments=environments)
    texts = get_trained_texts(without_prefill, replay(without_prefill)[0])
    assert texts == [THINK + LOOK + "<|im_end|>", THINK + ANSWER + "<|im_end|>"]


def test_an_auxiliary_demonstration_trains_its_sub_agents_only(components):
    samples = replay(components, is_auxiliary=True)
    assert [get_trained_texts(components, sample) for sample in samples] == [["none<|im_end|>"], ["4-6<|im_end|>"]]
    assert [sample.ledger for sample in samples] == [sample.ledger for sample in replay(components)[1:]]


def test_an_auxiliary_demonstration_without_sub_agents_trains_its_replies(components):
    (sample,) = replay(components, replies=(ANSWER,), children=(), is_auxiliary=True)
    assert get_trained_texts(components, sample) == [ANSWER + "<|im_end|>"]


def test_the_prompt_has_the_demonstrations_frame_budget(components):
    for frame_budget in (1, 3):
        assert len(replay(components, frame_budget=frame_budget)[0].ledger.segments[0].slots) == frame_budget


def test_the_packed_batch_trains_the_same_tokens(components):
    samples = replay(components)
    batches = pack(
        samples,
        compute_positions=components.vlm.renderer.compute_position_ids,
        pack_length=512,
        micro_batch_size=8,
    )
    for index, sample in enumerate(samples):
        trained = [token for batch in batches for token in batch.token_N[batch.sample_N == index].tolist()]
        assert tuple(trained) == sample.ledger.sampled_tokens()


# ---- invalid demonstrations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replies": (LOOK,)}, "fewer replies"),
        ({"replies": ()}, "fewer replies"),
        ({"children": ()}, "sub-agent's reply"),
        ({"children": (("none",),)}, "sub-agent's reply"),
        ({"replies": (ANSWER,), "is_auxiliary": True}, "belong to no call"),
        ({"replies": (ANSWER, ANSWER), "children": ()}, "its reply 2 of 2 is not reached"),
        ({"replies": (ANSWER,)}, "2 of its 2 sub-agents' replies belong to no call"),
        ({"children": (("none", "4-6", "surplus"),)}, "1 of its 3 sub-agents' replies"),
        ({"replies": (LOOK, LOOK, LOOK, ANSWER), "children": (("a", "b"),) * 3}, "reply 3 of 4 are not answered"),
        ({"replies": (MALFORMED, ANSWER), "children": ()}, "call 1 of turn 1 has an error result"),
        ({"replies": (LATE, ANSWER), "children": (("none",),)}, "outside the video"),
        ({"replies": (LOOK + "<answer>x</answer>",)}, "the calls of its reply 1 of 1 are not answered"),
        ({"results": ((RecordedResult(error="no"), RecordedResult(text="4-6")),), "children": ()}, "error result: no"),
        ({"results": ((RecordedResult(text="none"),),), "children": ()}, "has no result of it"),
        ({"results": ((RecordedResult(error="Traceback:\n  1\nE: no\n"),),), "children": ()}, "error result: E: no"),
        ({"results": ((RecordedResult(text="none"),) * 3,), "children": ()}, "3 results for 2 calls"),
        ({"task": replace(TASK, question="why " * 2000)}, "no room"),
        ({"replies": ("<answer>4-6</answer>",), "children": ()}, "reply 1 has no thought"),
        ({"replies": (THINK + LOOK, "It is 4-6. <answer>4-6</answer>")}, "reply 2 has no thought"),
        ({"replies": (THINK + "I see.</think><answer>4-6",), "children": ()}, "reply 1 has <answer> without its end"),
        ({"task": replace(TASK, media=(Media(path="missing.mp4"),))}, "missing.mp4"),
    ],
)
def test_an_invalid_demonstration_raises_with_its_task_and_the_reason(components, changes, reason):
    with raises(DataError, key="replies", value="t-1") as caught:
        replay(components, **changes)
    assert reason in str(caught.value)


def test_text_that_spells_a_special_token_stays_text(components):
    reply = "<|im_end|><|image_pad|></think><answer>x</answer>"
    (main,) = replay(components, replies=(reply,), children=())
    renderer = components.vlm.renderer
    assert set(renderer.forbidden_ids).isdisjoint(main.ledger.sampled_tokens())
    assert set(renderer.stop_ids).isdisjoint(main.ledger.sampled_tokens()[:-1])


def test_recorded_results_stand_where_calls_would_run(components):
    results = ((RecordedResult(text="nothing here"), RecordedResult(text="4-6", images=(Media(path="figure.png"),))),)
    (main,) = replay(components, children=(), results=results)
    (segment,) = [segment for segment in main.ledger.segments if segment.origin is Origin.OBSERVATION]
    assert [slot.image.path for slot in segment.slots] == ["figure.png"]
    assert "nothing here" in components.vlm.renderer.decode(segment.tokens)
    assert get_trained_texts(components, main) == [LOOK + "<|im_end|>", ANSWER + "<|im_end|>"]


def test_a_recorded_error_is_learned_where_the_recipe_accepts_it(components):
    demonstration = replace(
        DEMONSTRATION, children=(), results=((RecordedResult(error="no frame"), RecordedResult(text="4-6")),)
    )
    make_environment, context = components.environments(TASK), components.build_context(seed=0)
    with raises(DataError, key="replies", value="t-1"):
        asyncio.run(replay_demonstration(demonstration, make_environment, context))
    (main,) = asyncio.run(replay_demonstration(demonstration, make_environment, context, accept_recorded_errors=True))
    assert get_trained_texts(components, main) == [LOOK + "<|im_end|>", ANSWER + "<|im_end|>"]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_long_result_is_truncated_as_in_rollouts(components, is_recorded):
    text, limit = " ".join(["red disc at 3"] * 60), components.recipe.environment.settings["max_tool_result_tokens"]
    recorded = ((RecordedResult(text=text), RecordedResult(text="4-6")),)
    changes = {"children": (), "results": recorded} if is_recorded else {"children": ((text, "4-6"),)}
    main, *children = replay(components, **changes)
    (segment,) = [segment for segment in main.ledger.segments if segment.origin is Origin.OBSERVATION]
    renderer = components.vlm.renderer
    shown = truncate(text, renderer, limit)
    assert len(renderer.encode(shown)) <= limit < len(renderer.encode(text))
    assert f"\n{shown}\n" in renderer.decode(segment.tokens)
    for child in children[:1]:  # its own reply is replayed
        assert get_trained_texts(components, child) == [text + "<|im_end|>"]


def test_a_recorded_error_does_not_stand_for_a_call_that_is_refused(components):
    demonstration = replace(
        DEMONSTRATION, replies=(THINK + MALFORMED, ANSWER), children=(), results=((RecordedResult(error="no"),),)
    )
    environment, context = components.environments(TASK), components.build_context(seed=0)
    with raises(DataError, key="replies", value="t-1"):
        asyncio.run(replay_demonstration(demonstration, environment, context, accept_recorded_errors=True))


def test_the_end_of_a_long_error_is_shown(components):
    error = "Traceback (most recent call last):\n" + "  line\n" * 400 + "NameError: red"
    demonstration = replace(
        DEMONSTRATION, children=(), results=((RecordedResult(error=error), RecordedResult(text="4-6")),)
    )
    environment, context = components.environments(TASK), components.build_context(seed=0)
    (main,) = asyncio.run(replay_demonstration(demonstration, environment, context, accept_recorded_errors=True))
    (segment,) = [segment for segment in main.ledger.segments if segment.origin is Origin.OBSERVATION]
    shown = components.vlm.renderer.decode(segment.tokens)
    assert "NameError: red" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("think", ["<think>", "\n<think> ", "<think>\n\n", ""])
def test_white_space_around_the_prefilled_tag_is_not_learned(components, think):
    (main,) = replay(components, replies=(think + ANSWER,), children=())
    assert get_trained_texts(components, main) == [ANSWER + "<|im_end|>"]


def test_a_thought_without_an_end_is_learned_as_written(components):
    (main,) = replay(components, replies=("<think>I see <answer>4-6</answer>",), children=())
    assert get_trained_texts(components, main) == ["I see <answer>4-6</answer><|im_end|>"]


def test_a_thought_that_the_reply_does_not_have_is_not_begun(workspace, components):
    environments = workspace.load_components("environment.settings.force_think=false").environments
    reply = "<answer>4-6</answer>"
    (main,) = replay(replace(components, environments=environments), replies=(reply,), children=())
    assert get_trained_texts(components, main) == [reply + "<|im_end|>"]


SLOW_TOOL = """
import asyncio
from saccade.tools.base import tool

@tool(timeout=1)
async def wait(seconds: float, *, ctx) -> str:
    \"\"\"Wait.\"\"\"
    await asyncio.sleep(seconds)
    return f"{seconds} s"
"""


def test_a_tool_may_exceed_its_time_limit_in_a_replay(workspace, components, tmp_path):
    """A machine that other work slows down must not make demonstrations invalid."""
    (tmp_path / "wait.py").write_text(SLOW_TOOL)
    tool_name = f"{tmp_path}/wait.py:wait"
    environments = workspace.load_components(f"environment.settings.tools=[{tool_name}]").environments
    call = "I wait.</think><tool_call>" + json.dumps({"name": "wait", "arguments": {"seconds": 3}}) + "</tool_call>"
    demonstration = replace(DEMONSTRATION, replies=(THINK + call, THINK + ANSWER), children=())
    make_environment, context = environments(TASK), components.build_context(seed=0)
    (main,) = run_in_virtual_time(replay_demonstration(demonstration, make_environment, context))
    (segment,) = [segment for segment in main.ledger.segments if segment.origin is Origin.OBSERVATION]
    assert "3.0 s" in components.vlm.renderer.decode(segment.tokens)
