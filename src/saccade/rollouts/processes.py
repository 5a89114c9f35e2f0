"""The executor `processes`: rollouts in processes of this machine, each with a copy of the model.

    collect ──run_episodes──> ProcessExecutor ──groups, weights──> worker processes (`worker_process`)
                                    ▲──────────── results ────────┘

Python runs on one core per process, and a small model keeps no more than one busy: N processes sample on N cores, and
the trainer may update its weights meanwhile (`rl.max_staleness`). Groups that start together are divided in turn and
sent together, so that the batches that a process samples don't depend on timing.

A process that ends takes its groups with it, so no group can run any more: the run stops with a checkpoint.
"""

import asyncio
import io
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from saccade.errors import BrokenEngineError, SaccadeError
from saccade.protocols import Engine, WeightSource
from saccade.rollouts import messages
from saccade.rollouts.child_process import ChildProcess
from saccade.rollouts.components import RolloutComponents
from saccade.rollouts.messages import GroupKey, GroupRequest
from saccade.rollouts.worker_executor import EngineWithWorkers, WorkerExecutor
from saccade.utils.cpus import count_cpus

LOG_FILE = "logs/rollouts.log"  # of a run: what the processes print
_CLOSE_SECONDS = 20.0  # for a process to end


@dataclass(slots=True, eq=False)
class _Worker:
    process: ChildProcess
    keys: set[GroupKey] = field(default_factory=set)  # of its groups in progress
    synced: asyncio.Event = field(default_factory=asyncio.Event)  # whether it has the newest weights


class ProcessExecutor(WorkerExecutor):
    """Runs groups in processes of this machine; the first group starts them.

    Its calls raise what keeps a process from starting, and BrokenEngineError if one ends.
    """

    def __init__(self, components: RolloutComponents, folder: Path, *, has_rewards: bool = True) -> None:
        recipe = components.recipe
        self._num_processes = recipe.rollouts.num_processes
        num_threads = max(recipe.model.num_threads // self._num_processes, 1)
        super().__init__(components, folder, computes_rewards=has_rewards, values={"model.num_threads": num_threads})
        self._workers: list[_Worker] = []
        self._version: int | None = None  # of the last weight sync
        self._first_weights: messages.LoadWeights | None = None  # of that sync, until the processes start
        self._unsent: list[GroupRequest] = []

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _submit(self, request: GroupRequest) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_groups)
        self._unsent.append(request)

    def _send_groups(self) -> None:
        """Send the groups of this iteration of the event loop, each to the process with the fewest in progress."""
        requests, self._unsent = self._unsent, []
        parts: dict[_Worker, list[GroupRequest]] = {worker: [] for worker in self._workers}
        for request in requests:
            group = self._open_groups.get(request.key)
            if group is not None and not group.is_cancelled and self._workers:
                worker = min(self._workers, key=lambda worker: len(worker.keys))
                worker.keys.add(request.key)
                parts[worker].append(request)
        for worker, part in parts.items():
            if part:
                worker.process.send(messages.RunGroups(part))

    def _cancel(self, key: GroupKey) -> bool:
        for worker in self._workers:
            if key in worker.keys:
                worker.process.send(messages.Cancel(key))
                return self._failure is None
        return False

    # ---- weight syncs ------------------------------------------------------------------------------------------------

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights to all processes, and wait until they sample from them."""
        import torch

        self._raise_failure()
        buffer = io.BytesIO()
        torch.save(dict(source.state_dict()), buffer)
        self._version, weights = version, messages.LoadWeights(buffer.getvalue(), version)
        self._first_weights = None if self._workers else weights
        for worker in self._workers:
            worker.synced.clear()
            worker.process.send(weights)
        for worker in self._workers:
            await worker.synced.wait()
        self._raise_failure()

    # ---- the processes -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes; see `WorkerExecutor.start`."""
        self._raise_failure()
        if self._workers:
            return
        setup = self._build_worker_setup(num_cpus=max(count_cpus() // self._num_processes, 1))
        for number in range(self._num_processes):
            process = ChildProcess(
                "saccade.rollouts.worker_process",
                [str(number)],
                log_path=self._folder / LOG_FILE,
                on_message=partial(self._handle, number),
            )
            self._workers.append(_Worker(process))
            process.send(setup)
            if self._first_weights is not None:
                process.send(self._first_weights)
        self._first_weights = None

    def _handle(self, number: int, message: object) -> None:
        if not self._workers:  # they are closed
            return
        worker = self._workers[number]
        match message:
            case messages.Finished(result):
                worker.keys.discard(result.key)
                self._finish(result)
            case messages.Synced(self._version):
                worker.synced.set()
            case messages.Fatal(error):
                self._fail(error)
            case None:
                self._fail(
                    BrokenEngineError(
                        f"a process of rollouts.executor=processes ended ({worker.process.describe_exit()}); look into "
                        f"{self._folder / LOG_FILE}, and run the command again (a training with --resume)",
                        key="rollouts.executor",
                        value="processes",
                    )
                )

    def _fail(self, error: SaccadeError) -> None:
        if self._failure is None:
            super()._fail(error)
        for worker in self._workers:
            worker.synced.set()

    async def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.send(messages.Close())
        await asyncio.gather(*(worker.process.end(_CLOSE_SECONDS) for worker in workers))


class ProcessEngine(EngineWithWorkers):
    """The trainer's engine beside worker processes, which sample from weights of their own."""

    def __init__(self, engine: Engine, executor: ProcessExecutor, *, is_overlapped: bool) -> None:
        super().__init__(engine, executor)
        # Else a validation takes turns with the training, whose batches would depend on it.
        self.has_separate_weights = is_overlapped
        self._processes = executor

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Sync the weights; see protocols.Engine."""
        await self._engine.sync_weights(source, version)
        await self._processes.sync_weights(source, version)
