"""Dataset validation reports every kind of problem; `data show` displays rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import fail, good
from error_cases import raises
from PIL import Image

from saccade.data.dataset import find_item, write_items
from saccade.data.synthetic.video_writer import write_video
from saccade.data.validate import validate_dataset
from saccade.errors import DataError
from saccade.media import video
from saccade.types import AnswerType, Demonstration, Media, MediaKind, Task


@pytest.fixture
def folder(tmp_path):
    """Two different clips of two seconds, and an image."""
    for number in range(2):
        frames = (np.full((32, 32, 3), (number * 90, shade * 20, 80), np.uint8) for shade in range(8))
        write_video(tmp_path / f"{number}.mp4", frames, 4.0)
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.png")
    return tmp_path


def task(number, media="0.mp4", **changes):
    kind = MediaKind.IMAGE if media.endswith("png") else MediaKind.VIDEO
    base = Task(
        id=f"t{number}",
        question=f"Q{number}?",
        media=(Media(path=media, kind=kind),),
        answer_type=AnswerType.OPEN,
        ground_truth="x",
    )
    return replace(base, **changes)


def findings(folder, *splits, **settings):
    paths = []
    for number, tasks in enumerate(splits):
        paths.append(folder / f"split{number}.jsonl")
        write_items(paths[-1], tasks)
    return [dict(split.findings) for split in validate_dataset(paths, **settings)]


SPAN = {"answer_type": AnswerType.GROUNDING}
CHOICE = {"answer_type": AnswerType.CHOICE, "options": ("red", "blue")}


def test_valid_splits_have_no_findings(folder):
    first = [
        task(1),
        task(2),
        task(3, "a.png"),
        task(4, ground_truth=(0.5, 2.0), **SPAN),
        task(5, ground_truth="A", **CHOICE),
    ]
    assert findings(folder, first, [task(6, "1.mp4")]) == [{}, {}]


@pytest.mark.parametrize(
    ("bad_task", "finding"),
    [
        (task(2, "none.mp4"), "missing"),
        (task(2, "cut.mp4"), "unreadable"),
        (task(2, "text.png"), "unreadable"),
        (task(2, ground_truth=(1.0, 5.0), **SPAN), "time"),
        (task(2, ground_truth=(-1.0, 1.0), **SPAN), "time"),
        (task(2, ground_truth="C", **CHOICE), "answer"),
        (task(2, ground_truth="A", answer_type=AnswerType.CHOICE, options=("red", " Red")), "answer"),
        (task(2, ground_truth=" "), "answer"),
        (task(1, question="Another?"), "id"),
        (task(2, question="q1?"), "repeated"),
    ],
)
def test_problem_is_found(folder, bad_task, finding):
    (folder / "cut.mp4").write_bytes((folder / "0.mp4").read_bytes()[:300])
    (folder / "text.png").write_text("not an image")
    assert findings(folder, [task(1), bad_task]) == [{finding: 1}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("0.srt", {}), ("none.srt", {"missing": 2}), ("empty.srt", {"unreadable": 2}), ("", {})],
)
def test_subtitle_files_are_checked(folder, name, expected):
    (folder / "0.srt").write_text("1\n00:00:00,500 --> 00:00:01,500\nIt is red.\n")
    (folder / "empty.srt").write_text("no cue\n")
    rows = [task(number, extras={"subtitles": name}) for number in (1, 2)]
    assert findings(folder, rows) == [expected]
    if name == "empty.srt":
        assert findings(folder, rows, open_media=False) == [{}]


def test_a_damaged_video_with_a_whole_timeline_is_found(folder):
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 64, 3), np.uint8)
    write_video(folder / "damaged.mp4", noise, 4.0)
    content = bytearray((folder / "damaged.mp4").read_bytes())
    start = content.index(b"mdat") + len(content) // 4
    content[start : start + len(content) // 3] = bytes(len(content) // 3)
    (folder / "damaged.mp4").write_bytes(content)
    assert video.probe_video(str(folder / "damaged.mp4")).num_frames == 48
    assert findings(folder, [task(1), task(2, "damaged.mp4")]) == [{"unreadable": 1}]
    assert findings(folder, [task(1), task(2, "damaged.mp4")], open_media=False) == [{}]


def test_clip_in_two_splits_is_a_leak_under_any_name(folder):
    (folder / "copy.mp4").write_bytes((folder / "0.mp4").read_bytes())
    assert findings(folder, [task(1)], [task(2), task(3)]) == [{}, {"leak": 1}]
    assert findings(folder, [task(1)], [task(2, "copy.mp4")]) == [{}, {"leak": 1}]
    assert findings(folder, [task(1)], [task(2, "copy.mp4")], open_media=False) == [{}, {}]
    *_, report = validate_dataset([folder / f"split{number}.jsonl" for number in (0, 1)])
    assert report.examples == {"leak": [f"{folder / 'copy.mp4'} (t2), as in {folder / 'split0.jsonl'}"]}


def test_question_in_two_splits_is_a_note(folder):
    same = [task(1, "0.mp4")], [task(2, "1.mp4", question="q1?")]
    assert findings(folder, *same) == [{}, {"shared question": 1}]
    other = [task(1, "0.mp4")], [task(2, "1.mp4", question="Q1?", ground_truth="y")]
    assert findings(folder, *other) == [{}, {}]


def test_letter_bias_is_a_note(folder):
    assert findings(folder, [task(n, ground_truth="A", **CHOICE) for n in range(60)]) == [{"letter bias": 1}]
    assert findings(folder, [task(n, ground_truth="AB"[n % 2], **CHOICE) for n in range(60)]) == [{}]


def test_an_invalid_first_row_does_not_stop_validation(folder):
    write_items(folder / "a.jsonl", [task(1)])
    (folder / "a.jsonl").write_text('{"id\n' + (folder / "a.jsonl").read_text())
    write_items(folder / "b.jsonl", [task(2)])
    first, second = validate_dataset([folder / "a.jsonl", folder / "b.jsonl"])
    assert (first.findings["row"], second.findings["row"]) == (1, 0)


def test_invalid_row_does_not_stop_validation(folder):
    write_items(folder / "a.jsonl", [task(1), task(2)])
    lines = (folder / "a.jsonl").read_text().splitlines()
    (folder / "a.jsonl").write_text("\n".join([lines[0], '{"id": "x"}', '{"id', lines[0], lines[1]]))
    (split,) = validate_dataset([folder / "a.jsonl"])
    assert split.findings["row"] == 2
    assert "row 2, field question" in split.examples["row"][0]
    assert "line 3: " in split.examples["row"][1]
    assert split.findings["id"] == 1


def test_media_root_is_the_folder_of_relative_paths(folder, tmp_path):
    (tmp_path / "rows").mkdir()
    write_items(tmp_path / "rows" / "a.jsonl", [task(1)])
    fail(DataError, "data", "check", tmp_path / "rows" / "a.jsonl", key=tmp_path / "rows" / "a.jsonl", value=1)
    good("data", "check", tmp_path / "rows" / "a.jsonl", "--root", folder)
    page = tmp_path / "row.html"
    good("data", "show", tmp_path / "rows" / "a.jsonl", "--root", folder, "--page", page)
    assert page.read_text().count("data:image/jpeg") == 8


def test_command_reports_findings(folder):
    write_items(folder / "a.jsonl", [task(1)])
    good("data", "check", folder / "a.jsonl")
    write_items(folder / "b.jsonl", [task(2, "none.mp4")])
    fail(DataError, "data", "check", folder / "a.jsonl", folder / "b.jsonl", key=folder / "a.jsonl", value=1)
    (folder / "c.jsonl").write_text('{"prompt": "x"}\n')
    fail(DataError, "data", "check", folder / "c.jsonl", key=folder / "c.jsonl")
    assert str(folder / "a.jsonl") in fail(DataError, "data", "check", folder, key=folder)


def test_task_may_have_several_demonstrations(folder):
    demo = Demonstration(task=task(1), frame_budget=4, replies=("<answer>x</answer>",))
    assert findings(folder, [demo, replace(demo, frame_budget=8)]) == [{}]
    assert findings(folder, [demo, demo]) == [{"repeated": 1}]
    assert findings(folder, [demo, replace(demo, replies=("x",))]) == [{"answer": 1}]


# ---- data show -----------------------------------------------------------------------------------------------------


def test_show_row_as_text_and_page(folder):
    write_items(folder / "a.jsonl", [task(1), task(2, ground_truth="B", question="<b>Which?</b>", **CHOICE)])
    output = good("data", "show", folder / "a.jsonl", "--id", "t2", "--page", folder / "row.html")
    assert "* B. blue" in output
    assert "32x32, 2.0 s, 8 frames" in output
    page = (folder / "row.html").read_text()
    assert "&lt;b&gt;Which?" in page
    assert page.count("data:image/jpeg") == 8
    assert good("data", "show", folder / "a.jsonl").startswith("t1")


def test_show_demonstration_with_its_replies(folder):
    demo = Demonstration(
        task=task(1, "a.png"), frame_budget=4, replies=("<think>a", "<answer>x</answer>"), children=(("red at 1",),)
    )
    write_items(folder / "d.jsonl", [demo])
    output = good("data", "show", folder / "d.jsonl", "--page", folder / "row.html")
    assert "red at 1" in output
    assert "40x20" in (folder / "row.html").read_text()


def test_missing_row_is_an_error(folder):
    write_items(folder / "a.jsonl", [task(1)])
    with raises(DataError, key=str(folder / "a.jsonl"), value=2):
        find_item(Path(folder / "a.jsonl"), 2)
    fail(DataError, "data", "show", folder / "a.jsonl", "--id", "z", key=folder / "a.jsonl", value="z")
    write_items(folder / "b.jsonl", [task(1, "none.mp4")])
    assert "none.mp4" in good("data", "show", folder / "b.jsonl", "--page", folder / "row.html")
