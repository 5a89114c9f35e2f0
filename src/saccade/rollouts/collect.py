"""Collect scored groups of episodes concurrently.

    collect ─┬─ run_group 0 ─┬─ run_episode 0 ── reset ─> [ sample ─> parse ─> step ]* ─> Episode ──score──> Group
             │               └─ run_episode 1              └── engine.generate: concurrent requests are batched
             └─ run_group 1 ...

    at most `max_concurrency` episodes run; a finished group starts the next one

An episode waits for the engine and its own tools, never for a sibling; a group ends with its slowest episode. Scoring
runs between passes of the engine; rewards that wait (for a judge, a process) wait concurrently, and only their own
group waits for them. An exception (a setting or a task that the user must fix) cancels every group and is raised.

Episodes run in this process, or where an executor runs them: in other processes of this machine
(`rollouts/processes.py`), or in workers of a Ray cluster (`rollouts/ray`). Workers may grade single episodes, too;
rewards of groups are computed here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from saccade.config.schema import MAX_EPISODES_IN_PROGRESS
from saccade.protocols import Context, EnvironmentFactory, ScoreFn, ScoreResult, SelectEnvironment
from saccade.rewards.compose import build_group
from saccade.rollouts.runner import RunEpisode, run_episode
from saccade.types import Episode, Group, ScoredEpisode, Task, Ungraded
from saccade.utils.async_utils import gather_or_cancel, run_until
from saccade.utils.hashing import derive_seed


class RolloutExecutor(Protocol):
    """Runs the episodes of groups in other processes."""

    async def run_episodes(
        self,
        task: Task,
        make_environment: EnvironmentFactory,
        contexts: Sequence[Context],
        *,
        run_fn: RunEpisode,
        on_discarded: Callable[[Episode], None],
    ) -> tuple[list[Episode], Sequence[ScoreResult] | None]:
        """Run one episode per context with `run_fn`, all started together, and return them in order.

        The second value holds the results of the rewards of single episodes if the processes have computed them, as
        `protocols.ScoreFn` takes them. If the call is cancelled, `on_discarded` receives the episodes that had ended.
        """

    def pop_metrics(self) -> Mapping[str, float]:
        """Return metrics of the workers since the last call."""


async def await_episodes(
    episode_tasks: Sequence["asyncio.Task[Episode]"], on_discarded: Callable[[Episode], None]
) -> list[Episode]:
    """Return the results of the tasks in order; if cancelled, `on_discarded` receives the episodes that had ended."""
    try:
        return await gather_or_cancel(episode_tasks)
    except asyncio.CancelledError:
        for ended in episode_tasks:
            if not ended.cancelled() and ended.exception() is None:
                on_discarded(ended.result())
        raise


async def collect(
    tasks: Sequence[Task],
    select_environment: SelectEnvironment,
    base_context: Context,
    *,
    group_size: int,
    score_fn: ScoreFn,
    seed_salts: int | Sequence[int] = 0,
    frame_budgets: Sequence[int | None] | None = None,
    max_concurrency: int = MAX_EPISODES_IN_PROGRESS,
    num_required: int | None = None,
    with_greedy_baseline: bool = False,
    on_group_done: Callable[[int, Group], None] | None = None,
    on_discarded: Callable[[Episode], None] = lambda episode: None,
    run_fn: RunEpisode = run_episode,
    executor: RolloutExecutor | None = None,
) -> list[Group]:
    """Return a group of `group_size` scored episodes per task, in task order; `run_fn` runs each episode.

    `executor` decides where: by default in this process.

    `with_greedy_baseline` adds a greedy episode (temperature 0) to each group, as its `greedy_baseline`. If that can't
    be graded, neither are the group's episodes.

    An episode's seed is derived from `base_context.seed` (the run's), the whole task, the episode's index, and its
    task's number in `seed_salts`, such as the training step: another number samples other episodes. `frame_budgets`
    holds each task's frame budget K (None: the context's). At most `max_concurrency` episodes run at a time, sub-agents
    not counted, but always at least one group. `on_group_done(index, group)` is called as each group finishes, with its
    task's index.

    After `num_required` groups (None: all) the others are cancelled and missing from the result; `on_discarded`
    receives their finished episodes. Failed episodes are in their groups, scored: filters decide which statuses to
    drop. Episodes that rewards could not grade are the group's `ungraded`. Raises DataError for a task whose
    environment isn't configured.
    """
    num_episodes = group_size + with_greedy_baseline  # of a group
    semaphore, has_enough, num_done = asyncio.Semaphore(max(max_concurrency // num_episodes, 1)), asyncio.Event(), 0

    def finish_group(index: int, group: Group) -> None:
        nonlocal num_done
        if on_group_done is not None:
            on_group_done(index, group)
        num_done += 1
        if num_done == num_required:
            has_enough.set()

    environments = [select_environment(task) for task in tasks]
    seed_salts = [seed_salts] * len(tasks) if isinstance(seed_salts, int) else seed_salts
    group_tasks = [
        asyncio.create_task(
            run_group(
                task,
                environments[index],
                build_group_contexts(
                    base_context,
                    task,
                    group_size=num_episodes,
                    seed_salt=seed_salts[index],
                    frame_budget=frame_budgets[index] if frame_budgets else None,
                ),
                score_fn,
                with_greedy_baseline=with_greedy_baseline,
                semaphore=semaphore,
                on_done=partial(finish_group, index),
                on_discarded=on_discarded,
                run_fn=run_fn,
                executor=executor,
            )
        )
        for index, task in enumerate(tasks)
    ]
    groups = gather_or_cancel(group_tasks)
    await (groups if num_required is None else run_until(has_enough, groups))
    return [task.result() for task in group_tasks if not task.cancelled()]


async def run_group(
    task: Task,
    make_environment: EnvironmentFactory,
    contexts: Sequence[Context],
    score_fn: ScoreFn,
    *,
    semaphore: AbstractAsyncContextManager[Any],
    on_done: Callable[[Group], None],
    with_greedy_baseline: bool = False,
    on_discarded: Callable[[Episode], None] = lambda episode: None,
    run_fn: RunEpisode = run_episode,
    executor: RolloutExecutor | None = None,
) -> Group:
    """Run one episode per context, started together, in order, and score them; see `collect`.

    The last context is the greedy episode's if `with_greedy_baseline`.
    """
    if with_greedy_baseline:
        *contexts, last = contexts
        contexts += [replace(last, sampling=replace(last.sampling, temperature=0.0))]
    async with semaphore:
        if executor is None:
            episode_tasks = [asyncio.create_task(run_fn(task, make_environment, ctx)) for ctx in contexts]
            sampled, graded = await await_episodes(episode_tasks, on_discarded), None
        else:
            sampled, graded = await executor.run_episodes(
                task, make_environment, contexts, run_fn=run_fn, on_discarded=on_discarded
            )

    async def score(part: slice) -> Sequence[ScoreResult]:
        return await (score_fn(sampled[part]) if graded is None else score_fn(sampled[part], graded[part]))

    # Outside the semaphore: the next group starts while this one is scored.
    num_compared = len(sampled) - with_greedy_baseline
    try:
        group = build_group(sampled[:num_compared], await score(slice(num_compared)))
        if with_greedy_baseline:  # scored alone: a group reward compares the others
            [result] = await score(slice(num_compared, None))
            group = _add_greedy_baseline(group, sampled, result)
    except asyncio.CancelledError:
        for episode in sampled:
            on_discarded(episode)
        raise
    on_done(group)
    return group


def _add_greedy_baseline(group: Group, sampled: Sequence[Episode], result: ScoreResult) -> Group:
    *episodes, baseline = sampled
    if isinstance(result, Ungraded):
        reason = f"the group's greedy episode could not be graded: {result.reason}"
        return build_group(episodes, [Ungraded(reason=reason)] * len(episodes))
    return replace(group, greedy_baseline=ScoredEpisode(episode=baseline, score=result))


def build_group_contexts(
    base_context: Context, task: Task, *, group_size: int, seed_salt: int = 0, frame_budget: int | None = None
) -> list[Context]:
    """Return the context of each episode of a group: its own seed, one frame budget, and events with its index."""

    def add_index(index: int) -> Callable[[str, Mapping[str, Any]], None] | None:
        on_event = base_context.on_event
        return on_event and (lambda event, data: on_event(event, {**data, "task": task.id, "index": index}))

    return [
        replace(
            base_context,
            seed=derive_seed(base_context.seed, seed_salt, task.digest, index),
            # One budget for the whole group, whose episodes are compared with each other.
            frame_budget=base_context.frame_budget if frame_budget is None else frame_budget,
            on_event=add_index(index),
        )
        for index in range(group_size)
    ]
