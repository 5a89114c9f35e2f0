"""Rank 0 sends commands, the other ranks run them: all collective operations of a training start here.

    rank 0                                                     rank 1, 2, …
    Controller.call ──command: method, arguments (gloo)──────> serve_commands
      TrainingWorker.method <──collective operations (FSDP2)──> TrainingWorker.method
      MicroSteps    ──one micro-batch per rank and micro-step─> MicroSteps

Calls have one lock, so two of them can't interleave. A rank that fails writes the reason to the job's key-value store
and closes its connections, which ends the collective operations of the others; rank 0 raises the reason. A rank that is
killed closes its connections too; one that hangs ends the operation after the timeout.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.distributed_c10d import Store

from saccade.errors import RunError, SaccadeError, convert_errors
from saccade.training.background import RankLostError

_COMMAND_TIMEOUT = timedelta(days=7)  # of the ranks that wait for a command while rank 0 collects rollouts
_FAILURE_KEY, _RECEIVED_KEY = "saccade/failure", "saccade/failure_received"
_RANK_ZERO_FAILURE_KEY = "saccade/rank_zero_failure"
_RANK_ZERO_LOST_KEY = "saccade/rank_zero_lost"  # a counter: the first rank that has lost rank 0 reports it
_FAILURE_SECONDS = 5.0  # in which a failing rank's reason arrives
_RECEIPT_SECONDS = 10.0  # in which rank 0 receives it, unless it is lost
_STOP = "stop"
Command = tuple[str, tuple[Any, ...], int]  # the method's name, its arguments, the number of micro-steps


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

    def __init__(self, worker: Any, group: Any, store: Store) -> None:
        self._worker, self._group, self._store = worker, group, store
        self._lock = threading.Lock()
        self._is_broken, self._lost_reason = False, "a rank of this training was lost; resume it with --resume"
        self.has_lost_rank = False  # a call raises RankLostError soon, or has raised it

    def prepare(self, method: str, *args: Any) -> None:
        """Run a worker's method on rank 0 alone, before a call; an error in it leaves the other ranks ready."""
        with self._lock:
            getattr(self._worker, method)(*args)

    def call(
        self, method: str, *args: Any, micro_steps: Iterator[Sequence[Any]] | None = None, num_micro_steps: int = 0
    ) -> Any:
        """Run a worker's method on every rank; return rank 0's result.

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
                result = getattr(self._worker, method)(*([own] if own else []), *args)
                self._is_broken = False
                return result
            except RuntimeError as error:
                if own is not None and own.is_aborted:
                    raise
                self.has_lost_rank = True
                raise self.explain(error) from error
            except SaccadeError as error:
                if own is None or not own.is_aborted:
                    with contextlib.suppress(RuntimeError):
                        # torchrun's signal may come before the failed rank's connections end.
                        if self._store.check([_FAILURE_KEY]):
                            self.has_lost_rank = True
                            raise self.explain(RuntimeError(str(error))) from error
                        self._store.set(_RANK_ZERO_FAILURE_KEY, "")
                raise
            finally:
                if own is not None and own.is_aborted:
                    self._is_broken = False

    def stop(self) -> None:
        """End the other ranks."""
        with self._lock, contextlib.suppress(RuntimeError):
            if not self._is_broken:
                self._is_broken = True
                self._send((_STOP, (), 0))

    def _send(self, command: Command) -> None:
        distributed.broadcast_object_list([command], src=0, group=self._group)

    def explain(self, error: RuntimeError) -> RankLostError:
        """Return the failure of another rank that ended a collective operation, or else this rank's error.

        Later calls raise the same.
        """
        explained = self._find_failure(error)
        self._lost_reason = str(explained)
        with contextlib.suppress(RuntimeError):
            self._store.set(_RECEIVED_KEY, "")  # the others needn't report it
        return explained

    def _find_failure(self, error: RuntimeError) -> RankLostError:
        with contextlib.suppress(RuntimeError):
            if _has_key(self._store, _FAILURE_KEY):
                reason, key, value = json.loads(self._store.get(_FAILURE_KEY))
                return RankLostError(f"{reason}; resume the training with --resume", key=key, value=value)
        return RankLostError(
            f"rank 0 or its connection to another rank failed: {_shorten(error)}; resume the training with --resume"
        )


def serve_commands(worker: Any, group: Any, store: Store) -> None:
    """Run the methods that rank 0 sends until it stops. Raises RunError on the first rank that has lost rank 0.

    Raises SystemExit after an error that another rank reports.
    """
    rank = distributed.get_rank()
    while True:
        received: list[Any] = [None]
        try:
            distributed.broadcast_object_list(received, src=0, group=group)
        except RuntimeError as error:
            raise _report_lost_rank_zero(store, f"rank {rank} has lost rank 0: {_shorten(error)}") from error
        method, args, num_micro_steps = received[0]
        if method == _STOP:
            return
        try:
            with convert_errors(RunError, f"rank {rank} failed"):
                getattr(worker, method)(*([MicroSteps(num_micro_steps, None)] if num_micro_steps else []), *args)
        except CommandAbortedError:
            continue
        except SaccadeError as error:
            if store.check([_RANK_ZERO_FAILURE_KEY]):  # rank 0 reports it
                raise SystemExit(1) from None
            is_disconnected = _is_connection_error(error.__cause__)
            message = (
                f"rank {rank} has lost another rank: {_shorten(error.__cause__)}" if is_disconnected else str(error)
            )
            with contextlib.suppress(RuntimeError):
                value = error.value if isinstance(error.value, int) else None
                # The reason of a failed rank precedes those of the ranks that have lost it.
                reason = json.dumps([message, error.key, value])
                is_first = store.compare_set(_FAILURE_KEY, "", reason).decode() == reason
                distributed.destroy_process_group()
                # A process's end closes its connections, which ends the others' operations, those of rank 0 at last.
                if not is_first:
                    raise SystemExit(1) from None
                if _has_key(store, _RECEIVED_KEY, _RECEIPT_SECONDS) or not isinstance(error.__cause__, RuntimeError):
                    raise SystemExit(1) from None
            raise _report_lost_rank_zero(store, message) from error  # rank 0 may be lost


def _report_lost_rank_zero(store: Store, message: str) -> RunError:
    """Return the error of the first rank that has lost rank 0; raise SystemExit on the others."""
    with contextlib.suppress(RuntimeError):  # without the store each rank reports it
        if store.add(_RANK_ZERO_LOST_KEY, 1) > 1:
            raise SystemExit(1)
    return RunError(f"{message}; resume the training with --resume")


def _has_key(store: Store, key: str, seconds: float = _FAILURE_SECONDS) -> bool:
    """Return whether the store holds a key, or receives it within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (is_set := store.check([key])) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_set


_GLOO_ERROR = re.compile(r"\[\S+\.cc:\d+\] (.*?)(\. |$)")


def _is_connection_error(error: BaseException | None) -> bool:
    """Return whether a collective operation failed because another rank did."""
    return isinstance(error, distributed.DistError) or bool(_GLOO_ERROR.match(str(error)))


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
