"""The executor `ray`: the trainer's side of rollouts on a Ray cluster.

    collect ──run_episodes──> RayExecutor ──messages──> driver process ──> workers
                                   ▲                          │
                                   └── results; a driver that ends is replaced, and gets the open groups again

A group runs once: its result stays here from the moment it arrives, whatever happens to workers, nodes or the head. A
group that was lost before runs again with the same seeds, so the episodes are those of a run without losses.

A weight sync of the trainer's engine copies the weights while workers continue; it pauses them for the switch alone,
and sends them its state. This process never imports Ray, which ends a process whose head is restarted.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from saccade.errors import BrokenEngineError, ConfigError, SaccadeError
from saccade.protocols import SharedServersEngine, WeightSource
from saccade.rollouts import messages
from saccade.rollouts.child_process import ChildProcess
from saccade.rollouts.components import RolloutComponents
from saccade.rollouts.messages import DriverSetup, GroupKey, GroupRequest, GroupResult
from saccade.rollouts.worker_executor import EngineWithWorkers, WorkerExecutor

LOG_FILE = "logs/ray.log"  # of a run: what the driver and all workers print
_CLOSE_SECONDS = 20.0  # for the driver to end
_CONNECTION_SECONDS = 180.0  # for a driver to connect; Ray's own call may wait forever
_FIRST_CONNECTION_SECONDS = 60.0  # as long as a running cluster could never be reached: it seems that there is none
_MAX_BACKOFF = 15.0  # seconds between two drivers
_logger = logging.getLogger("saccade")


class RayExecutor(WorkerExecutor):
    """Runs groups on Ray workers; the first group starts the driver process.

    Its calls raise RunError if their workers are lost again and again, BrokenEngineError if no worker is up for
    `rollouts.ray.down_timeout` seconds.
    """

    def __init__(self, components: RolloutComponents, folder: Path, *, has_rewards: bool = True) -> None:
        self._config, self._engine = components.recipe.rollouts.ray, components.engine
        computes_rewards = has_rewards and self._config.scoring == "workers"
        super().__init__(components, folder, computes_rewards=computes_rewards, values={})
        self._driver_task: asyncio.Task[None] | None = None
        self._driver: ChildProcess | None = None
        self._is_connected = self._is_closing = False  # whether the driver has connected to the cluster; `close`
        self._was_connected = False  # whether any driver has
        self._pause_done: asyncio.Future[None] | None = None  # of the weight sync under way
        self._sync_state: Any = None
        self._num_up = self._num_lost = self._num_rerun = self._num_drivers_lost = 0
        self._wait_seconds: list[float] = []  # of the groups since the last `pop_metrics`
        self._last_up, self._last_reason = 0.0, "no worker has started yet"

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _submit(self, request: GroupRequest) -> None:
        if self._is_connected:  # else the next driver receives it
            self._send(messages.RunGroup(request))

    def _cancel(self, key: GroupKey) -> bool:
        if self._is_connected:
            self._send(messages.Cancel(key))
        return self._is_connected

    def pop_metrics(self) -> Mapping[str, float]:
        """Return what happened to workers since the last call; see docs/metrics.md."""
        waits, self._wait_seconds = self._wait_seconds, []
        metrics = {
            "workers/up": self._num_up,
            "workers/lost": self._num_lost,
            "workers/rerun_groups": self._num_rerun,
            "workers/lost_drivers": self._num_drivers_lost,
            "workers/wait_seconds": sum(waits) / (len(waits) or 1),
        }
        self._num_lost = self._num_rerun = self._num_drivers_lost = 0
        return {**{name: float(value) for name, value in metrics.items()}, **super().pop_metrics()}

    # ---- weight syncs ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Pause all workers inside the block; they continue with the weights that the trainer's engine then has."""
        if self._driver_task is not None:
            self._raise_failure()
            self._pause_done = asyncio.get_running_loop().create_future()
            if self._is_connected:
                self._send(messages.Pause())
                await self._pause_done
        try:
            yield
        finally:
            self._pause_done = None
            if isinstance(self._engine, SharedServersEngine):
                self._sync_state = self._engine.get_sync_state()
            if self._is_connected:
                self._send(messages.Resume(self._sync_state))

    # ---- the driver process ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the driver; see `WorkerExecutor.start`."""
        self._raise_failure()
        if self._driver_task is None:
            self._last_up = asyncio.get_running_loop().time()
            self._driver_task = asyncio.create_task(self._keep_driver())

    def _fail(self, error: SaccadeError) -> None:
        super()._fail(error)
        if self._pause_done is not None and not self._pause_done.done():
            self._pause_done.set_exception(error)

    async def _keep_driver(self) -> None:
        """Start a driver, and another one whenever it ends, until the workers fail for good."""
        num_failures = 0
        while self._failure is None and not self._is_closing:
            try:
                was_up = await self._run_driver()
            except SaccadeError as error:  # it can't start
                self._fail(error)
                return
            self._num_drivers_lost += was_up
            num_failures = 0 if was_up else num_failures + 1
            self._num_up, self._is_connected = 0, False
            # A new driver knows no group, so nothing is in progress.
            self._end_pause()
            for group in self._open_groups.values():
                if group.is_cancelled and not group.result.done():
                    group.result.set_result(GroupResult(key=group.request.key, episodes=(), is_cancelled=True))
            self._check_outage()
            if self._failure is None and not self._is_closing:
                _logger.warning("the driver of the rollout workers ended (%s); it is started again", self._last_reason)
                await asyncio.sleep(min(0.5 * 2**num_failures, _MAX_BACKOFF))

    def _check_outage(self) -> None:
        seconds, limit = asyncio.get_running_loop().time() - self._last_up, self._config.down_timeout
        if not self._was_connected and self._config.address != "local":
            limit = min(limit, _FIRST_CONNECTION_SECONDS)
        if self._failure is None and self._open_groups and seconds > limit:
            needed = {"CPU": self._config.cpus_per_worker, **self._config.resources}
            self._fail(
                BrokenEngineError(
                    f"no rollout worker was up for {seconds:.0f} seconds ({self._last_reason}); start the cluster of "
                    f"rollouts.ray.address={self._config.address}, with a node that has {needed}, and look into "
                    f"{self._folder / LOG_FILE}",
                    key="rollouts.ray.address",
                    value=self._config.address,
                )
            )

    async def _run_driver(self) -> bool:
        """Run a driver process to its end; return whether it had connected to the cluster."""
        setup = self._build_setup()
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        driver = ChildProcess(
            "saccade.rollouts.ray.driver",
            [],
            log_path=self._folder / LOG_FILE,
            on_message=inbox.put_nowait,
            environment={"RAY_DEDUP_LOGS": "0"},
        )
        self._driver = driver
        self._send(setup)
        try:
            while True:
                # A driver that connects may wait for the head; one that is connected reports regularly.
                connecting = min(self._config.down_timeout, _CONNECTION_SECONDS)
                timeout = self._config.lease_timeout if self._is_connected else connecting
                async with asyncio.timeout(timeout):
                    message = await inbox.get()
                if message is None:
                    break
                self._handle(message)
        except TimeoutError:
            self._last_reason = f"it was silent for {timeout:g} seconds"
        finally:
            await driver.end(0)
        return self._is_connected

    def _handle(self, message: object) -> None:
        match message:
            case messages.Finished(result):
                self._wait_seconds.append(result.wait_seconds)
                self._finish(result)
            case messages.ClusterStatus():
                self._handle_status(message)
            case messages.Paused():
                self._end_pause()
            case messages.Fatal(error):
                self._fail(error)
            case messages.Unreachable(reason):
                self._last_reason = reason

    def _handle_status(self, status: messages.ClusterStatus) -> None:
        if not self._is_connected:
            self._is_connected = self._was_connected = True
            if self._pause_done is not None:
                self._send(messages.Pause())
            else:
                self._send(messages.Resume(self._sync_state))
            for group in self._open_groups.values():
                if not group.result.done():
                    self._send(messages.RunGroup(group.request))
        self._num_up = status.num_up
        self._num_lost += status.num_lost
        self._num_rerun += status.num_rerun
        if status.num_up:
            self._last_up = asyncio.get_running_loop().time()
        self._check_outage()
        if status.outdated_servers and self._pause_done is None and isinstance(self._engine, SharedServersEngine):
            self._engine.reload_servers(status.outdated_servers)

    def _end_pause(self) -> None:
        if self._pause_done is not None and not self._pause_done.done():
            self._pause_done.set_result(None)

    def _send(self, message: object) -> None:
        if self._driver is not None:  # if it has ended, the next one receives the open groups
            self._driver.send(message)

    def _build_setup(self) -> DriverSetup:
        cpus = self._config.cpus_per_worker
        is_pinned = self._config.pin_cpus and cpus > 0
        worker = self._build_worker_setup(num_cpus=math.ceil(cpus), is_pinned=is_pinned)
        return DriverSetup(run=self._folder.name, config=self._config, worker=worker)

    async def close(self) -> None:
        """End the driver and, with it, the workers."""
        task, self._driver_task, self._is_closing = self._driver_task, None, True
        if task is None:
            return
        if self._driver is not None:
            self._driver.send(messages.Close())
            await self._driver.end(_CLOSE_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class RayEngine(EngineWithWorkers):
    """The trainer's engine, whose weight syncs include Ray workers."""

    async def sync_weights(self, source: WeightSource, version: int) -> Mapping[str, float] | None:
        """Sync the weights; the workers are paused while servers switch. See protocols.Engine."""
        if not isinstance(self._engine, SharedServersEngine):
            raise ConfigError(
                f"rollouts.executor=ray can't train with the engine {type(self._engine).__name__}, which doesn't "
                "implement SharedServersEngine; set rollouts.executor=local",
                key="rollouts.executor",
                value="ray",
            )
        return await self._engine.sync_weights(source, version)
