"""Files mixed by weight: exact shares, every task once an epoch, the same from any place on."""

from collections import Counter

import pytest
from commands import bad
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config import dump, load_recipe
from saccade.data.mixture import Mixture, order, shares
from saccade.errors import ConfigError, DataError
from saccade.training.prompts import epoch_at, task_at
from saccade.types import Kind, Task


def tasks(name, count):
    return [Task(id=f"{name}{n}", question="?", media=(), kind=Kind.OPEN, gold="x") for n in range(count)]


def ids(mixture, seed, places):
    return [mixture.at(seed, place)[0].id for place in places]


def test_one_file_gives_what_it_gives_alone():
    """What a run drew before there were mixtures, worked out as it was then."""
    alone = tasks("a", 7)
    for seed in range(3):
        then = [alone[order(7, seed, place // 7)[place % 7]] for place in range(40)]
        assert [task_at(alone, seed, place) for place in range(40)] == then
        assert [Mixture((alone,), (3.0,)).at(seed, place)[0] for place in range(40)] == then
        assert [epoch_at(alone, seed, place) for place in range(40)] == [place // 7 for place in range(40)]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_weights_are_exact_and_every_task_comes_once_an_epoch(files, seed):
    mixture = Mixture(
        tuple(tasks(f"{number}-", size) for number, (size, _) in enumerate(files)),
        tuple(float(weight) for _, weight in files),
    )
    cycle = sum(shares(mixture.weights))
    row = [mixture.at(seed, place) for place in range(cycle * 12)]
    for number, (size, weight) in enumerate(files):
        own = [(task.id, epoch) for task, epoch in row if task.id.startswith(f"{number}-")]
        assert len(own) * sum(each for _, each in files) == len(row) * weight
        assert [epoch for _, epoch in own] == [place // size for place in range(len(own))]
        for start in range(0, len(own) - size + 1, size):
            assert len({task for task, _ in own[start : start + size]}) == size


def test_a_row_goes_on_from_any_place():
    films, pictures = tasks("film", 5), tasks("picture", 3)
    whole = ids(Mixture((films, pictures), (0.7, 0.3)), 1, range(100))
    for start in (0, 1, 37, 99):
        again = Mixture((list(films), list(pictures)), (0.7, 0.3))
        assert ids(again, 1, range(start, 100)) == whole[start:]
    assert ids(Mixture((films, pictures), (0.7, 0.3)), 2, range(100)) != whole
    assert Counter(name[:4] for name in whole) == {"film": 70, "pict": 30}


def test_odd_weights_are_near_enough():
    counts = shares((3.14159, 1.0, 0.0001))
    assert sum(counts) == pytest.approx(1000, abs=1)
    assert counts[2] == 1
    assert counts[0] / counts[1] == pytest.approx(3.14159, rel=0.01)


def test_files_of_one_length_dont_go_in_step():
    mixture = Mixture((tasks("a", 50), tasks("b", 50)), (1.0, 1.0))
    row = ids(mixture, 0, range(100))
    first = [name[1:] for name in row if name[0] == "a"]
    assert first != [name[1:] for name in row if name[0] == "b"]


def test_what_cant_be_mixed_is_refused(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        Mixture((tasks("a", 1), []), (1.0, 1.0))
    with pytest.raises(DataError, match="above 0"):
        Mixture((tasks("a", 1),), (0.0,))
    with pytest.raises(ConfigError, match=r"data.train.weight.a.jsonl can't be 0"):
        load_recipe("tiny/base", ["data.train={a.jsonl: 0}"])
    with pytest.raises(ConfigError, match=r"data.train.file can't be 3"):
        load_recipe("tiny/base", ["data.train=3"])
    recipe = load_recipe("tiny/base", ["data.train={a.jsonl: 2, b.parquet: 0.5}"])
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe
    said = bad("train", "tiny/base", f"data.train={{{tmp_path}/a.jsonl: 1}}", "--out", tmp_path / "run")
    assert "there is no such file" in said
