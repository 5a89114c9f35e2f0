"""Limits select the same tasks everywhere, evenly over strata and nested; frame budgets are assigned evenly."""

from collections import Counter

from evaluation_cases import NAMES, STRATA, build_tasks, task
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.evaluation.subset import Subset, assign_frame_budgets
from saccade.types import AnswerType, Task

TASKS = [task(f"w-{i}", question=("at", "when")[i % 2]) for i in range(8)]


ROWS = st.lists(st.tuples(NAMES, st.sampled_from("pq")), max_size=40)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 45), st.randoms())
def test_limit_is_stable_and_nested(rows, limit, chance):
    tasks = build_tasks(rows)
    few = Subset(limit=limit, strata=STRATA).select(tasks)
    assert len(few) == (min(limit, len(tasks)) or len(tasks))
    assert [task for task in tasks if task in few] == few
    shuffled = chance.sample(tasks, len(tasks))
    assert {task.id for task in Subset(limit=limit, strata=STRATA).select(shuffled)} == {task.id for task in few}
    if limit:
        more = Subset(limit=limit + 1, strata=STRATA).select(tasks)
        assert all(task in more for task in few)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("pq")), max_size=40), st.integers(1, 45))
def test_limit_is_even_over_rows(rows, limit):
    tasks = build_tasks(rows)
    few, whole = Subset(limit=limit, strata=STRATA).select(tasks), Counter(a for a, _ in rows)
    held = Counter(task.extras["a"] for task in few)
    for name in whole:
        assert held[name] == whole[name] or held[name] >= max(held.values()) - 1
        inner = Counter(b for a, b in rows if a == name)
        got = Counter(task.extras["b"] for task in few if task.extras["a"] == name)
        assert all(got[b] == inner[b] or got[b] >= max(got.values(), default=0) - 1 for b in inner)


def test_plain_tasks_are_spread_over_question_types():
    tasks = [task(f"w-{i}", question="when" if i < 2 else "at") for i in range(30)]
    held = Counter(task.extras["question"] for task in Subset(limit=5).select(tasks))
    assert held == {"when": 2, "at": 3}
    kinds = [
        Task(id=str(i), question="?", media=(), answer_type=list(AnswerType)[i % 2], ground_truth="A")
        for i in range(20)
    ]
    assert Counter(task.answer_type for task in Subset(limit=6).select(kinds)) == {
        AnswerType.CHOICE: 3,
        AnswerType.OPEN: 3,
    }


def test_units_are_selected_whole():
    tasks = build_tasks([("x", "p")] * 12)
    part = {
        limit: Subset(limit=limit, joint_key=lambda task: str(int(task.id[2:]) // 4)).select(tasks)
        for limit in range(1, 13)
    }
    assert {limit: len(few) for limit, few in part.items()} == {
        **dict.fromkeys(range(1, 8), 4),
        **dict.fromkeys(range(8, 12), 8),
        12: 12,
    }
    assert all(len({int(task.id[2:]) // 4 for task in few}) == len(few) / 4 for few in part.values())


def test_frame_budgets_are_even_within_each_question_type():
    budgets = assign_frame_budgets(TASKS, (4, 8))
    for kind in ("at", "when"):
        dealt = sorted(budgets[task.id] for task in TASKS if task.extras["question"] == kind)
        assert dealt == [4, 4, 8, 8]
    assert assign_frame_budgets(TASKS[::-1], (4, 8)) == budgets
    assert set(assign_frame_budgets(TASKS, ()).values()) == {None}
