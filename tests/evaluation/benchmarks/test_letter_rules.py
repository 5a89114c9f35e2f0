"""Strict rules of each multiple-choice benchmark on twenty-five kinds of answer, with reasons; C is right."""

import pytest
from toy_rows import MAKERS, OPTIONS, write_copy

from saccade import plugins
from saccade.evaluation.benchmarks.base import Answer, grade
from saccade.evaluation.judge_results import JudgeVerdict, apply_verdicts_to_answers
from saccade.types import AnswerType

# kind: the answer, and its value as a person reads it (the lenient rule of every benchmark)
SAID = {
    "plain letter": ("C", 1),
    "another letter": ("B", 0),
    "lower case": ("c", 1),
    "parentheses": ("(C)", 1),
    "full stop": ("C.", 1),
    "sentence": ("The answer is C.", 1),
    "label": ("Answer: C", 1),
    "best option": ("Best option: C", 1),
    "other capitals": ("A man walks in and Bob leaves, so C", 1),
    "boxed": (r"\boxed{C}", 1),
    "tag unclosed": ("<think>A or B?</think> so <answer>C", 1),
    "two tags": ("<answer>A</answer> No: <answer>C</answer>", 1),
    "mm:ss": ("C at 00:12", 1),
    "range in words": ("from 3 to 5 seconds", None),
    "percentage": ("about 50%", None),
    "unicode minus": ("\u22123", None),
    "number word": ("three", None),
    "refusal": ("I cannot determine the answer.", None),
    "very long": ("We look at it. " * 3000 + "The answer is C", 1),
    "two answers": ("A or C", None),
    "other language": ("答案是C", 1),
    "option text": ("a green hat", 1),
    "letter and text": ("C. a green hat", 1),
    "bold": ("**C**", 1),
    "denial": ("not C", None),
}

# benchmark: kind -> the strict value (None: unparsed), and why; kinds that are missing have the value 1
FIRST_LETTER = {
    "another letter": (0, "B is the first of A-D"),
    "lower case": (None, "only capitals are looked for"),
    "other capitals": (0, "the article A is the first of A-D"),
    "range in words": (None, "no capital at all"),
    "percentage": (None, "no capital at all"),
    "unicode minus": (None, "no letter"),
    "number word": (None, "no capital"),
    "refusal": (None, "I is none of A-D"),
    "two answers": (0, "A comes first"),
    "option text": (None, "texts of options are not known"),
    "denial": (1, "a denial is not read"),
}
STRICT_VALUES = {
    "videomme": {**FIRST_LETTER, "best option": (0, "a missing comma: the phrase stays, and its B is first")},
    "longvideobench": {**FIRST_LETTER, "label": (0, "'Answer:' is not deleted, and its A is first")},
    "lvbench": {
        "another letter": (0, "B"),
        "lower case": (0, "c is read, and is not C"),
        "sentence": (0, "the first character of the first word is T"),
        "label": (0, "A of Answer:"),
        "best option": (0, "B of Best"),
        "other capitals": (0, "A"),
        "boxed": (0, "a backslash"),
        "range in words": (0, "f"),
        "percentage": (0, "a"),
        "unicode minus": (0, "the minus"),
        "number word": (0, "t"),
        "refusal": (0, "I"),
        "very long": (0, "W"),
        "two answers": (0, "A"),
        "other language": (0, "the first character is no letter"),
        "option text": (0, "a"),
        "bold": (0, "an asterisk"),
        "denial": (0, "n"),
    },
    "mlvu": {
        "another letter": (0, "B"),
        "lower case": (None, "c is not the letter"),
        "full stop": (None, "without a bracket the answer must be the letter alone"),
        **{
            kind: (None, "neither a bracket nor the letter alone")
            for kind in SAID
            if kind not in ("plain letter", "another letter", "parentheses", "tag unclosed", "two tags")
        },
    },
    "hrbench": {
        "another letter": (0, "B"),
        "lower case": (None, "only capitals are option letters"),
        "other capitals": (None, "A and C are both among the words, and no other words follow"),
        "range in words": (None, "no letter"),
        "percentage": (None, "no letter"),
        "unicode minus": (None, "no letter"),
        "number word": (None, "no letter"),
        "refusal": (None, "I is no option"),
        "two answers": (None, "two letters"),
        "other language": (None, "the letter is part of a longer word"),
        "option text": (1, "the only option whose text occurs"),
        "denial": (1, "the only letter, among the last four words"),
    },
    "vsibench": {
        "another letter": (0, "B"),
        "parentheses": (None, "the first word is (C)"),
        "sentence": (None, "the first word is The"),
        "label": (None, "Answer:"),
        "best option": (None, "Best"),
        "other capitals": (0, "the first word is A"),
        "boxed": (None, "the first word is more than a letter"),
        "range in words": (None, "from"),
        "percentage": (None, "about"),
        "unicode minus": (None, "two characters"),
        "number word": (None, "three"),
        "refusal": (0, "the first word is I, which is a letter and no option"),
        "very long": (None, "We"),
        "two answers": (0, "A"),
        "other language": (None, "one word of four characters"),
        "option text": (0, "the article a, in any case"),
        "bold": (None, "the asterisks are part of the word"),
        "denial": (None, "not"),
    },
    "wemath": {
        "another letter": (0, "B"),
        "lower case": (None, "only capitals"),
        "parentheses": (None, "a bracket comes first"),
        "sentence": (None, "there is no 'Answer', and T comes first"),
        "best option": (0, "B of Best"),
        "other capitals": (0, "A"),
        "boxed": (None, "a backslash comes first"),
        **dict.fromkeys(("range in words", "percentage", "unicode minus"), (None, "begins with none of A-H")),
        "number word": (None, "t"),
        "refusal": (None, "I is beyond H"),
        "very long": (None, "W"),
        "two answers": (0, "A"),
        "other language": (None, "the first character is no letter"),
        "option text": (None, "a"),
        "bold": (None, "an asterisk"),
        "denial": (None, "n"),
    },
    "mathvision": {
        "another letter": (0, "B"),
        "label": (0, "'Answer:' is none of the phrases that are looked for"),
        "best option": (0, "nor is this one"),
        "other capitals": (0, "the whole sentence is the answer"),
        "mm:ss": (0, "the whole sentence is the answer"),
        "range in words": (0, "the whole text is the answer"),
        "percentage": (0, "the whole text is the answer"),
        "unicode minus": (0, "no number, and not C"),
        "number word": (0, "not C"),
        "refusal": (0, "not C"),
        "two answers": (0, "not C"),
        "other language": (0, "not C"),
        "option text": (0, "blanks are deleted from the answer and not from the option"),
        "letter and text": (0, "the text stays behind the letter"),
        "bold": (0, "asterisks are not deleted"),
        "denial": (0, "not C"),
    },
    "mmvu": {
        "another letter": (0, "B is named"),
        **dict.fromkeys(("range in words", "percentage", "unicode minus", "number word"), (None, "a judge must say")),
        **dict.fromkeys(("refusal", "two answers", "denial"), (None, "none is named, or two: a judge must say")),
        **dict.fromkeys(("other capitals", "mm:ss"), (None, "a letter within a sentence: a judge must say")),
    },
    "vstar": {
        "another letter": (0, "B"),
        "label": (0, "the answer begins with A, which is taken for the letter"),
        "best option": (0, "it begins with B"),
        "other capitals": (0, "it begins with A"),
        "boxed": (None, "BOXED holds B and D, so that C is not the only letter"),
        "range in words": (None, "SECONDS holds C and D"),
        "percentage": (0, "ABOUT begins with A"),
        "unicode minus": (None, "no letter"),
        "number word": (None, "THREE holds none"),
        "refusal": (None, "several letters, none by itself"),
        "two answers": (0, "it begins with A"),
        "option text": (0, "it begins with A"),
        "denial": (1, "a letter by itself"),
    },
}


def choice_task(name, folder):
    """Return the benchmark and its first multiple-choice task with the answer C."""
    benchmark = plugins.resolve("evaluation.benchmarks", name, {})()
    tasks = benchmark.load_tasks(write_copy(name, folder))
    return benchmark, next(task for task in tasks if task.answer_type == AnswerType.CHOICE and task.ground_truth == "C")


def value(benchmark, task, text, scoring):
    (result,) = grade(benchmark, [task], {task.id: Answer(text=text)}, scoring=scoring)
    return None if result.is_unparsed else result.grade.value


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT_VALUES)
def test_strict_rule(name, tmp_path):
    benchmark, task = choice_task(name, tmp_path)
    assert task.options[:3] == OPTIONS[:3]
    for kind, (text, _) in SAID.items():
        expected, why = STRICT_VALUES[name].get(kind, (1, "it names C"))
        assert value(benchmark, task, text, "strict") == expected, f"{kind}: {why}"


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT_VALUES)
def test_lenient_rule(name, tmp_path):
    benchmark, task = choice_task(name, tmp_path)
    for kind, (text, expected) in SAID.items():
        found = value(benchmark, task, text, "lenient")
        # MathVision accepts the option's value instead of its letter, so any text is an answer.
        assert found == expected or (name == "mathvision" and expected is None and found == 0), kind


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT_VALUES)
def test_missing_answer_is_an_error(name, tmp_path):
    benchmark, task = choice_task(name, tmp_path)
    for answers in ({}, {task.id: Answer(text=" \n")}, {task.id: Answer(text="C", error="the server died")}):
        (result,) = grade(benchmark, [task], answers)
        assert result.answer.error
        assert result.value == 0
        assert not result.is_unparsed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "expected", "why"),
    [
        ("A) or C)", 0, "the character before the first bracket is A"),
        ("C) a green hat", 1, "the character before the first bracket"),
        ("Look (closely): C", None, "the character before the first bracket is y"),
        (")", None, "nothing stands before the bracket"),
    ],
)
def test_mlvu_reads_before_the_first_bracket(reply, expected, why, tmp_path):
    assert value(*choice_task("mlvu", tmp_path), reply, "strict") == expected, why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "expected", "why"),
    [
        ("<Thought process>: <<A car>> <Answer>: <<C>>", 1, "the form that is asked for"),
        ("Answer: B. Answer: C", 1, "the last Answer"),
        ("<answer>C</answer>", 1, "the tag is resolved before the rule"),
        ("the answer is C", None, "no capital Answer"),
    ],
)
def test_wemath_reads_after_the_last_answer(reply, expected, why, tmp_path):
    assert value(*choice_task("wemath", tmp_path), reply, "strict") == expected, why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "expected", "why"),
    [
        ("C is right since the light falls on it", None, "the letter is not among the last four words"),
        ("the Answer  is **c** since B and A are dark", 1, "asterisks and any case after 'answer is'"),
        ("the answer is because of it", 0, "a letter inside a word counts: b"),
        ("The answer is: C or A", None, "no colon after 'answer is', and two letters"),
        ("The answer is (C) or A", None, "nor a bracket"),
        ("Cannot determine the answer, C", 0, "a refusal is wrong whatever follows"),
        ("I'm sorry, but without the image provided I say C", 0, "a refusal"),
        ("cannot determine the answer, C", 1, "refusals have their own case"),
        ("Failed to obtain answer via API C", None, "no letter is read from a failure, and no option occurs"),
        ("Failed to obtain answer via API: a green hat", 1, "but the text of an option is"),
        ("Z", 0, "the published letter for no option"),
        ("Z, a green hat", 0, "the same"),
        ("The correct answer is C since B is dark and A is far away", 1, "what follows 'answer is'"),
        ("a green hat or a dog", None, "two options occur"),
        ("x" * 90 + " a green hat", None, "the response is longer than twice the options"),
    ],
)
def test_hrbench_matches_words(reply, expected, why, tmp_path):
    assert value(*choice_task("hrbench", tmp_path), reply, "strict") == expected, why


def test_longvideobench_random_fallback(tmp_path):
    _, task = choice_task("longvideobench", tmp_path)
    drawing = plugins.resolve("evaluation.benchmarks", "longvideobench", {"random_fallback": True})()
    first, second = (grade(drawing, [task], {task.id: Answer(text="none")})[0].grade for _ in range(2))
    assert first == second
    assert first.extracted in "ABCD"


@pytest.mark.slow
@pytest.mark.parametrize(
    "reply",
    [
        *(
            "Not C.",
            "it can't be (C)",
            "rule out C",
            "C is wrong",
            "neither B nor C",
            "C isn't right",
            "anything but C",
        ),
        *(
            "C, not B",
            "The answer is not C",
            "I doubt it is C",
            "C\nA is wrong",
            "C can hardly be wrong",
            "not a green hat",
        ),
        *("C is a distractor", "I refuse to say C", "Strike C", "Some would say C", "see exhibit C", "C overlooks it"),
        *("It is not, as far as I can see, C", "C? No.", "all but C", r"not \boxed{C}", "C is ruled out"),
    ],
)
def test_mmvu_strict_never_decides_an_answer_that_denies(reply, tmp_path):
    benchmark, task = choice_task("mmvu", tmp_path)
    assert benchmark.grade_strict(reply, task).value is None


def test_mmvu_answer_without_a_letter_is_undecided(tmp_path):
    benchmark, task = choice_task("mmvu", tmp_path)
    (result,) = grade(benchmark, [task], {task.id: Answer(text="the hat, I suppose")})
    assert result.grade.value is None
    verdicts = [JudgeVerdict(task_id=task.id, answer="the hat, I suppose", value=1.0)]
    (result,) = apply_verdicts_to_answers([result], verdicts, benchmark.grade_strict)
    assert result.grade.value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["strict", "lenient"])
@pytest.mark.parametrize(
    "text",
    [
        *("C is hardly right", "C (incorrect)", "C: wrong", "C. Wait, it is A", "C\nIt is A", "C\nBoth A and C fit"),
        *("It is far from C", "apart from C", r"\boxed{C}? No.", r"\boxed{C}. That is wrong.", "~~C~~ or A"),
    ],
)
def test_mmvu_pays_no_letter_that_is_denied_or_taken_back(text, scoring, tmp_path):
    benchmark, task = choice_task("mmvu", tmp_path)
    assert not value(benchmark, task, text, scoring)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MAKERS)
def test_rules_read_long_replies(name, tmp_path):
    """A quadratic pattern would take minutes for one of them."""
    benchmark = plugins.resolve("evaluation.benchmarks", name, {})()
    task = benchmark.load_tasks(write_copy(name, tmp_path))[0]
    for piece in ("{", "{}", "o{}xed{", r"\boxed{", "\u00bd", "answer is ", "(1,2)", "1", "**"):
        for scoring in ("strict", "lenient"):
            value(benchmark, task, piece * (300_000 // len(piece)), scoring)
