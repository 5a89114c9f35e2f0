"""Define what executors with workers, the driver process and the workers send each other; every message is pickled.

    Ray:        executor ──RunGroup, Cancel, Pause, Resume──> driver ──method calls──> workers
                executor <──Finished, Paused, ClusterStatus, Fatal, Unreachable── driver <──results── workers
    processes:  executor ──WorkerSetup, RunGroups, Cancel, LoadWeights──> a worker's process
                executor <──Finished, Synced, Fatal── a worker's process

A group is identified by its key wherever it runs: see `GroupKey`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from saccade.config.schema import RayConfig, Recipe
from saccade.errors import SaccadeError
from saccade.protocols import ScoreResult
from saccade.types import Episode, SamplingParams, Task

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"  # of the driver and the workers


class GroupKey(NamedTuple):
    """The identity of a group of episodes: two runs of the same key have the same seeds.

    The seed of a group's first episode is derived from the run's seed, the step, the task and how often the task was
    drawn in that step. `call` distinguishes repeated evaluations of the same group with other weights.
    """

    call: int  # number of the call of `run_episodes`
    task_digest: str
    seed: int  # of the first episode


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """What of an episode's context is its own; a worker adds its engine, renderer, media and clock."""

    seed: int
    sampling: SamplingParams
    frame_budget: int | None
    episode_timeout: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Episodes of one task that start together on one worker."""

    key: GroupKey
    task: Task
    environment_settings: Mapping[str, Any]  # of the task's environment
    episodes: Sequence[EpisodeRequest]
    restarts_on_sync: bool  # whether episodes in progress start over at a weight sync
    media_files: Sequence[str]  # of the task, that exist where the trainer runs
    is_scored: bool  # whether the worker computes the rewards of single episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The episodes of a group in order; if it was cancelled, those that had ended."""

    key: GroupKey
    episodes: Sequence[Episode]
    graded: Sequence[ScoreResult] | None = None  # of the rewards of single episodes, if the worker has computed them
    is_cancelled: bool = False
    error: SaccadeError | None = None  # what the user must fix
    restarts: Mapping[str, float] = field(default_factory=dict)  # of its worker; see RestartOnSync.pop_metrics
    media: Mapping[str, int] = field(default_factory=dict)  # of its worker; see CachingMediaLoader.pop_counts
    wait_seconds: float = 0.0  # until a worker had room
    worker: str = ""  # its name


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker is built from."""

    recipe: Recipe  # with the rewards that workers compute
    generated_dir: str  # folder of images that tools make
    probe_file: str  # a file in it that a worker must see
    working_dir: str  # where relative paths start
    environment: Mapping[str, str]  # variables that libraries read on import
    num_cpus: int  # that its threads and sandboxes use; 0: all of the node
    is_pinned: bool  # whether they are its own


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run's rollouts; the driver sends it with each heartbeat, for `saccade cluster status`."""

    num_workers: int
    num_up: int  # workers
    num_waiting_groups: int  # until a worker has room
    num_lost: int  # workers that died or stopped to respond, in total
    num_rerun: int  # groups that ran again because their worker was lost, in total
    last_error: str  # the last failure of a group, or of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker reports with each heartbeat, and to `saccade cluster status`."""

    name: str
    host: str  # name of its node
    pid: int
    run: RunStatus | None  # None before the first heartbeat
    num_running_groups: int  # leased to it, those that it scores included
    sampled_tokens_per_second: float  # sampled tokens of the groups that finished within the last minute
    num_finished_groups: int
    num_finished_episodes: int
    num_sampled_tokens: int
    version: int  # of the weights that its engine samples from
    outdated_servers: Sequence[str] = ()  # that have other weights than the run's


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSetup:
    """What a driver process is started with."""

    run: str  # name of the run, a part of its workers' names
    config: RayConfig
    worker: WorkerSetup


# ---- from the executor -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Run a group."""

    request: GroupRequest


@dataclass(frozen=True, slots=True)
class RunGroups:
    """Run groups that start together."""

    requests: Sequence[GroupRequest]


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load new weights, as soon as unfinished replies have ended; answered by `Synced`."""

    state: bytes  # a state dict as torch saves it
    version: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a group; its result holds the episodes that had ended."""

    key: GroupKey


@dataclass(frozen=True, slots=True)
class Pause:
    """Start no group, and pause requests of those in progress; answered by `Paused`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue with the weights that `state` describes; see protocols.SharedServersEngine."""

    state: Any


@dataclass(frozen=True, slots=True)
class Close:
    """End the workers, and the driver."""


# ---- to the executor -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finished:
    """A group has a result."""

    result: GroupResult


@dataclass(frozen=True, slots=True)
class Synced:
    """A worker's process samples from the weights of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Paused:
    """No worker that is up sends requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The state of the workers, sent regularly: the driver's own heartbeat."""

    num_up: int  # workers
    num_lost: int = 0  # workers that died or stopped to respond, since the last message
    num_rerun: int = 0  # groups that were in progress on them and run again, since the last message
    outdated_servers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Fatal:
    """No group can run: the user must fix something."""

    error: SaccadeError


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The cluster can't be used now; the driver ends, and a new one may connect later."""

    reason: str
