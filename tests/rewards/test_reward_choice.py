import itertools

import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import answer_episode, episode, stray, task, text, turn

from saccade.errors import DataError
from saccade.rewards.answer_types.choice import ChoiceAnswer
from saccade.types import AnswerType

OPTIONS = ("the red ball", "the blue ball", "A and B", "none of them")


def score(body, ground_truth="B", choices=OPTIONS):
    return ChoiceAnswer()(answer_episode(body, ground_truth=ground_truth, kind=AnswerType.CHOICE, choices=choices))


@pytest.mark.parametrize(
    "body",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "B)",
        "[b]",
        " B\n",
        "**B**",
        "\\boxed{B}",
        "\\boxed{B}\\boxed{B}",
        "\\boxed{B",
        "$\\boxed{\\text{B}}$",
        "Option B",
        "Answer: B",
        "answer : b",
        "The answer is B",
        "The correct answer is: (B).",
        "the final answer is option B",
        "The blue ball",
        "the blue ball.",
        "B. the blue ball",
        "(B) The Blue Ball.",
        "B: the blue ball",
        "Ｂ",
        "'B'",
        "\u201cB\u201d",
        "__B__",
        "\\(B\\)",
        "\\[\\boxed{B}\\]",
        "$\\boxed{\\textbf{(B)}}$",
        "\\mathbf{B}",
        "\\text{B. the blue ball}",
        "Ⓑ",
        "B,",
        "答案：B",
        "B the blue ball",
        "B - the blue ball",
        "B\u2014the blue ball",
        "B\nthe blue ball",
        "Answer: B. The blue ball.",
        "b\u200b",
        "B!",
        "{B}",
        "B\u3002",
        "\u300cB\u300d",
        "\u9009B",
        "\u9009\u9879B",
        "The blue ball!",
    ],
)
def test_one_letter_or_its_text(body):
    assert score(body) == 1.0


@pytest.mark.parametrize(
    "body",
    [
        "A or B",
        "A, B",
        "AB",
        "B B",
        "A/B",
        "B (or A)",
        "not B",
        "B. the red ball",
        "I think B",
        "A man, so B",
        "blue",
        "",
        "B or the blue ball",
        "E",
        "the blue ball or the red ball",
        "B\nA",
        "<b>",
        "Both",
        "option",
        "answer",
        "B C D",
        "2",
        "B/A",
        "A and B, so B",
        "B?A",
        "\\boxed{A}\\boxed{B}",
        "B\u200bA",
        "Bthe blue ball",
        "(A)(B)",
        "B - the red ball",
        "В",  # a Cyrillic letter
        "the blue  ball or so",
        "\\text{not }B",
        "neither",
    ],
)
def test_other_answers_are_wrong(body):
    assert score(body) == 0.0


def test_options_may_mention_letters():
    assert score("A and B", ground_truth="C") == 1.0
    assert score("A and B", ground_truth="A") == 0.0


@pytest.mark.parametrize("form", ["{}", "({})", "{}.", "Option {}", "The answer is {}.", "\\boxed{{{}}}", "**{}**"])
@pytest.mark.parametrize("count", range(2, 11))
def test_every_letter_of_every_number_of_options(count, form):
    choices = tuple(f"number {i}" for i in range(count))
    for ground_truth, letter in itertools.product("ABCDEFGHIJ"[:count], "ABCDEFGHIJK"):
        assert score(form.format(letter), ground_truth=ground_truth, choices=choices) == float(letter == ground_truth)


def test_only_letters_of_this_task():
    assert score("D", ground_truth="D") == 1.0
    assert score("D", ground_truth="A", choices=("x", "y", "z")) == 0.0
    assert score("J", ground_truth="J", choices=tuple("abcdefghij")) == 1.0


def test_labels_inside_options_and_repeated_options():
    labelled = ("A. Apples.", "B. Candles.", "C. Berries.")
    assert score("candles", choices=labelled) == score("B. Candles.", choices=labelled) == 1.0
    assert score("same", ground_truth="A", choices=("same", "same")) == 0.0
    assert score("A", ground_truth="A", choices=("B", "A")) == 1.0  # a letter wins over a text


def test_text_outside_an_answer_block_is_not_graded():
    of = task("B", AnswerType.CHOICE, OPTIONS)
    assert ChoiceAnswer()(episode(turn(text("B")), of=of)) == 0.0
    assert ChoiceAnswer()(episode(turn(stray("<answer>"), text("B")), of=of)) == 0.0


@pytest.mark.parametrize(("ground_truth", "choices"), [("E", OPTIONS), ("red", OPTIONS), ("A", ()), (1.0, OPTIONS)])
def test_invalid_tasks_raise(ground_truth, choices):
    with raises(DataError, key="ground_truth" if choices else "options", value=ground_truth if choices else ()):
        score("A", ground_truth=ground_truth, choices=choices)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_never_two_letters_for_one_answer(body):
    assert sum(score(body, ground_truth=letter) for letter in "ABCD") <= 1.0


def test_a_long_answer_is_read_quickly():
    assert score("the answer is " * 3000 + "!") == 0.0
