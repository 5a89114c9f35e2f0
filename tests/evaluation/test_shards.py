"""Shards: every task once, rows even; joined they are what one machine would have written, or it is said why not."""

import shutil
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evaluate import TASKS, bare, counting, run
from test_portions import STRATA, made

from saccade.errors import ConfigError, DataError, RunError
from saccade.evaluation.benchmarks._benchmark import extra
from saccade.evaluation.merge import merge
from saccade.evaluation.portions import Portion
from saccade.evaluation.run import read_records, read_results
from saccade.evaluation.shards import Shard, shard_path
from saccade.types import Media


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, "x", "y", ["x", "y"]]), st.sampled_from("pq")), min_size=6, max_size=40),
    st.integers(1, 6),
    st.integers(6, 50),
)
def test_shards_hold_every_task_once_and_rows_evenly(rows, count, limit):
    tasks = made(rows)
    whole = Portion(limit=limit, strata=STRATA).of(tasks)
    parts = [
        Portion(limit=limit, strata=STRATA, shard=Shard(index=index, of=count)).of(tasks)
        for index in range(1, count + 1)
    ]
    assert sorted(each.id for part in parts for each in part) == sorted(each.id for each in whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for name in {str(row[0]) for row in rows}:
        held = [Counter(str(each.extras["a"]) for each in part)[name] for part in parts]
        assert max(held) - min(held) <= 1
    again = Portion(limit=limit, strata=STRATA, shard=Shard(index=1, of=count)).of(tasks[::-1])
    assert {each.id for each in again} == {each.id for each in parts[0]}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=6, max_size=12), st.integers(1, 6))
def test_what_a_metric_reads_together_is_in_one_shard(sizes, count):
    tasks = [
        replace(TASKS[0], id=f"{name}-{i}", extras={"a": "x", "b": str(i), "problem": f"p{name}"})
        for name, size in enumerate(sizes)
        for i in range(size)
    ]
    parts = [
        Portion(strata=STRATA, unit=extra("problem"), shard=Shard(index=index, of=count)).of(tasks)
        for index in range(1, count + 1)
    ]
    assert sorted(each.id for part in parts for each in part) == sorted(each.id for each in tasks)
    units = [{each.extras["problem"] for each in part} for part in parts]
    assert sum(map(len, units)) == len(sizes)
    assert max(map(len, units)) - min(map(len, units)) <= 1
    with pytest.raises(ConfigError, match=f"{len(tasks)} tasks.* are too few for 13 shards"):
        Portion(strata=STRATA, unit=extra("problem"), shard=Shard(index=1, of=13)).of(tasks)


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "1/0", "-1/2", "a/b", "1/2/3", "1.0/2"])
def test_what_is_no_shard(text):
    with pytest.raises(ConfigError, match="a shard is written i/n"):
        Shard.read(text)


def test_there_must_be_a_task_for_every_shard():
    assert str(Shard.read(" 2 / 8 ")) == "2/8"
    with pytest.raises(ConfigError, match="8 tasks are too few for 9 shards"):
        Portion(shard=Shard.read("9/9")).of(TASKS)


def shard(renderer, folder, text, **more):
    """One shard of an evaluation in a run's folder."""
    part = Portion(shard=Shard.read(text))
    path = shard_path(folder, "test", part.shard)
    return run(renderer, path, portion=part, root=folder, **{"repeat": 2, **more})


@pytest.mark.parametrize("options", [{}, {"shuffle_options": True}, {"limit": 5}])
def test_joined_shards_are_what_one_machine_writes(renderer, tmp_path, options):
    folders = [tmp_path / name for name in "abc"]
    tasks = [replace(each, media=(Media(path=str(tmp_path / "a" / "clip.mp4")),)) for each in TASKS]
    for place, folder in enumerate(folders):
        # each machine has the run at its own place, and clips in it
        here = [replace(each, media=(Media(path=str(folder / "clip.mp4")),)) for each in tasks]
        shard(renderer, folder, f"{place + 1}/3", tasks=here, **options)
    path = merge(folders[0], "test", folders[1:])
    whole = tmp_path / "a" / "evaluations" / "whole.jsonl"
    found = run(renderer, whole, tasks=tasks, repeat=2, root=tmp_path / "a", **options)
    assert bare(read_results(path)) == bare(found)  # in the order of one machine as well
    assert {each.episode.task.media[0].path for each in read_results(path)} == {str(tmp_path / "a" / "clip.mp4")}
    keys = [[(record.key, record.under) for record in read_records(file)] for file in (path, whole)]
    assert sorted(keys[0]) == sorted(keys[1])
    engine = counting(renderer)
    run(renderer, path, engine=engine, tasks=tasks, repeat=2, root=tmp_path / "a", **options)
    assert engine.asked == 0  # nothing is left to be done
    before = path.read_bytes()
    assert merge(folders[0], "test", folders[1:]).read_bytes() == before


def test_machines_may_lack_the_subtitles_of_others_and_new_ones_are_another_attempt(renderer, tmp_path):
    def here(folder, has):
        folder.mkdir(parents=True, exist_ok=True)
        for each in has:
            (folder / f"{each.id}.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nhi\n")
        return [
            replace(
                each,
                media=(Media(path=str(folder / "clip.mp4")),),
                extras={**each.extras, "subtitles": f"{each.id}.srt" if each in has else ""},
            )
            for each in TASKS
        ]

    folders = [tmp_path / name for name in "ab"]
    for place, folder in enumerate(folders):
        own = Portion(shard=Shard(index=place + 1, of=2)).of(TASKS)
        shard(renderer, folder, f"{place + 1}/2", tasks=here(folder, own))
    path = merge(folders[0], "test", folders[1:])
    assert len(read_results(path)) == 2 * len(TASKS)
    # where subtitles are there now that weren't, what was asked without them is no result
    engine = counting(renderer)
    one = tmp_path / "one"
    shard(renderer, one, "1/1", tasks=here(one, []))
    shard(renderer, one, "1/1", tasks=here(one, TASKS[:1]), engine=engine)
    assert engine.asked == 2


def test_what_cannot_be_joined_is_said_in_a_sentence(renderer, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    with pytest.raises(RunError, match="holds no shard of 'test'; evaluate with --shard"):
        merge(one, "test")
    shard(renderer, one, "2/4")
    with pytest.raises(RunError, match="holds no shard of 'else', but some of 'test'"):
        merge(one, "else")
    with pytest.raises(RunError, match="these shards are missing: 1/4, 3/4, 4/4"):
        merge(one, "test")
    shutil.rmtree(one)
    shard(renderer, one, "1/2", identity={"weights": "these"})
    for options, why in (
        ({"identity": {"weights": "others"}}, "was made with other weights than"),
        ({"identity": {"weights": "these"}, "temperature": 0.0}, "was made with other settings than"),
        ({"identity": {"weights": "these"}, "seed": 8}, "was made with other seed than"),
        ({"identity": {"weights": "these"}, "limit": 6}, "is a part of other tasks"),
        ({"identity": {"weights": "these"}, "repeat": 3}, "is a part of other tasks"),
        ({"identity": {"weights": "these"}, "tasks": TASKS[1:]}, "is a part of other tasks"),
    ):
        shard(renderer, two, "2/2", **options)
        with pytest.raises(RunError, match=why):
            merge(one, "test", [two])
        assert not (one / "evaluations" / "test.jsonl").exists()
        shutil.rmtree(two)
    shard(renderer, two, "1/3")
    with pytest.raises(RunError, match=r"is shard 1/2 and .* shard 1/3"):
        merge(one, "test", [two])


def test_an_unfinished_shard_and_one_too_many(renderer, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    shard(renderer, one, "1/2")
    dying = counting(renderer)
    dying.lives = 5
    with pytest.raises(KeyboardInterrupt):
        shard(renderer, one, "2/2", engine=dying, at_once=2)
    with pytest.raises(RunError, match=r"2-of-2\.jsonl isn't finished, \d of its 8 attempts are missing; run the same"):
        merge(one, "test")
    shard(renderer, one, "2/2")
    shutil.copytree(one, two)
    path = merge(one, "test", [two, one])  # the same copied, or named twice, is one all the same
    for name in ("1-of-2", "2-of-2"):
        file = two / "evaluations" / "shards" / "test" / f"{name}.jsonl"
        file.write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
    with pytest.raises(RunError, match="of 'test' is there twice, with other results"):
        merge(one, "test", [two])
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(RunError, match="holds other results; delete it"):
        merge(one, "test")
    path.unlink()
    cut = shard_path(one, "test", Shard.read("1/2")).with_suffix(".cut.json")
    cut.write_text("{}")
    with pytest.raises(DataError, match=r"1-of-2\.cut\.json, field shard"):
        merge(one, "test")
    cut.write_text("{")
    with pytest.raises(RunError, match=r"1-of-2\.cut\.json can't be read"):
        merge(one, "test")
