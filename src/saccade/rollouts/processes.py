"""The executor `processes`: rollouts in processes of this machine, each with a copy of the model.

    collect ──run_episodes──> ProcessExecutor ──groups, weights──> worker processes (`worker_process`)
                                    ▲──────────── results ────────┘

Python runs on one core per process, and a small model keeps no more than one busy: N processes sample on N cores, and
the trainer may update its weights meanwhile (`rl.max_staleness`). Groups that start together are divided in turn and
sent together, so that the batches that a process samples don't depend on timing.

A process that ends takes its groups with it, so no group can run any more: the run stops with a checkpoint.
"""

import asyncio
import contextlib
import io
import multiprocessing
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from saccade.errors import BrokenEngineError, RunError, SaccadeError, convert_errors
from saccade.protocols import Engine, WeightSource
from saccade.rollouts import messages
from saccade.rollouts.components import RolloutComponents
from saccade.rollouts.messages import GroupKey, GroupRequest
from saccade.rollouts.worker_executor import EngineWithWorkers, WorkerExecutor
from saccade.utils.files import convert_file_errors, open_file

LOG_FILE = "logs/rollouts.log"  # of a run: what the processes print
_CLOSE_SECONDS = 20.0  # for a process to end


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    keys: set[GroupKey] = field(default_factory=set)  # of its groups in progress
    synced: asyncio.Event = field(default_factory=asyncio.Event)  # whether it has the newest weights
    reader: threading.Thread | None = None


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
        self._weights: messages.LoadWeights | None = None  # None: those of the recipe's `model.path`
        self._unsent: list[GroupRequest] = []

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _submit(self, request: GroupRequest) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_groups)
        self._unsent.append(request)

    def _send_groups(self) -> None:
        """Send the groups of this iteration of the event loop, each to the process with the fewest in progress."""
        requests, self._unsent = self._unsent, []
        parts: list[list[GroupRequest]] = [[] for _ in self._workers]
        for request in requests:
            group = self._open_groups.get(request.key)
            if group is None or group.is_cancelled or not self._workers:
                continue
            number = min(range(len(self._workers)), key=lambda number: len(self._workers[number].keys))
            self._workers[number].keys.add(request.key)
            parts[number].append(request)
        for worker, part in zip(self._workers, parts, strict=True):
            if part:
                self._send(worker, messages.RunGroups(part))

    def _cancel(self, key: GroupKey) -> bool:
        for worker in self._workers:
            if key in worker.keys:
                self._send(worker, messages.Cancel(key))
                return self._failure is None
        return False

    def pop_metrics(self) -> Mapping[str, float]:
        """Return what the processes decoded since the last call; see docs/metrics.md."""
        metrics = {f"workers/{name}": float(number) for name, number in self._num_images.items()}
        self._num_images = Counter(dict.fromkeys(self._num_images, 0))
        return metrics

    # ---- weight syncs ------------------------------------------------------------------------------------------------

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights to all processes, and wait until they sample from them."""
        import torch

        self._raise_failure()
        buffer = io.BytesIO()
        torch.save(dict(source.state_dict()), buffer)
        self._weights = messages.LoadWeights(buffer.getvalue(), version)
        for worker in self._workers:
            worker.synced.clear()
            self._send(worker, self._weights)
        for worker in self._workers:
            await worker.synced.wait()
        self._raise_failure()

    # ---- the processes -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes; see `WorkerExecutor.start`."""
        self._raise_failure()
        if self._workers:
            return
        setup, log_path = self._build_worker_setup(), self._folder / LOG_FILE
        with convert_file_errors(log_path):
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = open_file(log_path, "ab")
        with log, convert_errors(RunError, "a rollout process can't start", key="rollouts.executor"):
            for number in range(self._num_processes):
                self._start_process(number, setup, log)

    def _start_process(self, number: int, setup: messages.WorkerSetup, log: IO[bytes]) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "saccade.rollouts.worker_process", str(theirs.fileno()), str(number)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal reaches the trainer alone
            )
        worker = _Worker(process=process, connection=ours)
        self._workers.append(worker)
        self._send(worker, setup)
        if self._weights is not None:
            self._send(worker, self._weights)
        loop = asyncio.get_running_loop()
        worker.reader = threading.Thread(target=self._read, args=(worker, loop), name="saccade-rollouts", daemon=True)
        worker.reader.start()

    def _read(self, worker: _Worker, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._handle, worker, worker.connection.recv())
            loop.call_soon_threadsafe(self._handle, worker, None)

    def _handle(self, worker: _Worker, message: object) -> None:
        match message:
            case messages.Finished(result):
                worker.keys.discard(result.key)
                self._finish(result)
            case messages.Synced(version) if self._weights is not None and version == self._weights.version:
                worker.synced.set()
            case messages.Fatal(error):
                self._fail(error)
            case None if worker in self._workers:  # else it was closed
                self._fail(
                    BrokenEngineError(
                        f"a process of rollouts.executor=processes ended ({_describe_exit(worker.process)}); look into "
                        f"{self._folder / LOG_FILE}, and run the command again with --resume",
                        key="rollouts.executor",
                        value="processes",
                    )
                )

    def _fail(self, error: SaccadeError) -> None:
        if self._failure is None:
            super()._fail(error)
        for worker in self._workers:
            worker.synced.set()

    def _send(self, worker: _Worker, message: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `_read` notices
            worker.connection.send(message)

    async def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            self._send(worker, messages.Close())
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(worker.process.wait, _CLOSE_SECONDS)
            worker.process.kill()
            await asyncio.to_thread(worker.process.wait)
            if worker.reader is not None:  # it reads the connection to its end
                await asyncio.to_thread(worker.reader.join)
            worker.connection.close()


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=5)
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    return "its connection broke"


class ProcessEngine(EngineWithWorkers):
    """The trainer's engine beside worker processes, which sample from weights of their own."""

    has_separate_weights = True

    def __init__(self, engine: Engine, executor: ProcessExecutor) -> None:
        super().__init__(engine, executor)
        self._processes = executor

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Sync the weights; see protocols.Engine."""
        await self._engine.sync_weights(source, version)
        await self._processes.sync_weights(source, version)
