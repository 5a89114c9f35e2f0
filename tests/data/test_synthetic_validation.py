"""`validate_dataset` finds wrong answers, changed files and leaks, in videos and in images."""

import json
import shutil
from dataclasses import dataclass, replace

import pytest
from error_cases import raises

from saccade.config.schema import SyntheticConfig, SyntheticImageConfig
from saccade.data.dataset import write_items
from saccade.data.synthetic import generate_dataset, validate_dataset
from saccade.data.synthetic.image.questions import ANSWER_TYPES as IMAGE_ANSWER_TYPES
from saccade.data.synthetic.questions import ANSWER_TYPES as VIDEO_ANSWER_TYPES
from saccade.errors import DataError
from saccade.types import AnswerType, Task
from saccade.utils.jsonl import read_jsonl


@dataclass(frozen=True)
class Media:
    """A small dataset of one media kind: its file names, and a wrong answer."""

    config: SyntheticConfig
    files: str  # the path of a numbered file in a split
    labels: str
    num_train_files: int
    answer_types: dict
    answer_type: AnswerType
    wrong_answer: object


SIZES = {"train": 4, "validation": 2, "test": 2}
MEDIA = {
    "video": Media(
        SyntheticConfig(**SIZES, distractors=1),
        "clips/{:05d}.mp4",
        "events.json",
        4,
        VIDEO_ANSWER_TYPES,
        AnswerType.NUMBER,
        9.0,
    ),
    "image": Media(
        SyntheticConfig(
            media="image", **SIZES, image=SyntheticImageConfig(distractors=1, grid_images=0.5, grid_size=2)
        ),
        "pictures/{:05d}.png",
        "objects.json",
        4 + 2,  # two grid images
        IMAGE_ANSWER_TYPES,
        AnswerType.BOX,
        (0.0, 0.0, 32.0, 32.0),
    ),
}


@pytest.fixture(scope="module", params=MEDIA)
def dataset(request, tmp_path_factory):
    """A kind of media and the folder of its dataset."""
    media, folder = MEDIA[request.param], tmp_path_factory.mktemp("synthetic") / request.param
    generate_dataset(folder, media.config, seed=5)
    return media, folder


@pytest.fixture
def copy(dataset, tmp_path):
    media, folder = dataset
    return media, shutil.copytree(folder, tmp_path / "copy")


def test_valid_dataset_has_no_problems(dataset):
    media, folder = dataset
    report = validate_dataset(folder)
    assert report.problems == ()
    assert report.num_media == {"train": media.num_train_files, "validation": 2, "test": 2}
    assert report.num_tasks == {"train": 32, "validation": 16, "test": 16}
    assert set(report.constant_baselines["train"]) <= set(media.answer_types)


def test_wrong_answer_is_found(copy):
    media, folder = copy
    path = folder / "test" / "tasks.jsonl"
    tasks = read_jsonl(path, Task)
    index = next(i for i, task in enumerate(tasks) if task.answer_type == media.answer_type)
    tasks[index] = replace(tasks[index], ground_truth=media.wrong_answer)
    write_items(path, tasks)
    (problem,) = validate_dataset(folder).problems
    assert problem.startswith(f"task {tasks[index].id}: ")
    assert str(media.wrong_answer) in problem


def test_changed_file_is_found(copy):
    media, folder = copy
    shutil.copy(folder / "train" / media.files.format(1), folder / "train" / media.files.format(0))
    (problem,) = validate_dataset(folder).problems
    assert problem.startswith(f"train/{media.files.format(0)}")


def test_leak_is_found(copy):
    media, folder = copy
    name, copied = media.files.format(0), media.files.format(7)
    train, test = (json.loads((folder / split / media.labels).read_text()) for split in ("train", "test"))
    shutil.copy(folder / "train" / name, folder / "test" / copied)
    labels = {**test, copied.rpartition("/")[2]: train[name.rpartition("/")[2]]}
    (folder / "test" / media.labels).write_text(json.dumps(labels))
    problems = validate_dataset(folder).problems
    assert len(problems) == 2
    assert all(f"train/{name}, test/{copied}" in problem for problem in problems)


def test_incomplete_dataset_is_an_error(copy):
    media, folder = copy
    (folder / "test" / media.labels).unlink()
    with raises(DataError, key=str(folder / "test" / media.labels)):
        validate_dataset(folder)
