"""Shards: every task once, rows even; merged they equal a single evaluation, or an error explains why not."""

import shutil
from collections import Counter
from dataclasses import replace

import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evaluate import TASKS, CountingEngine, Killed, bare, run
from test_subset import STRATA, build_tasks

from saccade.errors import ConfigError, DataError, RunError
from saccade.evaluation.benchmarks.base import group_by_extra
from saccade.evaluation.records import find_fingerprint_differences, read_records, read_scored_episodes
from saccade.evaluation.shards import get_results_path, merge_shards
from saccade.evaluation.subset import Shard, Subset
from saccade.types import Media


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, "x", "y", ["x", "y"]]), st.sampled_from("pq")), min_size=6, max_size=40),
    st.integers(1, 6),
    st.integers(6, 50),
)
def test_shards_hold_every_task_once_and_rows_evenly(rows, count, limit):
    tasks = build_tasks(rows)
    whole = Subset(limit=limit, strata=STRATA).select(tasks)
    parts = [
        Subset(limit=limit, strata=STRATA, shard=Shard(index=index, num_shards=count)).select(tasks)
        for index in range(1, count + 1)
    ]
    assert sorted(task.id for part in parts for task in part) == sorted(task.id for task in whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for name in {str(row[0]) for row in rows}:
        held = [Counter(str(task.extras["a"]) for task in part)[name] for part in parts]
        assert max(held) - min(held) <= 1
    again = Subset(limit=limit, strata=STRATA, shard=Shard(index=1, num_shards=count)).select(tasks[::-1])
    assert {task.id for task in again} == {task.id for task in parts[0]}


def test_fingerprints_differ_in_a_part_that_only_one_has():
    first, second = "seed=1, environments=2", "seed=1"
    assert find_fingerprint_differences(first, second) == ["environments"]
    assert find_fingerprint_differences(second, first) == ["environments"]
    assert find_fingerprint_differences("seed=1, tools=2", "seed=2, tools=2") == ["seed"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=6, max_size=12), st.integers(1, 6))
def test_joint_tasks_are_in_one_shard(sizes, count):
    tasks = [
        replace(TASKS[0], id=f"{name}-{i}", extras={"a": "x", "b": str(i), "problem": f"p{name}"})
        for name, size in enumerate(sizes)
        for i in range(size)
    ]
    parts = [
        Subset(strata=STRATA, joint_key=group_by_extra("problem"), shard=Shard(index=index, num_shards=count)).select(
            tasks
        )
        for index in range(1, count + 1)
    ]
    assert sorted(task.id for part in parts for task in part) == sorted(task.id for task in tasks)
    units = [{task.extras["problem"] for task in part} for part in parts]
    assert sum(map(len, units)) == len(sizes)
    assert max(map(len, units)) - min(map(len, units)) <= 1
    with raises(ConfigError, key="--shard", value="1/13"):
        Subset(strata=STRATA, joint_key=group_by_extra("problem"), shard=Shard(index=1, num_shards=13)).select(tasks)


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "1/0", "-1/2", "a/b", "1/2/3", "1.0/2"])
def test_invalid_shard_raises(text):
    with raises(ConfigError, key="--shard", value=text):
        Shard.parse(text)


def test_more_shards_than_tasks_raise():
    assert str(Shard.parse(" 2 / 8 ")) == "2/8"
    with raises(ConfigError, key="--shard", value="9/9"):
        Subset(shard=Shard.parse("9/9")).select(TASKS)


def shard(renderer, folder, text, **more):
    """Run one shard of an evaluation in a run folder."""
    part = Subset(shard=Shard.parse(text))
    path = get_results_path(folder, "test", part.shard)
    return run(renderer, path, subset=part, root=folder, **{"num_samples": 2, **more})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shuffle_options": True}, {"num_tasks": 5}])
def test_merged_shards_equal_a_single_evaluation(renderer, tmp_path, options):
    folders = [tmp_path / name for name in "abc"]
    tasks = [replace(task, media=(Media(path=str(tmp_path / "a" / "clip.mp4")),)) for task in TASKS]
    for place, folder in enumerate(folders):
        # Each machine has its own copy of the run, with clips in it.
        here = [replace(task, media=(Media(path=str(folder / "clip.mp4")),)) for task in tasks]
        shard(renderer, folder, f"{place + 1}/3", tasks=here, **options)
    path = merge_shards(folders[0], "test", folders[1:])
    whole = tmp_path / "a" / "evaluations" / "whole.jsonl"
    found = run(renderer, whole, tasks=tasks, num_samples=2, root=tmp_path / "a", **options)
    assert bare(read_scored_episodes(path)) == bare(found)  # including the order
    assert {scored.episode.task.media[0].path for scored in read_scored_episodes(path)} == {
        str(tmp_path / "a" / "clip.mp4")
    }
    keys = [[(record.key, record.fingerprint) for record in read_records(file)] for file in (path, whole)]
    assert sorted(keys[0]) == sorted(keys[1])
    engine = CountingEngine(renderer)
    run(renderer, path, engine=engine, tasks=tasks, num_samples=2, root=tmp_path / "a", **options)
    assert engine.asked == 0  # everything is finished
    before = path.read_bytes()
    assert merge_shards(folders[0], "test", folders[1:]).read_bytes() == before


def test_other_shards_may_lack_subtitles(renderer, tmp_path):
    def here(folder, has):
        folder.mkdir(parents=True, exist_ok=True)
        for task in has:
            (folder / f"{task.id}.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nhi\n")
        return [
            replace(
                task,
                media=(Media(path=str(folder / "clip.mp4")),),
                extras={**task.extras, "subtitles": f"{task.id}.srt" if task in has else ""},
            )
            for task in TASKS
        ]

    folders = [tmp_path / name for name in "ab"]
    for place, folder in enumerate(folders):
        own = Subset(shard=Shard(index=place + 1, num_shards=2)).select(TASKS)
        shard(renderer, folder, f"{place + 1}/2", tasks=here(folder, own))
    path = merge_shards(folders[0], "test", folders[1:])
    assert len(read_scored_episodes(path)) == 2 * len(TASKS)
    # New subtitles invalidate results that were obtained without them.
    engine = CountingEngine(renderer)
    one = tmp_path / "one"
    shard(renderer, one, "1/1", tasks=here(one, []))
    shard(renderer, one, "1/1", tasks=here(one, TASKS[:1]), engine=engine)
    assert engine.asked == 2


@pytest.mark.slow
def test_incompatible_shards_raise(renderer, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    with raises(RunError, key="shards", value="test"):
        merge_shards(one, "test")
    shard(renderer, one, "2/4")
    with raises(RunError, key="shards", value="else"):
        merge_shards(one, "else")
    with raises(RunError, key="shards", value=("1/4", "3/4", "4/4")):
        merge_shards(one, "test")
    shutil.rmtree(one)
    shard(renderer, one, "1/2", identity={"weights": "these"})
    path = two / "evaluations" / "shards" / "test" / "2-of-2.shard.json"
    for options, difference in (
        ({"identity": {"weights": "others"}}, ("weights",)),
        ({"identity": {"weights": "these"}, "temperature": 0.0}, ("settings",)),
        ({"identity": {"weights": "these"}, "seed": 8}, ("seed",)),
        ({"identity": {"weights": "these"}, "num_tasks": 6}, "tasks"),
        ({"identity": {"weights": "these"}, "num_samples": 3}, "tasks"),
        ({"identity": {"weights": "these"}, "tasks": TASKS[1:]}, "tasks"),
    ):
        shard(renderer, two, "2/2", **options)
        with raises(RunError, key=str(path), value=difference):
            merge_shards(one, "test", [two])
        assert not (one / "evaluations" / "test.jsonl").exists()
        shutil.rmtree(two)
    shard(renderer, two, "1/3")
    with raises(RunError, key=str(path.with_name("1-of-3.shard.json")), value="1/3"):
        merge_shards(one, "test", [two])


def test_unfinished_and_duplicate_shards_raise(renderer, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    shard(renderer, one, "1/2")
    dying = CountingEngine(renderer)
    dying.lives = 5
    with pytest.raises(Killed):
        shard(renderer, one, "2/2", engine=dying, max_concurrency=2)
    with raises(RunError, key=str(one / "evaluations" / "shards" / "test" / "2-of-2.jsonl")) as caught:
        merge_shards(one, "test")
    assert 0 < caught.value.value < 8
    shard(renderer, one, "2/2")
    shutil.copytree(one, two)
    path = merge_shards(one, "test", [two, one])  # identical copies count once
    for name in ("1-of-2", "2-of-2"):
        file = two / "evaluations" / "shards" / "test" / f"{name}.jsonl"
        file.write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
    with raises(RunError, value="1/2"):
        merge_shards(one, "test", [two])
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with raises(RunError, key=str(path)):
        merge_shards(one, "test")
    path.unlink()
    manifest = get_results_path(one, "test", Shard.parse("1/2")).with_suffix(".shard.json")
    manifest.write_text("{}")
    with raises(DataError, key=str(manifest)):
        merge_shards(one, "test")
    manifest.write_text("{")
    with raises(DataError, key=str(manifest)):
        merge_shards(one, "test")
