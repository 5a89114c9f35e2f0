"""Distribute micro-batches over the ranks in micro-steps of similar cost; the last one is padded with empty ones.

A second thread loads the pixels of the next micro-step while the ranks train on one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.ledger import ImageRef
from saccade.models.attention import find_attention_spans
from saccade.models.vlm import LoadAllPixels
from saccade.training.background import CheckCancelled
from saccade.training.packing import MicroBatch

_PAIRS_PER_TOKEN = 8192  # visible pairs whose attention costs as much as the matrices' work on a token


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMicroBatch:
    """A rank's micro-batch of a micro-step, with the pixels of its images by key."""

    index: int | None  # in the order of packing; None is padding
    micro_batch: MicroBatch
    pixels: Mapping[str, Any]

    def load_pixels(self, image: ImageRef) -> Any:
        """Return an image's pixels, uint8 RGB [height, width, 3]."""
        return self.pixels[image.key]

    def load_all_pixels(self, _: Collection[ImageRef]) -> Mapping[str, Any]:
        """Return the pixels of all images, by key."""
        return self.pixels


def iterate_micro_steps(
    micro_batches: Sequence[MicroBatch], num_ranks: int, load_all_pixels: LoadAllPixels, check_cancelled: CheckCancelled
) -> Iterator[list[LoadedMicroBatch]]:
    """Yield micro-steps of one micro-batch per rank, the most expensive first; pixels are loaded one micro-step ahead.

    `check_cancelled` is called before each micro-step.
    """
    order = sorted(range(len(micro_batches)), key=lambda index: -estimate_cost(micro_batches[index]))

    def load_micro_step(start: int) -> list[LoadedMicroBatch]:
        micro_step = [
            LoadedMicroBatch(
                index=index, micro_batch=micro_batches[index], pixels=load_all_pixels(micro_batches[index].images)
            )
            for index in order[start : start + num_ranks]
        ]
        return micro_step + [LoadedMicroBatch(index=None, micro_batch=_build_empty_micro_batch(), pixels={})] * (
            num_ranks - len(micro_step)
        )

    with ThreadPoolExecutor(1, thread_name_prefix="saccade-micro-step") as pool:
        loading = pool.submit(load_micro_step, 0)
        for start in range(0, len(order), num_ranks):
            check_cancelled()
            micro_step = loading.result()
            loading = pool.submit(load_micro_step, start + num_ranks)  # empty after the last
            yield micro_step


def count_micro_steps(micro_batches: Sequence[MicroBatch], num_ranks: int) -> int:
    """Return how many micro-steps `iterate_micro_steps` yields."""
    return -(-len(micro_batches) // num_ranks)


def estimate_cost(micro_batch: MicroBatch) -> float:
    """Return the cost of a micro-batch in tokens: padded tokens, and the pairs of a query and a key that it sees."""
    pairs = sum(span.num_pairs for span in find_attention_spans(micro_batch.tree_BT, micro_batch.branch_BT))
    return micro_batch.ids_BT.size + pairs / _PAIRS_PER_TOKEN


def _build_empty_micro_batch() -> MicroBatch:
    """Return one token without a target: a pass over it takes part in every collective operation and adds zero."""
    row, no_tokens = np.zeros((1, 1), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return MicroBatch(
        ids_BT=row,
        positions_3BT=np.zeros((3, 1, 1), dtype=np.int64),
        tree_BT=row,
        branch_BT=row,
        images=(),
        image_start_2I=np.zeros((2, 0), dtype=np.int64),
        row_N=no_tokens,
        logit_index_N=no_tokens,
        column_N=no_tokens,
        token_N=no_tokens,
        engine_logp_N=no_tokens.astype(np.float32),
        advantage_N=no_tokens.astype(np.float32),
        sample_N=no_tokens,
        version_N=no_tokens,
    )
