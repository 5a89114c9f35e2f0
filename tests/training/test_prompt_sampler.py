"""The prompt sampler: order of epochs, requeued prompt indices."""

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
    ids = [Mixture.from_tasks(TASKS).get_task(0, prompt_index)[0].id for prompt_index in range(40)]
    assert ids == [str(number) for number in (*first, *second)]


def test_requeued_prompts_come_first():
    prompt_indices, rest = PromptSampler().take(4)
    assert (prompt_indices, rest) == ((0, 1, 2, 3), PromptSampler(next_index=4))
    rest = rest.requeue([3, 1])
    assert rest == PromptSampler(next_index=4, requeued_indices=(1, 3))
    assert rest.take(1) == ((1,), PromptSampler(next_index=4, requeued_indices=(3,)))
    assert rest.take(3) == ((1, 3, 4), PromptSampler(next_index=5))
    assert rest.requeue([0]).requeued_indices == (0, 1, 3)


def test_a_sampler_is_restored_from_plain_values():
    sampler = PromptSampler(next_index=4, requeued_indices=(1,))
    assert PromptSampler.from_state(json.loads(json.dumps(asdict(sampler)))) == sampler


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=12))
def test_no_prompt_is_lost_or_taken_twice(steps):
    """Each step takes some prompts and requeues some of these; every earlier prompt is either used or requeued."""
    sampler, used = PromptSampler(), []
    for count, num_requeued in steps:
        prompt_indices, sampler = sampler.take(count)
        assert len(prompt_indices) == count == len(set(prompt_indices))
        sampler = sampler.requeue(prompt_indices[:num_requeued])
        used += prompt_indices[num_requeued:]
    assert sorted([*used, *sampler.requeued_indices]) == list(range(sampler.next_index))
