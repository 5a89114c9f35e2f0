"""Shuffled options: the same texts, the ground truth with them, and options that refer to positions stay."""

from collections import Counter
from dataclasses import replace

import pytest
from evaluation_cases import make_scored, task
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.option_shuffle import can_shuffle_options, restore_options, shuffle_options
from saccade.metrics.episode_metrics import compute_paired_difference, summarize
from saccade.types import AnswerType, Task

WORDS = ("red", "blue", "green", "a dog", "12", "")


def make_choice_task(*options, ground_truth="A", question="Which?", kind=AnswerType.CHOICE):
    return Task(
        id="q",
        question=question,
        media=(),
        answer_type=kind,
        ground_truth=ground_truth,
        options=options,
        extras={"d": [1]},
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=2, max_size=12), st.data(), st.integers(0, 99), st.integers(0, 9))
def test_ground_truth_follows_and_restore_is_exact(choices, data, seed, attempt):
    ground_truth = data.draw(st.sampled_from([*(chr(65 + i) for i in range(len(choices))), ""]))
    one = make_choice_task(*choices, ground_truth=ground_truth)
    variant = shuffle_options(one, seed=seed, sample_index=attempt)
    assert Counter(variant.options) == Counter(choices)
    if ground_truth:
        assert variant.options[ord(variant.ground_truth) - 65] == choices[ord(ground_truth) - 65]
    else:
        assert variant.ground_truth == ""
    assert restore_options(variant) == one
    assert restore_options(one) is one
    assert shuffle_options(one, seed=seed, sample_index=attempt) == variant
    assert shuffle_options(one, seed=seed, sample_index=attempt + 1).digest != variant.digest


def test_positions_are_uniform():
    original = make_choice_task("red", "blue", "green", "grey")
    letters = Counter(
        shuffle_options(replace(original, id=f"q{i}"), seed=0, sample_index=i % 3).ground_truth for i in range(800)
    )
    assert set(letters) == set("ABCD")
    assert all(150 < count < 250 for count in letters.values())
    other = [shuffle_options(original, seed=seed, sample_index=0).options for seed in range(12)]
    assert len(set(other)) > 3


@pytest.mark.parametrize(
    "choices",
    [
        ("red", "blue", "Both A and B"),
        ("red", "blue", "all of the above"),
        ("red", "blue", "None of the above."),
        ("red", "blue", "(A) or (C)"),
        ("red", "blue", "A, B and C"),
        ("red", "the same as option A"),
        ("A", "B", "C", "D"),
        ("(a)", "(b)"),
        ("red",),
    ],
)
def test_options_that_refer_to_positions_stay(choices):
    one = make_choice_task(*choices)
    assert not can_shuffle_options(one)
    assert all(shuffle_options(one, seed=seed, sample_index=0).options == choices for seed in range(20))
    assert restore_options(shuffle_options(one, seed=0, sample_index=1)) == one


@pytest.mark.parametrize(
    "choices",
    [
        ("red", "blue"),
        ("A red ball", "An owl above the door"),
        ("the box above it", "none of these"),
        ("Vitamin A", "Plan B", "I don't know"),
        ("AB", "BA"),
        ("1", "2"),
    ],
)
def test_other_options_are_shuffled(choices):
    assert can_shuffle_options(make_choice_task(*choices))


def test_other_answer_types_and_questions_about_options_stay():
    assert not can_shuffle_options(make_choice_task("red", "blue", kind=AnswerType.OPEN))
    assert not can_shuffle_options(make_choice_task("red", "blue", question="Why is option B wrong?"))


def test_orders_of_options_are_samples_of_one_task():
    one = replace(task("a"), answer_type=AnswerType.CHOICE, ground_truth="A", options=("red", "blue", "green"))
    rows = [make_scored(shuffle_options(one, seed=0, sample_index=i), value) for i, value in enumerate((1, 0, 1))]
    found = summarize(rows)
    assert (found.num_tasks, found.num_episodes) == (1, 3)
    assert found.at_k["pass@3"] == 1.0
    assert compute_paired_difference([make_scored(one, 0)], rows).n == 1
