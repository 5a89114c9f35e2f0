"""The driver process: places rollout workers on a Ray cluster, and leases groups to them.

A *driver* is Ray's word for the process that connects to the cluster and creates its actors, here the rollout workers.

    executor ──RunGroup──> waiting ──lease──> worker with room ──result──> executor
                              ▲                    │
                              └── lost or silent ──┘   its groups run on another worker, at most `max_attempts` times

- A lease lasts as long as its worker responds to heartbeats, at most `lease_timeout` seconds longer. Ray restarts a
  worker that died; the driver kills one that is silent. The first result of a group counts, a later one is dropped.
- It is a process of its own because Ray ends a driver whose head is restarted. The executor then starts another one,
  and sends it the groups without a result again; nothing is stored here.
- It ends itself if no worker has been up for `lease_timeout` seconds though one was: workers of a restarted head are
  never restarted, and only a new driver can make new ones.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from saccade.errors import RunError, SaccadeError
from saccade.rollouts import messages
from saccade.rollouts.messages import DriverSetup, GroupKey, GroupRequest, GroupResult, RunStatus, WorkerStatus
from saccade.rollouts.worker import RolloutWorker

NAMESPACE = "saccade"  # of the workers' names on a cluster
_MAX_CALLS = 10_000  # concurrent calls of a worker, heartbeats included
_RETRY_SECONDS = 0.5
_PROBE_SECONDS = 10.0
_HTTP2_PREFACE, _HTTP2_SETTINGS, _HTTP2_HEADER_BYTES = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 4, 9
_logger = logging.getLogger("saccade")


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A group that has no result yet."""

    request: GroupRequest
    start_time: float  # when it arrived
    num_lost_workers: int = 0
    wait_seconds: float | None = None  # until its first worker had room
    is_running: bool = False  # whether its episodes are in progress; else it waits, or is scored


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutWorkerHandle:
    """A rollout worker as the driver sees it."""

    name: str
    actor: Any
    is_up: bool = False
    incarnation: int = 0  # how often it came up
    leases: dict[GroupKey, Lease] = field(default_factory=dict)  # the groups in progress
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # set by a call that failed
    lost_reason: str = ""
    outdated_servers: tuple[str, ...] = ()

    @property
    def num_episodes(self) -> int:
        """Return the number of its episodes in progress; those that are scored need no room."""
        return sum(len(lease.request.episodes) for lease in self.leases.values() if lease.is_running)


class Driver:
    """Ray's driver of one run: it creates the workers and leases groups to them.

    It runs in one event loop; `send` passes a message to the executor.
    """

    def __init__(self, setup: DriverSetup, connection: Connection) -> None:
        self._setup, self._config, self._connection = setup, setup.config, connection
        self._leases: dict[GroupKey, Lease] = {}  # all
        self._waiting: deque[Lease] = deque()
        self._cancelled: set[GroupKey] = set()
        self._is_paused, self._sync_state = False, None
        self._num_lost = self._num_rerun = 0  # in total
        self._num_lost_sent = self._num_rerun_sent = 0  # to the executor
        self._last_error = ""
        self._workers: list[RolloutWorkerHandle] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._last_up = 0.0  # time when a worker was last up; 0: never

    async def run(self) -> None:
        """Place the workers and process messages until the executor closes the connection or ends."""
        self._workers = [self._create_worker(index) for index in range(self._config.workers)]
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(inbox.put_nowait, self._connection.recv())
            loop.call_soon_threadsafe(inbox.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        background = [asyncio.create_task(self._supervise(worker)) for worker in self._workers]
        background.append(asyncio.create_task(self._report()))
        reading = asyncio.create_task(self._read(inbox))
        done, _ = await asyncio.wait([reading, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only `reading` ends without an error

    async def _read(self, inbox: "asyncio.Queue[Any]") -> None:
        while (message := await inbox.get()) is not None:  # None: the executor has ended
            match message:
                case messages.Close():
                    return
                case messages.RunGroup(request):
                    lease = Lease(request=request, start_time=asyncio.get_running_loop().time())
                    self._leases[request.key] = lease
                    self._waiting.append(lease)
                    self._dispatch()
                case messages.Cancel(key):
                    self._cancel(key)
                case messages.Pause():
                    self._start(self._pause())
                case messages.Resume(state):
                    await self._resume(state)

    def _send(self, message: object) -> None:
        self._connection.send(message)

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._calls.add(task)
        task.add_done_callback(self._end_call)

    def _end_call(self, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _logger.error("the driver of the rollout workers failed", exc_info=error)
            os._exit(1)  # the executor starts another one

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Lease waiting groups, oldest first, to the workers with the most room."""
        while self._waiting and not self._is_paused:
            size = len(self._waiting[0].request.episodes)
            able = [
                worker
                for worker in self._workers
                if worker.is_up and (not worker.num_episodes or worker.num_episodes + size <= self._config.max_episodes)
            ]
            if not able:
                return
            lease, worker = self._waiting.popleft(), min(able, key=lambda worker: worker.num_episodes)
            if lease.wait_seconds is None:
                lease.wait_seconds = asyncio.get_running_loop().time() - lease.start_time
            worker.leases[lease.request.key], lease.is_running = lease, True
            self._start(self._run(worker, lease))

    async def _run(self, worker: RolloutWorkerHandle, lease: Lease) -> None:
        key, incarnation = lease.request.key, worker.incarnation
        try:
            result = await worker.actor.run_group.remote(lease.request, self._sync_state)
            if result is None:  # its episodes have ended: other groups take their room while they are scored
                if worker.leases.get(key) is lease:
                    lease.is_running = False
                    self._dispatch()
                result = await worker.actor.score_group.remote(key)
        except RayTaskError as error:
            if isinstance(error.cause, AssertionError):  # Ray restarted the worker
                self._lose(worker, incarnation, "it was restarted")
                return
            text = " ".join(str(error.cause).split())
            failure = RunError(f"a rollout worker failed on task {lease.request.task.id}: {text}", key="rollouts")
            result = GroupResult(key=key, episodes=(), error=failure, worker=worker.name)
        except RayError as error:
            self._lose(worker, incarnation, _describe(error))
            return
        if worker.leases.get(key) is lease:
            lease.is_running = False
            del worker.leases[key]
        if result.error is not None:
            self._last_error = str(result.error)
        if self._leases.get(key) is lease:  # else another worker was faster
            self._finish(replace(result, wait_seconds=lease.wait_seconds or 0.0))
        self._dispatch()

    def _finish(self, result: GroupResult) -> None:
        del self._leases[result.key]
        self._cancelled.discard(result.key)
        self._send(messages.Finished(result))

    def _cancel(self, key: GroupKey) -> None:
        lease = self._leases.get(key)
        if lease is None:  # its result is on the way
            return
        self._cancelled.add(key)
        holders = [worker for worker in self._workers if worker.leases.get(key) is lease]
        if not holders:
            self._waiting.remove(lease)
            self._finish(GroupResult(key=key, episodes=(), is_cancelled=True))
        for worker in holders:
            self._start(self._call(worker, worker.actor.cancel.remote(key)))

    # ---- weight syncs ------------------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        self._is_paused = True
        up = [worker for worker in self._workers if worker.is_up]
        await asyncio.gather(*(self._call(worker, worker.actor.pause.remote()) for worker in up))
        self._send(messages.Paused())

    async def _resume(self, state: Any) -> None:
        self._sync_state, self._is_paused = state, False
        for worker in self._workers:
            if worker.is_up:
                self._start(self._call(worker, worker.actor.resume.remote(state)))
        self._dispatch()

    async def _call(self, worker: RolloutWorkerHandle, reference: Any) -> None:
        """Wait until a worker has executed a call, or is lost."""
        is_lost, incarnation = asyncio.create_task(worker.lost.wait()), worker.incarnation
        call = asyncio.wrap_future(reference.future())
        try:
            await asyncio.wait((call, is_lost), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                call.result()
        except RayError as error:
            self._lose(worker, incarnation, _describe(error))
        finally:
            is_lost.cancel()

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _create_worker(self, index: int) -> RolloutWorkerHandle:
        name = f"{self._setup.run}/{os.getpid()}/{index}"
        actor_class: Any = ray.remote(RolloutWorker)
        actor = actor_class.options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=self._config.cpus_per_worker,
            resources=self._config.resources,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=_MAX_CALLS,
        ).remote(name)
        return RolloutWorkerHandle(name=name, actor=actor)

    async def _supervise(self, worker: RolloutWorkerHandle) -> None:
        """Start a worker whenever Ray has placed it, and watch its heartbeat until it is lost."""
        while True:
            try:
                error = await worker.actor.start.remote(self._setup.worker)
            except RayError as failure:
                _logger.warning("the rollout worker %s can't start yet: %s", worker.name, _describe(failure))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if error is not None:
                self._send(messages.Fatal(error))
                return
            worker.lost.clear()
            worker.is_up, worker.incarnation = True, worker.incarnation + 1
            self._send_status()
            self._dispatch()
            await self._watch(worker)
            self._release(worker)

    async def _watch(self, worker: RolloutWorkerHandle) -> None:
        """Return when a worker is lost: a call failed, or it was silent for `lease_timeout` seconds."""
        timeout = self._config.lease_timeout
        while not worker.lost.is_set():
            reference: Any = worker.actor.report_heartbeat.remote(self._build_run_status())
            heartbeat = asyncio.wrap_future(reference.future())
            is_lost = asyncio.create_task(worker.lost.wait())
            await asyncio.wait((heartbeat, is_lost), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            is_lost.cancel()
            if heartbeat.done():
                try:
                    status: WorkerStatus = heartbeat.result()
                    worker.outdated_servers = tuple(status.outdated_servers)
                    self._last_up = asyncio.get_running_loop().time()
                except RayError as error:
                    self._lose(worker, worker.incarnation, _describe(error))
            elif not worker.lost.is_set():
                self._lose(worker, worker.incarnation, f"it sent no heartbeat for {timeout:g} seconds")
                await asyncio.to_thread(ray.kill, worker.actor, no_restart=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.lost.wait(), min(timeout / 6, 5.0))

    def _lose(self, worker: RolloutWorkerHandle, incarnation: int, reason: str) -> None:
        """Record that a worker is lost, unless it has come up again since the call that failed."""
        if worker.incarnation == incarnation and not worker.lost.is_set():
            worker.lost_reason = reason
            worker.lost.set()

    def _release(self, worker: RolloutWorkerHandle) -> None:
        """Let the groups of a lost worker run elsewhere."""
        worker.is_up, leases = False, list(worker.leases.values())
        worker.leases.clear()
        self._num_lost += 1
        reason = worker.lost_reason
        self._last_error = f"{worker.name} is lost: {reason}"
        _logger.warning("the rollout worker %s is lost (%s); %d groups run again", worker.name, reason, len(leases))
        for lease in reversed(leases):
            key = lease.request.key
            if self._leases.get(key) is not lease:
                continue
            lease.num_lost_workers += 1
            if key in self._cancelled:
                self._finish(GroupResult(key=key, episodes=(), is_cancelled=True))
            elif lease.num_lost_workers >= self._config.max_attempts:
                self._finish(GroupResult(key=key, episodes=(), error=_build_attempts_error(lease, reason)))
            else:
                self._num_rerun += 1
                self._waiting.appendleft(lease)
        self._send_status()
        self._dispatch()

    def _send_status(self) -> None:
        up = [worker for worker in self._workers if worker.is_up]
        status = messages.ClusterStatus(
            num_up=len(up),
            num_lost=self._num_lost - self._num_lost_sent,
            num_rerun=self._num_rerun - self._num_rerun_sent,
            outdated_servers=sorted({server for worker in up for server in worker.outdated_servers}),
        )
        self._num_lost_sent, self._num_rerun_sent = self._num_lost, self._num_rerun
        self._send(status)

    def _build_run_status(self) -> RunStatus:
        return RunStatus(
            num_workers=len(self._workers),
            num_up=sum(worker.is_up for worker in self._workers),
            num_waiting_groups=len(self._waiting),
            num_lost=self._num_lost,
            num_rerun=self._num_rerun,
            last_error=self._last_error,
        )

    async def _report(self) -> None:
        """Send the executor the state of the workers regularly; end if none has been up for too long."""
        while True:
            self._send_status()
            await asyncio.sleep(min(self._config.lease_timeout / 6, 5.0))
            silence = asyncio.get_running_loop().time() - self._last_up
            is_silent = not any(worker.is_up for worker in self._workers) and silence > self._config.lease_timeout
            if self._last_up and is_silent:
                self._send(messages.Unreachable(f"no rollout worker was up for {silence:.0f} seconds"))
                os._exit(1)


def _describe(error: RayError) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _build_attempts_error(lease: Lease, reason: str) -> SaccadeError:
    return RunError(
        f"task {lease.request.task.id} was in progress on {lease.num_lost_workers} rollout workers that were lost, the "
        f"last one because of: {reason}; leave it out, or give workers more memory (rollouts.ray.max_episodes)",
        key="rollouts.ray.max_attempts",
        value=lease.num_lost_workers,
    )


def connect(address: str, num_cpus: int = 0, resources: dict[str, float] | None = None) -> None:
    """Connect this process to a cluster: `local` starts one with the resources, `auto` finds the running one.

    Raises OSError, RuntimeError or ValueError if there is none.
    """
    options: dict[str, Any] = {"namespace": NAMESPACE, "configure_logging": False, "include_dashboard": False}
    if address == "local":
        ray.init(address="local", num_cpus=max(num_cpus, os.cpu_count() or 1), resources=resources, **options)
        return
    del options["include_dashboard"]
    api: Any = ray  # its own functions are untyped
    found = api._private.services.canonicalize_bootstrap_address(address)  # of `auto`; None if there is none
    host, separator, port = (found or "").rpartition(":")
    if separator:
        _probe(host, int(port))
    ray.init(address=address, **options)


def _probe(host: str, port: int) -> None:
    """Raise OSError or ValueError if no gRPC server listens at an address, where Ray would try for minutes.

    An HTTP/2 server answers the client's first bytes with a frame of settings (RFC 9113, section 3.4).
    """
    deadline = time.monotonic() + _PROBE_SECONDS
    with socket.create_connection((host, port), _PROBE_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":  # then it answers only what is encrypted
            return
        connection.sendall(_HTTP2_PREFACE + bytes([0, 0, 0, _HTTP2_SETTINGS, 0, 0, 0, 0, 0]))
        head = b""
        while len(head) < _HTTP2_HEADER_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = connection.recv(_HTTP2_HEADER_BYTES - len(head))
            if not part:
                break
            head += part
    if head[3:4] != bytes([_HTTP2_SETTINGS]):
        raise ValueError("another program listens there")


def main() -> None:
    """Serve the executor at the other end of the connection whose file descriptor is the argument."""
    connection = Connection(int(sys.argv[1]))
    setup: DriverSetup = connection.recv()
    config = setup.config
    logging.basicConfig(format=messages.LOG_FORMAT, stream=sys.stderr)
    num_cpus = math.ceil(config.workers * config.cpus_per_worker)
    resources = {name: config.workers * amount for name, amount in config.resources.items()}
    try:
        connect(config.address, num_cpus, resources)
    except (OSError, RuntimeError, ValueError) as error:
        connection.send(messages.Unreachable(" ".join(str(error).split())[:300]))
        return
    asyncio.run(Driver(setup, connection).run())
    ray.shutdown()


if __name__ == "__main__":
    main()
