"""Rank 0 sends commands, the other ranks run them: all collective operations of a training start here.

    rank 0                                                     rank 1, 2, …
    Controller.call ──command: method, arguments (gloo)──────> serve_commands
      TrainingWorker.method <──collective operations (FSDP2)──> TrainingWorker.method
      MicroSteps    ──one micro-batch per rank and micro-step─> MicroSteps

Calls have one lock, so two of them can't interleave. A rank that fails, or has lost another one, ends: its connections
close, which ends the collective operations of the others. `failure_report` decides which process prints the reason. A
rank that hangs ends the operation after the timeout.
"""

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

from torch import distributed

from saccade.errors import RunError, SaccadeError, convert_errors
from saccade.training.background import RankLostError
from saccade.training.distributed.failure_report import LOST_RANK_KEY, FailureReport

_COMMAND_TIMEOUT = timedelta(days=7)  # of the ranks that wait for a command while rank 0 collects rollouts
_FAILURE_SECONDS = 5.0  # in which a failing rank's reason arrives
_STOP = "stop"
Command = tuple[str, tuple[Any, ...], int]  # the method's dotted name, its arguments, the number of micro-steps


class CommandAbortedError(SaccadeError):
    """Rank 0 failed to prepare a micro-step: the other ranks drop the command."""


class MicroSteps:
    """The micro-steps of a command: iterating yields this rank's item of each, which rank 0 sends."""

    def __init__(self, count: int, source: Iterator[Sequence[Any]] | None) -> None:
        self._count, self._source = count, source
        self.is_aborted = False

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's items. Raises what rank 0's source raises; CommandAbortedError on the other ranks."""
        for _ in range(self._count):
            item = self._scatter(self._prepare_items())
            if isinstance(item, CommandAbortedError):
                raise item
            yield item

    def _prepare_items(self) -> list[Any] | None:
        if self._source is None:
            return None
        self.is_aborted = True
        try:
            items = list(next(self._source))
            self.is_aborted = False
            return items
        finally:
            if self.is_aborted:
                self._scatter([CommandAbortedError("rank 0 stopped the command")] * distributed.get_world_size())

    def _scatter(self, items: list[Any] | None) -> Any:
        received: list[Any] = [None]
        distributed.scatter_object_list(received, items, src=0)
        return received[0]


class Controller:
    """Runs methods of the workers of all ranks at the same time; exists on rank 0."""

    def __init__(self, worker: Any, group: Any, report: FailureReport) -> None:
        self._worker, self._group, self._report = worker, group, report
        self._lock = threading.Lock()
        self._is_stopped = False
        self._is_broken, self._lost_reason = False, "a rank of this training was lost; resume it with --resume"
        self.has_lost_rank = False  # a call raises RankLostError soon, or has raised it
        self.is_ending = False  # the job was stopped by a signal

    def call_on_rank_zero(self, method: str, *args: Any) -> None:
        """Run a worker's method on rank 0 alone, before a call; an error in it leaves the other ranks ready."""
        with self._lock:
            attrgetter(method)(self._worker)(*args)

    def call(
        self, method: str, *args: Any, micro_steps: Iterator[Sequence[Any]] | None = None, num_micro_steps: int = 0
    ) -> Any:
        """Run a worker's method, or one of a part of it ("vlm.save"), on every rank; return rank 0's result.

        With `num_micro_steps` the method's first argument is an iterable of micro-steps, from `micro_steps`, which
        yields one item per rank. Raises RankLostError if a rank fails or is lost; no call is possible then.
        """
        with self._lock:
            if self._is_broken:
                raise RankLostError(self._lost_reason)
            own = MicroSteps(num_micro_steps, micro_steps) if num_micro_steps else None
            self._is_broken = True
            try:
                self._send((method, args, num_micro_steps))
                result = attrgetter(method)(self._worker)(*([own] if own else []), *args)
                self._is_broken = False
                return result
            except RuntimeError as error:
                if own is not None and own.is_aborted:
                    raise
                raise self.explain(error) from error
            except SaccadeError as error:
                if own is not None and own.is_aborted:
                    raise
                # torchrun's signal may come before the failed rank's connections end.
                if self.find_failure():
                    raise self.explain(error) from error
                self._report.claim()  # before the connections to the other ranks end
                raise
            finally:
                if own is not None and own.is_aborted:
                    self._is_broken = False

    def stop(self) -> None:
        """End the other ranks, once; those that can't be reached leave the report to this one.

        After a second Ctrl-C a thread may still be inside of a call: the other ranks end when this process does.
        """
        if not self._lock.acquire(blocking=False):
            self._report.claim()
            return
        try:
            if self._is_stopped:
                return
            if self._is_broken:
                self._report.claim()
            else:
                self._is_broken = self._is_stopped = True
                with contextlib.suppress(RuntimeError):
                    self._send((_STOP, (), 0))
        finally:
            self._lock.release()

    def _send(self, command: Command) -> None:
        distributed.broadcast_object_list([command], src=0, group=self._group)

    def find_failure(self) -> RankLostError | None:
        """Return the failure of another rank, if it has written its reason."""
        return self._report.find_failure()

    def explain(self, error: Exception) -> RankLostError:
        """Return the failure of another rank that ended a collective operation, or else this rank's error.

        Later calls raise the same.
        """
        self.has_lost_rank = True
        explained = self._report.find_failure(_FAILURE_SECONDS) or RankLostError(
            f"rank 0 or its connection to another rank failed: {_shorten(error)}; resume the training with --resume",
            key=LOST_RANK_KEY,
        )
        self._lost_reason = str(explained)
        self._report.claim()
        return explained


def serve_commands(worker: Any, group: Any, report: FailureReport) -> None:
    """Run the methods that rank 0 sends until it stops.

    Raises RunError if this rank reports why the job failed, and SystemExit if another one does.
    """
    while True:
        received: list[Any] = [None]
        try:
            distributed.broadcast_object_list(received, src=0, group=group)
        except RuntimeError as error:  # the sender isn't always rank 0
            raise _report_failure(report, _describe_loss(report.rank, error), LOST_RANK_KEY) from error
        method, args, num_micro_steps = received[0]
        if method == _STOP:
            return
        try:
            with convert_errors(RunError, f"rank {report.rank} failed"):
                attrgetter(method)(worker)(*([MicroSteps(num_micro_steps, None)] if num_micro_steps else []), *args)
        except CommandAbortedError:
            continue
        except SaccadeError as error:
            # a collective operation failed because another rank did
            if isinstance(error.__cause__, distributed.DistError) or _GLOO_ERROR.match(str(error.__cause__)):
                raise _report_failure(report, _describe_loss(report.rank, error.__cause__), LOST_RANK_KEY) from error
            value = error.value if isinstance(error.value, int) else None
            raise _report_failure(report, str(error), error.key, value) from error


def _report_failure(report: FailureReport, message: str, key: str, value: int | None = None) -> RunError:
    """Return the error of a rank that reports why the job failed; raises SystemExit on the others."""
    if report.post(message, key, value) and not report.wait_for_claim() and report.claim():
        return RunError(f"{message}; rank 0 doesn't respond; resume the training with --resume", key=key)
    raise SystemExit(1)


def _describe_loss(rank: int, error: BaseException | None) -> str:
    return f"rank {rank} has lost another rank: {_shorten(error)}"


_GLOO_ERROR = re.compile(r"\[[^\s\[]+\.cc:\d+\] (.*?)(\. |$)")


def _shorten(error: BaseException | None) -> str:
    """Return the first line of an error; of one of gloo, without its source file and its advice.

    >>> _shorten(RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2. This is typically"))
    'Connection closed by peer [::1]:2'
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if gloo := _GLOO_ERROR.match(line):
        line = gloo[1]
    return line[:300]


def create_control_group(timeout: timedelta) -> Any:
    """Return the group over which commands are sent, through the CPU; rank 0 waits at most `timeout`."""
    # Each process has its own timeout.
    return distributed.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT if distributed.get_rank() else timeout)
