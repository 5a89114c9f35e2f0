import json
from dataclasses import replace

import pytest

from saccade.data.record import plain
from saccade.data.rows import read_demos, read_tasks, write_tasks
from saccade.errors import DataError
from saccade.types import Demo, Kind, Media, Task


def task(**changes):
    base = Task(id="t1", question="Which?", media=(Media(path="clips/a.mp4"),), kind=Kind.OPEN, gold="red")
    return replace(base, **changes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").write_bytes(b"x")
    return tmp_path


def test_media_paths_are_joined_to_the_files_folder(folder):
    write_tasks(folder / "tasks.jsonl", [task()])
    (back,) = read_tasks(folder / "tasks.jsonl")
    assert back.media[0].path == str(folder / "clips" / "a.mp4")
    assert replace(back, media=task().media) == task()
    assert back.digest == task().digest  # a moved data set keeps its seeds


def test_absolute_paths_stay(folder):
    there = str(folder / "clips" / "a.mp4")
    write_tasks(folder / "tasks.jsonl", [task(media=(Media(path=there),))])
    assert read_tasks(folder / "tasks.jsonl")[0].media[0].path == there


@pytest.mark.parametrize(
    ("kind", "gold"),
    [(Kind.MATH, r"\frac{1}{2}"), (Kind.BOX, (1.0, 2.0, 3.0, 4.0)), (Kind.POINT, (0.0, 0.0, 1.0, 1.0))],
)
def test_formulas_and_boxes_come_back(folder, kind, gold):
    write_tasks(folder / "tasks.jsonl", [task(kind=kind, gold=gold)])
    assert read_tasks(folder / "tasks.jsonl")[0].gold == gold


def test_demonstrations_are_located_too(folder):
    demo = Demo(task=task(), frames=4, replies=("x</think><answer>red</answer>",))
    write_tasks(folder / "traces.jsonl", [demo, demo])
    back = read_demos(folder / "traces.jsonl")
    assert len(back) == 2
    assert back[0].task.media[0].path == str(folder / "clips" / "a.mp4")


@pytest.mark.parametrize("read", [read_tasks, read_demos])
def test_an_empty_file_is_an_error(folder, read):
    (folder / "rows.jsonl").write_text("\n")
    with pytest.raises(DataError, match="the file holds no row"):
        read(folder / "rows.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"media": (Media(path="clips/b.mp4"),)}, "task t2: media file .*b.mp4 is missing"),
        ({"id": "t1"}, "the id was used before"),
        ({"kind": Kind.CHOICE, "choices": ("red",), "gold": "A"}, "1 choices"),
        ({"kind": Kind.CHOICE, "choices": ("red", "blue"), "gold": "C"}, "'C' is not one of the letters AB"),
        ({"kind": Kind.CHOICE, "choices": ("red", "blue"), "gold": "AB"}, "'AB' is not one of the letters AB"),
        ({"kind": Kind.GROUNDING, "gold": (5.0, 5.0)}, "not a span"),
        ({"kind": Kind.GROUNDING, "gold": (5.0,)}, "not a span"),
        ({"kind": Kind.GROUNDING, "gold": (1.0, 2.0, 3.0, 4.0)}, "not a span"),
        ({"kind": Kind.BOX, "gold": (1.0, 2.0)}, "not a box"),
        ({"kind": Kind.POINT, "gold": (1.0, 2.0, 3.0, 2.0)}, "not a box"),
        ({"kind": Kind.MATH, "gold": " "}, "not a formula"),
        ({"kind": Kind.NUMBER, "gold": "three"}, "not a number"),
        ({"kind": Kind.NUMBER, "gold": float("nan")}, "not a number"),
        ({"kind": Kind.OPEN, "gold": 3.0}, "not a text"),
    ],
)
def test_a_task_that_cant_be_used_is_named(folder, changes, message):
    write_tasks(folder / "tasks.jsonl", [task(), task(**{"id": "t2", **changes})])
    with pytest.raises(DataError, match=message):
        read_tasks(folder / "tasks.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row | {"glod": "x"}, r"row 2, field glod: a Task has no such field; did you mean 'gold'\?"),
        (lambda row: row | {"media": [{**row["media"][0], "start": 3}]}, "row 2, media, field start: a Media has no"),
        (lambda row: {"task": {**row, "answer": "x"}, "frames": 4, "replies": []}, "row 2, task, field answer"),
        (lambda row: {"task": row, "frames": 4, "replies": [], "child": []}, "field child: .* mean 'children'"),
    ],
)
def test_a_field_of_an_unknown_name_is_named(folder, change, message):
    fair, wrong = plain(task()), change(plain(task(id="t2")))
    read, first = (read_demos, {"task": fair, "frames": 4, "replies": ["x"]}) if "task" in wrong else (read_tasks, fair)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, wrong)))
    with pytest.raises(DataError, match=message):
        read(folder / "rows.jsonl")


def test_a_column_of_an_unknown_name_is_named(folder):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing: pip install 'saccade[parquet]'")
    write_tasks(folder / "a.parquet", [task()])
    table = parquet.read_table(folder / "a.parquet")
    parquet.write_table(table.append_column("answer", [["red"]]), folder / "b.parquet")
    with pytest.raises(DataError, match="row 1, field answer: a Task has no such field"):
        read_tasks(folder / "b.parquet")


def test_why_a_file_cant_be_read(folder):
    (folder / "rows.jsonl").mkdir()
    with pytest.raises(DataError, match=r"rows\.jsonl is a folder; name a file"):
        read_tasks(folder / "rows.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file"):
        read_tasks(folder / "none.jsonl")
    with pytest.raises(DataError, match=r"can't be read: .*name too long"):
        read_tasks(folder / ("x" * 300 + ".jsonl"))
