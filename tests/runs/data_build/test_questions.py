"""What a teacher writes becomes tasks, or is refused with a reason that is counted."""

import collections
import json
from dataclasses import replace

import pytest

from saccade.config.schema import CaptionsConfig, QuestionsConfig
from saccade.data.dataset import find_task_problem
from saccade.media.scenes import Scene
from saccade.runs.data_build.captions import CaptionedScene, FrameCaption, SceneText, read_caption
from saccade.runs.data_build.clips import Clip, SceneRecord
from saccade.runs.data_build.questions import (
    QuestionUnit,
    draw_pairs,
    drop_repeated,
    format_prompt,
    plan_units,
    read_questions,
)
from saccade.runs.data_build.replies import InvalidReply, Rejection, parse_json
from saccade.types import AnswerType, Completion, FinishReason, Task

TYPES = ("choice", "open", "number", "grounding")
RECORD = SceneRecord(
    key="k",
    digest="d" * 32,
    duration=12.0,
    num_frames=96,
    width=64,
    height=48,
    scenes=(Scene(0, 4), Scene(4, 8), Scene(8, 12)),
)
CLIP = Clip(path="a.mp4", record=RECORD)
TEXT = SceneText("A red screen.", (FrameCaption(1.0, "It is red."),))
SCENES = tuple(CaptionedScene(clip=CLIP, index=index, text=TEXT) for index in range(3))
UNIT = QuestionUnit(scenes=SCENES[:1], answer_types=TYPES)
CHOICE = {
    "question": "Which color?",
    "answer_type": "choice",
    "options": ["red", "blue", "green", "gray"],
    "answer": "red",
}


def complete(text, finish_reason=FinishReason.STOP):
    return Completion(text=text, tokens=(), logprobs=(), version=None, finish_reason=finish_reason)


def read(*rows, unit=UNIT, **changes):
    return read_questions([list(rows)], unit, QuestionsConfig(**changes), seed=0, provenance={"teacher": "m"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('[{"a": 1}]', [[{"a": 1}]]),
        ('Sure:\n```json\n{"a": [1]}\n```\nDone.', [{"a": [1]}]),
        ('<think>maybe [1] or {"b": 2}</think>\n[3]', [[3]]),
        ("[not JSON], but [4]", [[4]]),
        ('{"a": 1}\n{"b": [2]} and [3]', [{"a": 1}, {"b": [2]}, [3]]),
        ('["\\ud83d", "\\ud83d\\ude00", "\ud800"]', [["?", "\U0001f600", "?"]]),
    ],
)
def test_json_is_found_in_a_reply(text, value):
    assert parse_json(complete(text)) == value


@pytest.mark.parametrize("text", ["", "I can't.", "<think>[1]", "[1, 2", "{'a': 1}", "[" * 100_000])
def test_a_reply_without_json_is_refused(text):
    with pytest.raises(InvalidReply, match="no JSON"):
        parse_json(complete(text))


def test_a_truncated_reply_is_refused_even_if_a_part_of_it_is_json():
    with pytest.raises(InvalidReply, match="truncated"):
        parse_json(complete('[{"a": 1}], [', FinishReason.LENGTH))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("red", "wrong type"),
        ({"summary": "x"}, "wrong type"),
        ({"summary": "x", "frames": [{"time": "soon", "caption": "y"}]}, "wrong type"),
        ({"summary": " ", "frames": [{"time": 1, "caption": "y"}]}, "blank"),
        ({"summary": "x", "frames": []}, "blank"),
        ({"summary": "x", "frames": [{"time": 5, "caption": "y"}]}, "outside"),
        ({"summary": "x", "frames": [{"time": float("nan"), "caption": "y"}]}, "outside"),
    ],
)
def test_captions_that_are_not_about_the_scene_are_refused(value, reason):
    with pytest.raises(InvalidReply, match=reason):
        read_caption([value], Scene(0, 4))


def test_questions_of_every_type_are_gradable_tasks_with_their_provenance():
    tasks = read(
        CHOICE,
        {"question": "What is  shown?", "answer_type": "Open", "answer": "a cat"},
        {"question": "How many?", "answer_type": "number", "answer": "3"},
        {"question": "When?", "answer_type": "grounding", "answer": "1 to 3.5"},
    )
    assert [task.answer_type for task in tasks] == list(TYPES)
    assert [task.ground_truth for task in tasks[1:3]] == ["a cat", 3.0]
    assert tasks[1].question == "What is shown?"
    assert not any(find_task_problem(task) for task in tasks)
    assert len({task.id for task in tasks}) == 4
    assert tasks[0].extras["provenance"] == {"digest": "d" * 32, "scenes": [[0, 4]], "teacher": "m"}


def test_the_right_option_stays_right_and_is_not_always_the_first():
    letters = set()
    for number in range(20):
        (task,) = read({**CHOICE, "question": f"Which color, {number}?"})
        assert task.options["ABCD".index(task.ground_truth)] == "red"
        letters.add(task.ground_truth)
    assert len(letters) > 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": "  "}, "blank"),
        ({"question": "x" * 501}, "too long"),
        ({"question": 3}, "wrong type"),
        ({"answer_type": "poem"}, "not requested"),
        ({"question": "Which color is in scene 2?"}, "captions or scenes"),
        ({"question": "What does the caption say?"}, "captions or scenes"),
        ({"options": ["red", "blue"]}, "options"),
        ({"options": ["red", "Red.", "blue", "green"]}, "options"),
        ({"options": ["red", "", "blue", "green"]}, "options"),
        ({"options": "red"}, "wrong type"),
        ({"options": ["red", "x" * 201, "blue", "green"]}, "option is too long"),
        ({"answer": "purple"}, "answer"),
        ({"answer": None}, "answer"),
        ({"answer_type": "open", "answer": " "}, "answer"),
        ({"answer_type": "open", "answer": "one two three four five six seven eight nine ten eleven"}, "too long"),
        ({"answer_type": "open", "question": "Is the cat gray?", "answer": "cat"}, "names its answer"),
        ({"answer_type": "number", "answer": "many"}, "answer"),
        ({"answer_type": "number", "answer": True}, "answer"),
        ({"answer_type": "grounding", "answer": [3, 1]}, "answer"),
        ({"answer_type": "grounding", "answer": [1, 9]}, "outside its scenes"),
        ({"answer_type": "grounding", "answer": [1, float("inf")]}, "answer"),
    ],
)
def test_unusable_questions_are_refused(changes, reason):
    (rejection,) = read({**CHOICE, **changes})
    assert isinstance(rejection, Rejection)
    assert reason in rejection.reason


def test_one_unusable_question_does_not_void_the_others():
    results = read("no question", CHOICE, {**CHOICE, "question": "And?"}, CHOICE, CHOICE)
    assert [type(result) for result in results] == [Rejection, Task, Task, Task, Rejection]
    assert results[-1].reason == "more questions than requested"


@pytest.mark.parametrize("values", [[{"a": 1}], [[]], [[1, 2]], ["x"], [{"questions": 3}], [{"questions": []}]])
def test_json_without_questions_is_refused(values):
    with pytest.raises(InvalidReply, match="no questions"):
        read_questions(values, UNIT, QuestionsConfig(), seed=0, provenance={})


@pytest.mark.parametrize(
    "values",
    [
        [[CHOICE, {**CHOICE, "question": "And?"}]],
        [CHOICE, {**CHOICE, "question": "And?"}],
        [[2], [CHOICE], [{**CHOICE, "question": "And?"}]],
        [{"questions": [CHOICE, {**CHOICE, "question": "And?"}]}],
    ],
)
def test_questions_may_be_in_one_list_or_several_or_none(values):
    results = read_questions(values, UNIT, QuestionsConfig(), seed=0, provenance={})
    assert [(type(result), result.question) for result in results] == [(Task, "Which color?"), (Task, "And?")]
    assert len({result.id for result in results}) == 2


def test_the_last_caption_of_a_reply_counts():
    draft, final = ({"summary": text, "frames": [{"time": 1, "caption": text}]} for text in ("draft", "final"))
    assert read_caption([draft, final, [3]], Scene(0, 4)).summary == "final"


def test_repeated_questions_about_a_video_are_dropped():
    tasks = read(CHOICE, {**CHOICE, "question": "WHICH color"})
    unique, rejections = drop_repeated(tasks)
    assert [task.id for task in unique] == [tasks[0].id]
    assert [rejection.item for rejection in rejections] == [tasks[1].id]


def test_units_are_scenes_and_pairs_whose_types_take_turns():
    settings = QuestionsConfig(num_per_scene=4, num_per_pair=2, pairs_per_video=2)
    units = plan_units(SCENES, settings, seed=0)
    assert [len(unit.scenes) for unit in units] == [1, 1, 1, 2, 2]
    assert [sorted(unit.answer_types) for unit in units[:3]] == [sorted(TYPES)] * 3
    for unit in units:
        start = TYPES.index(unit.answer_types[0])
        assert unit.answer_types == (TYPES * 2)[start : start + len(unit.answer_types)]
    assert len({unit.name for unit in units}) == len(units)
    assert plan_units(SCENES, QuestionsConfig(num_per_scene=0, num_per_pair=0), seed=0) == []
    prompt = format_prompt(units[3], settings)
    assert "two scenes" in prompt
    assert prompt.count("A red screen.") == 2
    assert json.dumps("{") not in prompt


def make_scenes(count):
    clip = replace(CLIP, record=replace(RECORD, scenes=tuple(Scene(index, index + 1) for index in range(count))))
    return [CaptionedScene(clip=clip, index=index, text=TEXT) for index in range(count)]


def test_all_types_are_asked_for_about_equally():
    units = plan_units(make_scenes(400), QuestionsConfig(num_per_scene=1, pairs_per_video=0), seed=0)
    counts = collections.Counter(name for unit in units for name in unit.answer_types)
    assert min(counts[name] for name in TYPES) > 50  # of 100 on average: 5 standard deviations


def test_a_missing_caption_changes_no_other_request():
    scenes, settings = make_scenes(9), QuestionsConfig(num_per_scene=1, num_per_pair=1, pairs_per_video=12)
    complete_units = plan_units(scenes, settings, seed=3)
    for missing in scenes:
        units = plan_units([scene for scene in scenes if scene is not missing], settings, seed=3)
        assert units == [unit for unit in complete_units if missing not in unit.scenes]


@pytest.mark.parametrize(
    ("num_scenes", "count"), [(0, 3), (1, 3), (2, 3), (5, 0), (5, 4), (5, 10), (5, 99), (10**6, 7)]
)
def test_pairs_are_drawn_without_repetition(num_scenes, count):
    pairs = draw_pairs(num_scenes, count, seed=0, digest="d")
    assert len(pairs) == len({*pairs}) == min(count, num_scenes * (num_scenes - 1) // 2)
    assert all(0 <= first < second < num_scenes for first, second in pairs)
    assert draw_pairs(num_scenes, count + 1, seed=0, digest="d")[: len(pairs)] == pairs


def test_all_pairs_are_equally_probable():
    counts = collections.Counter(pair for seed in range(1000) for pair in draw_pairs(5, 2, seed=seed, digest="d"))
    assert len(counts) == 10
    assert all(120 < count < 280 for count in counts.values())  # of 200 on average: 6 standard deviations


def test_an_answer_type_outside_the_four_is_no_setting():
    assert set(QuestionsConfig().answer_types) < {*AnswerType}
    assert CaptionsConfig().frame_range[0] >= 1
