"""The episodes of a step on disk: whole or readable up to the damage, once per step, bounded, never in the way."""

import asyncio
import errno
import gzip
import logging
import os
import threading

import numpy as np
import pytest
from error_cases import raises

from saccade.errors import DataError
from saccade.ledger import ImageRef, ImageSlot, Ledger
from saccade.training import episode_log
from saccade.training.episode_log import (
    EpisodeWriter,
    RolloutRecord,
    list_recorded_steps,
    read_rollouts,
    read_step_token_values,
)
from saccade.training.token_log import TokenValues, identify_conversation
from saccade.types import Episode, EpisodeStatus, Media, Reply, Score, Task, Turn


def build_record(root, step=1, index=0, text="It was red.", **fields):
    image = ImageRef(path=str(root / "images/a.png"), digest="a", time=None, width=32, height=16)
    ledger = Ledger().observe((7, 0), slots=(ImageSlot(index=1, image=image, num_tokens=2),))
    task = Task(
        id=f"t{index}",
        question="Which color?",
        media=(Media(path="/clips/a.mp4"),),
        answer_type="open",
        ground_truth="red",
    )
    episode = Episode(
        task=task,
        environment="single_turn",
        ledger=ledger.append_completion((5, 6), logprobs=(-0.5, float("-inf")), version=step),
        turns=(Turn(reply=Reply(text=text)),),
        status=EpisodeStatus.NO_ANSWER,
    )
    values = {"outcome": "kept", "score": Score(value=0.5, parts={"accuracy": 0.5}), **fields}
    return RolloutRecord(stage="rl", step=step, group=0, index=index, episode=episode, **values)


def write(folder, *records_by_step, max_bytes=10**9):
    async def write_all():
        writer = EpisodeWriter(folder, max_bytes)
        for records in records_by_step:
            await writer.write("rl", records[0].step, records)

    asyncio.run(write_all())


def test_records_are_read_back_equal(tmp_path):
    records = [
        build_record(tmp_path),
        build_record(tmp_path, index=1, outcome="dropped", reason="reward_std"),
        build_record(tmp_path, index=2, outcome="discarded", reason="over-provisioned", score=None),
    ]
    write(tmp_path, records)
    assert read_rollouts(tmp_path, "rl", 1) == records


def test_media_are_references_that_move_with_the_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder, [build_record(folder)])
    folder.rename(tmp_path / "moved")
    (record,) = read_rollouts(tmp_path / "moved", "rl", 1)
    assert record.episode.ledger.images()[0].path == str(tmp_path / "moved/images/a.png")
    assert record.episode.task.media[0].path == "/clips/a.mp4"


def test_a_step_that_is_sampled_again_replaces_its_file(tmp_path):
    write(tmp_path, [build_record(tmp_path, text="old"), build_record(tmp_path, index=1)])
    write(tmp_path, [build_record(tmp_path, text="new")])
    assert [record.episode.turns[0].reply.text for record in read_rollouts(tmp_path, "rl", 1)] == ["new"]


def test_a_truncated_file_is_read_up_to_the_damage(tmp_path):
    records = [build_record(tmp_path, index=index, text=f"reply {index} " * 20) for index in range(4)]
    write(tmp_path, records)
    (path,) = (tmp_path / "episodes").iterdir()
    data, counts = path.read_bytes(), set()
    for size in range(0, len(data) + 1, 7):
        path.write_bytes(data[:size])
        readable = read_rollouts(tmp_path, "rl", 1)
        assert readable == records[: len(readable)]
        counts.add(len(readable))
    assert {0, 3} <= counts
    path.write_bytes(data[:-30] + b"\xff" * 30)  # overwritten, as by a broken disk
    readable = read_rollouts(tmp_path, "rl", 1)
    assert readable == records[: len(readable)]


@pytest.mark.parametrize("function", ["open", "replace"])
def test_a_kill_while_writing_leaves_the_other_steps(tmp_path, monkeypatch, function):
    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    write(tmp_path, [build_record(tmp_path)])
    with monkeypatch.context() as patch:
        patch.setattr(*{"open": (gzip.GzipFile, "write"), "replace": (os, "replace")}[function], kill)
        with pytest.raises(Killed):
            write(tmp_path, [build_record(tmp_path, step=2)])
    (tmp_path / "episodes" / "rl-000003.jsonl.gz.part").write_bytes(b"a part")  # of a process that was killed
    write(tmp_path, [build_record(tmp_path, step=4)])
    assert list_recorded_steps(tmp_path, "rl") == [1, 4]
    assert not list((tmp_path / "episodes").glob("*.part"))


def test_the_oldest_steps_are_deleted(tmp_path):
    steps = [[build_record(tmp_path, step=step)] for step in range(1, 6)]
    write(tmp_path, steps[0])
    os.utime(tmp_path / "episodes" / "rl-000001.jsonl.gz", ns=(10**9, 10**9))
    size = (tmp_path / "episodes" / "rl-000001.jsonl.gz").stat().st_size
    for step, records in enumerate(steps[1:], 2):
        write(tmp_path, records, max_bytes=2 * size + size // 2)
        os.utime(tmp_path / "episodes" / f"rl-{step:06d}.jsonl.gz", ns=(step * 10**9, step * 10**9))
    assert list_recorded_steps(tmp_path, "rl") == [4, 5]
    write(tmp_path, [build_record(tmp_path, step=6)], max_bytes=1)
    assert list_recorded_steps(tmp_path, "rl") == [6]  # the newest stays


def build_values(record):
    return TokenValues(
        ledger=record.episode.ledger,
        position_N=np.array([3, 4]),
        logprob_diff_N=np.array([1e-6, float("inf")], dtype=np.float32),
        entropy_N=np.array([0.25, 2.0], dtype=np.float32),
    )


def test_values_of_trained_tokens_are_read_back_by_conversation(tmp_path):
    record, other = build_record(tmp_path), build_record(tmp_path, index=1)
    writer = EpisodeWriter(tmp_path, 10**9)
    asyncio.run(writer.write_tokens(1, [build_values(record)]))
    assert read_step_token_values(tmp_path, "rl", 1) == {}  # without episodes there is nothing to show
    asyncio.run(writer.write("rl", 1, [record, other]))
    asyncio.run(writer.write_tokens(1, [build_values(record)]))
    stored = read_step_token_values(tmp_path, "rl", 1)
    [read, _] = read_rollouts(tmp_path, "rl", 1)
    found = stored[identify_conversation(read.episode.ledger)].by_position()
    assert found == {3: (pytest.approx(1e-6, rel=0.05), 0.25), 4: (float("inf"), 2.0)}
    first = (tmp_path / "episodes" / "rl-000001.token_values.npz").read_bytes()
    asyncio.run(writer.write_tokens(1, [build_values(record)]))
    assert (tmp_path / "episodes" / "rl-000001.token_values.npz").read_bytes() == first
    asyncio.run(EpisodeWriter(tmp_path, 1).write("rl", 2, [build_record(tmp_path, step=2)]))
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["rl-000002.jsonl.gz"]
    (tmp_path / "episodes" / "rl-000002.token_values.npz").write_bytes(first[:50])
    with raises(DataError, key=str(tmp_path / "episodes" / "rl-000002.token_values.npz")):
        read_step_token_values(tmp_path, "rl", 2)


def test_nothing_is_written_with_no_space(tmp_path):
    write(tmp_path, [build_record(tmp_path)], max_bytes=0)
    assert not (tmp_path / "episodes").exists()


def test_a_full_disk_is_one_warning(tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gzip.GzipFile, "write", fail)
    with caplog.at_level(logging.WARNING, logger="saccade"):
        write(tmp_path, *([build_record(tmp_path, step=step)] for step in (1, 2, 3)))
    (warning,) = caplog.records
    assert "rl-000001.jsonl.gz" in warning.getMessage()
    assert list_recorded_steps(tmp_path, "rl") == []


def test_the_event_loop_runs_while_a_step_is_written(tmp_path, monkeypatch):
    is_writing, may_continue = threading.Event(), threading.Event()
    encode = episode_log.encode_json_line

    def wait(record):
        is_writing.set()
        assert may_continue.wait(60)
        return encode(record)

    monkeypatch.setattr(episode_log, "encode_json_line", wait)

    async def write_beside():
        task = asyncio.create_task(EpisodeWriter(tmp_path, 10**9).write("rl", 1, [build_record(tmp_path)]))
        while not is_writing.is_set():
            await asyncio.sleep(0)
        assert not task.done()
        may_continue.set()
        await task

    asyncio.run(write_beside())
    assert list_recorded_steps(tmp_path, "rl") == [1]


def test_a_step_without_episodes_raises(tmp_path):
    write(tmp_path, [build_record(tmp_path, step=3)])
    with raises(DataError, key="step", value=2):
        read_rollouts(tmp_path, "rl", 2)
    with raises(DataError, key="step", value=1):
        read_rollouts(tmp_path, "rl_validation", 1)
