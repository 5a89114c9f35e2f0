"""The KV cache of the running rows, and the prefix cache between turns.

Axis letters: L layers, H key-value heads, B rows, S positions, D head size. One tensor [L, 2, B, H, S, D] holds the
running rows. The prefix cache stores finished parts of a conversation as blocks [L, 2, H, n, D]; conversations with a
common prefix share its blocks.
"""

import itertools
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class RowRun(NamedTuple):
    """Rows [start, stop), in which the first `shared_length` positions hold the same keys and values."""

    start: int
    stop: int
    shared_length: int


_MIN_SAVED_POSITIONS = 1024  # that a run of rows needn't read, so that it is computed on its own


def find_runs(prefixes: Sequence["CachedPrefix"]) -> tuple[RowRun, ...]:
    """Split rows into runs: consecutive rows whose prefixes begin with the same blocks, and the others.

    Where sharing would save little, rows are in one run with the next ones.
    """
    runs: list[RowRun] = []
    for _, group in itertools.groupby(range(len(prefixes)), key=lambda row: id(next(iter(prefixes[row].blocks), None))):
        rows = list(group)
        common = itertools.takewhile(
            lambda blocks: all(block is blocks[0] for block in blocks),
            zip(*(prefixes[row].blocks for row in rows), strict=False),
        )
        shared_length = sum(blocks[0].shape[3] for blocks in common)
        if (len(rows) - 1) * shared_length < _MIN_SAVED_POSITIONS:
            shared_length = 0
        if runs and not shared_length and not runs[-1].shared_length:
            runs[-1] = runs[-1]._replace(stop=rows[-1] + 1)
        else:
            runs.append(RowRun(rows[0], rows[-1] + 1, shared_length))
    return tuple(runs)


class KVCache:
    """The keys and values of the running rows; `lengths[b]` positions of row b are filled.

    It starts empty and grows on demand; if it would exceed `max_positions`, it drops unused rows and positions. A
    forward pass appends T new positions to each of the first `num_rows` rows; positions beyond a row's length are
    garbage that the mask hides.
    """

    def __init__(
        self, *, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, max_positions: int = sys.maxsize
    ) -> None:
        layers, heads, dim = shape
        self._max_positions = max_positions
        self.data = torch.zeros(layers, 2, 0, heads, 0, dim, dtype=dtype, device=device)
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)
        self.num_rows = 0
        self.key_length = 0
        self._is_even = False
        self.runs: Sequence[RowRun] = ()
        self._write_positions = self.lengths[:, None]
        self._write_indices = self.lengths

    def reserve(self, num_rows: int, capacity: int) -> None:
        """Make room for `num_rows` rows of `capacity` positions; none beyond them may be in use.

        Grow by at least a quarter, so that growing is rare.
        """
        layers, two, held_rows, heads, held_capacity, dim = self.data.shape
        if num_rows <= held_rows and capacity <= held_capacity:
            return
        grown = _grow_size(held_rows, num_rows), _grow_size(held_capacity, capacity)
        if grown[0] * grown[1] > self._max_positions:  # from many short rows to few long ones, or vice versa
            spare, room = capacity // 4, self._max_positions // num_rows - capacity
            grown = num_rows, capacity + (spare if room < 0 else min(spare, room))
        num_rows, capacity = grown
        # Zeros, not uninitialized memory: a masked key has weight 0, but 0 times NaN is NaN.
        data, common = self.data.new_zeros(layers, two, num_rows, heads, capacity, dim), min(held_capacity, capacity)
        data[:, :, :held_rows, :, :common] = self.data[:, :, :num_rows, :, :common]
        lengths = self.lengths.new_zeros(num_rows)
        lengths[:held_rows] = self.lengths[:num_rows]
        self.data, self.lengths = data, lengths

    def shrink(self, max_bytes: int) -> None:
        """Free the memory if it is more than `max_bytes`; none of it may be in use."""
        if self.data.nbytes > max_bytes:
            layers, two, _, heads, _, dim = self.data.shape
            self.data = self.data.new_zeros(layers, two, 0, heads, 0, dim)
            self.lengths = self.lengths.new_zeros(0)

    def load_row(self, row: int, blocks: Sequence[Tensor]) -> None:
        """Fill a row from the blocks of its conversation."""
        start = 0
        for block in blocks:
            self.data[:, :, row, :, start : start + block.shape[3]] = block
            start += block.shape[3]
        self.lengths[row] = start

    def clear_row(self, row: int) -> None:
        """Fill a row with zeros, if it may hold NaN: a masked key has weight 0, but 0 times NaN is NaN."""
        self.data[:, :, row] = 0
        self.lengths[row] = 0

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another, so that the running rows stay contiguous at the front."""
        length = int(self.lengths[source])
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
        self.lengths[target] = length

    def copy_block(self, row: int, start: int, stop: int) -> Tensor:
        """Copy positions [start, stop) of a row: [L, 2, H, n, D]."""
        return self.data[:, :, row, :, start:stop].clone()

    def prepare(
        self,
        num_rows: int,
        num_new_tokens: int,
        max_length: int,
        *,
        is_even: bool = False,
        runs: Sequence[RowRun] = (),
    ) -> None:
        """Prepare a forward pass over the first `num_rows` rows with `num_new_tokens` new positions each.

        `max_length` is the largest length of these rows before the pass, and of all of them if `is_even`. `runs` are
        all of these rows; by default they share nothing.
        """
        self.runs = runs or (RowRun(0, num_rows, 0),)
        self.num_rows, self.key_length, self._is_even = num_rows, max_length + num_new_tokens, is_even
        self.reserve(num_rows, self.key_length)
        device = self.lengths.device
        self._write_positions = self.lengths[:num_rows, None] + torch.arange(num_new_tokens, device=device)
        held_rows, heads, capacity = self.data.shape[2:5]
        rows = torch.arange(num_rows * heads, device=device).view(1, num_rows, heads, 1)
        rows = torch.cat((rows, rows + held_rows * heads))  # of keys and of values
        self._write_indices = (rows * capacity + self._write_positions[:, None]).flatten()  # into [2 * B * H * S]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, T, D]; return all of them [B, H, S, D]."""
        data, dim = self.data[layer], key.shape[-1]
        data.view(-1, dim).index_copy_(0, self._write_indices, torch.stack((key, value)).view(-1, dim))
        keys, values = data[:, : self.num_rows, :, : self.key_length]
        return keys, values

    def build_mask(self) -> Tensor:
        """Return which positions each new token attends to [B, T, S]: all before it, and itself."""
        positions = torch.arange(self.key_length, device=self._write_positions.device)
        mask: Tensor = positions <= self._write_positions[..., None]
        return mask

    def build_additive_mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return what to add to the scores of one new token per row [B, 1, 1, S]; None if all rows have one length."""
        if self._is_even:
            return None
        mask = torch.zeros(self.num_rows, self.key_length, dtype=dtype, device=self._write_positions.device)
        positions = torch.arange(self.key_length, device=mask.device)
        mask.masked_fill_(positions > self._write_positions, float("-inf"))
        return mask[:, None, None]


def _grow_size(current: int, required: int) -> int:
    return current if required <= current else max(required, current + current // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """A prefix of a conversation: its blocks, how many tokens they cover, and the last hidden state [D].

    After a prefill they cover the whole ledger, and `last_hidden` predicts its continuation. After sampling, the newest
    token has not been through the model yet: they cover one token less, and `last_hidden` is None.
    """

    blocks: tuple[Tensor, ...]
    num_tokens: int
    last_hidden: Tensor | None


NO_PREFIX = CachedPrefix(blocks=(), num_tokens=0, last_hidden=None)


class PrefixCache:
    """An LRU cache of conversations by prefix hash, within a budget of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._ref_counts: Counter[int] = Counter()  # how many conversations hold each block

    def put(self, key: str, prefix: CachedPrefix) -> None:
        """Store a conversation; a shared block counts once against the budget."""
        self._evict(key)
        self._entries[key] = prefix
        # A block lives as long as any conversation holds it, even if its own entry was evicted.
        for block in prefix.blocks:
            self._num_tokens += 0 if self._ref_counts[id(block)] else block.shape[3]
            self._ref_counts[id(block)] += 1
        while self._num_tokens > self._max_tokens and len(self._entries) > 1:
            self._evict(next(iter(self._entries)))

    def _evict(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        for block in entry.blocks if entry else ():
            self._ref_counts[id(block)] -= 1
            if not self._ref_counts[id(block)]:
                del self._ref_counts[id(block)]
                self._num_tokens -= block.shape[3]

    def find_longest(self, keys: Sequence[str]) -> CachedPrefix:
        """Return the longest stored prefix among a ledger's prefix hashes, NO_PREFIX if there is none."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        return NO_PREFIX

    def clear(self) -> None:
        """Remove all entries; required after a weight update."""
        self._entries.clear()
        self._ref_counts.clear()
        self._num_tokens = 0
