"""The answer types open, grounding and number, and the reward accuracy."""

import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import RAN, answer, answer_episode, call, episode, task, text, think, turn

from saccade.errors import ConfigError, DataError
from saccade.rewards.accuracy import Accuracy
from saccade.rewards.answer_types.grounding import GroundingAnswer
from saccade.rewards.answer_types.number import NumberAnswer
from saccade.rewards.answer_types.open_ import OpenAnswer
from saccade.types import AnswerType


def grade_open(body, ground_truth, mode="f1_precision"):
    return OpenAnswer(mode=mode)(answer_episode(body, ground_truth=ground_truth))


@pytest.mark.parametrize(
    ("body", "ground_truth", "expected"),
    [
        ("red", "red", 1.0),
        ("The RED ball!", "a red ball", 1.0),
        ("red ball", "red", 2 / 3 / 2),  # P 1/2, R 1
        ("red red", "red", 2 / 3 / 2),  # multisets: the second red matches nothing
        ("red", "red red", 2 / 3),
        ("blue green red", "red", 0.5 / 3),
        ("blue", "red", 0.0),
        ("the", "the red ball", 0.0),
        ("a an the", "the red ball", 0.0),
        ("...", "red", 0.0),
        ("-5", "5", 0.0),
        ("5", "-5", 0.0),
        ("- 5", "5", 0.0),
        ("minus 5", "5", 0.0),
        ("negative 5 degrees", "-5 degrees", 1.0),
        ("\u22125", "-5", 1.0),
        ("0.5", "5", 0.0),
        (".5", "0.5", 1.0),
        ("-.5", "-0.5", 1.0),
        ("1.5", "15", 0.0),
        ("1,000", "1000", 1.0),
        ("3-5", "3 5", 1.0),  # not a sign between numbers
        ("5.", "5", 1.0),
        ("\u20135", "5", 0.0),  # an en dash is a sign too
        ("\u20135", "-5", 1.0),
        ("3\u20135", "3 5", 1.0),
        ("r\u200bed", "red", 1.0),  # invisible characters are removed
        ("ｒｅｄ", "red", 1.0),
        ("r e d", "red", 0.0),
        ("1.2.3", "1.2", 2 / 3 / 2),
        ("-1,000.5", "-1000.5", 1.0),
        ("1,000.5", "-1000.5", 0.0),
        ("A", "A", 1.0),  # the ground truth is itself an article
        ("the", "A", 0.0),
        ("U.S.A.", "the USA", 1.0),
        ("no", "No.", 1.0),
        ("true false", "true", 0.0),
        ("yes", "yes, it is", 0.5),  # P 1, R 1/3: no hedge
        ("red yes", "red", 2 / 3 / 2),
        ("-$5", "$5", 0.0),
        ("red or blue", "red", 0.0),  # worth the worst of what it offers
        ("Either blue, or red.", "red", 0.0),
        ("red/blue", "red", 0.0),
        ("blue \uff5c red", "red", 0.0),
        ("red and/or blue", "red", 0.0),
        ("dark red or red", "dark red", 2 / 3 / 2),
        ("red or", "red", 2 / 3 / 2),  # one answer, and a word too many
        ("AC/DC", "AC DC", 1.0),  # every word is in the ground truth
        ("red or blue", "red or blue", 1.0),
        ("a red or green one", "red or blue", 4 / 7 / 2),  # the ground truth has alternatives too
        ("1/2 cup", "1/2 of a cup", 6 / 7),
        ("1/2 cup", "one half cup", 1 / 3 / 3),  # a number, no choice
        ("for Orson", "Orson", 2 / 3 / 2),
        ("\u0663", "3", 1.0),
        ("\u0e14\u0e33", "\u0e14\u0e35", 0.0),  # Thai vowels are marks
    ],
)
def test_f1(body, ground_truth, expected):
    assert grade_open(body, ground_truth) == pytest.approx(expected)


def test_exact_mode():
    assert grade_open("The red ball.", "red ball", "exact") == 1.0
    assert grade_open("ball red", "red ball", "exact") == 0.0
    assert grade_open("red or blue", "red", "exact") == 0.0


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_bounded_and_one_for_the_ground_truth(left, right):
    value = grade_open(left, right)
    assert 0.0 <= value <= 1.0
    assert value == 0.0 or grade_open(left, left) == 1.0


def grade_grounding(body, ground_truth=(4.0, 8.0)):
    return GroundingAnswer()(answer_episode(body, ground_truth=ground_truth, kind=AnswerType.GROUNDING))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("4 - 8", 1.0),
        ("4.0s to 8.0s", 1.0),
        ("From 4 to 8 seconds.", 1.0),
        ("[4, 8]", 1.0),
        ("(4.0,8.0)", 1.0),
        ("between 4 and 8", 1.0),
        ("00:04 - 00:08", 1.0),
        ("00:00:04\u201300:00:08.0", 1.0),
        ("start: 4, end: 8", 1.0),
        ('{"start_time": 4.0, "end_time": 8.0}', 1.0),
        ("6-10", 2 / 6),
        ("4-6", 0.5),
        ("0 to 16", 0.25),
        ("4\u20118", 1.0),
        ("4s\u20148s", 1.0),
        ("4 \u2192 8", 1.0),
        ("4\u20268", 1.0),
        ("4 --> 8", 1.0),
        ("<4.0 seconds> to <8.0 seconds>", 1.0),  # as prompts write times
        ("<4.0 seconds>-<8.0 seconds>", 1.0),
        ('{"start": "00:04", "end": "00:08"}', 1.0),
        ("['4', '8']", 1.0),
        ("**4** to **8**", 1.0),
        ("$4$ to $8$", 1.0),
        ("(4s) to (8s)", 1.0),
        ("4 sec. to 8 sec.", 1.0),
        ("from 4 up to 8", 1.0),
        ("4\u79d2\u52308\u79d2", 1.0),
        ("\u0664 - \u0668", 1.0),
        ("frames 9-20, that is 4 to 8 seconds", 1.0),
        ("00:00:04,000 --> 00:00:08,000", 1.0),
        ("from second 4 to second 8", 1.0),
        ("it starts at 4 and ends at 8", 1.0),
        ("start: 4\nend: 8", 1.0),
        ("t=4 to t=8", 1.0),
        ("8-12", 0.0),
        ("20 to 30", 0.0),
        ("8-4", 0.0),  # inverted
        ("6-6", 0.0),  # empty
        ("8-4, no: 4-8", 0.0),  # the first well-formed span counts
        ("0-1, 4-8", 0.0),
        ("-4 to 8", 0.0),
        ("\u20134 to 8", 0.0),
        ("4 to -8", 0.0),
        ("4 to \u22128", 0.0),
        ("4.0.0 to 8", 0.0),
        ("4 to 8.0.0", 0.0),
        ("4% to 8%", 0.0),
        ("4 min to 8 min", 0.0),
        ("frames 4 to 8", 0.0),
        ("4:8", 0.0),
        ("4:75 to 8:00", 0.0),
        ("4 to 8 minutes", 0.0),
        ("frames 4 to 8 frames", 0.0),
        ("4", 0.0),
        ("", 0.0),
        ("nan to inf", 0.0),
    ],
)
def test_iou(body, expected):
    assert grade_grounding(body) == pytest.approx(expected)


def test_clock_times():
    assert grade_grounding("01:04 to 1:08", (64.0, 68.0)) == 1.0
    assert grade_grounding("1:01:04 to 1:01:08.5", (3664.0, 3668.5)) == 1.0


@pytest.mark.parametrize("ground_truth", [(8.0, 4.0), "4-8", 4.0])
def test_invalid_span_raises(ground_truth):
    with raises(DataError, key="ground_truth", value=ground_truth):
        grade_grounding("4-8", ground_truth)


@settings(deadline=None)
@given(st.floats(0, 1000), st.floats(0, 1000))
def test_iou_is_bounded(start, end):
    assert 0.0 <= grade_grounding(f"{start:.3f} to {end:.3f}") <= 1.0


def grade_number(body, ground_truth, **settings):
    return NumberAnswer(**settings)(answer_episode(body, ground_truth=ground_truth, kind=AnswerType.NUMBER))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("100", 1.0),
        ("105", 1.0),
        ("95", 1.0),
        ("110", 0.9),
        ("90", 0.9),
        ("125", 0.6),
        ("150", 0.1),
        ("151", 0.0),
        ("-100", 0.0),
    ],
)
def test_mra_matches_the_official_values(body, expected):
    assert grade_number(body, 100.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    "body",
    [
        "4",
        "four",
        "Four chairs",
        "4.0 m",
        "4.0m",
        "+4",
        "\\boxed{4}",
        "4 (four)",
        "4e0",
        "4 m²",
        "4 m^2",
        "There are 4.",
        "4%",
        "４",
        "4 m2",
        "4th",
        "$4",
        "4 times per second",
        "\u0664",
        "4'",
        "x = 4",
        "about 4",
        "4/1",
    ],
)
def test_number_formats(body):
    assert grade_number(body, 4.0, mode="exact") == 1.0


@pytest.mark.parametrize(
    "body",
    [
        "3 or 4",
        "3-4",
        "-4",
        "minus four",
        "0.4",
        "40",
        "4, 5",
        "1/4",
        "x4",
        "",
        "none",
        "1e999",
        "4^2",
        "4²",
        "4 million",
        "forty-four",
        "14^2",
        "\u20134",
        "\u2012 4",
        "±4",
        "+/- 4",
        ">4",
        "\u22654",
        "not 4",
        "it isn't 4",
        "4k",
        "4\u2082",
        "4½",
        "0x4",
        "4/4",
        "4*1",
        "4:00",
        "4..5",
        "4.0.1",
        "√4",
        "4,5",
        "1,2345",
    ],
)
def test_wrong_numbers(body):
    assert grade_number(body, 4.0, mode="exact") == 0.0


@settings(deadline=None)
@given(
    st.decimals(-(10**7), 10**7, places=2),
    st.sampled_from(["{:,}", "{}", " {} m", "It is {}.", "\\boxed{{{}}}", "${}$"]),
)
def test_numbers_round_trip(value, form):
    assert grade_number(form.format(value), float(value), mode="exact") == 1.0
    assert grade_number(form.format(value + 1), float(value), mode="exact") == 0.0
    if value:
        assert grade_number(form.format(-value), float(value)) == 0.0


@settings(deadline=None)
@given(
    st.integers(0, 359_998),
    st.integers(1, 359_999),
    st.sampled_from(["{}-{}", "{} to {}", "from {} until {}", "[{}, {}]"]),
)
def test_spans_round_trip(start, length, form):
    def clock(seconds):
        return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    end = start + length
    ground_truth = (float(start), float(end))
    for write in (clock, str, lambda seconds: f"{seconds}.0s"):
        assert grade_grounding(form.format(write(start), write(end)), ground_truth) == 1.0
        assert grade_grounding(form.format(write(end), write(start)), ground_truth) == 0.0


@pytest.mark.parametrize(
    ("body", "value"),
    [
        *(("-$4", -4), ("-(4)", -4), ("minus (4)", -4), ("$-4$", -4), ("4_000", 4000), ("\u0664\u066b\u0665", 4.5)),
        *(("twenty", 20), ("twenty-one", 21), ("twenty one", 21), ("Ninety nine", 99), ("minus forty", -40)),
        *(("21 (twenty-one)", 21), ("1.5e3", 1500)),
    ],
)
def test_values_of_numbers(body, value):
    assert grade_number(body, float(value), mode="exact") == 1.0
    assert grade_number(body, -float(value)) == 0.0


@pytest.mark.parametrize(
    "body",
    [
        *("more than 4", "at least 4", "under 4", "4+", "4 or more", "4 and up", "4 x 10^3", "4x10^3", "4**4", "4 ^ 4"),
        *("4\u00b74", "4 times 4", "four times four", "4 4", "four-four", "four point four", "4 over 4", "4 trillion"),
        *(
            "4 hundredths",
            "4 tenths",
            "4 and a third",
            "4 squared",
            "twice 4",
            "-(4)",
            "-$4",
            "4_000",
            "4\u4e07",
            "4\u20444",
        ),
        *("4\u0336", "4 lakh", "none of the 4", "square root of 4", "4 bn"),
    ],
)
def test_ambiguous_numbers(body):
    assert grade_number(body, 4.0, mode="exact") == 0.0


def test_signs_thousands_tolerance_and_zero():
    assert grade_number("\u22124", -4.0, mode="exact") == 1.0
    for written in ("1,234.5", "1\u202f234.5", "1\u00a0234.5", "1'234.5", "1234.50"):
        assert grade_number(written, 1234.5, mode="exact") == 1.0
    assert grade_number("12,345,678", 12345678.0, mode="exact") == 1.0
    assert grade_number("50%", 50.0, mode="exact") == 1.0
    assert grade_number("50%", 0.5, mode="exact") == 0.0  # the sign is ignored like any unit
    assert grade_number("3.1", "3.0", mode="exact", tolerance=0.1) == 1.0
    assert grade_number("3.11", "3.0", mode="exact", tolerance=0.1) == 0.0
    assert grade_number("0", 0.0) == 1.0
    assert grade_number("0.001", 0.0) == 0.0
    with raises(DataError, key="ground_truth", value="four or so"):
        grade_number("4", "four or so")


def accurate(body, **settings):
    rule = {key: settings.pop(key) for key in ("open", "number") if key in settings}
    return Accuracy(answer_types=rule)(answer_episode(body, **settings)).value


def test_accuracy_follows_the_answer_type():
    assert accurate("B", ground_truth="B", kind=AnswerType.CHOICE, choices=("x", "y")) == 1.0
    assert accurate("4-6", ground_truth=(4.0, 8.0), kind=AnswerType.GROUNDING) == 0.5
    assert accurate("110", ground_truth=100, kind=AnswerType.NUMBER) == pytest.approx(0.9)
    assert accurate("110", ground_truth=100, kind=AnswerType.NUMBER, number={"mode": "exact"}) == 0.0
    rule = {"mode": "exact", "tolerance": 10}
    assert accurate("110", ground_truth=100, kind=AnswerType.NUMBER, number=rule) == 1.0
    assert accurate("red ball", ground_truth="red") == pytest.approx(1 / 3)
    assert accurate("red ball", ground_truth="red", open={"mode": "exact"}) == 0.0
    assert accurate("[0, 0, 1, 0.5]", ground_truth=(0.0, 0.0, 1.0, 1.0), kind=AnswerType.BOX) == 0.5
    assert accurate("(0.5, 0.5)", ground_truth=(0.0, 0.0, 1.0, 1.0), kind=AnswerType.POINT) == 1.0


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"judge": {"model": "m"}}, "rewards.judge.settings.url"),
        ({"judge": {"url": "http://x", "model": "m", "modell": "n"}}, "rewards.judge.settings.modell"),
        ({"answer_types": {"open": {"mode": "f2"}}}, "rewards.accuracy.settings.answer_types.open.mode"),
        ({"answer_types": {"number": {"tolerance": -0.1}}}, "rewards.accuracy.settings.answer_types.number.tolerance"),
        ({"answer_types": {"box": {"unit": 1}}}, "rewards.accuracy.settings.answer_types.box.unit"),
        ({"answer_types": {"grade_open": {}}}, "answer_type"),
        ({"answer_types": {"formula": {}}}, "answer_type"),
        ({"judged": ("open_ended",)}, "answer_type"),
    ],
)
def test_settings_of_judge_and_answer_types_are_checked(settings, key):
    with raises(ConfigError, key=key):
        Accuracy(**settings)


def test_only_the_last_closed_answer_is_graded():
    of, accuracy = task("red"), Accuracy()

    def right(attempt):
        return accuracy(attempt).value

    assert right(episode(turn(think(), answer("red"), answer("blue")), of=of)) == 0.0
    assert right(episode(turn(think(), answer("red"), answer(" ")), of=of)) == 1.0
    assert right(episode(turn(think(), answer("red", closed=False)), of=of)) == 0.0
    printed = episode(turn(think(), call(), results=[RAN]), turn(think(), text("red")), of=of)
    assert right(printed) == 0.0
