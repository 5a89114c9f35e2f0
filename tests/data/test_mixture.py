"""Mixtures: exact shares, every task once per epoch, and the same sequence from any position on."""

from collections import Counter

import pytest
from commands import fail
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config.load import dump_recipe, load_recipe
from saccade.data.mixture import Mixture, compute_cycle_counts, compute_epoch_order
from saccade.errors import ConfigError, DataError
from saccade.types import AnswerType, Task


def tasks(name, count):
    return [
        Task(id=f"{name}{n}", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="x")
        for n in range(count)
    ]


def ids(mixture, seed, positions):
    return [mixture.get_task(seed, position)[0].id for position in positions]


def test_single_dataset_keeps_its_order():
    dataset = tasks("a", 7)
    for seed in range(3):
        expected = [dataset[compute_epoch_order(7, seed, position // 7)[position % 7]] for position in range(40)]
        assert [Mixture.from_tasks(dataset).get_task(seed, position)[0] for position in range(40)] == expected
        assert [Mixture((dataset,), (3.0,)).get_task(seed, position)[0] for position in range(40)] == expected
        epochs = [Mixture.from_tasks(dataset).get_task(seed, position)[1] for position in range(40)]
        assert epochs == [position // 7 for position in range(40)]


def test_iterating_reads_each_dataset_once():
    class CountingList(list):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    first, second = CountingList(tasks("a", 3)), CountingList(tasks("b", 2))
    assert list(Mixture((first, second), (1.0, 1.0))) == [*tasks("a", 3), *tasks("b", 2)]
    assert (first.reads, second.reads) == (1, 1)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_shares_are_exact_and_every_task_occurs_once_per_epoch(files, seed):
    mixture = Mixture(
        tuple(tasks(f"{number}-", size) for number, (size, _) in enumerate(files)),
        tuple(float(weight) for _, weight in files),
    )
    cycle = sum(compute_cycle_counts(mixture.weights))
    drawn = [mixture.get_task(seed, position) for position in range(cycle * 12)]
    for number, (size, weight) in enumerate(files):
        own = [(task.id, epoch) for task, epoch in drawn if task.id.startswith(f"{number}-")]
        assert len(own) * sum(weight for _, weight in files) == len(drawn) * weight
        assert [epoch for _, epoch in own] == [position // size for position in range(len(own))]
        for start in range(0, len(own) - size + 1, size):
            assert len({task for task, _ in own[start : start + size]}) == size


def test_sequence_resumes_at_any_position():
    videos, images = tasks("video", 5), tasks("image", 3)
    whole = ids(Mixture((videos, images), (0.7, 0.3)), 1, range(100))
    for start in (0, 1, 37, 99):
        again = Mixture((list(videos), list(images)), (0.7, 0.3))
        assert ids(again, 1, range(start, 100)) == whole[start:]
    assert ids(Mixture((videos, images), (0.7, 0.3)), 2, range(100)) != whole
    assert Counter(name[:4] for name in whole) == {"vide": 70, "imag": 30}


def test_irrational_weights_are_rounded():
    counts = compute_cycle_counts((3.14159, 1.0, 0.0001))
    assert sum(counts) == pytest.approx(1000, abs=1)
    assert counts[2] == 1
    assert counts[0] / counts[1] == pytest.approx(3.14159, rel=0.01)


def test_datasets_of_one_length_are_shuffled_differently():
    mixture = Mixture((tasks("a", 50), tasks("b", 50)), (1.0, 1.0))
    names = ids(mixture, 0, range(100))
    assert [name[1:] for name in names if name[0] == "a"] != [name[1:] for name in names if name[0] == "b"]


@pytest.mark.parametrize("datasets", [(), ([],), (["task"], [])])
def test_empty_dataset_is_an_error(datasets):
    with raises(DataError, key="data.train"):
        Mixture(datasets, (1.0,) * len(datasets))


def test_invalid_mixtures_are_errors(tmp_path):
    with raises(ConfigError, key="data.train.weight./a.jsonl", value=0):
        load_recipe("tiny/base", ["data.train={/a.jsonl: 0}"])
    with raises(ConfigError, key="data.train.file", value=3):
        load_recipe("tiny/base", ["data.train=3"])
    recipe = load_recipe("tiny/base", ["data.train={/a.jsonl: 2, /b.parquet: 0.5}"])
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe
    words = ["rl", "tiny/base", f"data.train={{{tmp_path}/a.jsonl: 1}}", "--out", tmp_path / "run"]
    fail(DataError, *words, key=tmp_path / "a.jsonl")
