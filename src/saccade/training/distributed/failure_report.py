"""Which process prints why a job of several ranks failed: one of them, in one sentence.

    rank r: post the reason ──> store (of torchrun on the first node: it outlives rank 0)
                                  ├──> rank 0, in a thread: claim the report, for when its operation fails
    rank r: exit silently <───────┘
        or, without a claim within _CLAIM_SECONDS: rank 0 is lost; claim the report

    the rank that claims ──sentence──> store ──> the process of `--nproc`, once all ranks have ended: print it, or
            │                                    if the rank was killed first: the reason, or which rank was killed
            └ under torchrun: print it

Without the store, which is lost with the first node, the first rank of each other node prints it.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from saccade.errors import RunError, SaccadeError
from saccade.training.background import RankLostError

LOST_RANK_KEY = "rank"  # of an error that only says that a connection ended, not why
_LAUNCHER_KEY, _FAILURE_KEY, _REPORTER_KEY, _SENTENCE_KEY = (
    f"saccade/{name}" for name in ("launcher", "failure", "reporter", "sentence")
)
_WATCH_TIMEOUT = timedelta(days=7)
_CLAIM_SECONDS = 10.0  # in which rank 0 claims the report of a reason, unless it is lost
_INTERRUPTED = 130  # the exit code of a rank that has printed how it is resumed


class FailureReport:
    """A rank's part in deciding which process prints why the job failed."""

    def __init__(self, store: Store, rank: int, *, is_first_of_node: bool) -> None:
        self._store, self.rank, self._is_first_of_node = store, rank, is_first_of_node
        self._is_claimed = threading.Event()

    def watch(self) -> None:
        """Follow the store in a thread: on rank 0 claim what another rank posts, on the others learn of a claim."""
        store = self._store.clone()  # type: ignore[attr-defined] # a connection of the thread's own
        threading.Thread(target=self._watch, args=(store,), name="saccade-failures", daemon=True).start()

    def _watch(self, store: Store) -> None:
        with contextlib.suppress(RuntimeError):  # torchrun has ended
            store.wait([_REPORTER_KEY if self.rank else _FAILURE_KEY], _WATCH_TIMEOUT)
            if self.rank == 0:
                self.claim()
            self._is_claimed.set()

    def claim(self) -> bool:
        """Return whether this rank reports why the job failed. A repeated call returns the same."""
        try:
            return self._store.compare_set(_REPORTER_KEY, "", str(self.rank)) == str(self.rank).encode()
        except RuntimeError:
            return self._is_first_of_node and not self._is_claimed.is_set()

    @contextlib.contextmanager
    def raise_on_one_rank(self) -> Iterator[None]:
        """Raise the block's SaccadeError if this rank prints it, and SystemExit if another process does."""
        try:
            yield
        except SaccadeError as error:
            if not self.claim():
                raise SystemExit(1) from None
            if self._leave_to_launcher(error):
                raise SystemExit(error.exit_code) from None
            raise

    def _leave_to_launcher(self, error: SaccadeError) -> bool:
        """Write the sentence for the process of `--nproc`; return False if there is none, or if it is lost."""
        try:
            if not self._store.check([_LAUNCHER_KEY]):
                return False
            self._store.compare_set(_SENTENCE_KEY, "", json.dumps([str(error), error.key, error.exit_code]))
            return True
        except RuntimeError:
            return False

    def wait_for_claim(self) -> bool:
        """Return whether a rank claims the report within _CLAIM_SECONDS."""
        return self._is_claimed.wait(_CLAIM_SECONDS)

    def post(self, reason: str, key: str, value: int | None) -> bool:
        """Write why this rank failed, unless another one failed before; return whether this was the first."""
        text = json.dumps([reason, key, value])
        try:
            return self._store.compare_set(_FAILURE_KEY, "", text) == text.encode()
        except RuntimeError:
            return True

    def find_failure(self, seconds: float = 0.0) -> RankLostError | None:
        """Return the failure of another rank, if its reason arrives within so many seconds."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while True:
                if failure := _read_failure(self._store):
                    return failure
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
        return None


def _read_failure(store: Store) -> RankLostError | None:
    if not store.check([_FAILURE_KEY]):
        return None
    reason, key, value = json.loads(store.get(_FAILURE_KEY))
    return RankLostError(f"{reason}; resume the training with --resume", key=key, value=value)


def announce_launcher(store: Store) -> None:
    """Let the ranks of a job leave their sentence in its store; this process prints it."""
    store.set(_LAUNCHER_KEY, "1")


def read_sentence(store: Store) -> RunError | None:
    """Return the error that a rank has left to the process of `--nproc`, with its exit code."""
    if not store.check([_SENTENCE_KEY]):
        return None
    sentence, key, exit_code = json.loads(store.get(_SENTENCE_KEY))
    error = RunError(sentence, key=key)
    error.exit_code = exit_code
    return error


def explain_exits(store: Store, exit_codes: Mapping[int, int], advice: str) -> SaccadeError | None:
    """Return why a job of `--nproc` failed, None if a rank has printed it.

    `exit_codes` has those of the ranks that failed, in the order of their ends; `advice` follows the name of a rank
    that was killed.
    """
    error: SaccadeError | None = read_sentence(store)
    if error is None:
        reporter = int(store.get(_REPORTER_KEY)) if store.check([_REPORTER_KEY]) else -1
        # Ctrl-C, a full disk and a bug are no SaccadeError: the rank has printed them.
        if _INTERRUPTED in exit_codes.values() or exit_codes.get(reporter, 0) > 0:
            return None
        error = _read_failure(store)
    if error is not None and error.key != LOST_RANK_KEY:
        return error
    first = next(iter(exit_codes))
    for rank, code in exit_codes.items():
        if code < 0 and (code != -signal.SIGTERM or rank == first):  # torchrun ends the others by SIGTERM
            return RunError(f"rank {rank} was ended by signal {-code} ({signal.strsignal(-code)}); {advice}")
    return error
