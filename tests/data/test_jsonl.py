import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.data.record import append, read_jsonl, relocated, seen_from, write_jsonl
from saccade.errors import DataError
from saccade.ledger import Ledger, Origin, Picture, Slot
from saccade.types import (
    Block,
    BlockKind,
    Call,
    End,
    Episode,
    Form,
    Group,
    Kind,
    Media,
    MediaKind,
    Reply,
    Score,
    Scored,
    Task,
    ToolResult,
    Turn,
    Usage,
    digest_of,
)

TEXT = st.text(max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NUMBER = st.floats(allow_nan=False)
TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=6)
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PICTURES = st.builds(
    Picture, path=TEXT, digest=TEXT, time=st.none() | FINITE, width=st.integers(1, 999), height=st.integers(1, 999)
)


@st.composite
def ledgers(draw):
    ledger = Ledger()
    for verb in draw(st.lists(st.sampled_from(("observe", "tool", "force", "act")), max_size=4)):
        tokens = draw(TOKENS)
        if verb == "act":
            logprobs = draw(st.lists(NUMBER, min_size=len(tokens), max_size=len(tokens)))
            ledger = ledger.act(tokens, logprobs=logprobs, version=draw(st.integers(0, 9)))
        elif verb == "force":
            ledger = ledger.force(tokens)
        else:
            places = sorted(draw(st.sets(st.integers(0, len(tokens) - 1))))
            slots = [Slot(at=at, picture=draw(PICTURES), tokens=draw(st.integers(1, 9))) for at in places]
            ledger = ledger.observe(tokens, slots=slots, origin=Origin.TOOL if verb == "tool" else Origin.PROMPT)
    return ledger


GOLDS = TEXT | st.sampled_from(("3", "nan", "1e5", "true")) | FINITE | st.tuples(FINITE, FINITE)
TASKS = st.builds(
    Task,
    id=TEXT,
    question=TEXT,
    media=st.lists(st.builds(Media, path=TEXT, kind=st.sampled_from(MediaKind)), max_size=2).map(tuple),
    kind=st.sampled_from(Kind),
    gold=GOLDS,
    choices=st.lists(TEXT, max_size=3).map(tuple),
    extras=st.dictionaries(TEXT, JSONISH, max_size=3),
)
CALLS = st.builds(
    Call,
    name=TEXT,
    arguments=st.dictionaries(TEXT, JSONISH, max_size=2),
    form=st.sampled_from(Form),
    error=st.none() | TEXT,
)
BLOCKS = st.builds(Block, kind=st.sampled_from(BlockKind), body=TEXT, closed=st.booleans(), call=st.none() | CALLS)
RESULTS = st.builds(
    ToolResult,
    text=TEXT,
    pictures=st.lists(PICTURES, max_size=2).map(tuple),
    error=st.none() | TEXT,
    executed=st.booleans(),
    child=st.none() | st.integers(0, 3),
    seconds=FINITE,
)
TURNS = st.builds(
    Turn,
    reply=st.builds(Reply, text=TEXT, blocks=st.lists(BLOCKS, max_size=2).map(tuple), forced=TEXT),
    results=st.lists(RESULTS, max_size=2).map(tuple),
)


def episodes(children):
    return st.builds(
        Episode,
        task=TASKS,
        agent=TEXT,
        ledger=ledgers(),
        turns=st.lists(TURNS, max_size=2).map(tuple),
        end=st.sampled_from(End),
        children=children,
        usage=st.builds(Usage, prompt_tokens=st.integers(0, 99), seconds=FINITE),
        frames=st.none() | st.integers(1, 64),
        error=st.none() | TEXT,
    )


FAMILIES = episodes(st.lists(episodes(st.just(())), max_size=2).map(tuple))
RELAXED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@RELAXED
@given(items=st.lists(ledgers(), max_size=3))
def test_ledgers_come_back_identical(tmp_path, items):
    write_jsonl(tmp_path / "ledgers.jsonl", items)
    back = read_jsonl(tmp_path / "ledgers.jsonl", Ledger)
    assert back == items
    assert [ledger.keys() for ledger in back] == [ledger.keys() for ledger in items]


@pytest.mark.slow
@RELAXED
@given(episode=FAMILIES)
def test_what_moves_with_its_files_finds_them_again(tmp_path, episode):
    inside = relocated(episode, lambda file: str(tmp_path / "run" / digest_of(file)))
    written = relocated(inside, lambda file: seen_from(tmp_path / "run/rl/step", file, tmp_path / "run"))
    moved = relocated(written, lambda file: os.path.normpath(tmp_path / "moved/rl/step" / file))
    assert moved == relocated(episode, lambda file: str(tmp_path / "moved" / digest_of(file)))
    assert relocated(inside, lambda file: seen_from(tmp_path / "other", file, tmp_path / "other")) == inside


@pytest.mark.slow
@RELAXED
@given(episode=FAMILIES, score=st.builds(Score, value=FINITE, parts=st.dictionaries(TEXT, FINITE, max_size=2)))
def test_episodes_with_children_come_back_identical(tmp_path, episode, score):
    group = Group(task=episode.task, members=(Scored(episode=episode, score=score),))
    write_jsonl(tmp_path / "groups.jsonl", [group])
    (back,) = read_jsonl(tmp_path / "groups.jsonl", Group)
    assert back == group
    assert repr(back) == repr(group)  # types too: an int stays an int, a text of digits a text


def sample(name="a"):
    return Task(id=name, question="?", media=(), kind=Kind.NUMBER, gold=3.0, extras={"note": [1, 2.5, None]})


def test_infinite_and_undefined_floats_survive(tmp_path):
    path = tmp_path / "ledgers.jsonl"
    write_jsonl(path, [Ledger().act((1, 2, 3), logprobs=(-math.inf, math.nan, -0.1), version=0)])
    values = read_jsonl(path, Ledger)[0].logprobs()
    assert values[0] == -math.inf
    assert math.isnan(values[1])


def test_lone_surrogates_survive(tmp_path):
    write_jsonl(tmp_path / "replies.jsonl", [Reply(text="a\ud800b\u2028c")])
    assert read_jsonl(tmp_path / "replies.jsonl", Reply) == [Reply(text="a\ud800b\u2028c")]


def test_append_adds_lines(tmp_path):
    path = tmp_path / "tasks.jsonl"
    for name in "abc":
        append(path, sample(name))
    assert [task.id for task in read_jsonl(path, Task)] == ["a", "b", "c"]


def test_a_torn_last_line_is_an_error_unless_asked_for(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"tasks\.jsonl, line 2: not valid JSON and without a line end"):
        read_jsonl(path, Task)
    assert [task.id for task in read_jsonl(path, Task, torn_end=True)] == ["a"]


def test_only_the_last_line_may_be_torn(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:-9] + b"\n" + second)
    with pytest.raises(DataError, match="line 1"):
        read_jsonl(path, Task, torn_end=True)
    path.write_bytes(first + second[:-9] + b"\n")  # ended, so not torn but wrong
    with pytest.raises(DataError, match="line 2"):
        read_jsonl(path, Task, torn_end=True)


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_append_mends_a_torn_end(tmp_path, cut):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    path.write_bytes(path.read_bytes()[:-cut])
    append(path, sample("c"))
    expected = ["a", "b", "c"] if cut == 1 else ["a", "c"]
    assert [task.id for task in read_jsonl(path, Task)] == expected


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"kind":"number"', '"kind":"riddle"', "kind"),
        ('"question":"?"', '"question":7', "question"),
        ('"id":"b"', '"identity":"b"', "id"),
        ('"media":[]', '"media":[{"path":"x","kind":"film"}]', r"media\.0\.kind"),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path, old, new, field):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a"), sample("b")])
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + second.replace(old, new) + "\n")
    with pytest.raises(DataError, match=rf"tasks\.jsonl, line 2, field {field}: .*read as Task"):
        read_jsonl(path, Task)


def test_broken_invariants_are_data_errors_too(tmp_path):
    path = tmp_path / "ledgers.jsonl"
    path.write_text('{"segments":[{"tokens":[1,2],"origin":"sampled","logprobs":[-0.5],"version":0}]}\n')
    with pytest.raises(DataError, match=r"line 1, field segments\.0: .*a logprob per token"):
        read_jsonl(path, Ledger)


def test_a_missing_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_jsonl(tmp_path / "nothing.jsonl", Task)


def test_what_has_no_json_is_refused_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [sample("a")])
    odd = Task(id="b", question="?", media=(), kind=Kind.OPEN, gold="x", extras={"set": {1, 2}})
    with pytest.raises(DataError, match="a set can't be written"):
        write_jsonl(path, [odd])
    assert [task.id for task in read_jsonl(path, Task)] == ["a"]
