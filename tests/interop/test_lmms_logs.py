"""Logs of lmms-eval: as it writes them, torn, hostile, and marked by our rules. lmms-eval itself isn't needed."""

import json
from dataclasses import replace

import pytest

from saccade.errors import DataError, RunError
from saccade.evaluation.benchmarks._benchmark import Answer, Benchmark, Mark, accuracy, grade
from saccade.interop.lmms_logs import LoggedSample, answers_of, read_samples, samples_of, write_samples
from saccade.types import Kind, Media, MediaKind, Task

HASH = "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"
NASTY = "</script><b>\u202e\ud800\x00 | \"'\\ \u2028 {{ 7*7 }}\n<answer>B"
# the forms that lmms-eval writes: with what was said beside what was marked, without it, in lists, with a whole row
LINES = [
    {"doc_id": 0, "target": "C", "resps": "<think>B?</think> C", "filtered_resps": "C", "input": "Which?", "acc": 1.0},
    {"doc_id": 1, "target": "A", "filtered_resps": "B", "token_counts": [{"input_tokens": 9, "output_tokens": 2}]},
    {"doc_id": 2, "target": "D", "resps": [["a D", "or A"]], "filtered_resps": ["D"], "doc_hash": HASH},
    {"doc_id": 3, "target": "B", "resps": [[NASTY]], "filtered_resps": [NASTY], "doc": {"q": NASTY}, "arguments": [1]},
    {"doc_id": 4, "target": "[24.3, 30.4]", "filtered_resps": None, "input_media": ["a.mp4"], "score": {"iou": None}},
]


def log(folder, lines, tail=""):
    path = folder / "20260801_120000_samples_mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def tasks(golds="CADBA"):
    return [
        Task(id=f"t{i}", question="Which?", media=(), kind=Kind.CHOICE, gold=gold, choices=("a", "b", "c", "d"))
        for i, gold in enumerate(golds)
    ]


@pytest.fixture
def benchmark():
    def rule(text, task):
        read = text.strip()[:1] if text.strip()[:1] in "ABCD" else None
        return Mark(read=read, value=float(read == task.gold))

    return Benchmark(
        name="mine",
        hub="",
        patterns=(),
        count=5,
        read=lambda row, copy: [],
        official=rule,
        tolerant=rule,
        headline="accuracy",
        metrics=accuracy,
    )


def test_every_form_of_a_line_is_read():
    found = [LoggedSample(line=line) for line in LINES]
    assert [each.responses for each in found] == [("<think>B?</think> C",), ("B",), ("a D", "or A"), (NASTY,), ()]
    assert [each.filtered for each in found] == [("C",), ("B",), ("D",), (NASTY,), ()]
    assert [each.metrics for each in found] == [{"acc": 1.0}, {}, {}, {}, {"score": {"iou": None}}]
    assert found[4].target == "[24.3, 30.4]"


def test_what_a_question_showed_is_read_and_written_in_every_form(benchmark):
    data = "data:image/png;base64,aGk="
    forms = [["a.png", data, "https://x.org/a.jpg"], "b.png", [["c.png"], [data]], None, []]
    found = [LoggedSample(line={"doc_id": 0, "filtered_resps": "", "input_media": form}).media for form in forms]
    assert found == [("a.png", data, "https://x.org/a.jpg"), ("b.png",), ("c.png", data), (), ()]
    media = (Media(path="v/a.mp4"), Media(path="b.png", kind=MediaKind.IMAGE))
    shown = [replace(each, media=media) for each in tasks("CA")]
    written = samples_of(grade(benchmark, shown, {}), shown)
    assert [each.media for each in written] == [("v/a.mp4", "b.png")] * 2
    assert "input_media" not in samples_of(grade(benchmark, tasks("C"), {}), tasks("C"))[0].line


def test_a_log_comes_back_as_it_was(tmp_path):
    samples = read_samples(log(tmp_path, LINES))
    assert [each.line for each in samples] == LINES
    write_samples(tmp_path / "new" / "again.jsonl", samples)
    assert read_samples(tmp_path / "new" / "again.jsonl") == samples
    again = [json.loads(line) for line in (tmp_path / "new" / "again.jsonl").read_text().split("\n") if line]
    assert again == LINES


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_passed_over_and_one_in_the_middle_is_not(tmp_path, cut):
    whole = json.dumps(LINES[0])
    assert len(read_samples(log(tmp_path, LINES[1:3], tail=whole[:cut]))) == 2
    with pytest.raises(DataError, match=r"samples_mine\.jsonl, line 3: not valid JSON"):
        read_samples(log(tmp_path, LINES[1:3], tail=whole[:cut] + "\n" + whole + "\n"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"target": "A", "filtered_resps": "A"}, "sample 2: 'doc_id' must be the place of a row, it is None"),
        ({"doc_id": -1, "filtered_resps": "A"}, "'doc_id' must be the place of a row, it is -1"),
        ({"doc_id": True, "filtered_resps": "A"}, "'doc_id' must be the place of a row, it is True"),
        ({"doc_id": 1, "target": "A"}, "it holds neither 'filtered_resps' nor 'resps'"),
        ([1, 2], "line 2, field the whole line"),
    ],
)
def test_what_is_no_line_of_a_log_is_named(tmp_path, line, sentence):
    with pytest.raises(DataError, match=sentence):
        read_samples(log(tmp_path, [LINES[0], line]))


def test_a_missing_log_and_one_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        read_samples(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written"):
        write_samples(tmp_path / "file" / "log.jsonl", [])


# ---- with benchmarks -----------------------------------------------------------------------------------------------


def test_their_answers_are_marked_by_our_rules(tmp_path, benchmark):
    answers = answers_of(read_samples(log(tmp_path, LINES)), tasks())
    results = grade(benchmark, tasks(), answers)
    # what was said counts, not what their filter left: "a D" begins with no letter; the last said nothing
    assert [each.mark.read for each in results] == ["C", "B", None, "B", None]
    assert [each.value for each in results] == [1, 0, 0, 1, 0]
    assert [each.answer.error is not None for each in results] == [False, False, False, False, True]


def test_of_several_samples_of_a_row_the_first_counts():
    twice = [LoggedSample(line={"doc_id": 0, "target": "C", "filtered_resps": said}) for said in "CA"]
    assert answers_of(twice, tasks())["t0"].text == "C"


def test_a_log_of_another_split_is_refused():
    samples = [LoggedSample(line=line) for line in LINES]
    with pytest.raises(
        DataError, match=r"row 2 is answered by D, the copy says A \(t2\): they are of different splits"
    ):
        answers_of(samples, tasks("CAABA"))
    with pytest.raises(DataError, match="the log answers row 3, and the copy ends with row 2"):
        answers_of(samples, tasks("CAD"))


def test_our_results_go_there_and_back(tmp_path, benchmark):
    said = ["<answer>C</answer>", "B", NASTY, "", "<think>A"]
    answers = {task.id: Answer(text=text) for task, text in zip(tasks(), said, strict=True)}
    answers["t1"] = Answer(text="", error="the video can't be decoded")
    results = grade(benchmark, tasks(), answers)
    path = tmp_path / "log.jsonl"
    write_samples(path, samples_of(results[:4], tasks(), metric="accuracy"))
    samples = read_samples(path)
    assert [each.doc_id for each in samples] == [0, 1, 2, 3]
    assert [each.metrics for each in samples] == [{"accuracy": each.value} for each in results[:4]]
    assert grade(benchmark, tasks(), answers_of(samples, tasks()))[:4] == results[:4]
    with pytest.raises(DataError, match="the benchmark's copy has no question t3"):
        samples_of(results, tasks()[:3])
