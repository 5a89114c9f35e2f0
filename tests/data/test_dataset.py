"""Tasks and demonstrations are written and loaded unchanged; invalid rows are typed errors."""

import json
from dataclasses import replace

import pytest
from error_cases import raises

from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations, load_tasks, write_items
from saccade.errors import DataError
from saccade.runs import pipeline
from saccade.types import AnswerType, Demonstration, Media, Task
from saccade.utils.jsonl import to_jsonable


def task(**changes):
    base = Task(
        id="t1", question="Which?", media=(Media(path="clips/a.mp4"),), answer_type=AnswerType.OPEN, ground_truth="red"
    )
    return replace(base, **changes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").write_bytes(b"x")
    return tmp_path


def test_media_paths_are_joined_to_the_files_folder(folder):
    write_items(folder / "tasks.jsonl", [task()])
    (back,) = load_tasks(folder / "tasks.jsonl")
    assert back.media[0].path == str(folder / "clips" / "a.mp4")
    assert replace(back, media=task().media) == task()
    assert back.digest == task().digest  # a moved dataset keeps its seeds


def test_absolute_paths_stay(folder):
    absolute = str(folder / "clips" / "a.mp4")
    write_items(folder / "tasks.jsonl", [task(media=(Media(path=absolute),))])
    assert load_tasks(folder / "tasks.jsonl")[0].media[0].path == absolute


def test_media_root_is_the_folder_of_relative_paths(folder, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    demo = Demonstration(task=task(), frame_budget=4, replies=("<answer>red</answer>",))
    write_items(tmp_path / "run" / "tasks.jsonl", [task()])
    write_items(tmp_path / "run" / "demonstrations.jsonl", [demo])
    with raises(DataError, key="media", value=str(tmp_path / "run" / "clips" / "a.mp4")):
        load_tasks(tmp_path / "run" / "tasks.jsonl")
    (loaded,) = load_tasks(tmp_path / "run" / "tasks.jsonl", media_root=folder)
    (loaded_demo,) = load_demonstrations(tmp_path / "run" / "demonstrations.jsonl", media_root=folder)
    assert loaded.media == loaded_demo.task.media == (Media(path=str(folder / "clips" / "a.mp4")),)
    monkeypatch.chdir(tmp_path / "run")
    for media_root in (str(folder), ".."):  # a relative one starts where the command is run
        recipe = load_recipe("tiny/base", ["data.train=tasks.jsonl", f"data.media_root={media_root}"])
        (loaded,) = pipeline.load_training_tasks(tmp_path / "run", recipe)
        assert loaded.digest == task().digest


@pytest.mark.parametrize(
    ("answer_type", "ground_truth"),
    [
        (AnswerType.MATH, r"\frac{1}{2}"),
        (AnswerType.BOX, (0.1, 0.2, 0.3, 0.4)),
        (AnswerType.POINT, (0.0, 0.0, 1.0, 1.0)),
    ],
)
def test_formulas_and_boxes_round_trip(folder, answer_type, ground_truth):
    write_items(folder / "tasks.jsonl", [task(answer_type=answer_type, ground_truth=ground_truth)])
    assert load_tasks(folder / "tasks.jsonl")[0].ground_truth == ground_truth


def test_media_paths_of_demonstrations_are_joined(folder):
    demo = Demonstration(task=task(), frame_budget=4, replies=("x</think><answer>red</answer>",))
    write_items(folder / "demonstrations.jsonl", [demo, demo])
    back = load_demonstrations(folder / "demonstrations.jsonl")
    assert len(back) == 2
    assert back[0].task.media[0].path == str(folder / "clips" / "a.mp4")


@pytest.mark.parametrize("load", [load_tasks, load_demonstrations])
def test_empty_file_is_an_error(folder, load):
    (folder / "rows.jsonl").write_text("\n")
    with raises(DataError, key=str(folder / "rows.jsonl")):
        load(folder / "rows.jsonl")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"id": "t1"}, "id"),
        ({"answer_type": AnswerType.CHOICE, "options": ("red",), "ground_truth": "A"}, "options"),
        ({"answer_type": AnswerType.CHOICE, "options": ("red", "blue"), "ground_truth": "C"}, "ground_truth"),
        ({"answer_type": AnswerType.CHOICE, "options": ("red", "blue"), "ground_truth": "AB"}, "ground_truth"),
        ({"answer_type": AnswerType.GROUNDING, "ground_truth": (5.0, 5.0)}, "ground_truth"),
        ({"answer_type": AnswerType.GROUNDING, "ground_truth": (5.0,)}, "ground_truth"),
        ({"answer_type": AnswerType.GROUNDING, "ground_truth": (1.0, 2.0, 3.0, 4.0)}, "ground_truth"),
        ({"answer_type": AnswerType.BOX, "ground_truth": (1.0, 2.0)}, "ground_truth"),
        ({"answer_type": AnswerType.POINT, "ground_truth": (1.0, 2.0, 3.0, 2.0)}, "ground_truth"),
        ({"answer_type": AnswerType.MATH, "ground_truth": " "}, "ground_truth"),
        ({"answer_type": AnswerType.NUMBER, "ground_truth": "three"}, "ground_truth"),
        ({"answer_type": AnswerType.NUMBER, "ground_truth": float("nan")}, "ground_truth"),
        ({"answer_type": AnswerType.OPEN, "ground_truth": 3.0}, "ground_truth"),
    ],
)
def test_invalid_task_is_an_error(folder, changes, key):
    bad_task = task(**{"id": "t2", **changes})
    write_items(folder / "tasks.jsonl", [task(), bad_task])
    with raises(DataError, key=key) as caught:
        load_tasks(folder / "tasks.jsonl")
    assert repr(caught.value.value) == repr(getattr(bad_task, key))
    assert f"task {bad_task.id}: " in str(caught.value)


def test_missing_media_file_is_an_error(folder):
    write_items(folder / "tasks.jsonl", [task(), task(id="t2", media=(Media(path="clips/b.mp4"),))])
    with raises(DataError, key="media", value=str(folder / "clips" / "b.mp4")):
        load_tasks(folder / "tasks.jsonl")


@pytest.mark.parametrize(
    ("change", "key", "location"),
    [
        (lambda row: row | {"ground_thruth": "x"}, "ground_thruth", "'ground_truth'"),
        (lambda row: row | {"media": [{**row["media"][0], "start": 3}]}, "start", "row 2, media, "),
        (lambda row: {"task": {**row, "answer": "x"}, "frame_budget": 4, "replies": []}, "answer", "row 2, task, "),
        (lambda row: {"task": row, "frame_budget": 4, "replies": [], "child": []}, "child", "'children'"),
    ],
)
def test_unknown_field_is_an_error(folder, change, key, location):
    valid, invalid = to_jsonable(task()), change(to_jsonable(task(id="t2")))
    load, first = (
        (load_demonstrations, {"task": valid, "frame_budget": 4, "replies": ["x"]})
        if "task" in invalid
        else (load_tasks, valid)
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, invalid)))
    with raises(DataError, key=key) as caught:
        load(folder / "rows.jsonl")
    assert "row 2, " in str(caught.value)
    assert location in str(caught.value)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_environment_of_a_task_round_trips(folder, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    path = folder / f"tasks.{suffix}"
    write_items(path, [task(), task(id="t2", environment="python")])
    assert [loaded.environment for loaded in load_tasks(path)] == [None, "python"]


def test_unknown_parquet_column_is_an_error(folder):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing: pip install 'saccade[data]'")
    write_items(folder / "a.parquet", [task()])
    table = parquet.read_table(folder / "a.parquet")
    parquet.write_table(table.append_column("answer", [["red"]]), folder / "b.parquet")
    with raises(DataError, key="answer"):
        load_tasks(folder / "b.parquet")


@pytest.mark.parametrize("name", ["folder.jsonl", "none.jsonl", "x" * 300 + ".jsonl"])
def test_unreadable_file_is_an_error(folder, name):
    (folder / "folder.jsonl").mkdir()
    with raises(DataError, key=str(folder / name)):
        load_tasks(folder / name)
