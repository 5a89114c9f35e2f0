"""JSONL files round-trip every type; truncated and invalid lines are typed errors."""

import math
import os

import pytest
from error_cases import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.errors import DataError
from saccade.ledger import ImageRef, ImageSlot, Ledger, Origin
from saccade.media.relocation import map_media_paths
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Episode,
    EpisodeStatus,
    Group,
    Media,
    MediaKind,
    Reply,
    Score,
    ScoredEpisode,
    Task,
    ToolResult,
    Turn,
    Usage,
)
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import append_jsonl, read_jsonl, relativize_path, write_jsonl

TEXT = st.text(max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NUMBER = st.floats(allow_nan=False)
TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=6)
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
IMAGES = st.builds(
    ImageRef, path=TEXT, digest=TEXT, time=st.none() | FINITE, width=st.integers(1, 999), height=st.integers(1, 999)
)


@st.composite
def ledgers(draw):
    ledger = Ledger()
    for operation in draw(st.lists(st.sampled_from(("prompt", "observation", "prefill", "sample")), max_size=4)):
        tokens = draw(TOKENS)
        if operation == "sample":
            logprobs = draw(st.lists(NUMBER, min_size=len(tokens), max_size=len(tokens)))
            ledger = ledger.append_completion(tokens, logprobs=logprobs, version=draw(st.integers(0, 9)))
        elif operation == "prefill":
            ledger = ledger.prefill(tokens)
        else:
            indices = sorted(draw(st.sets(st.integers(0, len(tokens) - 1))))
            slots = [
                ImageSlot(index=index, image=draw(IMAGES), num_tokens=draw(st.integers(1, 9))) for index in indices
            ]
            ledger = ledger.observe(tokens, slots=slots, origin=Origin(operation))
    return ledger


GROUND_TRUTHS = TEXT | st.sampled_from(("3", "nan", "1e5", "true")) | FINITE | st.tuples(FINITE, FINITE)
TASKS = st.builds(
    Task,
    id=TEXT,
    question=TEXT,
    media=st.lists(st.builds(Media, path=TEXT, kind=st.sampled_from(MediaKind)), max_size=2).map(tuple),
    answer_type=st.sampled_from([answer_type.value for answer_type in AnswerType]),
    ground_truth=GROUND_TRUTHS,
    options=st.lists(TEXT, max_size=3).map(tuple),
    extras=st.dictionaries(TEXT, JSONISH, max_size=3),
)
CALLS = st.builds(
    Call,
    name=TEXT,
    arguments=st.dictionaries(TEXT, JSONISH, max_size=2),
    call_format=st.sampled_from(CallFormat),
    error=st.none() | TEXT,
)
BLOCKS = st.builds(Block, kind=st.sampled_from(BlockKind), body=TEXT, is_closed=st.booleans(), call=st.none() | CALLS)
RESULTS = st.builds(
    ToolResult,
    text=TEXT,
    images=st.lists(IMAGES, max_size=2).map(tuple),
    error=st.none() | TEXT,
    was_executed=st.booleans(),
    child_index=st.none() | st.integers(0, 3),
    seconds=FINITE,
)
TURNS = st.builds(
    Turn,
    reply=st.builds(Reply, text=TEXT, blocks=st.lists(BLOCKS, max_size=2).map(tuple), prefill=TEXT),
    results=st.lists(RESULTS, max_size=2).map(tuple),
)


def episodes(children):
    return st.builds(
        Episode,
        task=TASKS,
        environment=TEXT,
        ledger=ledgers(),
        turns=st.lists(TURNS, max_size=2).map(tuple),
        status=st.sampled_from(EpisodeStatus),
        children=children,
        usage=st.builds(Usage, unsampled_tokens=st.integers(0, 99), seconds=FINITE),
        frame_budget=st.none() | st.integers(1, 64),
        error=st.none() | TEXT,
    )


EPISODES = episodes(st.lists(episodes(st.just(())), max_size=2).map(tuple))
RELAXED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
@RELAXED
@given(items=st.lists(ledgers(), max_size=3))
def test_ledgers_round_trip(tmp_path, items):
    write_jsonl(tmp_path / "ledgers.jsonl", items)
    back = read_jsonl(tmp_path / "ledgers.jsonl", Ledger)
    assert back == items
    assert [ledger.prefix_hashes() for ledger in back] == [ledger.prefix_hashes() for ledger in items]


@pytest.mark.slow
@RELAXED
@given(episode=EPISODES)
def test_media_paths_survive_a_move_of_the_run_folder(tmp_path, episode):
    inside = map_media_paths(episode, lambda file: str(tmp_path / "run" / compute_digest(file)))
    written = map_media_paths(inside, lambda file: relativize_path(tmp_path / "run/rl/step", file, tmp_path / "run"))
    moved = map_media_paths(written, lambda file: os.path.normpath(tmp_path / "moved/rl/step" / file))
    assert moved == map_media_paths(episode, lambda file: str(tmp_path / "moved" / compute_digest(file)))
    assert map_media_paths(inside, lambda file: relativize_path(tmp_path / "other", file, tmp_path / "other")) == inside


@pytest.mark.slow
@RELAXED
@given(episode=EPISODES, score=st.builds(Score, value=FINITE, parts=st.dictionaries(TEXT, FINITE, max_size=2)))
def test_episodes_with_children_round_trip(tmp_path, episode, score):
    group = Group(task=episode.task, scored_episodes=(ScoredEpisode(episode=episode, score=score),))
    write_jsonl(tmp_path / "groups.jsonl", [group])
    (back,) = read_jsonl(tmp_path / "groups.jsonl", Group)
    assert back == group
    assert repr(back) == repr(group)  # types too: an int stays an int, a text of digits a text


def sample(name="a"):
    return Task(
        id=name,
        question="?",
        media=(),
        answer_type=AnswerType.NUMBER,
        ground_truth=3.0,
        extras={"note": [1, 2.5, None]},
    )


def test_infinity_and_nan_round_trip(tmp_path):
    path = tmp_path / "ledgers.jsonl"
    write_jsonl(path, [Ledger().append_completion((1, 2, 3), logprobs=(-math.inf, math.nan, -0.1), version=0)])
    values = read_jsonl(path, Ledger)[0].logprobs()
    assert values[0] == -math.inf
    assert math.isnan(values[1])


def test_lone_surrogates_round_trip(tmp_path):
    write_jsonl(tmp_path / "replies.jsonl", [Reply(text="a\ud800b\u2028c")])
    assert read_jsonl(tmp_path / "replies.jsonl", Reply) == [Reply(text="a\ud800b\u2028c")]


def test_append_jsonl(tmp_path):
    path = tmp_path / "tasks.jsonl"
    for name in "abc":
        append_jsonl(path, sample(name))
    assert [task.id for task in read_jsonl(path, Task)] == ["a", "b", "c"]


def test_truncated_last_line_is_an_error_unless_skipped(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with raises(DataError, key=f"{path}, line 2"):
        read_jsonl(path, Task)
    assert [task.id for task in read_jsonl(path, Task, skip_truncated_line=True)] == ["a"]


def test_only_the_last_line_may_be_truncated(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:-9] + b"\n" + second)
    with raises(DataError, key=f"{path}, line 1"):
        read_jsonl(path, Task, skip_truncated_line=True)
    path.write_bytes(first + second[:-9] + b"\n")  # invalid, but not truncated
    with raises(DataError, key=f"{path}, line 2"):
        read_jsonl(path, Task, skip_truncated_line=True)


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_append_repairs_a_truncated_end(tmp_path, cut):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    path.write_bytes(path.read_bytes()[:-cut])
    append_jsonl(path, sample("c"))
    expected = ["a", "b", "c"] if cut == 1 else ["a", "c"]
    assert [task.id for task in read_jsonl(path, Task)] == expected


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"question":"?"', '"question":7', "question"),
        ('"id":"b"', '"identity":"b"', "id"),
        ('"media":[]', '"media":[{"path":"x","kind":"audio"}]', "media.0.kind"),
    ],
)
def test_invalid_row_error_names_file_line_and_field(tmp_path, old, new, field):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + second.replace(old, new) + "\n")
    with raises(DataError, key=field) as caught:
        read_jsonl(path, Task)
    assert str(caught.value).startswith(f"{path}, line 2, ")


def test_broken_invariant_is_a_data_error(tmp_path):
    path = tmp_path / "ledgers.jsonl"
    path.write_text('{"segments":[{"tokens":[1,2],"origin":"sampled","logprobs":[-0.5],"version":0}]}\n')
    with raises(DataError, key="segments.0"):
        read_jsonl(path, Ledger)


def test_missing_file_is_a_data_error(tmp_path):
    with raises(DataError, key=str(tmp_path / "nothing.jsonl")):
        read_jsonl(tmp_path / "nothing.jsonl", Task)


def test_unserializable_value_is_an_error_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a")])
    bad_task = Task(
        id="b", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="x", extras={"set": {1, 2}}
    )
    with raises(DataError, value={1, 2}):
        write_jsonl(path, [bad_task])
    assert [task.id for task in read_jsonl(path, Task)] == ["a"]


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_line_nested_too_deeply_is_an_error_with_its_number(tmp_path, ending):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a")])
    with path.open("a") as file:
        file.write("[" * 200_000 + "]" * 200_000 + ending)
    for skip in (False, True):
        with raises(DataError, key=f"{path}, line 2"):
            list(read_jsonl(path, Task, skip_truncated_line=skip))
    append_jsonl(path, sample("b"))
    with raises(DataError, key=f"{path}, line 2"):
        list(read_jsonl(path, Task))
