"""Shared-prefix packing: samples that begin alike are trained as one tree, their common prefix once.

Axis letters: B rows, T tokens of a row, N trained tokens.

    row    | prefix of tree 0 | branch 1 | branch 2 | prefix of tree 1 | branch 3 | padding |
    sees     itself, causally   prefix 0   prefix 0   itself             prefix 1   itself

A prefix ends before the first sampled token: the attempts of a group share their whole prompt, questions about the same
frames share the frames. A branch's first token is predicted by the prefix's last. Positions are explicit, so each
branch goes on from where the prefix ended. Losses and gradients equal those of one row per sample. A sample is in one
row as a whole and its trained tokens are neighbours, in order: ratios of sequences and sums along them rely on it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from saccade.ledger import Ledger, Picture
from saccade.types import Sample

Positions = Callable[[Ledger], np.ndarray]  # [3, T] of a ledger's expanded tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A common prefix of `length` tokens and the samples that go on from it, by index."""

    length: int
    members: tuple[int, ...]
    tokens: int  # of prefix and branches together


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows, as numpy arrays.

    `ids_BT`, `positions_3BT`; `tree_BT` and `branch_BT` say who sees whom (branch 0 is a prefix, tree −1 padding);
    `pictures` row by row, in order. For each trained token: `row_N`, `at_N` (the index that predicts it), `token_N`,
    `old_logp_N`, `advantage_N`, `sample_N` (which sample), `version_N` (of the weights that sampled it).
    """

    ids_BT: np.ndarray
    positions_3BT: np.ndarray
    tree_BT: np.ndarray
    branch_BT: np.ndarray
    pictures: tuple[Picture, ...]
    row_N: np.ndarray
    at_N: np.ndarray
    token_N: np.ndarray
    old_logp_N: np.ndarray
    advantage_N: np.ndarray
    sample_N: np.ndarray
    version_N: np.ndarray


def plant(samples: Sequence[Sample], row_tokens: int) -> list[Tree]:
    """Group samples by what they have in common; a tree longer than a row is split, its prefix repeated.

    Samples with the same prompt share all of it. Samples that show the same pictures before they ask different
    questions share what is equal up to there, wherever that makes fewer tokens.
    """
    scenes: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for index, sample in enumerate(samples):
        prefix = _prefix(sample.ledger)
        # Without pictures there is little to share: such samples meet only where the whole prompt is equal.
        shown = tuple(picture.key for picture in prefix.pictures())
        key = (prefix.keys() or ("",))[-1]
        scenes.setdefault(shown or (key,), {}).setdefault(key, []).append(index)
    return [
        tree
        for prompts in scenes.values()
        for length, members in _shared(samples, list(prompts.values()))
        for tree in _split(samples, length, members, row_tokens)
    ]


def _prefix(ledger: Ledger) -> Ledger:
    sampled = [segment.sampled for segment in ledger.segments]
    return ledger.fork(sampled.index(True) if True in sampled else len(sampled))


def _shared(samples: Sequence[Sample], prompts: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
    """Groups of equal prompts, as (prefix length, members): each by itself, or all as one if that is less work."""
    apart = [(len(_prefix(samples[members[0]].ledger)), members) for members in prompts]
    heads = [_prefix(samples[members[0]].ledger).expanded() for members in prompts]
    columns = zip(*heads, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    everyone = [member for members in prompts for member in members]
    saved_apart = sum(length * (len(members) - 1) for length, members in apart)
    return [(common, everyone)] if common * (len(everyone) - 1) > saved_apart else apart


def _split(samples: Sequence[Sample], length: int, members: Sequence[int], row_tokens: int) -> Iterator[Tree]:
    chosen: list[int] = []
    tokens = length
    for member in members:
        branch = len(samples[member].ledger) - length
        if chosen and tokens + branch > row_tokens:
            yield Tree(length=length, members=tuple(chosen), tokens=tokens)
            chosen, tokens = [], length
        chosen.append(member)
        tokens += branch
    yield Tree(length=length, members=tuple(chosen), tokens=tokens)


def fill(trees: Sequence[Tree], row_tokens: int) -> list[list[Tree]]:
    """Trees into rows of at most `row_tokens` (a longer tree has its own row): first fit, longest first."""
    rows: list[list[Tree]] = []
    room: list[int] = []
    for tree in sorted(trees, key=lambda tree: (-tree.tokens, tree.members)):
        row = next((index for index, free in enumerate(room) if free >= tree.tokens), None)
        if row is None:
            rows.append([tree])
            room.append(row_tokens - tree.tokens)
        else:
            rows[row].append(tree)
            room[row] -= tree.tokens
    return rows


def pack(
    samples: Sequence[Sample], *, positions: Positions, row_tokens: int, rows_per_pass: int, side_by_side: int = 1
) -> list[Batch]:
    """Samples to micro-batches of at most `rows_per_pass` rows of similar length, about as many rows in each.

    Their number is a multiple of `side_by_side`, so that many can be worked on at a time, as far as there are rows.
    """
    rows = fill(plant(samples, row_tokens), row_tokens)
    rows.sort(key=lambda row: -sum(tree.tokens for tree in row))
    # Rows of like length go together, so that little of a batch is padding.
    rounds = -(-len(rows) // (rows_per_pass * side_by_side))
    count = min(len(rows), rounds * side_by_side)
    ends = [len(rows) * (i + 1) // count for i in range(count)]
    return [_batch(samples, rows[start:end], positions) for start, end in zip([0, *ends], ends, strict=False)]


def _batch(samples: Sequence[Sample], rows: Sequence[Sequence[Tree]], positions: Positions) -> Batch:
    T = max(sum(tree.tokens for tree in row) for row in rows)
    shape = (len(rows), T)
    ids, branch = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    where, tree_of = np.zeros((3, *shape), dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    pictures: list[Picture] = []
    targets: list[np.ndarray] = []
    for b, row in enumerate(rows):
        start = 0
        for number, tree in enumerate(row):
            tree_of[b, start : start + tree.tokens] = number
            for piece in _pieces(samples, tree, start, positions):
                ids[b, piece.start : piece.stop] = piece.ids
                where[:, b, piece.start : piece.stop] = piece.positions
                branch[b, piece.start : piece.stop] = piece.branch
                pictures += piece.pictures
                targets.append(piece.targets(b, tree.length + start - 1))
            start += tree.tokens
    flat = np.concatenate(targets, axis=1)
    row_N, at_N, token_N, sample_N, version_N = flat[:5].astype(np.int64)
    return Batch(
        ids_BT=ids,
        positions_3BT=where,
        tree_BT=tree_of,
        branch_BT=branch,
        pictures=tuple(pictures),
        row_N=row_N,
        at_N=at_N,
        token_N=token_N,
        old_logp_N=flat[5].astype(np.float32),
        advantage_N=flat[6].astype(np.float32),
        sample_N=sample_N,
        version_N=version_N,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A prefix (branch 0, nothing trained) or a branch, laid at [start, stop) of its row."""

    start: int
    branch: int
    ids: np.ndarray
    positions: np.ndarray
    pictures: list[Picture]
    sample: int
    mask: np.ndarray
    old_logp: np.ndarray
    advantage: np.ndarray
    version: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    def targets(self, row: int, prefix_end: int) -> np.ndarray:
        """One column per trained token: row, predicting index, token, sample, version, old logprob, advantage."""
        # A token is predicted by the one before it; a branch's first by the end of its prefix, wherever that lies.
        at = np.arange(self.start - 1, self.stop - 1)
        if len(at):
            at[0] = prefix_end
        chosen = self.mask
        count = int(chosen.sum())
        return np.stack(
            [
                np.full(count, row, dtype=np.float64),
                at[chosen],
                self.ids[chosen],
                np.full(count, self.sample),
                self.version[chosen],
                self.old_logp[chosen],
                self.advantage[chosen],
            ]
        )


def _pieces(samples: Sequence[Sample], tree: Tree, start: int, positions: Positions) -> Iterator[_Piece]:
    at = start + tree.length
    for number, member in enumerate(tree.members):
        ledger = samples[member].ledger
        ids, where = np.array(ledger.expanded()), positions(ledger)
        mask, advantage = np.array(ledger.mask(), dtype=bool), np.array(samples[member].advantages)
        old_logp, version = np.array(ledger.logprobs()), np.array(ledger.versions())
        # The first member brings the prefix: all have the same one, and it is laid once.
        bounds = [(at, tree.length, len(ids), number + 1)]
        if number == 0 and tree.length:
            bounds.insert(0, (start, 0, tree.length, 0))
        for first, low, high, branch in bounds:
            yield _Piece(
                start=first,
                branch=branch,
                ids=ids[low:high],
                positions=where[:, low:high],
                pictures=[slot.picture for slot in ledger.slots() if low <= slot.at < high],
                sample=member,
                mask=mask[low:high],
                old_logp=old_logp[low:high],
                advantage=advantage[low:high],
                version=version[low:high],
            )
        at += len(ids) - tree.length
