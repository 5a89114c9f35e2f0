"""Keys and values of ragged rows, and what is kept of them between turns.

Axis letters: L layers, H key-value heads, B rows, S positions, D head size. One tensor [L, 2, B, H, S, D] holds the
rows in flight. A finished stretch of a conversation is kept as a block [L, 2, H, n, D]; conversations that share a
prefix share its blocks.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Rows:
    """The rows in flight: `lengths[b]` positions of row b are filled.

    It begins empty and grows with what is asked of it; where it would then hold more than `most` positions, it lets go
    of rows and positions that are no longer asked for. A forward pass writes T new positions into each of the first
    `count` rows, behind what is there; positions behind a row's length are garbage that the mask hides.
    """

    def __init__(
        self, *, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, most: int = sys.maxsize
    ) -> None:
        layers, heads, dim = shape
        self._most = most
        self.data = torch.zeros(layers, 2, 0, heads, 0, dim, dtype=dtype, device=device)
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)
        self.count = 0
        self.extent = 0
        self._at: Tensor | None = None

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` positions; none beyond them may be in use.

        Grows by a quarter at least, so that growing is rare.
        """
        layers, two, held_rows, heads, held, dim = self.data.shape
        if rows <= held_rows and capacity <= held:
            return
        grown = _grown(held_rows, rows), _grown(held, capacity)
        if grown[0] * grown[1] > self._most:  # many rows were short, now few are long, or the other way round
            spare, room = capacity // 4, self._most // rows - capacity
            grown = rows, capacity + (spare if room < 0 else min(spare, room))
        rows, capacity = grown
        # Zeros, not whatever memory holds: a masked key weighs nothing, but nothing times NaN is NaN.
        data, both = self.data.new_zeros(layers, two, rows, heads, capacity, dim), min(held, capacity)
        data[:, :, :held_rows, :, :both] = self.data[:, :, :rows, :, :both]
        lengths = self.lengths.new_zeros(rows)
        lengths[:held_rows] = self.lengths[:rows]
        self.data, self.lengths = data, lengths

    def shrink(self, most: int) -> None:
        """Let go of the memory, none of it being in use, where it is more than `most` bytes."""
        if self.data.nbytes > most:
            layers, two, _, heads, _, dim = self.data.shape
            self.data = self.data.new_zeros(layers, two, 0, heads, 0, dim)
            self.lengths = self.lengths.new_zeros(0)

    def load(self, row: int, blocks: Sequence[Tensor]) -> None:
        """Fill a row from the blocks of its conversation."""
        start = 0
        for block in blocks:
            self.data[:, :, row, :, start : start + block.shape[3]] = block
            start += block.shape[3]
        self.lengths[row] = start

    def move(self, source: int, target: int) -> None:
        """Copy a row over another, so that the rows in flight stay together at the front."""
        length = int(self.lengths[source])
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
        self.lengths[target] = length

    def block(self, row: int, start: int, stop: int) -> Tensor:
        """A copy of positions [start, stop) of a row: [L, 2, H, n, D]."""
        return self.data[:, :, row, :, start:stop].clone()

    def prepare(self, count: int, tokens: int, longest: int) -> None:
        """Announce a forward pass over the first `count` rows with `tokens` new positions each.

        `longest` is the largest length of these rows before the pass.
        """
        self.count, self.extent = count, longest + tokens
        self.reserve(count, self.extent)
        self._at = self.lengths[:count, None] + torch.arange(tokens, device=self.lengths.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, T, D]; returns all of them [B, H, S, D]."""
        assert self._at is not None
        rows = torch.arange(self.count, device=self._at.device)[:, None]
        held = self.data[layer, :, : self.count]
        held[0][rows, :, self._at] = key.transpose(1, 2)
        held[1][rows, :, self._at] = value.transpose(1, 2)
        return held[0, :, :, : self.extent], held[1, :, :, : self.extent]

    def mask(self) -> Tensor:
        """Which positions each new token sees [B, T, S]: all before it, and itself."""
        assert self._at is not None
        seen: Tensor = torch.arange(self.extent, device=self._at.device) <= self._at[..., None]
        return seen


def _grown(held: int, wanted: int) -> int:
    return held if wanted <= held else max(wanted, held + held // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A conversation up to some point: its blocks, how many tokens they cover, and the last hidden state [D].

    After a prefill the whole ledger is covered and `last` predicts its continuation. After sampling the newest token
    has not been through the model yet: one token less is covered, and there is no `last`.
    """

    blocks: tuple[Tensor, ...]
    length: int
    last: Tensor | None


class Prefixes:
    """Conversations kept by ledger key, least recently used dropped first, within a budget of tokens."""

    def __init__(self, tokens: int) -> None:
        self._budget = tokens
        self._held = 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._users: Counter[int] = Counter()  # how many conversations hold each block

    def put(self, key: str, kept: Kept) -> None:
        """Keep a conversation; a block counts against the budget once, whoever shares it."""
        self._drop(key)
        self._kept[key] = kept
        # A block lives as long as any conversation holds it, even where its own entry is gone.
        for block in kept.blocks:
            self._held += 0 if self._users[id(block)] else block.shape[3]
            self._users[id(block)] += 1
        while self._held > self._budget and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        for block in kept.blocks if kept else ():
            self._users[id(block)] -= 1
            if not self._users[id(block)]:
                del self._users[id(block)]
                self._held -= block.shape[3]

    def longest(self, keys: Sequence[str]) -> Kept | None:
        """What is kept of the longest prefix among a ledger's keys."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return None

    def clear(self) -> None:
        """Forget everything, as new weights demand."""
        self._kept.clear()
        self._users.clear()
        self._held = 0
