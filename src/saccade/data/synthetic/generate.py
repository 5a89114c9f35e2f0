"""Generate a synthetic video dataset: clips with events at known times, tasks with exact labels, demonstrations."""

import os
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic import questions
from saccade.data.synthetic.background_clips import (
    BackgroundSpan,
    BackgroundVideo,
    assign_to_splits,
    compute_span,
    decode_frames,
    find_overlaps,
    list_background_videos,
    select_background,
)
from saccade.data.synthetic.dataset import SPLITS, ContentT, SyntheticDataset, read_dataset_file
from saccade.data.synthetic.demonstrations import (
    build_auxiliary_demonstration,
    build_demonstration,
    build_direct_demonstration,
    build_perception_demonstration,
    build_python_demonstration,
)
from saccade.data.synthetic.events import Labels, sample_labels
from saccade.data.synthetic.render import FRAMES_PER_BLOCK, Frames, draw_events, render_background
from saccade.data.synthetic.video_writer import write_video
from saccade.media.frame_sampling import sample_uniform_times
from saccade.types import Demonstration, MediaKind, Task
from saccade.utils.hashing import derive_seed

FRAME_BUDGETS = (4, 8, 16, 32)  # default budgets of the overviews in demonstrations

BackgroundFrames = tuple[BackgroundVideo, tuple[float, ...]]  # a haystack file and its frame times in seconds


class ClipDataset(SyntheticDataset[ContentT]):
    """A dataset of clips, on rendered backgrounds or on those of a haystack."""

    media_kind, media_folder, suffix, labels_filename = MediaKind.VIDEO, "clips", ".mp4", "events.json"
    packages = ("av", "numpy")
    unused_settings: frozenset[str]  # of `synthetic`, which the files don't depend on
    frame_budgets: tuple[int, ...] = ()  # of the overviews in demonstrations

    def __init__(self, config: SyntheticConfig, *, tasks_per_file: int, seed: int) -> None:
        super().__init__(config, config, tasks_per_file=tasks_per_file, seed=seed)
        self._sources: dict[str, list[BackgroundVideo]] = {}

    @abstractmethod
    def draw(self, frames: Frames, content: ContentT, *, first_frame: int) -> None:
        """Draw, in place, what the clip shows on its frames from number `first_frame` on."""

    def describe(self) -> dict[str, Any]:
        """Return what the files depend on. Raises DataError for a haystack that can't be divided among the splits."""
        self._sources = assign_to_splits(list_background_videos(self.config.haystack) if self.config.haystack else [])
        return {
            "settings": self.config.model_dump(mode="json", exclude={"model", *self.unused_settings}),
            "frame_budgets": list(self.frame_budgets),
            "sources": {source.path.name: source.digest for split in SPLITS for source in self._sources[split]},
        }

    def write_media(self, path: Path, content: ContentT, split: str, index: int) -> dict[str, Any]:
        """Write a clip unless it exists, and return its labels with the haystack span behind it."""
        seed, sources, background = derive_seed("pixels", self.seed, split, index), self._sources[split], None
        if sources:
            count = _count_frames(self.config)
            background = select_background(sources, seed, count=count, fps=self.config.fps)
        if not path.exists():
            write_video(path, self.render_frames(content, seed, background), self.config.fps)
        labels: dict[str, Any] = asdict(content)  # type: ignore[call-overload]
        return {"source": asdict(compute_span(*background)) if background else None, **labels}

    def render_frames(self, content: ContentT, seed: int, background: BackgroundFrames | None) -> Iterator[Frames]:
        """Yield the frames of a clip, uint8 RGB [pixels, pixels, 3] each, on a rendered or a haystack background."""
        size = self.config.frame_size
        if background:
            source, times = background
            blocks: Iterator[Frames] = (
                decode_frames(source, times[first : first + FRAMES_PER_BLOCK], size)
                for first in range(0, len(times), FRAMES_PER_BLOCK)
            )
        else:
            blocks = render_background(_count_frames(self.config), size, self.config.fps, seed)
        first_frame = 0
        for frames in blocks:
            self.draw(frames, content, first_frame=first_frame)
            yield from frames
            first_frame += len(frames)

    @classmethod
    def find_leaks(cls, root: Path, labels: Mapping[str, Mapping[str, tuple[str, ContentT]]]) -> list[str]:
        """Find files, contents and background frames that occur in more than one split."""
        return [
            *super().find_leaks(root, labels),
            *find_overlaps({split: read_background_spans(root, split) for split in SPLITS}),
        ]


class VideoDataset(ClipDataset[Labels]):
    """A dataset of clips with events; `frame_budgets` are those of the overviews in its demonstrations."""

    contents_seed, noun, count_key = "labels", "events", "synthetic.events"
    unused_settings = frozenset({"media", "image", "tasks", "needles"})
    content_type = Labels
    sample_content = staticmethod(sample_labels)
    questions = questions

    def __init__(self, config: SyntheticConfig, *, seed: int, frame_budgets: Sequence[int] = FRAME_BUDGETS) -> None:
        super().__init__(config, tasks_per_file=config.tasks_per_video, seed=seed)
        self.frame_budgets = tuple(dict.fromkeys(frame_budgets))

    def draw(self, frames: Frames, content: Labels, *, first_frame: int) -> None:
        """Draw events and distractors."""
        draw_events(frames, (*content.events, *content.distractors), self.config.fps, first_frame=first_frame)

    def build_demonstrations(self, tasks: Sequence[Task], contents: list[Labels]) -> list[Demonstration]:
        """Build demonstrations in the style of `synthetic.demonstrations`."""
        if self.config.demonstrations == "tool_calls":
            return build_tool_call_demonstrations(tasks, seed=self.seed, frame_budgets=self.frame_budgets)
        fps = self.config.fps if self.config.demonstrations == "python" else None
        # Every demonstration is paired with one that trains perception only.
        demonstrations = []
        for task in tasks:
            rng = random.Random(derive_seed("drill", self.seed, task.id))
            demonstrations += [
                build_direct_demonstration(task) if fps is None else build_python_demonstration(task, fps),
                build_perception_demonstration(task, rng, fps),
            ]
        return demonstrations


def build_tool_call_demonstrations(
    tasks: Sequence[Task],
    *,
    seed: int,
    frame_budgets: Sequence[int] = FRAME_BUDGETS,
    direct_share: float = 0.4,
) -> list[Demonstration]:
    """Build a demonstration per task and frame budget, each followed by an auxiliary one for sub-agents alone."""
    demonstrations = []
    for task in tasks:
        for frame_budget in frame_budgets:
            rng = random.Random(derive_seed("trace", seed, task.id, frame_budget))
            overview_times = sample_uniform_times(task.extras["seconds"], frame_budget)
            demonstrations.append(build_demonstration(task, overview_times, rng, direct_share=direct_share))
            demonstrations.append(build_auxiliary_demonstration(task, rng))
    return demonstrations


def _count_frames(config: SyntheticConfig) -> int:
    return max(1, round(config.clip_seconds * config.fps))


def read_background_spans(folder: str | os.PathLike[str], split: str) -> dict[str, BackgroundSpan]:
    """Read the haystack span behind every clip of a split that has one, by file name. Raises DataError."""
    entries = read_dataset_file(Path(folder) / split / "events.json").items()
    return {name: BackgroundSpan(**entry["source"]) for name, entry in entries if entry.get("source")}
