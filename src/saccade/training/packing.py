"""Shared-prefix packing: samples with a common prefix are trained as one tree, the prefix once.

Axis letters: B rows, T tokens of a row, N trained tokens.

    row         | prefix of tree 0 | branch 1 | branch 2 | prefix of tree 1 | branch 3 | padding |
    attends to    itself, causally   prefix 0   prefix 0   itself             prefix 1   itself

A prefix ends before the first sampled token: the episodes of a group share their whole prompt, questions about the same
frames share the frames. The prefix's last token predicts each branch's first. Position ids are explicit, so each branch
continues from the end of the prefix. Losses and gradients equal those of one row per sample. A sample is never split
between rows, and its trained tokens are contiguous and in order: sequence ratios and rewards-to-go rely on this.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from saccade.ledger import ImageRef, Ledger
from saccade.types import TrainingSample

ComputePositions = Callable[[Ledger], np.ndarray]  # a ledger to the position ids of its expanded tokens, [3, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """A common prefix and the samples that continue it."""

    prefix_length: int  # in tokens
    sample_indices: tuple[int, ...]
    num_tokens: int  # of the prefix and all branches


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The packed rows of one forward and backward pass, as numpy arrays: B rows of T tokens, N trained tokens.

    Tree and branch define the attention mask.
    """

    ids_BT: np.ndarray  # token ids
    positions_3BT: np.ndarray  # position ids
    tree_BT: np.ndarray  # index of the tree of each token; −1 is padding
    branch_BT: np.ndarray  # index of its branch; 0 is the tree's prefix
    images: tuple[ImageRef, ...]  # in the order of the rows; I of them
    image_start_2I: np.ndarray  # row of each image, and index in it of the image's first token
    row_N: np.ndarray  # row of each trained token
    logit_index_N: np.ndarray  # index in its row of the position whose logits predict it: of the token before it
    column_N: np.ndarray  # index in its row of the token itself
    token_N: np.ndarray  # its id
    engine_logp_N: np.ndarray  # the engine's logprob of it
    advantage_N: np.ndarray  # its advantage
    sample_N: np.ndarray  # index of its sample
    version_N: np.ndarray  # of the weights that sampled it
    weight_N: np.ndarray | None = None  # its weight in the average of the loss
    prox_logp_N: np.ndarray | None = None  # the trainer's before the update; None is that of the current weights
    ref_logp_N: np.ndarray | None = None  # its logprob under the reference policy


def build_prefix_trees(samples: Sequence[TrainingSample], pack_length: int) -> list[PrefixTree]:
    """Group samples by common prefixes; a tree longer than a row is split, and its prefix repeated.

    Samples with equal prompts share the whole prompt. Samples with the same images but different questions share their
    common prefix if that reduces the number of tokens.
    """
    prefix_groups: dict[tuple[str, ...], dict[str, list[int]]] = {}  # images of a prompt -> prompt -> samples
    for index, sample in enumerate(samples):
        prompt = _get_prompt(sample.ledger)
        image_keys = tuple(image.key for image in prompt.images())
        prompt_key = (prompt.prefix_hashes() or ("",))[-1]
        # Prompts without images have little in common, so they are shared only if they are equal.
        prefix_groups.setdefault(image_keys or (prompt_key,), {}).setdefault(prompt_key, []).append(index)
    return [
        tree
        for prompts in prefix_groups.values()
        for prefix_length, sample_indices in _choose_shared_prefixes(samples, list(prompts.values()))
        for tree in _split_tree(samples, prefix_length, sample_indices, pack_length)
    ]


def _get_prompt(ledger: Ledger) -> Ledger:
    is_sampled = [segment.is_sampled for segment in ledger.segments]
    return ledger.prefix(is_sampled.index(True) if True in is_sampled else len(is_sampled))


def _choose_shared_prefixes(
    samples: Sequence[TrainingSample], prompt_groups: Sequence[list[int]]
) -> list[tuple[int, list[int]]]:
    """Return (prefix length, samples) of each prompt, or one pair for all if sharing their common prefix saves more."""
    prompts = [_get_prompt(samples[indices[0]].ledger) for indices in prompt_groups]
    separate = [(len(prompt), indices) for prompt, indices in zip(prompts, prompt_groups, strict=True)]
    columns = zip(*(prompt.input_ids() for prompt in prompts), strict=False)
    common_length = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    all_indices = [index for indices in prompt_groups for index in indices]
    saved_separate = sum(length * (len(indices) - 1) for length, indices in separate)
    return [(common_length, all_indices)] if common_length * (len(all_indices) - 1) > saved_separate else separate


def _split_tree(
    samples: Sequence[TrainingSample], prefix_length: int, sample_indices: Sequence[int], pack_length: int
) -> Iterator[PrefixTree]:
    chosen: list[int] = []
    num_tokens = prefix_length
    for index in sample_indices:
        branch_length = len(samples[index].ledger) - prefix_length
        if chosen and num_tokens + branch_length > pack_length:
            yield PrefixTree(prefix_length=prefix_length, sample_indices=tuple(chosen), num_tokens=num_tokens)
            chosen, num_tokens = [], prefix_length
        chosen.append(index)
        num_tokens += branch_length
    yield PrefixTree(prefix_length=prefix_length, sample_indices=tuple(chosen), num_tokens=num_tokens)


def bin_pack(trees: Sequence[PrefixTree], pack_length: int) -> list[list[PrefixTree]]:
    """Put trees into rows of at most `pack_length` tokens (or one longer tree): first fit, longest first."""
    rows: list[list[PrefixTree]] = []
    free_tokens: list[int] = []
    for tree in sorted(trees, key=lambda tree: (-tree.num_tokens, tree.sample_indices)):
        row = next((index for index, free in enumerate(free_tokens) if free >= tree.num_tokens), None)
        if row is None:
            rows.append([tree])
            free_tokens.append(pack_length - tree.num_tokens)
        else:
            rows[row].append(tree)
            free_tokens[row] -= tree.num_tokens
    return rows


def pack(
    samples: Sequence[TrainingSample],
    *,
    compute_positions: ComputePositions,
    pack_length: int,
    micro_batch_size: int,
    num_parallel_micro_batches: int = 1,
    share_prefixes: bool = True,
) -> list[MicroBatch]:
    """Pack samples into micro-batches of at most `micro_batch_size` rows of similar length.

    The micro-batches have about equally many rows, and their number is a multiple of `num_parallel_micro_batches` if
    there are enough rows. Without `share_prefixes` (see `supports_prefix_sharing` in `chat.families.base.Family`) each
    sample is a row.
    """
    if share_prefixes:
        rows = bin_pack(build_prefix_trees(samples, pack_length), pack_length)
    else:
        rows = [
            [PrefixTree(prefix_length=0, sample_indices=(index,), num_tokens=len(sample.ledger))]
            for index, sample in enumerate(samples)
        ]
    # Rows of similar length share a micro-batch, which minimizes padding.
    rows.sort(key=lambda row: -sum(tree.num_tokens for tree in row))
    parts = split_rows(len(rows), micro_batch_size, num_parallel_micro_batches)
    return [build_micro_batch(samples, rows[part], compute_positions) for part in parts]


def split_rows(num_rows: int, micro_batch_size: int, num_parallel_micro_batches: int) -> list[slice]:
    """Divide rows into micro-batches; see `pack`.

    >>> split_rows(5, 2, 2)
    [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    rounds = -(-num_rows // (micro_batch_size * num_parallel_micro_batches))
    count = min(num_rows, rounds * num_parallel_micro_batches)
    ends = [num_rows * (i + 1) // count for i in range(count)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def build_micro_batch(
    samples: Sequence[TrainingSample], rows: Sequence[Sequence[PrefixTree]], compute_positions: ComputePositions
) -> MicroBatch:
    """Return rows of prefix trees as one micro-batch, padded to its longest row."""
    T = max(sum(tree.num_tokens for tree in row) for row in rows)
    shape = (len(rows), T)
    ids_BT, branch_BT = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    positions_3BT, tree_BT = np.zeros((3, *shape), dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    images: list[ImageRef] = []
    image_starts: list[tuple[int, int]] = []  # row, index in the row
    targets: list[np.ndarray] = []  # per trained token: the columns of `stacked` below
    for b, row in enumerate(rows):
        start = 0
        for tree_index, tree in enumerate(row):
            tree_BT[b, start : start + tree.num_tokens] = tree_index
            prefix, branch_start = tree.prefix_length, start + tree.prefix_length
            for number, sample_index in enumerate(tree.sample_indices):
                sample = samples[sample_index]
                ledger, ids = sample.ledger, np.array(sample.ledger.input_ids())
                positions = np.arange(start, start + len(ids))  # of the sample's tokens in the row
                positions[prefix:] += branch_start - (start + prefix)
                first = prefix if number else 0  # all samples have the same prefix: the first one's is packed
                ids_BT[b, positions[first:]] = ids[first:]
                positions_3BT[:, b, positions[first:]] = compute_positions(ledger)[:, first:]
                branch_BT[b, positions[prefix:]] = number + 1
                slots = [slot for slot in ledger.slots() if slot.index >= first]
                images += [slot.image for slot in slots]
                image_starts += [(b, int(positions[slot.index])) for slot in slots]
                trained = np.flatnonzero(ledger.loss_mask())
                predictor = positions[trained] - 1
                predictor[trained == prefix] = start + prefix - 1  # the prefix's last token predicts a branch's first
                values = (ids, np.full(len(ids), sample_index), ledger.versions(), ledger.logprobs(), sample.advantages)
                columns = [np.full(len(trained), b), predictor, positions[trained]]
                columns += [np.array(value)[trained] for value in values]
                targets.append(np.stack(columns))
                branch_start += len(ids) - prefix
            start += tree.num_tokens
    stacked = np.concatenate(targets, axis=1)
    row_N, logit_index_N, column_N, token_N, sample_N, version_N = stacked[:6].astype(np.int64)
    return MicroBatch(
        ids_BT=ids_BT,
        positions_3BT=positions_3BT,
        tree_BT=tree_BT,
        branch_BT=branch_BT,
        images=tuple(images),
        image_start_2I=np.array(image_starts, dtype=np.int64).reshape(-1, 2).T,
        row_N=row_N,
        logit_index_N=logit_index_N,
        column_N=column_N,
        token_N=token_N,
        engine_logp_N=stacked[6].astype(np.float32),
        advantage_N=stacked[7].astype(np.float32),
        sample_N=sample_N,
        version_N=version_N,
    )


def split_micro_batch(micro_batch: MicroBatch) -> list[tuple[MicroBatch, np.ndarray]]:
    """Split a micro-batch in two that need less memory: its rows, else the trees of its row, else its tree's branches.

    Return each part with the mask [N] of its trained tokens, or nothing for a single sample. A prefix is repeated.
    """
    is_branch_BT = (micro_batch.tree_BT >= 0) & (micro_batch.branch_BT > 0)
    row_BT = np.broadcast_to(np.arange(len(micro_batch.ids_BT))[:, None], micro_batch.ids_BT.shape)
    for label_BT in (row_BT, micro_batch.tree_BT, micro_batch.branch_BT):
        labels, counts = np.unique(label_BT[is_branch_BT], return_counts=True)
        if len(labels) > 1:
            ends = counts.cumsum()
            num_first = int(np.abs(ends[:-1] - ends[-1] / 2).argmin()) + 1
            is_shared_BT = (
                (micro_batch.branch_BT == 0) if label_BT is micro_batch.branch_BT else np.zeros_like(is_branch_BT)
            )
            return [
                _select_tokens(micro_batch, (micro_batch.tree_BT >= 0) & (np.isin(label_BT, part) | is_shared_BT))
                for part in (labels[:num_first], labels[num_first:])
            ]
    return []


def _select_tokens(micro_batch: MicroBatch, is_kept_BT: np.ndarray) -> tuple[MicroBatch, np.ndarray]:
    """Return the micro-batch of some tokens, without the others' columns, and the mask [N] of its trained tokens."""
    rows = np.flatnonzero(is_kept_BT.any(axis=1))
    new_row_B, new_column_BT = np.cumsum(is_kept_BT.any(axis=1)) - 1, np.cumsum(is_kept_BT, axis=1) - 1
    T = int(is_kept_BT.sum(axis=1).max())

    def take(values_BT: np.ndarray, padding: int) -> np.ndarray:
        taken_BT = np.full((*values_BT.shape[:-2], len(rows), T), padding, dtype=values_BT.dtype)
        for new_row, row in enumerate(rows):
            values_T = values_BT[..., row, is_kept_BT[row]]
            taken_BT[..., new_row, : values_T.shape[-1]] = values_T
        return taken_BT

    is_kept_N = is_kept_BT[micro_batch.row_N, micro_batch.column_N]
    is_kept_I = is_kept_BT[tuple(micro_batch.image_start_2I)]
    image_row_I, image_column_I = micro_batch.image_start_2I[:, is_kept_I]
    by_token = {
        key.name: value[is_kept_N]
        for key in fields(micro_batch)
        if key.name.endswith("_N") and (value := getattr(micro_batch, key.name)) is not None
    }
    row_N = by_token["row_N"]
    moved = {
        "row_N": new_row_B[row_N],
        "logit_index_N": new_column_BT[row_N, by_token["logit_index_N"]],
        "column_N": new_column_BT[row_N, by_token["column_N"]],
    }
    part = MicroBatch(
        ids_BT=take(micro_batch.ids_BT, 0),
        positions_3BT=take(micro_batch.positions_3BT, 0),
        tree_BT=take(micro_batch.tree_BT, -1),
        branch_BT=take(micro_batch.branch_BT, 0),
        images=tuple(image for image, is_kept in zip(micro_batch.images, is_kept_I, strict=True) if is_kept),
        image_start_2I=np.stack([new_row_B[image_row_I], new_column_BT[image_row_I, image_column_I]]),
        **(by_token | moved),
    )
    return part, is_kept_N
