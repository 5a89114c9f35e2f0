"""A resumed run compares its data with what it was started with: rows in order, media files by content."""

import dataclasses
import json
import logging
import os

import pytest
from error_cases import raises

from saccade.data import digests
from saccade.data.dataset import load_demonstrations, load_tasks, write_items
from saccade.data.digests import DIGESTS_FILE, DataSource, record_data
from saccade.errors import DataError, RunError
from saccade.types import AnswerType, Demonstration, Media, Task


def build_task(index, **changes):
    task = Task(
        id=f"w-{index}",
        question=f"Question {index}?",
        media=(Media(path=f"clips/{index}.mp4"),),
        answer_type=AnswerType.OPEN,
        ground_truth="red",
        extras={"source": "made", "second": 1.5},
    )
    return dataclasses.replace(task, **changes)


class Data:
    """A run folder beside a dataset of five tasks, each about its own clip."""

    def __init__(self, root):
        self.run, self.file, self.tasks = root / "run", root / "data/tasks.jsonl", [build_task(i) for i in range(1, 6)]
        self.run.mkdir()
        (root / "data/clips").mkdir(parents=True)
        for i in range(1, 7):
            self.clip(i).write_bytes(bytes([i]) * 1000)

    def clip(self, index):
        return self.file.parent / f"clips/{index}.mp4"

    def record(self, tasks=None, *, key="data.train", load=load_tasks, **options):
        write_items(self.file, self.tasks if tasks is None else tasks)
        source = DataSource(key=key, file=self.file, media_folder=self.file.parent, items=load(self.file))
        record_data(self.run, [source], **options)

    def read(self):
        return json.loads((self.run / DIGESTS_FILE).read_text())


@pytest.fixture
def data(tmp_path):
    data = Data(tmp_path)
    data.record()
    return data


EDITED = build_task(2, ground_truth="blue")
CHANGES = {
    "edited": (lambda tasks: [tasks[0], EDITED, *tasks[2:]], "1 row edited (row 2, task w-2)"),
    "added": (lambda tasks: [*tasks, build_task(6)], "1 row added (row 6, task w-6)"),
    "missing": (lambda tasks: [*tasks[:3], tasks[4]], "1 row missing (row 4 before)"),
    "reordered": (
        lambda tasks: [tasks[1], tasks[0], *tasks[2:]],
        "2 rows in another place (row 1, task w-2; row 2, task w-1)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_rows_are_refused_or_accepted(data, change, caplog):
    apply_change, text = CHANGES[change]
    changed = apply_change(data.tasks)
    before = data.read()
    with raises(RunError, key="data.train", value=(text,)):
        data.record(changed)
    assert data.read() == before

    with caplog.at_level(logging.WARNING):
        data.record(changed, accepts_changes=True)
    (line,) = caplog.records
    assert text in line.getMessage()
    old, new = data.read()["sources"]["data.train"]
    assert [old] == before["sources"]["data.train"]
    assert new["count"] == len(changed)
    data.record(changed)  # accepted once
    with raises(RunError, key="data.train"):
        data.record()


def test_changes_of_several_kinds_are_all_named(data):
    tasks = [EDITED, *data.tasks[2:], build_task(6)]
    data.clip(3).write_bytes(b"other")
    with raises(RunError, key="data.train") as caught:
        data.record(tasks)
    assert caught.value.value == (
        "1 row edited (row 1, task w-2)",
        "1 row added (row 5, task w-6)",
        "1 row missing (row 1 before)",
        f"1 media file changed ({data.clip(3)})",
    )


def swap(first, second):
    spare = first.with_suffix(".spare")
    first.rename(spare), second.rename(first), spare.rename(second)


def rewrite(first, second):
    status = first.stat()
    first.write_bytes(second.read_bytes())
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that preserves times


@pytest.mark.parametrize("exchange", [swap, rewrite])
def test_exchanged_clips_of_equal_size_are_refused(data, exchange):
    exchange(data.clip(1), data.clip(2))
    with raises(RunError, key="data.train") as caught:
        data.record()
    assert str(data.clip(1)) in caught.value.value[0]
    data.record(accepts_changes=True)
    assert len(data.read()["media"][str(data.clip(1))]) == 2
    data.record()


def test_only_files_that_have_changed_are_read_again(data, monkeypatch):
    read = []
    compute = digests.compute_file_sha256
    monkeypatch.setattr(digests, "compute_file_sha256", lambda path: read.append(path) or compute(path))
    data.record()
    assert read == []
    os.utime(data.clip(4), ns=(1, 1))
    data.record()  # the same content
    assert read == [str(data.clip(4))]
    data.record()
    assert len(read) == 1


def test_media_beyond_the_limit_are_sampled_and_stay_comparable(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "MAX_BYTES_READ", 4999)
    data = Data(tmp_path)
    data.record()
    assert all(entries[-1]["is_sampled"] for entries in data.read()["media"].values())
    monkeypatch.undo()
    os.utime(data.clip(1), ns=(1, 1))
    data.record()
    data.clip(1).write_bytes(b"other")
    with raises(RunError, key="data.train"):
        data.record()


def test_a_moved_or_rewritten_dataset_is_the_same(data):
    folder = data.file.parent
    folder.rename(folder.with_name("moved"))
    data.file = folder.with_name("moved") / "tasks.jsonl"
    data.record([dataclasses.replace(task, extras=dict(reversed(task.extras.items()))) for task in data.tasks])
    data.file = data.file.with_suffix(".parquet")
    pytest.importorskip("pyarrow")
    data.record()


def test_demonstrations_of_one_task_are_compared_one_by_one(tmp_path):
    data = Data(tmp_path)
    rows = [
        Demonstration(task=data.tasks[0], frame_budget=budget, replies=(f"<answer>{budget}</answer>",))
        for budget in (4, 8)
    ]
    data.record(rows, key="data.demonstrations", load=load_demonstrations)
    rows[1] = dataclasses.replace(rows[1], replies=("<answer>red</answer>",))
    with raises(RunError, key="data.demonstrations", value=("1 row edited (row 2, task w-1)",)):
        data.record(rows, key="data.demonstrations", load=load_demonstrations)


def test_a_damaged_record_is_refused(data):
    path = data.run / DIGESTS_FILE
    text = path.read_text()
    for damaged in (text[:-20], text.replace('"rows":"', '"rows":"!'), "[]"):
        path.write_text(damaged)
        with raises(DataError):
            data.record([EDITED])
        assert path.read_text() == damaged
