"""A limit is the same tasks everywhere, even over strata, and part of every larger one; frame budgets are dealt."""

from collections import Counter

from evaluation_cases import task
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.evaluation.portions import Portion, deal
from saccade.types import Kind, Task

TASKS = [task(f"w-{i}", question=("at", "when")[i % 2]) for i in range(8)]


def made(rows):
    """Tasks with the rows of two tables; a row may be several names, or None."""
    return [
        Task(id=f"t-{i}", question="?", media=(), kind=Kind.OPEN, gold="red", extras={"a": a, "b": b})
        for i, (a, b) in enumerate(rows)
    ]


STRATA = (lambda task: task.extras["a"], lambda task: task.extras["b"])
NAMES = st.sampled_from([None, "x", "y", "z", ["x", "y"]])
ROWS = st.lists(st.tuples(NAMES, st.sampled_from("pq")), max_size=40)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 45), st.randoms())
def test_a_limit_is_the_same_tasks_whatever_their_order_and_part_of_a_larger_one(rows, limit, chance):
    tasks = made(rows)
    few = Portion(limit=limit, strata=STRATA).of(tasks)
    assert len(few) == (min(limit, len(tasks)) or len(tasks))
    assert [each for each in tasks if each in few] == few
    shuffled = chance.sample(tasks, len(tasks))
    assert {each.id for each in Portion(limit=limit, strata=STRATA).of(shuffled)} == {each.id for each in few}
    if limit:
        more = Portion(limit=limit + 1, strata=STRATA).of(tasks)
        assert all(each in more for each in few)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("pq")), max_size=40), st.integers(1, 45))
def test_every_row_has_as_many_as_any_other_while_it_has_any(rows, limit):
    tasks = made(rows)
    few, whole = Portion(limit=limit, strata=STRATA).of(tasks), Counter(a for a, _ in rows)
    held = Counter(each.extras["a"] for each in few)
    for name in whole:
        assert held[name] == whole[name] or held[name] >= max(held.values()) - 1
        inner = Counter(b for a, b in rows if a == name)
        got = Counter(each.extras["b"] for each in few if each.extras["a"] == name)
        assert all(got[b] == inner[b] or got[b] >= max(got.values(), default=0) - 1 for b in inner)


def test_plain_tasks_are_spread_over_kinds_of_question():
    tasks = [task(f"w-{i}", question="when" if i < 2 else "at") for i in range(30)]
    held = Counter(each.extras["question"] for each in Portion(limit=5).of(tasks))
    assert held == {"when": 2, "at": 3}
    kinds = [Task(id=str(i), question="?", media=(), kind=list(Kind)[i % 2], gold="A") for i in range(20)]
    assert Counter(each.kind for each in Portion(limit=6).of(kinds)) == {Kind.CHOICE: 3, Kind.OPEN: 3}


def test_a_unit_is_taken_whole_and_one_always():
    tasks = made([("x", "p")] * 12)
    part = {
        limit: Portion(limit=limit, unit=lambda task: str(int(task.id[2:]) // 4)).of(tasks) for limit in range(1, 13)
    }
    assert {limit: len(few) for limit, few in part.items()} == {
        **dict.fromkeys(range(1, 8), 4),
        **dict.fromkeys(range(8, 12), 8),
        12: 12,
    }
    assert all(len({int(each.id[2:]) // 4 for each in few}) == len(few) / 4 for few in part.values())


def test_frame_budgets_are_dealt_evenly_within_each_question_kind():
    budgets = deal(TASKS, (4, 8))
    for kind in ("at", "when"):
        dealt = sorted(budgets[each.id] for each in TASKS if each.extras["question"] == kind)
        assert dealt == [4, 4, 8, 8]
    assert deal(TASKS[::-1], (4, 8)) == budgets
    assert set(deal(TASKS, ()).values()) == {None}
