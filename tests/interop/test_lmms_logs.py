"""lmms-eval's logs: as it writes them, truncated, hostile, and graded by our rules. lmms-eval itself isn't needed."""

import json
from dataclasses import replace

import pytest
from error_cases import raises

from saccade.errors import DataError, RunError
from saccade.evaluation.benchmarks.base import Answer, Benchmark, Grade, compute_accuracy, grade
from saccade.interop.lmms_logs import build_answers, build_samples, read_samples, write_samples
from saccade.types import AnswerType, Media, MediaKind, Task

HASH = "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"
NASTY = "</script><b>\u202e\ud800\x00 | \"'\\ \u2028 {{ 7*7 }}\n<answer>B"
# lmms-eval's line formats: with the reply next to the graded text, without it, as lists, with the row itself
LINES = [
    {"doc_id": 0, "target": "C", "resps": "<think>B?</think> C", "filtered_resps": "C", "input": "Which?", "acc": 1.0},
    {"doc_id": 1, "target": "A", "filtered_resps": "B", "token_counts": [{"input_tokens": 9, "output_tokens": 2}]},
    {"doc_id": 2, "target": "D", "resps": [["a D", "or A"]], "filtered_resps": ["D"], "doc_hash": HASH},
    {"doc_id": 3, "target": "B", "resps": [[NASTY]], "filtered_resps": [NASTY], "doc": {"q": NASTY}, "arguments": [1]},
    {"doc_id": 4, "target": "[24.3, 30.4]", "filtered_resps": None, "input_media": ["a.mp4"], "score": {"iou": None}},
]


def log(folder, lines, tail=""):
    path = folder / "20260801_120000_parsedmine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def tasks(ground_truths="CADBA"):
    return [
        Task(
            id=f"t{i}",
            question="Which?",
            media=(),
            answer_type=AnswerType.CHOICE,
            ground_truth=ground_truth,
            options=("a", "b", "c", "d"),
        )
        for i, ground_truth in enumerate(ground_truths)
    ]


@pytest.fixture
def benchmark():
    def rule(text, task):
        read = text.strip()[:1] if text.strip()[:1] in "ABCD" else None
        return Grade(extracted=read, value=float(read == task.ground_truth))

    return Benchmark(
        name="mine",
        repo_id="",
        file_patterns=(),
        num_tasks=5,
        parse_row=lambda row: [],
        grade_strict=rule,
        grade_lenient=rule,
        primary_metric="accuracy",
        compute_metrics=compute_accuracy,
    )


def test_media_are_logged(benchmark):
    media = (Media(path="v/a.mp4"), Media(path="b.png", kind=MediaKind.IMAGE))
    shown = [replace(sample, media=media) for sample in tasks("CA")]
    written = build_samples(grade(benchmark, shown, {}), shown)
    assert [sample["input_media"] for sample in written] == [["v/a.mp4", "b.png"]] * 2
    assert "input_media" not in build_samples(grade(benchmark, tasks("C"), {}), tasks("C"))[0]


def test_log_round_trip(tmp_path):
    samples = read_samples(log(tmp_path, LINES))
    assert samples == LINES
    write_samples(tmp_path / "new" / "again.jsonl", samples)
    assert read_samples(tmp_path / "new" / "again.jsonl") == samples
    again = [json.loads(line) for line in (tmp_path / "new" / "again.jsonl").read_text().split("\n") if line]
    assert again == LINES


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_only_a_truncated_last_line_is_skipped(tmp_path, cut):
    whole = json.dumps(LINES[0])
    assert len(read_samples(log(tmp_path, LINES[1:3], tail=whole[:cut]))) == 2
    with raises(DataError) as caught:
        read_samples(log(tmp_path, LINES[1:3], tail=whole[:cut] + "\n" + whole + "\n"))
    assert caught.value.key.endswith("parsedmine.jsonl, line 3")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ({"target": "A", "filtered_resps": "A"}, "doc_id", None),
        ({"doc_id": -1, "filtered_resps": "A"}, "doc_id", -1),
        ({"doc_id": True, "filtered_resps": "A"}, "doc_id", True),
        ({"doc_id": 1, "target": "A"}, "filtered_resps", None),
        ([1, 2], "the whole line", [1, 2]),
    ],
)
def test_invalid_lines_raise(tmp_path, line, key, value):
    with raises(DataError, key=key, value=value) as caught:
        read_samples(log(tmp_path, [LINES[0], line]))
    assert " 2" in str(caught.value)


def test_missing_and_unwritable_logs_raise(tmp_path):
    with raises(DataError, key=str(tmp_path / "none.jsonl")):
        read_samples(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with raises(RunError, key=str(tmp_path / "file" / "log.jsonl")):
        write_samples(tmp_path / "file" / "log.jsonl", [])


# ---- with benchmarks -----------------------------------------------------------------------------------------------


def test_logged_answers_are_graded_by_our_rules(tmp_path, benchmark):
    answers = build_answers(read_samples(log(tmp_path, LINES)), tasks())
    results = grade(benchmark, tasks(), answers)
    assert [answer.text for answer in answers.values()] == ["<think>B?</think> C", "B", "a D", NASTY, ""]
    # The reply counts, not lmms-eval's filtered text: "a D" begins with no letter; the last reply is empty.
    assert [sample.grade.extracted for sample in results] == ["C", "B", None, "B", None]
    assert [sample.value for sample in results] == [1, 0, 0, 1, 0]
    assert [sample.answer.error is not None for sample in results] == [False, False, False, False, True]


def test_first_sample_of_a_row_counts():
    twice = [{"doc_id": 0, "target": "C", "filtered_resps": reply} for reply in "CA"]
    assert build_answers(twice, tasks())["t0"].text == "C"


def test_log_of_another_split_raises():
    with raises(DataError, key="target", value="D"):
        build_answers(LINES, tasks("CAABA"))
    with raises(DataError, key="doc_id", value=3):
        build_answers(LINES, tasks("CAD"))


def test_results_round_trip(tmp_path, benchmark):
    replies = ["<answer>C</answer>", "B", NASTY, "", "<think>A"]
    answers = {task.id: Answer(text=text) for task, text in zip(tasks(), replies, strict=True)}
    answers["t1"] = Answer(text="", error="the video can't be decoded")
    results = grade(benchmark, tasks(), answers)
    path = tmp_path / "log.jsonl"
    write_samples(path, build_samples(results[:4], tasks()))
    samples = read_samples(path)
    assert [(sample["doc_id"], sample["score"]) for sample in samples] == [
        (row, result.value) for row, result in enumerate(results[:4])
    ]
    assert grade(benchmark, tasks(), build_answers(samples, tasks()))[:4] == results[:4]
    with raises(DataError, key="tasks", value="t3"):
        build_samples(results, tasks()[:3])
