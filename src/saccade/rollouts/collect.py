"""Many groups at once, in this process.

    tasks ──> a gate of `at_once` episodes ──> run_group ──> score ──> done(group) ──> groups, in the order of the tasks
                       ▲                                       │
                       └────── a finished group lets in the next one, whatever its place

The engine sees the episodes of all open groups together and batches them. Scoring runs between passes of the engine;
rewards that wait (for a judge, a process) wait together, and nothing waits for them but their own group. An exception
(a setting or a task that must be mended) cancels every group and is raised.
"""

import asyncio
from collections.abc import Callable, Sequence

from saccade.protocols import Agent, Context, Scorer, Settled
from saccade.rollouts.run import Run, run_episode, run_group
from saccade.types import Episode, Group, Scored, Task, Ungraded, Unscored
from saccade.waiting import settled, together


async def collect(
    tasks: Sequence[Task],
    agent: Agent,
    base: Context,
    *,
    size: int,
    score: Scorer,
    epoch: int = 0,
    frames: Callable[[Task], int | None] = lambda task: None,
    at_once: int = 512,
    done: Callable[[int, Group], None] | None = None,
    run: Run = run_episode,
) -> list[Group]:
    """Groups of `size` scored attempts at each task; see `run_group` for seeds and `run`.

    `frames` draws a task's frame budget K (None: the agent's own). At most `at_once` episodes run at a time, sub-agents
    not counted, but always at least one group. `done(place, group)` is called as each group is finished, `place` being
    its task's index; the list is in the order of the tasks. Episodes that ended badly are in their groups, scored:
    which ends to leave out is for selection to say. Episodes that rewards could not grade are the group's `ungraded`.
    """
    gate = asyncio.Semaphore(max(at_once // size, 1))

    async def one(place: int, task: Task) -> Group:
        async with gate:
            episodes = await run_group(task, agent, base, size=size, epoch=epoch, frames=frames(task), run=run)
        # Outside the gate: while this group is scored the next one may begin.
        group = await graded(task, episodes, score)
        if done is not None:
            done(place, group)
        return group

    return await together([one(place, task) for place, task in enumerate(tasks)])


async def graded(task: Task, episodes: Sequence[Episode], score: Scorer) -> Group:
    """The attempts at a task as a group: those with a score, and those without one."""
    found = await together([_attempt(index, episode, score) for index, episode in enumerate(episodes)])
    return Group(
        task=task,
        members=tuple(each for each in found if isinstance(each, Scored)),
        ungraded=tuple(each for each in found if isinstance(each, Unscored)),
    )


async def _attempt(index: int, episode: Episode, score: Scorer) -> Scored | Unscored:
    found: Settled = await settled(score(episode, episode.task))
    if isinstance(found, Ungraded):
        return Unscored(episode=episode, index=index, reason=found.reason)
    return Scored(episode=episode, score=found)
