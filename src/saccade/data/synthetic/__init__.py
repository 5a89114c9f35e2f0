"""Synthetic needle-in-a-haystack datasets with exact labels.

Videos show short events at known times, images show small cards at known positions; tasks ask about them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic import text_templates
from saccade.data.synthetic.dataset import ProgressCallback, SyntheticDataset, ValidationReport, read_dataset_kind
from saccade.data.synthetic.generate import FRAME_BUDGETS, VideoDataset
from saccade.data.synthetic.image import maps
from saccade.data.synthetic.image import text_templates as image_text_templates
from saccade.data.synthetic.image.generate import ImageDataset
from saccade.data.synthetic.image.maps import MapDataset
from saccade.data.synthetic.needles import demonstrations as needle_demonstrations
from saccade.data.synthetic.needles.generate import NeedleDataset

DATASETS: dict[str, type[SyntheticDataset[Any]]] = {  # by the kinds of `read_dataset_kind`
    "image": ImageDataset,
    "map": MapDataset,
    "needles": NeedleDataset,
    "video": VideoDataset,
}


def generate_dataset(
    folder: str | os.PathLike[str],
    config: SyntheticConfig,
    *,
    seed: int,
    frame_budgets: Sequence[int] = FRAME_BUDGETS,
    progress: ProgressCallback | None = None,
) -> None:
    """Generate a dataset in `folder`, or resume an interrupted call; the same seed gives the same files.

    `frame_budgets` are those of the overviews in demonstrations about videos. `progress(split, done, total)` is called
    after every video or image. Raises ConfigError for impossible settings, DataError for a folder with another dataset.
    """
    if config.tasks == "map":
        MapDataset(config, seed=seed).generate(Path(folder), progress)
    elif config.media == "image":
        ImageDataset(config, seed=seed).generate(Path(folder), progress)
    elif config.tasks != "tiling":
        NeedleDataset(config, seed=seed).generate(Path(folder), progress)
    else:
        VideoDataset(config, seed=seed, frame_budgets=frame_budgets).generate(Path(folder), progress)


def validate_dataset(folder: str | os.PathLike[str]) -> ValidationReport:
    """Check that no split leaks into another, and that answers follow from their labels. Raises DataError."""
    return DATASETS[read_dataset_kind(folder)].validate(Path(folder))


def build_tokenizer_pieces(config: SyntheticConfig) -> tuple[str, ...]:
    """Return the fixed parts of questions and replies, which a tiny tokenizer should have as one token each."""
    if config.media == "image":
        return (*image_text_templates.TOKENIZER_PIECES, *(maps.TOKENIZER_PIECES if config.tasks == "map" else ()))
    if config.tasks != "tiling":
        return needle_demonstrations.TOKENIZER_PIECES
    if config.demonstrations != "python":
        return text_templates.TOKENIZER_PIECES
    scan = text_templates.format_coarse_scan_code(config.fps).splitlines(keepends=True)
    before, after = text_templates.SHOW_FRAMES_CODE
    show = (before, after.format(step=round(config.fps)))
    return (*text_templates.TOKENIZER_PIECES, *text_templates.CODE_DELIMITERS, *scan, *show, "Which colours at ")
