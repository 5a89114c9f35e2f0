"""Groups in progress while the trainer updates the policy, none staler than `rl.max_staleness` when it is trained on.

    prompts ──start──> in progress ──group──> waiting ──take, oldest first──> collect_batch ──> policy update
                ▲                                                                                      │
                └─────── if a step that may train on the group has a free slot <──set_version(version)─┘

The staleness of a group is the number of weight versions between its start and the step that trains on it. It never
exceeds `rl.max_staleness`, because of when groups start:

- Each step has a slot for each group that it trains on. A group that started with version v has slots in the steps up
  to v + max_staleness. Slots are given to the groups with the oldest version first.
- A group is started only if a slot is left for it after all other groups, in progress or waiting, have theirs.
- A step takes the waiting groups with the oldest versions. If a group in progress would then have no slot in any later
  step, the step waits for it. So a slow group delays only the last step that may train on it.

With `rl.on_stale_group: drop` no step waits for a group: it is cancelled after its last step, and its prompt is drawn
again. With `mask` no step waits for it either: it continues, and once it has ended its version is that of its newest
token. The trainer masks its tokens that are staler than `rl.max_staleness` (`training_samples.mask_stale_tokens`).

Without `rl.streaming` the groups of a step start together, once those of the step before have ended.

The tasks of groups wait for the engine and their tools; `take` and the task that starts groups wait for `_changed`,
which the end of a group, `take` and `set_version` set. So there is no deadlock: `rl.max_queued_tokens` and
`rl.max_groups_in_progress` never hold back all groups that the trainer waits for.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from saccade.config.schema import RlConfig
from saccade.metrics.episode_metrics import count_tokens, has_usable_episode
from saccade.training.prompt_sampler import PromptSampler
from saccade.types import Episode, Group

# Runs the group of a prompt, started with a version; the last argument receives finished episodes if it is cancelled.
RunGroup = Callable[[int, int, Callable[[Episode], None]], Coroutine[Any, Any, Group]]
# Takes prompts: returns their indices, those of surplus videos, and the advanced sampler.
TakePrompts = Callable[[PromptSampler, int], tuple[Sequence[int], Sequence[int], PromptSampler]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """A group that has ended and that no step has trained on."""

    prompt_index: int
    version: int  # of the weights when it was started; with `on_stale_group: mask`, of its newest token
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A group in progress."""

    version: int  # of the weights when it was started
    task: asyncio.Task[Group]
    discarded: list[Episode] = field(default_factory=list)  # its finished episodes if it is cancelled


class GroupScheduler:
    """Groups for the steps `next_step` to `settings.steps` − 1 (from 0).

    `run_group` runs a group; `take_prompts` takes the next prompts from a sampler. `groups` have ended already; those
    that are too stale are dropped, and their prompts drawn again. Nothing is started before the first `take`; `close`
    cancels all that is in progress.
    """

    def __init__(
        self,
        run_group: RunGroup,
        take_prompts: TakePrompts,
        prompt_sampler: PromptSampler,
        groups: Sequence[PendingGroup] = (),
        *,
        settings: RlConfig,
        version: int,
        next_step: int,
    ) -> None:
        self._run_group, self._take_prompts, self._settings = run_group, take_prompts, settings
        self._is_masking = settings.on_stale_group == "mask"
        self._version, self._step = version, next_step - 1  # the step that takes groups, or took them last
        self.num_surplus_videos = 0  # since the last batch
        self._num_needed = 0  # groups that this step waits for
        self._num_per_step, _ = settings.selection.compute_start_counts(settings.prompts_per_step)
        self._semaphore = asyncio.Semaphore(settings.max_running_groups)  # for groups that start together
        self._num_over_provisioned = 0  # groups of the newest round that are cancelled once its others have ended
        self._prompts = deque[int]()  # prompt indices taken from the sampler, next to be started
        self._in_progress: dict[int, _Started] = {}  # by prompt index, like the others
        self._taken: dict[int, PendingGroup] = {}  # for a batch that isn't complete
        self._cancelled: dict[int, list[Episode]] = {}  # their finished episodes, since the last batch
        self._stale_indices = list[int]()  # being cancelled
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._starter: asyncio.Task[None] | None = None
        self._waiting, self._num_waiting_tokens = dict[int, PendingGroup](), 0
        for pending in groups:
            self._add_waiting(pending)
        stale_indices = self._find_stale()
        for prompt_index in stale_indices:
            self._remove_waiting(prompt_index)
        self._prompt_sampler = prompt_sampler.requeue(stale_indices)

    @property
    def state(self) -> tuple[PromptSampler, tuple[PendingGroup, ...]]:
        """Return what a checkpoint saves: the groups that have ended, and a sampler that takes all others again first.

        Groups of which every episode failed are begun again, too: their failure may be why the run stops.
        """
        ended = {**self._taken, **self._waiting}
        usable = {
            prompt_index: pending for prompt_index, pending in ended.items() if has_usable_episode([pending.group])
        }
        prompt_indices = {*self._prompts, *self._stale_indices, *self._in_progress, *ended} - usable.keys()
        return self._prompt_sampler.requeue(prompt_indices), tuple(usable.values())

    @property
    def metrics(self) -> dict[str, float]:
        """Return how many groups are in progress, and how many have ended and wait for a step."""
        return {"groups/in_progress": float(len(self._in_progress)), "groups/waiting": float(len(self._waiting))}

    async def take(self, step: int, count: int) -> dict[int, Group]:
        """Wait for `count` groups for `step`; return them by prompt index. Raises the exception of a group."""
        self._step, self._num_needed = step, count
        if self._starter is None:
            self._starter = asyncio.create_task(self._keep_starting())
            self._starter.add_done_callback(self._record_failure)
        self._changed.set()
        while (taken := self._choose(count)) is None:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        self._num_needed = 0
        self._taken |= {prompt_index: self._remove_waiting(prompt_index) for prompt_index in taken}
        return {prompt_index: taken[prompt_index].group for prompt_index in sorted(taken)}

    async def cancel_stale(self) -> tuple[list[int], list[Episode]]:
        """Cancel groups that are too stale for the steps after this one; their prompts are drawn again.

        Return the prompt indices of all groups that were cancelled since the last call, and their finished episodes.
        """
        self._stale_indices = self._find_stale()
        await self._cancel(self._stale_indices)
        self._prompt_sampler, self._stale_indices = self._prompt_sampler.requeue(self._stale_indices), []
        cancelled, self._cancelled = self._cancelled, {}
        return [*cancelled], [episode for episodes in cancelled.values() for episode in episodes]

    def complete_batch(self, requeued_indices: Iterable[int]) -> None:
        """Forget the groups that the step has taken; draw the prompts of `requeued_indices` again first."""
        self._taken.clear()
        self.num_surplus_videos = 0
        started_again = {*self._prompts, *self._in_progress, *self._waiting}  # cancelled ones
        self._prompt_sampler = self._prompt_sampler.requeue({*requeued_indices} - started_again)

    def set_version(self, version: int) -> None:
        """Record that the engine has new weights."""
        self._version = version
        self._changed.set()

    async def close(self) -> None:
        """Cancel the groups in progress, and wait for their end."""
        tasks = [*([self._starter] if self._starter else []), *(started.task for started in self._in_progress.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- staleness -------------------------------------------------------------------------------------------------

    def _choose(self, count: int) -> dict[int, PendingGroup] | None:
        """Return the oldest groups, None if there are fewer or the step has to wait for an older one."""
        waiting = sorted(self._waiting.values(), key=lambda pending: (pending.version, pending.prompt_index))
        chosen = {pending.prompt_index: pending for pending in waiting[:count]}
        if len(chosen) < count:
            return None
        # An over-provisioned group that ended before it was cancelled may have no slot; waiting for it gains nothing.
        is_waiting = self._settings.on_stale_group == "wait"
        has_to_wait = is_waiting and not self._in_progress.keys().isdisjoint(self._find_stale(without=chosen))
        return None if has_to_wait else chosen

    def _count_slots(self, version: int) -> int:
        """Return the number of slots in the steps after this one, up to the last step for a group of `version`."""
        last_step = min(version + self._settings.max_staleness, self._settings.steps - 1)
        return max(last_step - self._step, 0) * self._num_per_step

    def _find_stale(self, without: Iterable[int] = ()) -> list[int]:
        """Return the prompt indices of groups without a slot in the steps after this one; ignore those in `without`.

        Of groups that started with the same version, those that have ended get slots first.
        """
        groups: list[tuple[int, bool, int]] = [
            *((pending.version, False, prompt_index) for prompt_index, pending in self._waiting.items()),
            # A group whose stale tokens are masked gets more tokens, of these weights or newer ones.
            *(
                (self._version if self._is_masking else started.version, True, prompt_index)
                for prompt_index, started in self._in_progress.items()
            ),
        ]
        num_assigned, stale_indices, excluded = 0, list[int](), set(without)
        for version, _, prompt_index in sorted(groups):
            if prompt_index in excluded:
                continue
            if num_assigned < self._count_slots(version):
                num_assigned += 1
            else:
                stale_indices.append(prompt_index)
        return stale_indices

    # ---- starting --------------------------------------------------------------------------------------------------

    async def _keep_starting(self) -> None:
        while True:
            self._changed.clear()
            if self._num_over_provisioned and len(self._in_progress) <= self._num_over_provisioned:
                self._num_over_provisioned = 0
                await self._cancel([*self._in_progress])
            for _ in range(self._count_startable()):
                self._start_group()
            await self._changed.wait()

    def _count_startable(self) -> int:
        """Return how many groups start now."""
        if self._failure is not None:
            return 0
        settings, num_untrained = self._settings, len(self._waiting) + len(self._in_progress)
        num_slots = self._num_needed + self._count_slots(self._version) - num_untrained
        num_missing = max(self._num_needed - num_untrained, 0)
        max_tokens = settings.max_queued_tokens
        is_full = max_tokens and self._num_waiting_tokens >= max_tokens
        if settings.streaming:
            return min(num_missing if is_full else num_slots, settings.max_running_groups - len(self._in_progress))
        num_required = num_missing or self._num_per_step
        if self._in_progress or num_required > num_slots or (is_full and not num_missing):
            return 0
        num_started = settings.selection.compute_num_started(num_required)
        self._num_over_provisioned = num_started - num_required
        return num_started

    def _start_group(self) -> None:
        if not self._prompts:
            prompt_indices, surplus, self._prompt_sampler = self._take_prompts(self._prompt_sampler, self._num_per_step)
            self._prompts += prompt_indices
            self.num_surplus_videos += len(surplus)
            if self._settings.selection.surplus == "requeue":
                self._prompt_sampler = self._prompt_sampler.requeue(surplus)
        prompt_index, version, discarded = self._prompts.popleft(), self._version, list[Episode]()
        task = asyncio.create_task(self._run(prompt_index, version, discarded))
        self._in_progress[prompt_index] = _Started(version=version, task=task, discarded=discarded)
        task.add_done_callback(partial(self._finish_group, prompt_index))

    async def _run(self, prompt_index: int, version: int, discarded: list[Episode]) -> Group:
        async with self._semaphore:
            return await self._run_group(prompt_index, version, discarded.append)

    def _finish_group(self, prompt_index: int, task: asyncio.Task[Group]) -> None:
        started = self._in_progress.pop(prompt_index, None)  # None if the group was cancelled
        self._record_failure(task)
        if started is not None and (task.cancelled() or task.exception() is not None):
            self._prompts.appendleft(prompt_index)  # the state of a run that stops must not lose it
        elif started is not None:
            group, version = task.result(), started.version
            if self._is_masking:
                version = max([version, *(v for episode in group.all_episodes for v in episode.ledger.versions())])
            self._add_waiting(PendingGroup(prompt_index=prompt_index, version=version, group=group))
        self._changed.set()

    def _record_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            self._failure = self._failure or task.exception()
            self._changed.set()

    def _add_waiting(self, pending: PendingGroup) -> None:
        self._waiting[pending.prompt_index] = pending
        self._num_waiting_tokens += count_tokens([pending.group])

    def _remove_waiting(self, prompt_index: int) -> PendingGroup:
        pending = self._waiting.pop(prompt_index)
        self._num_waiting_tokens -= count_tokens([pending.group])
        return pending

    async def _cancel(self, prompt_indices: Iterable[int]) -> None:
        """Cancel groups, or drop them if they have ended."""
        ended, started_by_prompt = list[PendingGroup](), dict[int, _Started]()
        for prompt_index in prompt_indices:
            if prompt_index in self._waiting:
                ended.append(self._remove_waiting(prompt_index))
            else:
                started_by_prompt[prompt_index] = self._in_progress.pop(prompt_index)
                started_by_prompt[prompt_index].task.cancel()
        await asyncio.gather(*(started.task for started in started_by_prompt.values()), return_exceptions=True)
        self._cancelled |= {pending.prompt_index: pending.group.all_episodes for pending in ended}
        for prompt_index, started in started_by_prompt.items():
            has_ended = not started.task.cancelled() and started.task.exception() is None
            self._cancelled[prompt_index] = started.task.result().all_episodes if has_ended else started.discarded
        self._changed.set()
