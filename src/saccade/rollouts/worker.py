"""A rollout worker: runs groups of episodes with its own engine client, media cache and sandboxes.

    caller ──run_group──────> RolloutWorker ──run_episode──> the engine's servers; sandboxes and media of this node
           ──score_group────>               ──score_fn─────> rewards of single episodes, judges
           ──pause, resume──>

The driver of a Ray cluster makes it an actor; this module doesn't import Ray. There it holds no weights:
`engine.follow` informs it of weight syncs. Ray restarts an actor without its state, so every group carries
the state of the last sync. In a process of the executor `processes` its engine holds a copy of the weights.
"""

import asyncio
import contextlib
import fcntl
import functools
import gc
import logging
import os
import random
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from saccade import sandbox
from saccade.errors import RunError, SaccadeError, convert_errors
from saccade.protocols import Engine, ScoreResult, SharedServersEngine
from saccade.rollouts.collect import await_episodes
from saccade.rollouts.messages import (
    LOG_FORMAT,
    GroupKey,
    GroupRequest,
    GroupResult,
    RunStatus,
    WorkerSetup,
    WorkerStatus,
)
from saccade.rollouts.restart_on_sync import RestartOnSync
from saccade.rollouts.runner import run_episode
from saccade.types import Episode
from saccade.utils import cpus
from saccade.utils.files import create_private_folder, open_file

if TYPE_CHECKING:
    from saccade.rollouts.components import RolloutComponents

T = TypeVar("T")
_THROUGHPUT_SECONDS = 60.0
_PIN_SECONDS = 20.0


class RolloutWorker:
    """Runs groups; `name` is the actor's or the number of the process. `start` comes first."""

    def __init__(self, name: str) -> None:
        self._name, self._host = name, socket.gethostname()
        self._components: RolloutComponents | None = None
        self._tasks: dict[GroupKey, asyncio.Task[Any]] = {}  # that `cancel` cancels
        self._unscored: dict[GroupKey, list[Episode]] = {}  # groups between `run_group` and `score_group`
        self._num_groups = self._num_episodes = self._num_tokens = 0  # of finished groups
        self._start_time = time.monotonic()
        self._recent_tokens: deque[tuple[float, int]] = deque()  # time and sampled tokens of recently finished groups
        self._run_status: RunStatus | None = None
        self._restart_on_sync = RestartOnSync()
        self._pause: contextlib.AsyncExitStack | None = None
        self._sync_state: Any = None
        self._cpu_locks: list[TextIO] = []  # open as long as the worker uses its CPUs

    async def start(self, setup: WorkerSetup) -> SaccadeError | None:
        """Build the components; return the error that the user must fix, if there is one."""
        logging.basicConfig(format=LOG_FORMAT, stream=sys.stderr)  # which Ray passes on to the driver
        os.environ.update(setup.environment)
        if os.path.isdir(setup.working_dir):
            os.chdir(setup.working_dir)
        try:
            with convert_errors(RunError, f"the rollout worker on {self._host} can't start", key="rollouts.executor"):
                if setup.is_pinned and not self._cpu_locks:
                    self._cpu_locks = await _pin_cpus(setup.num_cpus, self._host)
                if setup.num_cpus:
                    cpus.limit_cpus(setup.num_cpus)
                    sandbox.limit_cpus(setup.num_cpus)
                self._components = _build_components(setup, self._host)
            gc.freeze()  # see async_utils.keep_collections_short
        except SaccadeError as error:
            return _make_picklable(error)
        return None

    @property
    def engine(self) -> Engine:
        """The engine, after a successful `start`."""
        # Ray has restarted the actor: the driver treats the failure as a lost worker.
        assert self._components is not None, "the worker was restarted"
        return self._components.engine

    async def run_group(self, request: GroupRequest, sync_state: Any) -> GroupResult | None:
        """Run a group's episodes with the weights of `sync_state`; an error is a part of the result.

        None: the episodes have ended, and `score_group` returns them.
        """
        # Ray has restarted the actor: the driver treats the failure as a lost worker.
        assert self._components is not None, "the worker was restarted"
        self._follow(sync_state)
        discarded: list[Episode] = []
        episodes = await self._await(request.key, self._run_episodes(self._components, request, discarded), discarded)
        if isinstance(episodes, GroupResult):
            return episodes
        self._num_groups += 1
        self._num_episodes += len(episodes)
        num_tokens = sum(episode.usage.sampled_tokens for episode in episodes)
        self._num_tokens += num_tokens
        self._recent_tokens.append((time.monotonic(), num_tokens))
        if not request.is_scored:
            return self._build_result(request.key, episodes)
        self._unscored[request.key] = episodes
        return None

    async def score_group(self, key: GroupKey) -> GroupResult:
        """Compute the rewards of single episodes, after `run_group`."""
        assert self._components is not None, "the worker was restarted"
        assert key in self._unscored, "the worker was restarted"
        episodes = self._unscored.pop(key)
        graded = await self._await(key, self._components.score_fn(episodes), episodes)
        return graded if isinstance(graded, GroupResult) else self._build_result(key, episodes, graded)

    def _build_result(
        self, key: GroupKey, episodes: list[Episode], graded: Sequence[ScoreResult] | None = None
    ) -> GroupResult:
        restarts = self._restart_on_sync.pop_metrics()  # of all groups: the executor adds them up
        media = self._components.media.pop_counts() if self._components else {}
        return GroupResult(key=key, episodes=episodes, graded=graded, restarts=restarts, media=media, worker=self._name)

    async def _await(self, key: GroupKey, work: Awaitable[T], discarded: list[Episode]) -> T | GroupResult:
        """Return the result of `work`; if it is cancelled or fails, a group's result that holds `discarded`."""
        self._tasks[key] = task = asyncio.ensure_future(work)
        try:
            return await task
        except asyncio.CancelledError:  # by `cancel`
            return GroupResult(key=key, episodes=discarded, is_cancelled=True, worker=self._name)
        except SaccadeError as error:
            return GroupResult(key=key, episodes=(), error=_make_picklable(error), worker=self._name)
        finally:
            del self._tasks[key]

    async def _run_episodes(
        self, components: "RolloutComponents", request: GroupRequest, discarded: list[Episode]
    ) -> list[Episode]:
        if missing := [file for file in request.media_files if not os.path.exists(file)]:
            raise RunError(
                f"{missing[0]} is missing on the node {self._host}; rollout workers need the media at the same path as "
                "the trainer, on a file system that all nodes share",
                key=missing[0],
            )
        make_environment: Any = components.environments(request.task)
        contexts = [
            replace(
                components.build_context(seed=episode.seed, frame_budget=episode.frame_budget),
                sampling=episode.sampling,
                episode_timeout=episode.episode_timeout,
            )
            for episode in request.episodes
        ]
        run_fn = self._restart_on_sync.run_episode if request.restarts_on_sync else run_episode
        bound = functools.partial(make_environment.func, **request.environment_settings)
        episode_tasks = [asyncio.create_task(run_fn(request.task, bound, ctx)) for ctx in contexts]
        return await await_episodes(episode_tasks, discarded.append)

    async def cancel(self, key: GroupKey) -> None:
        """Cancel a group if it runs or is scored; its result then holds the episodes that have ended."""
        if task := self._tasks.get(key):
            task.cancel()

    async def pause(self) -> None:
        """Pause the episodes' clock, restart episodes that restart at a weight sync, and hold back requests."""
        if self._pause is not None or self._components is None:
            return
        self._pause, engine = contextlib.AsyncExitStack(), self._components.engine
        self._pause.enter_context(self._components.clock.pause())
        self._pause.enter_context(self._restart_on_sync.cancel_episodes())
        if isinstance(engine, SharedServersEngine):
            await self._pause.enter_async_context(engine.pause_requests())

    async def resume(self, sync_state: Any) -> None:
        """Continue with the weights of `sync_state`."""
        self._follow(sync_state)
        pause, self._pause = self._pause, None
        if pause is not None:
            await pause.aclose()

    def _follow(self, sync_state: Any) -> None:
        engine = self._components.engine if self._components else None
        if sync_state != self._sync_state and isinstance(engine, SharedServersEngine):
            engine.follow(sync_state)
            self._sync_state = sync_state

    async def report_heartbeat(self, run_status: RunStatus) -> WorkerStatus:
        """Keep the state of the run for `get_status`, and return what that returns."""
        self._run_status = run_status
        return await self.get_status()

    async def get_status(self) -> WorkerStatus:
        """Return the worker's status; it responds as long as its event loop runs."""
        now = time.monotonic()
        while self._recent_tokens and self._recent_tokens[0][0] < now - _THROUGHPUT_SECONDS:
            self._recent_tokens.popleft()
        seconds = min(max(now - self._start_time, 1.0), _THROUGHPUT_SECONDS)
        engine = self._components.engine if self._components else None
        return WorkerStatus(
            name=self._name,
            host=self._host,
            pid=os.getpid(),
            run=self._run_status,
            num_running_groups=len(self._tasks),
            sampled_tokens_per_second=sum(count for _, count in self._recent_tokens) / seconds,
            num_finished_groups=self._num_groups,
            num_finished_episodes=self._num_episodes,
            num_sampled_tokens=self._num_tokens,
            version=engine.version if engine else 0,
            outdated_servers=engine.list_outdated_servers() if isinstance(engine, SharedServersEngine) else (),
        )


def _build_components(setup: WorkerSetup, host: str) -> "RolloutComponents":
    from saccade.rollouts.components import RolloutComponents

    if not os.path.exists(setup.probe_file):
        raise RunError(
            f"the node {host} doesn't see the run's folder {os.path.dirname(setup.probe_file)}; put it on a file "
            "system that all nodes share",
            key="rollouts.executor",
            value=host,
        )
    components = RolloutComponents.from_recipe(setup.recipe, verifies_weights=False)
    components.media.generated_dir = setup.generated_dir
    return components


async def _pin_cpus(count: int, host: str) -> list[TextIO]:
    """Restrict this process and its later children to CPUs of the node that no other worker has locked.

    Return the locks, which end with the process. Raises RunError if too few CPUs are free for some seconds.
    """
    folder, deadline = Path(tempfile.gettempdir(), f"saccade-cpus-{os.getuid()}"), time.monotonic() + _PIN_SECONDS
    try:
        create_private_folder(folder)
    except OSError as error:
        raise RunError(
            f"{folder} on the node {host} can't hold the locks of CPUs: {(error.strerror or str(error)).lower()}. "
            "Set rollouts.ray.pin_cpus=false, or remove it",
            key="rollouts.ray.pin_cpus",
            value=str(folder),
        ) from error
    while True:
        locks = {cpu: lock for cpu in sorted(os.sched_getaffinity(0)) if (lock := _lock_file(folder / str(cpu)))}
        for cpu in list(locks)[count:]:
            locks.pop(cpu).close()
        if len(locks) == count:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread), locks)
            return [*locks.values()]
        for lock in locks.values():
            lock.close()
        if time.monotonic() > deadline:
            raise RunError(
                f"{len(locks)} CPUs of the node {host} are free for a worker that needs {count}: it has more workers "
                "than CPUs. Set rollouts.ray.pin_cpus=false, or start Ray on it with the right --num-cpus",
                key="rollouts.ray.pin_cpus",
                value=count,
            )
        await asyncio.sleep(
            random.uniform(0.1, 0.5)
        )  # another worker may try the same CPUs, or one that ended has them


def _lock_file(path: Path) -> TextIO | None:
    """Return the open file with a lock on it; None if another process has locked it."""
    file = open_file(path, "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _make_picklable(error: SaccadeError) -> SaccadeError:
    """Return an error that another process can read: an instance of Saccade's own class, with a simple value."""
    own_type = next(cls for cls in type(error).__mro__ if cls.__module__ == SaccadeError.__module__)
    value = error.value if isinstance(error.value, str | int | float | None) else repr(error.value)
    return own_type(str(error), key=error.key, value=value)
