"""A data set's mistakes are found, each kind of them; a sound one has none; a row can be looked at."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import bad, good
from PIL import Image

from saccade.data.check import check
from saccade.data.native import find
from saccade.data.rows import write_tasks
from saccade.data.world.film import write_clip
from saccade.errors import DataError
from saccade.types import Demo, Kind, Media, MediaKind, Task


@pytest.fixture
def folder(tmp_path):
    """Two clips of two seconds with other content, and a picture."""
    for number in range(2):
        frames = (np.full((32, 32, 3), (number * 90, shade * 20, 80), np.uint8) for shade in range(8))
        write_clip(tmp_path / f"{number}.mp4", frames, 4.0)
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.png")
    return tmp_path


def task(number, media="0.mp4", **changes):
    kind = MediaKind.IMAGE if media.endswith("png") else MediaKind.VIDEO
    base = Task(
        id=f"t{number}", question=f"Q{number}?", media=(Media(path=media, kind=kind),), kind=Kind.OPEN, gold="x"
    )
    return replace(base, **changes)


def findings(folder, *splits, **settings):
    paths = []
    for number, tasks in enumerate(splits):
        paths.append(folder / f"split{number}.jsonl")
        write_tasks(paths[-1], tasks)
    return [dict(split.findings) for split in check(paths, **settings)]


SPAN = {"kind": Kind.GROUNDING}
CHOICE = {"kind": Kind.CHOICE, "choices": ("red", "blue")}


def test_sound_splits_have_no_findings(folder):
    first = [task(1), task(2), task(3, "a.png"), task(4, gold=(0.5, 2.0), **SPAN), task(5, gold="A", **CHOICE)]
    assert findings(folder, first, [task(6, "1.mp4")]) == [{}, {}]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (task(2, "none.mp4"), "missing"),
        (task(2, "cut.mp4"), "unreadable"),
        (task(2, "text.png"), "unreadable"),
        (task(2, gold=(1.0, 5.0), **SPAN), "time"),
        (task(2, gold=(-1.0, 1.0), **SPAN), "time"),
        (task(2, gold="C", **CHOICE), "answer"),
        (task(2, gold="A", kind=Kind.CHOICE, choices=("red", " Red")), "answer"),
        (task(2, gold=" "), "answer"),
        (task(1, question="Another?"), "id"),
        (task(2, question="q1?"), "repeated"),
    ],
)
def test_a_mistake_is_found(folder, wrong, what):
    (folder / "cut.mp4").write_bytes((folder / "0.mp4").read_bytes()[:300])
    (folder / "text.png").write_text("no picture")
    assert findings(folder, [task(1), wrong]) == [{what: 1}]


@pytest.mark.parametrize(
    ("name", "found"),
    [("0.srt", {}), ("none.srt", {"missing": 2}), ("empty.srt", {"unreadable": 2}), ("", {})],
)
def test_subtitles_are_files_as_well(folder, name, found):
    (folder / "0.srt").write_text("1\n00:00:00,500 --> 00:00:01,500\nIt is red.\n")
    (folder / "empty.srt").write_text("nothing is said\n")
    rows = [task(number, extras={"subtitles": name}) for number in (1, 2)]
    assert findings(folder, rows) == [found]
    if name == "empty.srt":
        assert findings(folder, rows, look=False) == [{}]


def test_a_clip_in_two_splits_leaks_whatever_it_is_called(folder):
    (folder / "copy.mp4").write_bytes((folder / "0.mp4").read_bytes())
    assert findings(folder, [task(1)], [task(2), task(3)]) == [{}, {"leak": 1}]
    assert findings(folder, [task(1)], [task(2, "copy.mp4")]) == [{}, {"leak": 1}]
    assert findings(folder, [task(1)], [task(2, "copy.mp4")], look=False) == [{}, {}]
    *_, leaky = check([folder / f"split{number}.jsonl" for number in (0, 1)])
    assert leaky.examples == {"leak": [f"{folder / 'copy.mp4'} (t2), as in {folder / 'split0.jsonl'}"]}


def test_a_question_in_two_splits_is_worth_a_note(folder):
    same = [task(1, "0.mp4")], [task(2, "1.mp4", question="q1?")]
    assert findings(folder, *same) == [{}, {"shared question": 1}]
    other = [task(1, "0.mp4")], [task(2, "1.mp4", question="Q1?", gold="y")]
    assert findings(folder, *other) == [{}, {}]


def test_answers_that_lean_are_worth_a_note(folder):
    assert findings(folder, [task(n, gold="A", **CHOICE) for n in range(60)]) == [{"lean": 1}]
    assert findings(folder, [task(n, gold="AB"[n % 2], **CHOICE) for n in range(60)]) == [{}]


def test_a_row_that_is_none_doesnt_hide_the_others(folder):
    write_tasks(folder / "a.jsonl", [task(1), task(2)])
    lines = (folder / "a.jsonl").read_text().splitlines()
    (folder / "a.jsonl").write_text("\n".join([lines[0], '{"id": "x"}', '{"id', lines[0], lines[1]]))
    (split,) = check([folder / "a.jsonl"])
    assert split.findings["row"] == 2
    assert "row 2, field question" in split.examples["row"][0]
    assert "line 3: not valid JSON" in split.examples["row"][1]
    assert split.findings["id"] == 1


def test_the_command_says_what_it_found(folder):
    write_tasks(folder / "a.jsonl", [task(1)])
    assert "no problem was found" in good("data", "check", folder / "a.jsonl")
    write_tasks(folder / "b.jsonl", [task(2, "none.mp4")])
    assert "1 problems were found" in bad("data", "check", folder / "a.jsonl", folder / "b.jsonl")
    (folder / "c.jsonl").write_text('{"prompt": "x"}\n')
    assert "saccade data import" in bad("data", "check", folder / "c.jsonl")


def test_a_task_may_be_shown_in_several_ways(folder):
    demo = Demo(task=task(1), frames=4, replies=("<answer>x</answer>",))
    assert findings(folder, [demo, replace(demo, frames=8)]) == [{}]
    assert findings(folder, [demo, demo]) == [{"repeated": 1}]
    assert findings(folder, [demo, replace(demo, replies=("x",))]) == [{"answer": 1}]


# ---- looking at a row ----------------------------------------------------------------------------------------------


def test_a_row_is_shown_as_text_and_as_a_page(folder):
    write_tasks(folder / "a.jsonl", [task(1), task(2, gold="B", question="<b>Which?</b>", **CHOICE)])
    said = good("data", "show", folder / "a.jsonl", "--id", "t2", "--page", folder / "row.html")
    assert "* B. blue" in said
    assert "32x32, 2.0 s, 8 frames" in said
    page = (folder / "row.html").read_text()
    assert "&lt;b&gt;Which?" in page
    assert page.count("data:image/jpeg") == 8
    assert good("data", "show", folder / "a.jsonl").startswith("t1")


def test_a_demonstration_is_shown_with_its_replies(folder):
    demo = Demo(task=task(1, "a.png"), frames=4, replies=("<think>a", "<answer>x</answer>"), children=(("red at 1",),))
    write_tasks(folder / "d.jsonl", [demo])
    said = good("data", "show", folder / "d.jsonl", "--page", folder / "row.html")
    assert "a sub-agent says: red at 1" in said
    assert "40x20" in (folder / "row.html").read_text()


def test_a_row_that_isnt_there(folder):
    write_tasks(folder / "a.jsonl", [task(1)])
    with pytest.raises(DataError, match="has no row 2; it has 1 rows"):
        find(Path(folder / "a.jsonl"), 2)
    assert "no row with the id 'z'" in bad("data", "show", folder / "a.jsonl", "--id", "z")
    write_tasks(folder / "b.jsonl", [task(1, "none.mp4")])
    assert "can't be opened" in good("data", "show", folder / "b.jsonl", "--page", folder / "row.html")
