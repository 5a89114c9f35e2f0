"""Constant-answer baselines per wording, against hand-computed numbers."""

import itertools
from collections import Counter

import pytest

from saccade.data.constant_baseline import (
    MIN_TASKS_PER_WORDING,
    OTHER_WORDINGS,
    assign_wordings,
    compute_constant_baselines,
    compute_wording_baselines,
)
from saccade.types import AnswerType, Task


def make_tasks(question, answers, *, target=None, kind="count", answer_type=AnswerType.NUMBER):
    return [
        Task(
            id=f"{question} {index}",
            question=question.format(target=target, number=index),
            media=(),
            answer_type=answer_type,
            ground_truth=answer,
            extras={"question": kind, "target": target},
        )
        for index, answer in enumerate(answers)
    ]


def test_a_wording_gives_its_answer_away():
    # Over both wordings 2 is right in half of the tasks; per wording one constant is always right.
    total = make_tasks("How many flashes?", [5.0] * 8)
    red = make_tasks("How many {target} flashes?", [2.0] * 8, target="red")
    assert compute_constant_baselines(total + red) == {"count": 0.5}
    assert set(compute_wording_baselines(total + red).values()) == {1.0}


def test_targets_and_numbers_are_no_wording():
    tasks = [
        *make_tasks("How many {target} flashes in {number} s?", [1.0, 2.0] * 4, target="red"),
        *make_tasks("How many {target} flashes in {number} s?", [1.0] * 8, target="blue"),
    ]
    assert set(assign_wordings(tasks).values()) == {"count, number: How many … flashes in # s?"}
    assert set(compute_wording_baselines(tasks).values()) == {12 / 16}


@pytest.mark.slow
def test_the_best_constant_span():
    """Against a search over all pairs of bounds, which thousands of spans make slow."""
    spans = [(float(n % 7), float(n % 7 + 2 + n % 3)) for n in range(40)]
    tasks = make_tasks("When?", spans, kind="when", answer_type=AnswerType.GROUNDING)

    def compute_iou(one, other):
        overlap = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
        return overlap / (one[1] - one[0] + other[1] - other[0] - overlap)

    bounds = sorted({bound for span in spans for bound in span})
    best = max(sum(compute_iou(span, other) for other in spans) for span in itertools.combinations(bounds, 2))
    assert compute_constant_baselines(tasks)["when"] == pytest.approx(best / len(spans))
    many = [(n / 97, n / 97 + 5) for n in range(3000)]
    tasks = make_tasks("When?", many, kind="when", answer_type=AnswerType.GROUNDING)
    assert 0 < compute_constant_baselines(tasks)["when"] < 1


def test_rare_wordings_are_one():
    # One answer of one question is no baseline: it would be 1.
    tasks = [make_tasks(f"What is {word}?", [f"{index % 4}"])[0] for index, word in enumerate("abcdefgh")]
    assert set(assign_wordings(tasks).values()) == {f"count, number: {OTHER_WORDINGS}"}
    assert set(compute_wording_baselines(tasks).values()) == {0.25}
    assert len(tasks) == MIN_TASKS_PER_WORDING


def test_answer_types_are_separate_wordings():
    letters = make_tasks("Which?", ["A"] * 6 + ["B"] * 2, kind="at", answer_type=AnswerType.CHOICE)
    texts = make_tasks("Which?", ["red"] * 4 + ["blue"] * 4, kind="at", answer_type=AnswerType.OPEN)
    baselines = compute_wording_baselines(letters + texts)
    assert Counter(baselines.values()) == {0.75: 8, 0.5: 8}


def test_tasks_without_a_question_type_have_none():
    plain = Task(id="p", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    assert compute_wording_baselines([plain]) == {}
    assert compute_wording_baselines([]) == {}
