"""Options in another order: the same words, the gold with them, and nothing that is meant by its place."""

from collections import Counter
from dataclasses import replace

import pytest
from evaluation_cases import scored, task
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.evaluation.metrics import paired_difference, summarize
from saccade.evaluation.options import may_move, published, shuffled
from saccade.types import Kind, Task

WORDS = ("red", "blue", "green", "a dog", "12", "")


def asking(*choices, gold="A", question="Which?", kind=Kind.CHOICE):
    return Task(id="q", question=question, media=(), kind=kind, gold=gold, choices=choices, extras={"d": [1]})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=2, max_size=12), st.data(), st.integers(0, 99), st.integers(0, 9))
def test_the_gold_follows_and_the_way_back_is_exact(choices, data, seed, attempt):
    gold = data.draw(st.sampled_from([*(chr(65 + i) for i in range(len(choices))), ""]))
    one = asking(*choices, gold=gold)
    variant = shuffled(one, seed=seed, attempt=attempt)
    assert Counter(variant.choices) == Counter(choices)
    if gold:
        assert variant.choices[ord(variant.gold) - 65] == choices[ord(gold) - 65]
    else:
        assert variant.gold == ""
    assert published(variant) == one
    assert published(one) is one
    assert shuffled(one, seed=seed, attempt=attempt) == variant
    assert shuffled(one, seed=seed, attempt=attempt + 1).digest != variant.digest


def test_every_place_is_as_likely_as_any_other():
    one = asking("red", "blue", "green", "grey")
    golds = Counter(shuffled(replace(one, id=f"q{i}"), seed=0, attempt=i % 3).gold for i in range(800))
    assert set(golds) == set("ABCD")
    assert all(150 < count < 250 for count in golds.values())
    other = [shuffled(one, seed=seed, attempt=0).choices for seed in range(12)]
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
def test_what_is_meant_by_its_place_stays(choices):
    one = asking(*choices)
    assert not may_move(one)
    assert all(shuffled(one, seed=seed, attempt=0).choices == choices for seed in range(20))
    assert published(shuffled(one, seed=0, attempt=1)) == one


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
def test_what_is_not_moves(choices):
    assert may_move(asking(*choices))


def test_other_kinds_and_questions_about_options_stay():
    assert not may_move(asking("red", "blue", kind=Kind.OPEN))
    assert not may_move(asking("red", "blue", question="Why is option B wrong?"))


def test_attempts_with_other_orders_are_attempts_at_one_task():
    one = replace(task("a"), kind=Kind.CHOICE, gold="A", choices=("red", "blue", "green"))
    rows = [scored(shuffled(one, seed=0, attempt=i), value) for i, value in enumerate((1, 0, 1))]
    found = summarize(rows)
    assert (found.tasks, found.episodes) == (1, 3)
    assert found.at_k["pass@3"] == 1.0
    assert paired_difference([scored(one, 0)], rows).n == 1
