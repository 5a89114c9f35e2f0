"""The prompt sampler: order of epochs, requeued positions."""

import json
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.mixture import Mixture, compute_epoch_order
from saccade.training.prompt_sampler import PromptSampler
from saccade.types import AnswerType, Task

TASKS = [
    Task(id=str(number), question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    for number in range(20)
]


def test_an_epoch_draws_every_task_once_in_its_own_order():
    first, second = compute_epoch_order(20, 0, 0), compute_epoch_order(20, 0, 1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert compute_epoch_order(20, 1, 0) != first
    ids = [Mixture.from_tasks(TASKS).get_task(0, position)[0].id for position in range(40)]
    assert ids == [str(number) for number in (*first, *second)]


def test_requeued_positions_come_first():
    positions, rest = PromptSampler().take(4)
    assert (positions, rest) == ((0, 1, 2, 3), PromptSampler(next_position=4))
    rest = rest.requeue([3, 1])
    assert rest == PromptSampler(next_position=4, requeued_positions=(1, 3))
    assert rest.take(1) == ((1,), PromptSampler(next_position=4, requeued_positions=(3,)))
    assert rest.take(3) == ((1, 3, 4), PromptSampler(next_position=5))
    assert rest.requeue([0]).requeued_positions == (0, 1, 3)


def test_a_sampler_is_restored_from_plain_values():
    sampler = PromptSampler(next_position=4, requeued_positions=(1,))
    assert PromptSampler.from_state(json.loads(json.dumps(asdict(sampler)))) == sampler


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=12))
def test_no_position_is_lost_or_taken_twice(steps):
    """Each step takes some positions and requeues some of these; every earlier position is either used or requeued."""
    sampler, used = PromptSampler(), []
    for count, num_requeued in steps:
        positions, sampler = sampler.take(count)
        assert len(positions) == count == len(set(positions))
        sampler = sampler.requeue(positions[:num_requeued])
        used += positions[num_requeued:]
    assert sorted([*used, *sampler.requeued_positions]) == list(range(sampler.next_position))
