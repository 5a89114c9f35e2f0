"""Attempts at one task: the one path of training, evaluation and `saccade ask`.

    run_group ─┬─ run_episode 0 ── agent ──┐
               ├─ run_episode 1 ── agent ──┼── engine.generate: whatever waits is batched, children included
               └─ run_episode 2 ── agent ──┘
                     │
                     └─ each waits for the engine and its own tools; nobody waits for a sibling;
                        the group is done when its slowest episode is

An episode that fails through no fault of the policy (engine, media, time) ends as aborted, with the error's sentence;
the others go on. What the user must mend (a setting, a task) is raised and cancels the group.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from saccade.errors import ConfigError, EngineError, MediaError, SandboxError, boundary
from saccade.ledger import Ledger
from saccade.protocols import Agent, Context
from saccade.types import End, Episode, Task, seed_of
from saccade.waiting import together

GRACE = 1.0  # seconds beyond the deadline, in which an agent may end the episode itself
Run = Callable[[Task, Agent, Context], Coroutine[Any, Any, Episode]]  # `run_episode`, or something around it


async def run_episode(task: Task, agent: Agent, ctx: Context) -> Episode:
    """Attempt the task once; a failure of engine or media is the episode's end, not the run's, and so is its deadline.

    The deadline is `ctx.deadline`, or `ctx.seconds` from now, or never, by the context's clock.
    """
    deadline = ctx.deadline
    if deadline is None and ctx.seconds is not None:
        deadline = ctx.clock.time() + ctx.seconds
    try:
        # An agent that knows deadlines keeps what was said until then; one that doesn't must not hang either.
        async with ctx.clock.timeout_at(None if deadline is None else deadline + GRACE) as limit:
            with boundary(ConfigError, f"the agent {_name(agent)} failed on task {task.id}"):
                return await agent(task, replace(ctx, deadline=deadline))
    except (EngineError, MediaError, SandboxError) as error:
        reason = str(error)
    except TimeoutError:
        if not limit.expired():
            raise
        reason = "the episode's deadline passed before it had ended"
    return Episode(
        task=task,
        agent=_name(agent),
        ledger=Ledger(),
        turns=(),
        end=End.ABORTED,
        frames=ctx.frames,
        error=reason,
    )


async def run_group(
    task: Task,
    agent: Agent,
    base: Context,
    *,
    size: int,
    epoch: int = 0,
    frames: int | None = None,
    run: Run = run_episode,
) -> list[Episode]:
    """`size` attempts, each `run`, started together, in order; all have the frame budget `frames`.

    `base.seed` is the run's seed; an attempt's own is digested from it, the epoch (or step), the whole task and the
    attempt's index. Watchers are told the task's id and the index with every event.
    """
    # One budget for the whole group: its members are compared with each other.
    budget = base.frames if frames is None else frames
    contexts = [
        replace(
            base,
            seed=seed_of(base.seed, epoch, task.digest, index),
            frames=budget,
            watch=_indexed(base.watch, task.id, index),
        )
        for index in range(size)
    ]
    return await together([run(task, agent, ctx) for ctx in contexts])


def _indexed(
    watch: Callable[[str, Mapping[str, Any]], None] | None, task: str, index: int
) -> Callable[[str, Mapping[str, Any]], None] | None:
    if watch is None:
        return None
    return lambda event, data: watch(event, {**data, "task": task, "index": index})


def _name(agent: Agent) -> str:
    bare = agent.func if isinstance(agent, functools.partial) else agent
    return bare.__name__ if inspect.isfunction(bare) else type(bare).__name__
