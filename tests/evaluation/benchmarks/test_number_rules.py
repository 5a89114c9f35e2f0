"""Strict and lenient rules on spans, numbers, formulas, lists and open answers, with reasons."""

import math

import pytest
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.evaluation.benchmarks.base import Answer, grade
from saccade.evaluation.benchmarks.formulas import evaluate_formula

UNREAD, OPEN = None, "a judge must say"
LONG = "We look at it. " * 3000


def grade_text(name, folder, text, extractor, row):
    benchmark = plugins.resolve("evaluation.benchmarks", name, {})()
    (task,) = benchmark.load_tasks(write_copy(name, folder, [row]), allow_incomplete=True)
    (result,) = grade(benchmark, [task], {task.id: Answer(text=text)}, scoring=extractor)
    if result.answer.error:
        return "an error"
    return OPEN if result.grade.value is None else UNREAD if result.is_unparsed else round(result.grade.value, 4)


def first(name, **fits):
    return next(row for row in MAKERS[name]() if all(row[key] == value for key, value in fits.items()))


def tir(task, **changed):
    return {**first("tirbench", task=task), **changed}


# The right span is 24.3 to 30.4; 24.3 to 27.35 has an IoU of one half.
SPANS = [
    ("plain range", "24.3 - 30.4", 1, 1, "the form that is asked for"),
    ("parentheses", "(24.3 - 30.4)", 1, 1, "what is around the range doesn't matter"),
    ("half", "24.3 - 27.35", 0.5, 0.5, "half of the union"),
    ("sentence", "The event happens in the 24.3 - 30.4 seconds.", 1, 1, "a sentence with a keyword"),
    ("other capitals", "A man happens to do it in 24.3 to 30.4 s, Bob ends it", 1, 1, "to is a hyphen"),
    ("boxed", r"\boxed{24.3 - 30.4}", 1, 1, "a range anywhere"),
    ("tag unclosed", "<think>5 - 8?</think><answer>24.3 - 30.4", 1, 1, "the tag is resolved first"),
    ("mm:ss", "00:24 - 00:30", 0.8906, 0.8906, "24.3 to 30 of 24 to 30.4: 5.7 / 6.4"),
    ("h:mm:ss", "0:00:24 to 0:00:30", 0.8906, 0.8906, "as mm:ss"),
    ("clock with a fraction", "00:24.3 - 00:30.4", 0.0, 1, "read as 24.3 - 00, and turned round"),
    ("clocks in words", "starts at 00:00:24 and ends at 00:00:30", 0.8906, 0.8906, "two clock times"),
    ("words on one line", "starts at 24.3 s and ends at 30.4 s", UNREAD, 1, "one number a sentence, and no range"),
    ("words on two lines", "start: 24.3 s\nend: 30.4 s", 1, 1, "the first number of each sentence"),
    ("plain letter", "C", UNREAD, UNREAD, "no number"),
    ("range in words", "between 24.3 and 30.4", UNREAD, 1, "no hyphen, and one number a sentence"),
    ("seconds between", "from 24.3 seconds to 30.4 seconds", UNREAD, 1, "a word stands before the hyphen"),
    ("em dash", "24.3 — 30.4", UNREAD, 1, "hyphen and en dash alone are read"),
    ("en dash", "24.3 – 30.4", 1, 1, "an en dash is read"),
    ("unicode minus", "24.3 \u2212 30.4", UNREAD, 1, "a minus is no hyphen"),
    ("list", "[24.3, 30.4]", UNREAD, 1, "a comma is no hyphen"),
    ("JSON", '{"start": 24.3, "end": 30.4}', UNREAD, 1, "one line holds both"),
    ("reversed", "30.4 - 24.3", 1, 1, "turned round"),
    ("negative", "-3 - 8", 0.0, UNREAD, "read as 3 - 8, which overlaps nothing"),
    ("percentage", "24.3%", UNREAD, UNREAD, "one number"),
    ("number word", "from three to five seconds", UNREAD, 0.0, "no digits"),
    ("refusal", "I can't determine the time.", UNREAD, UNREAD, "no number"),
    ("empty", "", "an error", "an error", "an empty reply"),
    ("very long", LONG + "24.3 - 30.4", 1, 1, "the range is found whatever stands before"),
    ("two answers", "24.3 - 30.4 or 40 - 50", 1, 1, "the first span counts"),
    ("other language", "事件发生在 24.3 - 30.4 秒", 1, 1, "digits and a hyphen"),
    ("to inside a word", "photo 24.3 - 30.4", 1, 1, "pho- 24.3 is no range of two numbers"),
    ("nothing in common", "1 - 2", 0.0, 0.0, "no overlap"),
]


@pytest.mark.parametrize(("kind", "reply", "strict", "lenient", "why"), SPANS, ids=[span[0] for span in SPANS])
def test_charades(kind, reply, strict, lenient, why, tmp_path):
    row = first("charades_sta")
    assert grade_text("charades_sta", tmp_path, reply, "strict", row) == strict, why
    assert grade_text("charades_sta", tmp_path, reply, "lenient", row) == lenient


# The right number is 4, so 4.2 is 5 % off.
NUMBERS = [
    ("plain", "4", 1, 1, "the first word"),
    ("5 % off", "4.2", 1, 1, "<= at 0.05: the strict sign of the paper would make it 0.9"),
    ("10 % off", "4.4", 0.9, 0.9, "nine of ten thresholds"),
    ("25 % off", "5", 0.6, 0.6, "six of ten"),
    ("50 % off", "6", 0.1, 0.1, "one of ten"),
    ("plain letter", "C", UNREAD, UNREAD, "float() knows no letter"),
    ("full stop", "4.", 1, 1, "full stops are cut off"),
    ("unit", "4 chairs", 1, 1, "the first word"),
    ("unit at once", "4.0m", UNREAD, 1, "float() doesn't know it"),
    ("parentheses", "(4)", UNREAD, 1, "float() doesn't know it"),
    ("sentence", "There are 4", UNREAD, 1, "the first word is There"),
    ("other capitals", "A room in B has 4 chairs", UNREAD, 1, "the first word is A"),
    ("boxed", r"\boxed{4}", UNREAD, 1, "float() doesn't know it"),
    ("tag unclosed", "<think>7?</think><answer>4", 1, 1, "the tag is resolved first"),
    ("mm:ss", "00:04", UNREAD, UNREAD, "float() doesn't know it"),
    ("range in words", "from two to four", UNREAD, UNREAD, "the first word is from"),
    ("percentage", "4%", UNREAD, 1, "float() doesn't know it"),
    ("unicode minus", "\u22124", UNREAD, 0, "float() knows the ASCII minus alone"),
    ("minus", "-4", 0, 0, "twice the ground truth away"),
    ("number word", "four", UNREAD, 1, "float() knows digits alone"),
    ("thousands", "1,200", UNREAD, 0, "float() doesn't know it"),
    ("refusal", "I cannot tell.", UNREAD, UNREAD, "the first word is I"),
    ("empty", "", "an error", "an error", "an empty reply"),
    ("very long", LONG + "4", UNREAD, 1, "the first word is We"),
    ("two answers", "3 or 4", 0.6, UNREAD, "the first word; 3 is 25 % off"),
    ("other language", "共有4把椅子", UNREAD, 1, "the first word is the whole text"),
    ("infinite", "inf", 0, UNREAD, "float() knows it, and it is far off"),
    ("not a number", "nan", 0, UNREAD, "float() knows it, and nothing compares with it"),
]


@pytest.mark.parametrize(("kind", "reply", "strict", "lenient", "why"), NUMBERS, ids=[number[0] for number in NUMBERS])
def test_vsibench(kind, reply, strict, lenient, why, tmp_path):
    row = first("vsibench", question_type="object_counting")
    assert grade_text("vsibench", tmp_path, reply, "strict", row) == strict, why
    assert grade_text("vsibench", tmp_path, reply, "lenient", row) == lenient


def test_ground_truth_of_zero(tmp_path):
    row = {**first("vsibench", question_type="object_counting"), "ground_truth": "0"}
    assert [grade_text("vsibench", tmp_path, reply, "strict", row) for reply in ("0", "1")] == [1, 0]


# (ground truth, kind, answer, strict, lenient, why)
FORMULAS = [
    ("27", "plain", "27", 1, 1, "one string"),
    ("27", "plain letter", "C", 0, 0, "no value"),
    ("27", "parentheses", "(27)", 1, 1, "one value"),
    ("27", "boxed", r"so \boxed{27}.", 1, 1, "what is in the box"),
    ("27", "two boxes", r"\boxed{3} then \boxed{27}", 1, 1, "the last box"),
    ("27", "sentence", "The answer is 27.", 1, 1, "what follows 'is' is a number"),
    ("27", "other capitals", "A man says B, so the final answer is 27", 1, 1, "what follows 'is' is a number"),
    ("27", "rounded", r"\boxed{27.004}", 1, 1, "both are rounded to two decimals"),
    ("27", "percentage", r"\boxed{27\%}", 1, 1, "the sign is deleted"),
    ("27", "equation", r"\boxed{x = 27}", 1, 1, "right of the last ="),
    ("27", "tag unclosed", "<think>3?</think><answer>27", 1, 1, "the tag is resolved first"),
    ("27", "box unclosed", r"\boxed{27", 0, 1, "no brace closes it, so that the whole text is the answer"),
    ("27", "unit in words", "27 degrees", 0, 1, "the unit stays"),
    ("27", "unit in the box", r"\boxed{27\text{ cm}}", 0, 1, "of the unit only the command is deleted"),
    ("27", "label", "Answer: 27", 0, 1, "not one of the phrases"),
    ("27", "range in words", "from 20 to 27", 0, 0, "the whole text is the answer"),
    ("27", "number word", "twenty-seven", 0, 0, "words are no numbers"),
    ("-27", "unicode minus", "\u221227", 0, 1, "the parser knows the ASCII minus alone"),
    ("27", "refusal", "I can't say.", 0, 0, "no value"),
    ("27", "empty", "", "an error", "an error", "an empty reply"),
    ("27", "very long", LONG + "The answer is 27.", 1, 1, "what follows the last 'is'"),
    ("27", "two answers", "26 or 27", 0, 0, "neither"),
    ("27", "other language", "答案是 27", 0, 1, "not one of the phrases"),
    ("27", "wrong", "28", 0, 0, "another value"),
    (r"\frac{1}{3}", "decimal of a fraction", "0.33", 1, 1, "0.33 after rounding"),
    (r"\frac{1}{2}", "slash", "1/2", 1, 1, "turned into a fraction"),
    (r"2\sqrt{3}", "root", r"\boxed{3.46}", 1, 1, "3.46 after rounding"),
    ("(1,2)", "tuple", r"\boxed{(1.0, 2)}", 0, 0, "a rounded decimal keeps its point: (1.0,2)"),
    ("(1,2)", "same tuple", r"\boxed{(1, 2)}", 1, 1, "blanks are deleted"),
    ("23:38", "mm:ss", "23:38", 1, 1, "one string"),
]


@pytest.mark.parametrize(
    ("ground_truth", "kind", "reply", "strict", "lenient", "why"), FORMULAS, ids=[formula[1] for formula in FORMULAS]
)
def test_mathvision(ground_truth, kind, reply, strict, lenient, why, tmp_path):
    row = {**first("mathvision", answer="27"), "answer": ground_truth}
    assert grade_text("mathvision", tmp_path, reply, "strict", row) == strict, why
    assert grade_text("mathvision", tmp_path, reply, "lenient", row) == lenient


def test_formulas_are_never_executed(tmp_path):
    row = first("mathvision", answer="27")
    for reply in ("9^{9^{9^9}}", "__import__('os').getpid()", "(" * 5000, r"\frac{" * 150, "10!!!!!!", "1/0"):
        assert grade_text("mathvision", tmp_path, reply, "strict", row) == 0


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("3+4*2", 11.0),
        ("2^3", 8.0),
        ("-2^2", -4.0),
        (r"2\pi", 2 * math.pi),
        (r"\frac12", 0.5),
        (r"\sqrt[3]{8}", 2.0),
        ("5!", 120.0),
        ("|-3|", 3.0),
        (r"\left(1+2\right)\times 3", 9.0),
        ("x+1", None),
        ("", None),
        ("1,2", None),
        (r"\sqrt{-1}", None),
        ("(-8)^{1/3}", None),
    ],
)
def test_values_of_formulas(formula, value):
    assert evaluate_formula(formula) == (None if value is None else pytest.approx(value))


OPENS = [
    ("plain", "Dolly Zoom", 1, 1, "the ground truth"),
    ("other case", "dolly zoom.", 1, 1, "the ground truth but for case and the full stop"),
    ("sentence", "It is a dolly zoom", OPEN, 1, "a judge reads sentences"),
    ("parentheses", "(Dolly Zoom)", OPEN, 1, "a judge"),
    ("other capitals", "A Dolly Zoom by B", OPEN, 1, "a judge"),
    ("boxed", r"\boxed{Dolly Zoom}", OPEN, 1, "a judge"),
    ("tag unclosed", "<answer>Dolly Zoom", 1, 1, "the tag is resolved first"),
    ("a fragment", "Zoom", OPEN, OPEN, "the ground truth holds it, which proves nothing"),
    ("plain letter", "D", OPEN, OPEN, "the same"),
    ("inside a word", "nodolly zooms", OPEN, OPEN, "not as whole words"),
    ("denial", "not a dolly zoom", OPEN, OPEN, "only a judge reads denials"),
    ("two answers", "pan or dolly zoom", OPEN, OPEN, "only a judge weighs two"),
    ("refusal", "I can't tell", OPEN, OPEN, "even a refusal is the judge's to see"),
    ("empty", "", "an error", "an error", "an empty reply"),
    ("very long", LONG + "Dolly Zoom", OPEN, 1, "a judge"),
    ("other language", "希区柯克变焦", OPEN, OPEN, "a judge"),
    ("mm:ss", "00:12", OPEN, OPEN, "a judge"),
    ("percentage", "50%", OPEN, OPEN, "a judge"),
    ("unicode minus", "\u22124", OPEN, OPEN, "a judge"),
    ("number word", "four", OPEN, OPEN, "a judge"),
    ("range in words", "from three to five", OPEN, OPEN, "a judge"),
]


@pytest.mark.parametrize(("kind", "reply", "strict", "lenient", "why"), OPENS, ids=[case[0] for case in OPENS])
def test_mmvu_open(kind, reply, strict, lenient, why, tmp_path):
    row = first("mmvu", question_type="open-ended")
    assert grade_text("mmvu", tmp_path, reply, "strict", row) == strict, why
    assert grade_text("mmvu", tmp_path, reply, "lenient", row) == lenient


@pytest.mark.parametrize(
    ("ground_truth", "reply", "lenient"),
    [
        ("84 g/mol", "about 84.0 g/mol", 1),
        ("84 g/mol", "-84 g/mol", OPEN),
        ("84 g/mol", "84", OPEN),
        ("10", "-10", OPEN),
        ("10", "100", OPEN),
        ("O(n^2)", "it is O(n²)", 1),
    ],
)
def test_mmvu_numbers_keep_sign_and_unit(ground_truth, reply, lenient, tmp_path):
    row = {**first("mmvu", question_type="open-ended"), "answer": ground_truth}
    assert grade_text("mmvu", tmp_path, reply, "lenient", row) == lenient


VERSES = [
    ("plain", "14", 1, 1, "equal to the letter"),
    ("plain letter", "C", OPEN, OPEN, "the judge"),
    ("full stop", "14.", OPEN, 1, "not equal: the judge"),
    ("sentence", "The answer is 14 cm", OPEN, 1, "the judge"),
    ("parentheses", "(14)", OPEN, 1, "the judge"),
    ("other capitals", "A straw of B: the answer is 14", OPEN, 1, "the judge"),
    ("boxed", r"\boxed{14}", OPEN, 1, "the judge"),
    ("tag unclosed", "<answer>14", 1, 1, "the tag is resolved first"),
    ("mm:ss", "00:14", OPEN, OPEN, "the judge"),
    ("range in words", "from 3 to 14", OPEN, OPEN, "the judge"),
    ("percentage", "14%", OPEN, 1, "the judge"),
    ("unicode minus", "\u221214", OPEN, OPEN, "the judge"),
    ("number word", "fourteen", OPEN, OPEN, "the judge"),
    ("refusal", "I cannot say", OPEN, OPEN, "the judge"),
    ("empty", "", "an error", "an error", "an empty reply"),
    ("very long", LONG + "The answer is 14", OPEN, 1, "the judge"),
    ("two answers", "13 or 14", OPEN, OPEN, "the judge"),
    ("other language", "答案是14", OPEN, 1, "the judge"),
]


@pytest.mark.parametrize(("kind", "reply", "strict", "lenient", "why"), VERSES, ids=[verse[0] for verse in VERSES])
def test_mathverse(kind, reply, strict, lenient, why, tmp_path):
    row = first("mathverse", answer="14")
    assert grade_text("mathverse", tmp_path, reply, "strict", row) == strict, why
    assert grade_text("mathverse", tmp_path, reply, "lenient", row) == lenient


def short(answer):
    return f'{{"solution": "A step", "short answer": {answer}}}'


# (answer type, kind, answer, strict, lenient, why); the right answers are 3.8971, C and 23:38
DYNAMIC = [
    ("float", "plain", "3.897", UNREAD, 1, "no JSON"),
    ("float", "JSON", short('"3.8971"'), 1, 1, "equal"),
    ("float", "JSON number", short("3.8971"), 1, 1, "str() of a number"),
    ("float", "within", short('"3.898"'), 1, 1, "0.0009 off"),
    ("float", "beyond", short('"3.9"'), 0, 0, "0.0029 off"),
    ("float", "unit", short('"3.8971 cm"'), 1, 1, "the first word"),
    ("float", "sentence", short('"about 3.8971"'), 0, 0, "the first word is about"),
    ("float", "pi", short('"1.24048π"'), 1, 1, "1.24048 times pi is 3.89708"),
    ("float", "unicode minus", short('"\u22123.8971"'), 0, 0, "float() doesn't know it; and the sign is wrong"),
    ("float", "percentage", short('"3.8971%"'), 0, 1, "float() doesn't know it"),
    ("float", "boxed", r"\boxed{3.8971}", UNREAD, 1, "no JSON"),
    ("float", "tag unclosed", "<answer>" + short('"3.8971"'), 1, 1, "the tag is resolved first"),
    ("float", "torn JSON", '{"short answer": "3.8971"', UNREAD, 0, "no JSON"),
    ("float", "refusal", "I can't.", UNREAD, 0, "no JSON"),
    ("float", "empty", "", "an error", "an error", "an empty reply"),
    ("float", "very long", short('"' + "1" * 300 + '"'), 0, 0, "far off"),
    ("multiple choice", "JSON", short('"C"'), 1, 1, "one character, equal"),
    ("multiple choice", "parentheses", short('"(C)"'), 1, 1, "among the first three characters"),
    ("multiple choice", "letter and text", short('"C. red"'), 1, 1, "among the first three characters"),
    ("multiple choice", "sentence", short('"The answer is C"'), 0, 1, "not among the first three characters"),
    ("multiple choice", "other capitals", short('"A C"'), 1, UNREAD, "among the first three; two letters"),
    ("multiple choice", "lower case", short('"c"'), 0, 1, "another character"),
    ("multiple choice", "plain letter", "C", UNREAD, 1, "no JSON"),
    ("text", "mm:ss", short('"23:38"'), 1, 1, "equal"),
    ("text", "sentence", short('"It is 23:38 now"'), 1, 1, "the ground truth is in it"),
    ("text", "a fragment", short('"23"'), 0, 0, "the ground truth is not in it: the reverse doesn't count"),
    ("text", "blank", short('""'), 0, UNREAD, "the ground truth is not in it"),
    ("float", "range in words", short('"from 3 to 3.8971"'), 0, 0, "the first word is from"),
    ("text", "number word", short('"twenty-three"'), 0, 0, "the ground truth is not in it"),
    ("text", "other language", short('"时间是23:38"'), 1, 1, "the ground truth is in it"),
    ("text", "two answers", short('"11:38 or 23:38"'), 1, 0, "the ground truth is in it"),
]


@pytest.mark.parametrize(
    ("form", "kind", "reply", "strict", "lenient", "why"), DYNAMIC, ids=[f"{a[0]} {a[1]}" for a in DYNAMIC]
)
def test_dynamath(form, kind, reply, strict, lenient, why, tmp_path):
    row = next(row for row in MAKERS["dynamath"]() if row["row"]["answer_type"] == form)
    assert grade_text("dynamath", tmp_path, reply, "strict", row) == strict, why
    assert grade_text("dynamath", tmp_path, reply, "lenient", row) == lenient


# (row, kind, answer, strict, lenient, why)
TIR = [
    (tir("maze"), "plain letter", "C", 1, 1, "the letter"),
    (tir("maze"), "parentheses", "(C)", 1, 1, "C is nearest to (C)"),
    (tir("maze"), "boxed", r"\boxed{C}", 1, 1, "what is in the box"),
    (tir("maze"), "lower case", "c", 0, 1, "all letters are as near, the first is A"),
    (tir("maze"), "refusal", "none", 0, UNREAD, "any unknown text is the nearest letter"),
    (tir("maze", answer="B"), "option text", "blue", 1, UNREAD, "'B. blue' stands in the question"),
    (tir("maze"), "tag unclosed", "<think>A</think><answer>C", 1, 1, "the tag is resolved first"),
    (
        tir("maze"),
        "other capitals",
        "A man walks in and Bob leaves, so C",
        0,
        1,
        "all letters are as near, the first is A",
    ),
    (tir("instrument"), "mm:ss", "00:72", 1, UNREAD, "colons are deleted"),
    (tir("instrument"), "range in words", "from 70 to 72", 1, UNREAD, "math-verify reads the last number"),
    (tir("maze"), "two answers", "A or C", 0, UNREAD, "A and C are as near, the first is A"),
    (tir("maze"), "other language", "答案是C", 1, 1, "C is nearest"),
    (tir("maze"), "bold", "**C**", 1, 1, "asterisks are deleted"),
    (tir("refcoco"), "several letters", "CA", 1, 1, "sorted characters are equal"),
    (tir("refcoco"), "letters with a comma", "A, C", 0, 1, "the comma counts"),
    (tir("instrument"), "number", "72", 1, 1, "equal"),
    (tir("instrument"), "blank inside", "7 2", 1, UNREAD, "blanks are deleted"),
    (tir("instrument"), "sentence", "It reads 72 degrees", 1, 1, "letters are deleted"),
    (tir("instrument"), "sentence with a full stop", "It reads 72.", 1, 1, "the last number"),
    (tir("instrument"), "percentage", "72%", 1, 1, "the last number"),
    (tir("instrument"), "unicode minus", "\u221272", 0, 0, "another number"),
    (tir("instrument"), "number word", "four", UNREAD, 0, "words are no numbers"),
    (tir("instrument"), "nothing", "warm", UNREAD, UNREAD, "no number"),
    (tir("instrument", answer="72.5"), "decimal comma", "72,5", 1, 1, "a comma in a decimal"),
    (tir("instrument", answer="1200"), "thousands", "1,200", 1, 1, "math-verify reads 1200"),
    (tir("instrument", answer="200"), "thousands misread", "1,200", 0, 0, "math-verify reads 1200"),
    (tir("instrument", answer="5"), "decimal comma misread", "2,5", 0, 0, "math-verify reads 2.5"),
    (tir("instrument", answer="4"), "denominator", "3/4", 0, 0, "math-verify reads 0.75"),
    (tir("instrument", answer="0.75"), "fraction", "3/4", 1, 1, "math-verify reads 0.75"),
    (tir("instrument", answer="3"), "exponent", "10^3", 0, 0, "math-verify reads 1000"),
    (tir("instrument", answer="1000"), "power", "10^3", 1, 1, "math-verify reads 1000"),
    (tir("instrument", answer="2"), "number word misread", "seventy-two", UNREAD, 0, "words are no numbers"),
    (tir("instrument"), "number word above twenty", "seventy-two", UNREAD, 1, "words are no numbers"),
    (tir("instrument"), "range of digits", "70-72", 0, UNREAD, "math-verify reads a difference"),
    (tir("instrument"), "denied number", "not 72", 1, UNREAD, "letters are deleted"),
    (tir("ocr"), "inside a longer word", "automobiles", 1, 0, "the ground truth is in it"),
    (tir("math"), "float", "2.50", 1, 1, "one value"),
    (tir("math"), "very long", LONG + "2.5", 1, 1, "the last number"),
    (tir("ocr"), "substring", "It says mobile here", 1, 1, "the ground truth is in it"),
    (tir("ocr"), "other case", "MOBILE", 0, 1, "case counts"),
    (
        tir("ocr", image_1="data/160.jpg"),
        "patched ground truth",
        "mobi",
        1,
        0,
        "60.jpg is in the name, so mobi is the ground truth",
    ),
    (tir("word_search"), "pair", "row 3, 4", 1, 1, "the first pair"),
    (tir("word_search"), "turned", "(4, 3)", 0, 0, "the order counts"),
    (tir("word_search"), "no pair", "3 and 4", UNREAD, UNREAD, "no comma between"),
    (tir("word_search", answer=7), "whole number", "7", 1, 1, "a number if the ground truth is one"),
    (tir("spot_difference"), "set", "1, 2, 3", 1, 1, "one set"),
    (tir("spot_difference"), "part", "2, 3, 4", 0.5, 0.5, "two of four"),
    (tir("spot_difference"), "empty set", "none", 0, 0, "nothing of three"),
    (tir("jigsaw"), "grid", "[4, 3, 2, 1]", 1, 1, "all places"),
    (tir("jigsaw"), "half", "4 3 1 2", 0.5, 0.5, "two of four places"),
    (tir("jigsaw"), "nested", "[[4, 3], [2, 1]]", UNREAD, UNREAD, "brackets break the run"),
    (tir("jigsaw"), "too many", "4 3 2 1 0", UNREAD, UNREAD, "five numbers, not four"),
    (tir("jigsaw"), "empty", "", "an error", "an error", "an empty reply"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "kind", "reply", "strict", "lenient", "why"), TIR, ids=[f"{a[0]['task']} {a[1]}" for a in TIR]
)
def test_tirbench(row, kind, reply, strict, lenient, why, tmp_path):
    assert grade_text("tirbench", tmp_path, reply, "strict", row) == strict, why
    assert grade_text("tirbench", tmp_path, reply, "lenient", row) == lenient


TABLES = {
    **{"charades_sta": SPANS, "vsibench": NUMBERS, "mathvision": FORMULAS, "mmvu": OPENS, "mathverse": VERSES},
    **{"dynamath": DYNAMIC, "tirbench": TIR},
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_cover_common_answer_forms(name):
    required_forms = {
        "plain letter",
        "parentheses",
        "other capitals",
        "boxed",
        "tag unclosed",
        "mm:ss",
        "range in words",
    }
    required_forms |= {"percentage", "unicode minus", "number word", "refusal", "empty", "very long", "two answers"}
    assert required_forms | {"other language"} <= {
        cell for row in TABLES[name] for cell in row if isinstance(cell, str)
    }
