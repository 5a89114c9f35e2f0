"""Simulate RL steps on a trainer, servers and rollout workers: a discrete-event simulation, without torch.

    prompt ──> worker decodes frames ──> server samples ──> worker runs calls ──> server … ──> score ──> group
                                            ▲                  └─ sub-agents ─┘                           │
                                            └──── weight sync <── policy update <── packing <── groups of a step

A server shares its time among the replies in progress: a decoding step gives each of them a token and takes longer the
more there are. Prefill goes first, in order of arrival. The requests of a group go to one server, as the server pool
sends them; a sub-agent's go to the server with the fewest replies. Groups start, and steps take them, by the rules of
`training.group_scheduler` and `rollouts.collect`. Every draw comes from one seed.

Not simulated: restarted episodes (`rl.episodes_on_sync: restart`), filters that drop groups, validation, failures, and
`rl.max_queued_tokens`. With `rl.on_stale_group: mask` and `drop` no step waits for an old group, nor cancels it.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from typing import Literal

from saccade.config.schema import MAX_EPISODES_IN_PROGRESS
from saccade.errors import ConfigError

Event = Callable[[], None]
Bottleneck = Literal["trainer", "servers", "workers", "latency"]
_LATENCY_IDLE_SHARE = 0.5  # if every resource is idle for longer than this, none of them is the bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A log-normal amount with a mean (not the median); `sigma` is the standard deviation of its logarithm.

    Draws above `maximum` are cut to it, so that their mean is below `mean`.
    """

    mean: float
    sigma: float = 0.0
    maximum: float = math.inf

    def __post_init__(self) -> None:
        for key, value in (("mean", self.mean), ("sigma", self.sigma)):
            require_amount(key, value)

    def draw(self, rng: random.Random) -> float:
        """Draw an amount."""
        # The mean of exp(N(m, s²)) is exp(m + s² / 2).
        factor = math.exp(self.sigma * rng.gauss(0.0, 1.0) - self.sigma**2 / 2) if self.sigma else 1.0
        return min(self.mean * factor, self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds of each stage of a step.

    A decoding step of a server with n replies in progress takes `decode_step + n * decode_step_per_reply`.
    """

    decode_step: float
    decode_step_per_reply: float
    prefill_token: float  # of a server, per token that its prefix cache doesn't hold
    max_replies: int  # in progress on a server; others wait
    tool_call: LogNormal  # of a worker's thread, without its frames and its sub-agent
    frame: float  # of a worker's thread, per frame that it decodes
    score: LogNormal  # of an episode; episodes are scored concurrently
    packed_token: float  # of one process that packs a step's samples
    trained_token: float  # of one GPU, per packed token; all passes over the rows together
    optimizer_step: float  # of all GPUs together, with what they exchange
    sync_byte: float  # per byte of weights; all servers load at once
    sync: float  # of a weight sync, whatever its size
    step: float = 0.0  # of a step beside all that: log, checkpoint

    def __post_init__(self) -> None:
        for key in self.__dataclass_fields__:
            value = getattr(self, key)
            if not isinstance(value, LogNormal):
                require_amount(key, value)
        if self.max_replies < 1:
            raise ConfigError(
                f"a server can't hold a single reply: max_replies is {self.max_replies}",
                key="max_replies",
                value=self.max_replies,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The prompt of an episode or of a sub-agent, and the frames that are decoded for it."""

    prompt_tokens: int
    num_frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step samples and trains on, by the recipe's settings."""

    groups_per_round: int  # that a round of rollouts collects
    started_per_round: int  # that it starts; those that are left over are cancelled
    rounds_per_step: int
    group_size: int
    prompts: Sequence[Conversation]  # in rotation
    reply_tokens: LogNormal
    tool_turns: float  # of an episode, on average
    calls_per_turn: float  # on average
    tokens_per_result: int  # of a call's result
    sub_agent: Conversation | None  # of every call
    max_staleness: int
    is_streaming: bool
    waits_for_stale: bool  # rl.on_stale_group: wait
    max_running_groups: int
    packed_tokens: int  # of a step's rows
    num_updates: int  # optimizer steps of a step
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What runs the steps.

    `micro_step_tokens` are the packed tokens, padded, that a trainer GPU with the longest micro-batch of every
    micro-step trains on in a pass over a step's rows; `micro_step_idle` is the share of that time in which an average
    GPU waits for it.
    """

    micro_step_tokens: int
    micro_step_idle: float
    servers: int
    workers: int = 1
    threads_per_worker: int = 4
    episodes_per_worker: int = MAX_EPISODES_IN_PROGRESS  # in progress; a larger group runs alone

    def __post_init__(self) -> None:
        for key in ("servers", "workers", "threads_per_worker", "episodes_per_worker"):
            value = getattr(self, key)
            if value < 1:
                raise ConfigError(f"{key} must be at least 1, not {value}", key=key, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Means over the simulated steps, the first ones left out; shares are of the time of these steps."""

    seconds_per_step: float
    wait_seconds: float  # in which the trainer waits for groups
    train_seconds: float  # packing and policy update
    sync_seconds: float
    trainer_idle: float  # of its GPUs, those that wait for others' micro-batches included
    servers_idle: float  # without a reply in progress, or paused for a weight sync
    workers_idle: float  # of their threads
    replies_per_server: float  # in progress, on average over the time in which there is one
    sampled_tokens: float  # per step
    served_tokens: float  # per step; those of cancelled episodes included
    num_steps: int
    max_age: int  # weight versions between the start of a group and its training
    used_servers: int  # more of them change nothing but the share of the time in which they are idle

    @property
    def steps_per_hour(self) -> float:
        """Return how many steps an hour has."""
        return 3600 / self.seconds_per_step

    @property
    def bottleneck(self) -> Bottleneck:
        """Return the resource that is idle least; latency, if each is idle for most of the time.

        Then single episodes set the pace: turns one after another, and the longest replies.
        """
        idle: dict[Bottleneck, float] = {
            "trainer": self.trainer_idle,
            "servers": self.servers_idle,
            "workers": self.workers_idle,
        }
        name = min(idle, key=lambda resource: idle[resource])
        return name if idle[name] <= _LATENCY_IDLE_SHARE else "latency"


def require_amount(key: str, value: float) -> None:
    """Raise ConfigError unless a cost is a finite number of at least 0."""
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{key} must be a finite number of at least 0, not {value}", key=key, value=value)


def simulate(
    workload: Workload, costs: StageCosts, cluster: Cluster, *, num_steps: int = 12, seed: int = 0
) -> SimulationResult:
    """Simulate `num_steps` steps, and return the means of those after the first `max_staleness` + 1.

    Raises ConfigError if no step would be left.
    """
    if num_steps < workload.max_staleness + 2:
        raise ConfigError(
            f"{num_steps} steps are too few to simulate max_staleness={workload.max_staleness}: the first "
            f"{workload.max_staleness + 1} aren't counted",
            key="num_steps",
            value=num_steps,
        )
    return _Simulator(workload, costs, cluster, random.Random(seed)).run(num_steps)


# ---- resources -----------------------------------------------------------------------------------------------------


class _Clock:
    """Simulated time, and what happens next."""

    def __init__(self) -> None:
        self.now, self._events, self._numbers = 0.0, list[tuple[float, int, Event]](), count()

    def add(self, delay: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), event))

    def run_next(self) -> bool:
        """Run the next event; return whether there was one."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """A reply of `num_tokens` tokens; `prefill` holds the seconds left of its prefill."""

    prefill: float
    num_tokens: float
    group: "_Group"
    on_done: Event


class _Server:
    """Prefills one request at a time, else decodes all replies together at an equal pace.

    `_progress` counts the tokens that a reply in progress since the start would have, so the next reply to end is that
    with the smallest sum of its length and the progress at its start.
    """

    def __init__(self, clock: _Clock, costs: StageCosts, *, is_paused: bool, on_change: Event) -> None:
        self._clock, self._costs, self._is_paused, self._on_change = clock, costs, is_paused, on_change
        self._waiting, self._prefilling = deque[_Request](), deque[_Request]()
        self._decoding, self._num_decoding = list[tuple[float, int, _Request]](), 0
        self._progress, self._updated, self._numbers, self._event_number = 0.0, clock.now, count(), 0
        self.busy_seconds = self.reply_seconds = self.num_tokens = 0.0

    @property
    def num_requests(self) -> int:
        """Return how many requests wait or are in progress."""
        return len(self._waiting) + len(self._prefilling) + self._num_decoding

    def submit(self, request: _Request) -> None:
        self.update()
        self._waiting.append(request)
        self._on_change()
        self._schedule()

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume; replies in progress keep their tokens."""
        self.update()
        self._is_paused = is_paused
        self._schedule()

    def cancel(self, group: "_Group") -> None:
        """Drop the requests of a group."""
        self.update()
        self._waiting = deque(request for request in self._waiting if request.group is not group)
        self._prefilling = deque(request for request in self._prefilling if request.group is not group)
        self._decoding = [entry for entry in self._decoding if entry[2].group is not group]
        self._num_decoding = len(self._decoding)
        heapq.heapify(self._decoding)
        self._on_change()
        self._schedule()

    def update(self) -> None:
        """Bring the counts up to the present."""
        elapsed, self._updated = self._clock.now - self._updated, self._clock.now
        if self._is_paused or not (self._prefilling or self._decoding):
            return
        self.busy_seconds += elapsed
        self.reply_seconds += elapsed * (len(self._prefilling) + self._num_decoding)
        if self._prefilling:
            self._prefilling[0].prefill -= elapsed
        else:
            num_tokens = elapsed / self._compute_step_seconds()  # of each reply
            self._progress += num_tokens
            self.num_tokens += num_tokens * self._num_decoding

    def _compute_step_seconds(self) -> float:
        # A server that needs no time still takes some, so that a reply's end is an event of its own.
        return max(self._costs.decode_step + self._num_decoding * self._costs.decode_step_per_reply, 1e-12)

    def _schedule(self) -> None:
        self._event_number += 1
        while self._waiting and len(self._prefilling) + self._num_decoding < self._costs.max_replies:
            request = self._waiting.popleft()
            if request.prefill > 0:
                self._prefilling.append(request)
            else:
                self._start_decoding(request)
        if self._is_paused:
            return
        if self._prefilling:
            delay = self._prefilling[0].prefill
        elif self._decoding:
            delay = (self._decoding[0][0] - self._progress) * self._compute_step_seconds()
        else:
            return
        number = self._event_number
        self._clock.add(max(delay, 0.0), lambda: self._finish_next(number))

    def _start_decoding(self, request: _Request) -> None:
        heapq.heappush(self._decoding, (self._progress + request.num_tokens, next(self._numbers), request))
        self._num_decoding += 1

    def _finish_next(self, number: int) -> None:
        """End the prefill or the reply that ends first, unless the server's requests have changed since."""
        if number != self._event_number:
            return
        self.update()
        if self._prefilling:
            self._start_decoding(self._prefilling.popleft())
            self._schedule()
            return
        self._progress, _, request = heapq.heappop(self._decoding)
        self._num_decoding -= 1
        self._on_change()
        self._schedule()
        request.on_done()


class _ServerPool:
    """Finds the server with the fewest requests; a server exists from its first request on.

    So the time that a simulation takes depends on the servers in use, not on those of the cluster.
    """

    def __init__(self, clock: _Clock, costs: StageCosts, size: int) -> None:
        self._clock, self._costs, self._size, self._is_paused = clock, costs, size, False
        self.servers = list[_Server]()
        self._fewest = list[tuple[int, int]]()  # a heap of requests and server; entries of changed servers are stale

    def select(self) -> _Server:
        """Return the first of the servers with the fewest requests."""
        while self._fewest and self._fewest[0][0] != self.servers[self._fewest[0][1]].num_requests:
            heapq.heappop(self._fewest)
        if (self._fewest and not self._fewest[0][0]) or len(self.servers) == self._size:
            return self.servers[self._fewest[0][1]]
        index = len(self.servers)

        def on_change() -> None:
            heapq.heappush(self._fewest, (self.servers[index].num_requests, index))

        self.servers.append(_Server(self._clock, self._costs, is_paused=self._is_paused, on_change=on_change))
        return self.servers[index]

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume all servers."""
        self._is_paused = is_paused
        for server in self.servers:
            server.set_paused(is_paused)


class _SimulatedWorker:
    """Threads that run jobs in order of arrival."""

    def __init__(self, clock: _Clock, num_threads: int) -> None:
        self._clock, self._num_threads = clock, num_threads
        self._waiting, self._num_busy, self._updated, self.busy_seconds = deque[tuple[float, Event]](), 0, 0.0, 0.0
        self.num_groups = 0

    def update(self) -> None:
        """Bring the counts up to the present."""
        self.busy_seconds += (self._clock.now - self._updated) * self._num_busy
        self._updated = self._clock.now

    def run(self, seconds: float, on_done: Event) -> None:
        if seconds <= 0:
            on_done()
            return
        self.update()
        self._waiting.append((seconds, on_done))
        self._start()

    def _start(self) -> None:
        while self._waiting and self._num_busy < self._num_threads:
            seconds, on_done = self._waiting.popleft()
            self._num_busy += 1
            self._clock.add(seconds, lambda on_done=on_done: self._finish(on_done))  # type: ignore[misc]

    def _finish(self, on_done: Event) -> None:
        self.update()
        self._num_busy -= 1
        self._start()
        on_done()


# ---- episodes and steps --------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """A group in progress or at its end; `version` is that of the weights when it was started."""

    number: int
    version: int
    server: _Server | None = None
    worker: _SimulatedWorker | None = None
    num_left: int = 0  # episodes
    num_tokens: float = 0.0  # sampled
    is_cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class _Totals:
    """What the measured steps add up to."""

    start: float = 0.0
    wait: float = 0.0
    train: float = 0.0
    busy: float = 0.0  # seconds of an average trainer GPU
    sync: float = 0.0
    sampled_tokens: float = 0.0
    max_age: int = 0
    served: list[tuple[float, float, float]] = field(default_factory=list)  # of each server at the start
    worked: list[float] = field(default_factory=list)


class _Simulator:
    """One run; the trainer's loop is `run`, all else are events."""

    def __init__(self, workload: Workload, costs: StageCosts, cluster: Cluster, rng: random.Random) -> None:
        self.workload, self._costs, self._cluster, self._rng, self._clock = workload, costs, cluster, rng, _Clock()
        self._pool = _ServerPool(self._clock, costs, cluster.servers)
        self._workers = [_SimulatedWorker(self._clock, cluster.threads_per_worker) for _ in range(cluster.workers)]
        self._numbers, self._version, self._step, self._num_needed, self._num_over_provisioned = count(), 0, 0, 0, 0
        self._in_progress, self._waiting = dict[int, _Group](), list[_Group]()  # started and ended
        self._not_running = deque[_Group]()  # started, but beyond the limit of groups in progress
        self._num_running, self._groups_per_worker = 0, max(cluster.episodes_per_worker // workload.group_size, 1)

    def run(self, num_steps: int) -> SimulationResult:
        """Simulate the trainer: it waits for the groups of each step, updates the policy, and syncs the weights."""
        workload, costs, totals = self.workload, self._costs, _Totals()
        micro_step_seconds = self._cluster.micro_step_tokens * costs.trained_token
        optimizer_seconds = workload.num_updates * costs.optimizer_step
        train_seconds = workload.packed_tokens * costs.packed_token + micro_step_seconds + optimizer_seconds
        sync_seconds = costs.sync + workload.weight_bytes * costs.sync_byte
        for step in range(num_steps):
            if step == workload.max_staleness + 1:
                totals = self._start_totals()
            started = self._clock.now
            self._step = step
            groups = [group for _ in range(workload.rounds_per_step) for group in self._take()]
            totals.wait += self._clock.now - started
            totals.max_age = max([totals.max_age, *(step - group.version for group in groups)])
            totals.sampled_tokens += sum(group.num_tokens for group in groups)
            self._wait(train_seconds)
            self._pool.set_paused(True)
            self._wait(sync_seconds)
            self._pool.set_paused(False)
            self._version = step + 1
            self._start_groups()
            self._wait(costs.step)
            totals.train += train_seconds
            totals.busy += micro_step_seconds * (1 - self._cluster.micro_step_idle) + optimizer_seconds
            totals.sync += sync_seconds
        return self._summarize(totals, num_steps - workload.max_staleness - 1)

    def _start_totals(self) -> _Totals:
        for server in self._pool.servers:
            server.update()
        for worker in self._workers:
            worker.update()
        return _Totals(
            start=self._clock.now,
            served=[(server.busy_seconds, server.reply_seconds, server.num_tokens) for server in self._pool.servers],
            worked=[worker.busy_seconds for worker in self._workers],
        )

    def _summarize(self, totals: _Totals, num_steps: int) -> SimulationResult:
        before, now, seconds = totals, self._start_totals(), self._clock.now - totals.start
        busy, reply_seconds, num_tokens = (
            sum(
                end[index] - start[index]
                for start, end in zip_longest(before.served, now.served, fillvalue=(0.0, 0.0, 0.0))
            )
            for index in range(3)
        )
        worked = sum(now.worked) - sum(before.worked)
        num_threads = self._cluster.workers * self._cluster.threads_per_worker

        def compute_idle(busy_seconds: float, size: int) -> float:
            # Rounding of sums may leave a share slightly below 0.
            return min(max(1 - busy_seconds / (size * seconds), 0.0), 1.0) if seconds else 0.0

        return SimulationResult(
            seconds_per_step=seconds / num_steps,
            wait_seconds=totals.wait / num_steps,
            train_seconds=totals.train / num_steps,
            sync_seconds=totals.sync / num_steps,
            trainer_idle=compute_idle(totals.busy, 1),
            servers_idle=compute_idle(busy, self._cluster.servers),
            workers_idle=compute_idle(worked, num_threads),
            replies_per_server=reply_seconds / busy if busy else 0.0,
            sampled_tokens=totals.sampled_tokens / num_steps,
            served_tokens=num_tokens / num_steps,
            num_steps=num_steps,
            max_age=totals.max_age,
            used_servers=len(self._pool.servers),
        )

    def _wait(self, seconds: float) -> None:
        """Let everything else run for so long."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = True

        self._clock.add(seconds, end)
        while not is_over:
            self._clock.run_next()

    # ---- groups; see training.group_scheduler for the rules ----

    def _take(self) -> list[_Group]:
        """Wait for the groups of a round, and return them, the oldest first."""
        self._num_needed = self.workload.groups_per_round
        self._start_groups()
        while (taken := self._choose()) is None:
            if not self._clock.run_next():
                raise AssertionError("no group is in progress, but the trainer waits for one")
        self._num_needed = 0
        self._waiting = [group for group in self._waiting if group not in taken]
        self._start_groups()
        return taken

    def _choose(self) -> list[_Group] | None:
        if len(self._waiting) < self._num_needed:
            return None
        groups = sorted(self._waiting, key=lambda group: (group.version, group.number))[: self._num_needed]
        if not self.workload.max_staleness:
            return groups
        others = [group for group in self._waiting if group not in groups]
        # Of groups that started with the same version, those that have ended get slots first.
        versions = sorted(
            [(g.version, False) for g in others] + [(g.version, True) for g in self._in_progress.values()]
        )
        num_assigned, has_to_wait = 0, False
        for version, is_in_progress in versions:
            if num_assigned < self._count_slots(version):
                num_assigned += 1
            else:
                has_to_wait |= is_in_progress
        return None if has_to_wait and self.workload.waits_for_stale else groups

    def _count_slots(self, version: int) -> int:
        """Return the number of slots in the steps after this one, up to the last step for a group of `version`."""
        return max(version + self.workload.max_staleness - self._step, 0) * self.workload.groups_per_round

    def _start_groups(self) -> None:
        """Start as many groups as the settings allow now."""
        workload, num_untrained = self.workload, len(self._waiting) + len(self._in_progress)
        if self._num_over_provisioned and len(self._in_progress) <= self._num_over_provisioned:
            self._cancel_groups()
            num_untrained = len(self._waiting)
        num_slots = self._num_needed + self._count_slots(self._version) - num_untrained
        num_missing = max(self._num_needed - num_untrained, 0)
        if not workload.max_staleness:
            num_started = workload.started_per_round if self._num_needed and not num_untrained else 0
            self._num_over_provisioned = workload.started_per_round - workload.groups_per_round
        elif workload.is_streaming:
            num_started = min(num_slots, workload.max_running_groups - len(self._in_progress))
        else:
            num_required = num_missing or workload.groups_per_round
            if self._in_progress or num_required > num_slots:
                return
            num_started = math.ceil(num_required * workload.started_per_round / workload.groups_per_round)
            self._num_over_provisioned = num_started - num_required
        for _ in range(num_started):
            group = _Group(number=next(self._numbers), version=self._version)
            self._in_progress[group.number] = group
            self._not_running.append(group)
        self._run_groups()

    def _cancel_groups(self) -> None:
        self._num_over_provisioned = 0
        for group in self._in_progress.values():
            group.is_cancelled = True
            self._num_running -= group.worker is not None
            if group.worker is not None:
                group.worker.num_groups -= 1
            for server in self._pool.servers:
                server.cancel(group)
        self._in_progress.clear()
        self._not_running.clear()

    def _run_groups(self) -> None:
        while self._not_running and self._num_running < self.workload.max_running_groups:
            worker = min(self._workers, key=lambda worker: worker.num_groups)
            if worker.num_groups >= self._groups_per_worker:
                return
            group = self._not_running.popleft()
            self._num_running += 1
            prompt = self.workload.prompts[group.number % len(self.workload.prompts)]
            group.worker = worker
            group.worker.num_groups += 1
            group.num_left = self.workload.group_size

            def start(group: _Group = group, prompt: Conversation = prompt) -> None:
                # The first request encodes the prompt, and those of its siblings find it in the prefix cache.
                for index in range(self.workload.group_size):
                    _Episode(self, group).sample(0 if index else prompt.prompt_tokens)

            group.worker.run(prompt.num_frames * self._costs.frame, start)

    def finish_episode(self, group: _Group) -> None:
        """Score an episode; the last one ends its group."""
        group.num_left -= 1
        if group.num_left or group.is_cancelled:
            return
        assert group.worker is not None
        group.worker.num_groups -= 1
        self._num_running -= 1
        self._run_groups()  # while this one is scored
        seconds = max(self._costs.score.draw(self._rng) for _ in range(self.workload.group_size))
        self._clock.add(seconds, lambda: self._finish_group(group))

    def _finish_group(self, group: _Group) -> None:
        if self._in_progress.pop(group.number, None) is not None:
            self._waiting.append(group)
            self._start_groups()

    # ---- what an episode uses ----

    def sample(self, group: _Group, prefill_tokens: int, on_done: Event, *, is_sub_agent: bool = False) -> None:
        """Sample a reply on the group's server; a sub-agent's on the server with the fewest."""
        if group.is_cancelled:
            return
        if is_sub_agent or group.server is None:
            server = self._pool.select()
            group.server = group.server or server
        else:
            server = group.server
        num_tokens = max(1.0, self.workload.reply_tokens.draw(self._rng))
        group.num_tokens += num_tokens
        prefill = prefill_tokens * self._costs.prefill_token
        server.submit(_Request(prefill=prefill, num_tokens=num_tokens, group=group, on_done=on_done))

    def run_call(self, group: _Group, on_done: Event) -> None:
        """Run a call on the group's worker, then its sub-agent."""
        sub_agent = self.workload.sub_agent
        seconds = self._costs.tool_call.draw(self._rng)
        assert group.worker is not None
        if sub_agent is None:
            group.worker.run(seconds, on_done)
            return

        def sample() -> None:
            self.sample(group, sub_agent.prompt_tokens, on_done, is_sub_agent=True)

        group.worker.run(seconds + sub_agent.num_frames * self._costs.frame, sample)

    def draw_count(self, mean: float) -> int:
        """Draw one of the two integers around a mean, so that it is their mean."""
        return math.floor(mean) + (self._rng.random() < mean - math.floor(mean))


class _Episode:
    """Turns one after another; the calls of a turn run concurrently."""

    def __init__(self, simulator: _Simulator, group: _Group) -> None:
        self._simulator, self._group = simulator, group
        self._num_turns_left, self._num_calls_left = simulator.draw_count(simulator.workload.tool_turns), 0

    def sample(self, prefill_tokens: int) -> None:
        """Sample the reply of the next turn."""
        self._simulator.sample(self._group, prefill_tokens, self._run_calls)

    def _run_calls(self) -> None:
        if not self._num_turns_left:
            self._simulator.finish_episode(self._group)
            return
        self._num_turns_left -= 1
        self._num_calls_left = num_calls = self._simulator.draw_count(self._simulator.workload.calls_per_turn)
        if not num_calls:
            self.sample(0)
        for _ in range(num_calls):
            self._simulator.run_call(self._group, lambda: self._finish_call(num_calls))

    def _finish_call(self, num_calls: int) -> None:
        self._num_calls_left -= 1
        if not self._num_calls_left:
            self.sample(num_calls * self._simulator.workload.tokens_per_result)
