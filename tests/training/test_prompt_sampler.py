"""The endless row of prompts, place by place."""

from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.mixture import order
from saccade.training.prompts import Prompts, task_at
from saccade.types import Kind, Task

TASKS = [Task(id=str(number), question="?", media=(), kind=Kind.OPEN, gold="red") for number in range(20)]


def test_an_epoch_shows_every_task_once_in_an_order_of_its_own():
    first, second = order(20, 0, 0), order(20, 0, 1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert order(20, 1, 0) != first
    ids = [task_at(TASKS, 0, place).id for place in range(40)]
    assert ids == [str(number) for number in (*first, *second)]


def test_places_that_go_again_come_first():
    places, rest = Prompts().take(4)
    assert (places, rest) == ((0, 1, 2, 3), Prompts(cursor=4))
    rest = rest.again([3, 1])
    assert rest == Prompts(cursor=4, front=(1, 3))
    assert rest.take(1) == ((1,), Prompts(cursor=4, front=(3,)))
    assert rest.take(3) == ((1, 3, 4), Prompts(cursor=5))
    assert rest.again([0]).front == (0, 1, 3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=12))
def test_no_place_is_lost_and_none_is_out_twice(steps):
    """Each step takes some places and puts some of them back: what is behind the cursor was done once or waits."""
    prompts, done = Prompts(), []
    for count, back in steps:
        places, prompts = prompts.take(count)
        assert len(places) == count == len(set(places))
        prompts = prompts.again(places[:back])
        done += places[back:]
    assert sorted([*done, *prompts.front]) == list(range(prompts.cursor))
