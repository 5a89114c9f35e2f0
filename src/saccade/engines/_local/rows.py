"""The requests of the local engine, and the arrays from which each step reads what it needs of all running ones."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saccade.engines._local.kv_cache import NO_PREFIX, CachedPrefix, RowRun, find_runs
from saccade.ledger import ImageRef, Ledger
from saccade.types import Completion, SamplingParams

_FIRST_WIDTH = 128  # sampled tokens per row that the arrays have room for at first
_ROW = np.dtype(
    [("num_sampled", "i8"), ("max_tokens", "i8"), ("prefix", "i8"), ("position", "i8"), ("temperature", "f8")]
)
_TOKEN = np.dtype([("uniform", "f8"), ("id", "i8"), ("logprob", "f8")])
_NO_STOP_ID = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A ledger to continue; it waits for a row or runs in one."""

    ledger: Ledger
    length: int  # of the ledger, in tokens with expanded images
    sampling: SamplingParams
    future: "asyncio.Future[Completion]"
    prefix_hashes: tuple[str, ...]
    random: np.random.Generator  # of the request's own seed; one number per token
    prefix: CachedPrefix = NO_PREFIX
    position: int = 0  # of the first sampled token, on all three axes

    @property
    def num_new_tokens(self) -> int:
        """Return how many of the ledger's tokens are not in the KV cache yet."""
        return self.length - self.prefix.num_tokens

    @property
    def max_length(self) -> int:
        """Return the largest length that its row may reach."""
        return self.length + self.sampling.max_tokens

    def list_uncached_images(self) -> list[ImageRef]:
        """Return the ledger's images, in order, that are not in the KV cache yet."""
        return [slot.image for slot in self.ledger.slots() if slot.index >= self.prefix.num_tokens]


class Rows:
    """The running requests, one per row of the KV cache, and what was sampled for them.

    A step reads and writes arrays of all rows; only a row that starts or ends costs a step Python of its own.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._runs: Sequence[RowRun] = ()  # empty when rows have been added or removed
        self._rows = np.zeros(0, _ROW)
        self._tokens = np.zeros((0, _FIRST_WIDTH), _TOKEN)
        self._stop_ids = np.full((0, 1), _NO_STOP_ID)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def max_length(self) -> int:
        """Return the largest number of tokens that a row has now, the newest included; 0 without rows."""
        rows = self._rows[: len(self)]
        return int((rows["prefix"] + rows["num_sampled"]).max(initial=0))

    @property
    def are_even(self) -> bool:
        """Return whether all rows have the same number of tokens."""
        rows = self._rows[: len(self)]
        lengths = rows["prefix"] + rows["num_sampled"]
        return bool((lengths == lengths[0]).all())

    @property
    def runs(self) -> Sequence[RowRun]:
        """Return the rows in runs with a common beginning."""
        self._runs = self._runs or find_runs([request.prefix for request in self.requests])
        return self._runs

    def add(self, requests: Sequence[Request]) -> None:
        """Append rows for requests whose prefixes are known."""
        first, num_rows = len(self), len(self) + len(requests)
        num_stop_ids = max((len(request.sampling.stop_ids) for request in requests), default=0)
        self._rows = _grow(self._rows, (num_rows,))
        self._tokens = _grow(self._tokens, (num_rows, 0))
        self._stop_ids = _grow(self._stop_ids, (num_rows, num_stop_ids))
        for row, request in enumerate(requests, start=first):
            sampling = request.sampling
            values = 0, sampling.max_tokens, request.prefix.num_tokens, request.position, sampling.temperature
            self._rows[row] = values
            self._stop_ids[row] = _NO_STOP_ID
            self._stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
            self._tokens["uniform"][row] = request.random.random(self._tokens.shape[1])
        self.requests += requests
        self._runs = ()

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        last = len(self) - 1
        if row != last:
            for array in (self._rows, self._tokens, self._stop_ids):
                array[row] = array[last]
            self.requests[row] = self.requests[last]
        self.requests.pop()
        self._runs = ()

    def get_newest(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the newest token of each row and its position; the next one follows it."""
        rows = self._rows[: len(self)]
        newest = self._tokens["id"][np.arange(len(self)), rows["num_sampled"] - 1]
        return newest, rows["position"] + rows["num_sampled"] - 1

    def get_sampling(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for rows `first`, `first + 1`, …, the temperature and the number that draws the next token."""
        rows = self._rows[first : len(self)]
        self._reserve_tokens(int(rows["num_sampled"].max(initial=0)) + 1)
        return rows["temperature"], self._tokens["uniform"][np.arange(first, len(self)), rows["num_sampled"]]

    def append(self, first: int, tokens: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """Append a token to rows `first`, `first + 1`, …; return those that end or whose logprob is not finite."""
        rows, index = self._rows[first : len(self)], np.arange(first, len(self))
        self._tokens["id"][index, rows["num_sampled"]] = tokens
        self._tokens["logprob"][index, rows["num_sampled"]] = logprobs
        rows["num_sampled"] += 1
        has_stop_id = (self._stop_ids[first : len(self)] == tokens[:, None]).any(axis=1)
        has_ended = has_stop_id | (rows["num_sampled"] >= rows["max_tokens"]) | ~np.isfinite(logprobs)
        return (np.flatnonzero(has_ended) + first).tolist()

    def get_sampled(self, row: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the tokens that were sampled in a row, and their logprobs."""
        sampled = self._tokens[row, : self._rows["num_sampled"][row]]
        return tuple(sampled["id"].tolist()), tuple(sampled["logprob"].tolist())

    def _reserve_tokens(self, width: int) -> None:
        held = self._tokens.shape[1]
        if width > held:
            self._tokens = _grow(self._tokens, (0, width))
            for row, request in enumerate(self.requests):
                self._tokens["uniform"][row, held:] = request.random.random(self._tokens.shape[1] - held)


def _grow(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the array with at least this shape: itself, or a copy that has twice the room where it was too small."""
    if all(required <= held for required, held in zip(shape, array.shape, strict=True)):
        return array
    grown = [
        held if required <= held else max(required, 2 * held) for required, held in zip(shape, array.shape, strict=True)
    ]
    larger = np.full(grown, _NO_STOP_ID, array.dtype) if array.dtype.names is None else np.zeros(grown, array.dtype)
    larger[tuple(slice(held) for held in array.shape)] = array
    return larger
