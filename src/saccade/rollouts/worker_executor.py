"""What executors with rollout workers have in common: the trainer's side of groups that run in other processes.

    collect ──run_episodes──> WorkerExecutor ──GroupRequest──> a worker (`worker.RolloutWorker`)
                                    ▲──────────GroupResult───────┘

Workers compute the rewards of single episodes, judges included, unless `computes_rewards` is false; rewards of groups
are computed here.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError, SaccadeError
from saccade.protocols import Context, Engine, EnvironmentFactory, ScoreResult
from saccade.rollouts.components import RolloutComponents, remove_group_rewards, remove_rewards
from saccade.rollouts.messages import EpisodeRequest, GroupKey, GroupRequest, GroupResult, WorkerSetup
from saccade.rollouts.restart_on_sync import RestartOnSync
from saccade.rollouts.runner import RunEpisode, run_episode
from saccade.types import Episode, Task
from saccade.utils.files import convert_file_errors

_LIBRARY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS")
_CANCEL_SECONDS = 30.0  # to wait for the finished episodes of a cancelled group


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGroup:
    """A group without a result."""

    request: GroupRequest
    result: "asyncio.Future[GroupResult]"
    is_cancelled: bool = False


class WorkerExecutor(ABC):
    """Runs groups in workers; see `collect.RolloutExecutor`."""

    def __init__(
        self, components: RolloutComponents, folder: Path, *, computes_rewards: bool, values: Mapping[str, Any]
    ) -> None:
        recipe, images = components.recipe, components.media.generated_dir or folder / "images"
        self._folder, self._generated_dir = folder, Path(images).absolute()
        model = {"model.path": str(Path(recipe.model.path).absolute())} if recipe.model.path else {}
        self._computes_rewards = computes_rewards
        select_rewards = remove_group_rewards if computes_rewards else remove_rewards
        self._recipe = select_rewards(recipe).with_values({**model, **values})  # the workers'
        self._open_groups: dict[GroupKey, OpenGroup] = {}
        self._call_numbers = itertools.count()
        self._failure: SaccadeError | None = None  # no group can run any more
        # Of the workers, since the last `pop_metrics`.
        self._num_images = Counter(decoded_images=0, images_from_store=0)

    @abstractmethod
    def start(self) -> None:
        """Start the workers, unless they run. Raises the error after which no group can run any more."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers."""

    def pop_metrics(self) -> Mapping[str, float]:
        """Return what happened to workers since the last call; see docs/metrics.md."""
        counts, self._num_images = self._num_images, Counter(dict.fromkeys(self._num_images, 0))
        return {f"workers/{name}": float(number) for name, number in counts.items()}

    @abstractmethod
    def _submit(self, request: GroupRequest) -> None:
        """Send a group to a worker."""

    @abstractmethod
    def _cancel(self, key: GroupKey) -> bool:
        """Cancel a group; return whether a result with its finished episodes will follow."""

    async def run_episodes(
        self,
        task: Task,
        make_environment: EnvironmentFactory,
        contexts: Sequence[Context],
        *,
        run_fn: RunEpisode,
        on_discarded: Callable[[Episode], None],
    ) -> tuple[list[Episode], Sequence[ScoreResult] | None]:
        """Run a group's episodes on one worker; see `collect.RolloutExecutor`.

        Of the live events only `end` is emitted. Raises what an episode or a reward raises, and what ends the workers.
        """
        name = self._recipe.rollouts.executor
        restart_on_sync = run_fn.__self__ if inspect.ismethod(run_fn) else None
        if run_fn is not run_episode and not isinstance(restart_on_sync, RestartOnSync):
            message = f"rollouts.executor={name} can't run episodes by {run_fn!r}; set rollouts.executor=local"
            raise ConfigError(message, key="rollouts.executor", value=name)
        if not isinstance(make_environment, functools.partial) or make_environment.args:
            message = f"rollouts.executor={name} can't run the environment {make_environment!r}, which is none of the "
            raise ConfigError(f"{message}recipe's", key="rollouts.executor", value=name)
        request = GroupRequest(
            key=GroupKey(next(self._call_numbers), task.digest, contexts[0].seed),
            task=task,
            environment_settings=make_environment.keywords,
            episodes=tuple(
                EpisodeRequest(
                    seed=ctx.seed,
                    sampling=ctx.sampling,
                    frame_budget=ctx.frame_budget,
                    episode_timeout=ctx.episode_timeout,
                )
                for ctx in contexts
            ),
            restarts_on_sync=restart_on_sync is not None,
            media_files=tuple(media.path for media in task.media if os.path.exists(media.path)),
            is_scored=self._computes_rewards,
        )
        result = await self._run(request, on_discarded)
        if isinstance(restart_on_sync, RestartOnSync):
            restart_on_sync.add_metrics(result.restarts)
        self._num_images.update(result.media)
        for ctx, episode in zip(contexts, result.episodes, strict=True):
            ctx.emit_event("end", episode=episode)
        return [*result.episodes], result.graded

    async def _run(self, request: GroupRequest, on_discarded: Callable[[Episode], None]) -> GroupResult:
        self.start()
        group = OpenGroup(request=request, result=asyncio.get_running_loop().create_future())
        self._open_groups[request.key] = group
        self._submit(request)
        try:
            result = await asyncio.shield(group.result)
        except asyncio.CancelledError:
            group.is_cancelled = True
            if self._cancel(request.key):
                with contextlib.suppress(TimeoutError, SaccadeError):
                    async with asyncio.timeout(_CANCEL_SECONDS):
                        for episode in (await group.result).episodes:
                            on_discarded(episode)
            raise
        finally:
            del self._open_groups[request.key]
        if result.error is not None:
            raise result.error
        return result

    def _finish(self, result: GroupResult) -> None:
        """Pass a result on to the call that waits for it."""
        group = self._open_groups.get(result.key)
        if group is not None and not group.result.done():
            group.result.set_result(result)

    def _fail(self, error: SaccadeError) -> None:
        """End all open groups with an error, which every later call raises, too."""
        self._failure = error
        for group in self._open_groups.values():
            if not group.result.done():
                group.result.set_exception(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure), key=self._failure.key, value=self._failure.value)

    def _build_worker_setup(self, *, num_cpus: int = 0, is_pinned: bool = False) -> WorkerSetup:
        probe_file = self._generated_dir / ".probe"
        with convert_file_errors(probe_file):
            self._generated_dir.mkdir(parents=True, exist_ok=True)
            probe_file.touch()
        return WorkerSetup(
            recipe=self._recipe,
            generated_dir=str(self._generated_dir),
            probe_file=str(probe_file),
            working_dir=os.getcwd(),
            environment={name: os.environ[name] for name in _LIBRARY_VARIABLES if name in os.environ},
            num_cpus=num_cpus,
            is_pinned=is_pinned,
        )


class EngineWithWorkers:
    """The trainer's engine, whose weight syncs include the workers of an executor."""

    def __init__(self, engine: Engine, executor: WorkerExecutor) -> None:
        self._engine, self._executor = engine, executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def close(self) -> None:
        """End the workers and close the engine."""
        try:
            await self._executor.close()
        finally:
            await self._engine.close()
