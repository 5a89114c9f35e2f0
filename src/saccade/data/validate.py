"""Validate a dataset: rows, media files, times, answers, duplicates, and leaks between its splits.

Each file is a split. Only hashes of eight bytes per row stay in memory, so that large files can be checked.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.chat.parser import parse_reply
from saccade.data.dataset import detect_item_type, find_task_problem, get_task, parse_item
from saccade.data.source_row import SourceRow, iterate_rows_with_errors
from saccade.errors import DataError, MediaError
from saccade.media import hashing, image, video
from saccade.media.frame_sampling import sample_uniform_times
from saccade.media.subtitles import find_subtitles, read_cues
from saccade.types import AnswerType, Demonstration, Media, MediaKind, Task
from saccade.utils.hashing import compute_digest

MAX_EXAMPLES = 3  # per finding
DECODED_FRAMES = 8  # of each video, evenly spread
MAX_LETTER_SHARE = 0.6  # of one letter among the answers; a larger share is reported
MIN_CHOICE_TASKS = 50  # with fewer choice tasks, letter shares aren't reported

# Findings in NOTE_FINDINGS are worth knowing but aren't problems.
FINDING_DESCRIPTIONS = {
    "row": "rows that aren't valid tasks",
    "id": "ids that are used twice",
    "answer": "answers that can't be graded",
    "missing": "media files that don't exist",
    "unreadable": "media files that can't be opened",
    "time": "answers beyond the end of their video",
    "repeated": "questions that occur twice with the same media",
    "leak": "media files that are also in another split",
    "shared question": "questions with the same answer in another split, with other media",
    "letter bias": "one letter is the answer too often",
}
NOTE_FINDINGS = frozenset({"repeated", "shared question", "letter bias"})


@dataclass(slots=True)
class SplitReport:
    """The report on one file: tasks by answer type, number of different media files, findings with examples."""

    file: str
    answer_types: Counter[str] = field(default_factory=Counter)
    num_media: int = 0
    video_seconds: float = 0.0  # total length of its videos
    findings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    answer_letters: Counter[str] = field(default_factory=Counter)

    def add_finding(self, finding: str, message: str) -> None:
        """Count a finding, and keep its message among the first examples."""
        self.findings[finding] += 1
        if self.findings[finding] <= MAX_EXAMPLES:
            self.examples.setdefault(finding, []).append(message)


def validate_dataset(
    paths: Sequence[Path],
    *,
    media_root: Path | None = None,
    open_media: bool = True,
    on_progress: Callable[[str, int], None] = lambda file, rows: None,
) -> list[SplitReport]:
    """Check files of tasks or demonstrations, each a split, and return a report per file.

    Relative media paths start at `media_root`, or at the folder of their file. With `open_media` every media file is
    opened and identified by its content, otherwise by its path. Raises DataError for a file that doesn't exist or holds
    neither tasks nor demonstrations.
    """
    validator = _Validator(open_media=open_media, media_root=media_root)
    for source in paths:
        validator.reports.append(SplitReport(file=str(source)))
        validator.seen_ids.clear()
        item_type = detect_item_type(source)
        try:
            for num_rows, row in enumerate(iterate_rows_with_errors(source), start=1):
                validator.check_row(row, item_type)
                on_progress(source.name, num_rows)
        except DataError as error:  # the rest of the file can't be read
            validator.split.add_finding("row", str(error))
        validator.check_letter_bias()
    return validator.reports


@dataclass(slots=True)
class _MediaInfo:
    """A media file: a hash of its content, its duration in seconds, and its problem (finding, message), if any."""

    content_hash: int
    duration: float = 0.0
    problem: tuple[str, str] | None = None


@dataclass(slots=True)
class _Validator:
    open_media: bool
    media_root: Path | None
    reports: list[SplitReport] = field(default_factory=list)  # the last one is of the split that is checked
    seen_ids: set[int] = field(default_factory=set)  # hashes, of the split that is checked
    media_by_path: dict[str, _MediaInfo] = field(default_factory=dict)
    seen_questions: set[int] = field(default_factory=set)  # hashes of media, question and split
    splits_by_media: dict[int, set[int]] = field(default_factory=dict)  # content hash -> split indices
    first_occurrences: dict[int, tuple[int, int]] = field(default_factory=dict)  # question hash -> split, media hash

    @property
    def split(self) -> SplitReport:
        return self.reports[-1]

    def check_row(self, row: SourceRow | DataError, item_type: type[Any]) -> None:
        try:
            if isinstance(row, DataError):
                raise row
            item = parse_item(row, item_type)
        except DataError as error:
            self.split.add_finding("row", str(error))
            return
        task = get_task(item)
        self.split.answer_types[task.answer_type] += 1
        id_hash = _hash_value(task.id)
        if id_hash in self.seen_ids and not isinstance(item, Demonstration):  # a task may have several demonstrations
            self.split.add_finding("id", f"{task.id}, row {row.number}")
        self.seen_ids.add(id_hash)
        for problem in _find_answer_problems(item, task):
            self.split.add_finding("answer", f"{task.id}: {problem}")
        if task.answer_type == AnswerType.CHOICE:
            self.split.answer_letters[str(task.ground_truth)] += 1
        folder = self.media_root or row.file.parent
        media_infos = [self.check_media_file(str(folder / media.path), media, task) for media in task.media]
        for media in item.media[len(task.media) :]:  # images that a published conversation shows
            self.inspect(str(folder / media.path), media.kind, task)
        subtitles = find_subtitles(task)
        if subtitles is not None:
            self.inspect(str(folder / subtitles), None, task)
        self.check_time_span(task, media_infos)
        demonstration_key = [item.frame_budget, item.replies] if isinstance(item, Demonstration) else []
        self.check_duplicates(task, _hash_value([info.content_hash for info in media_infos]), demonstration_key)

    def check_media_file(self, path: str, media: Media, task: Task) -> _MediaInfo:
        """Check a media file of a task, and whether another split has it."""
        info = self.inspect(path, media.kind, task)
        splits = self.splits_by_media.setdefault(info.content_hash, set())
        split_index = len(self.reports) - 1
        if split_index not in splits:
            self.split.num_media += 1
            self.split.video_seconds += info.duration
            if splits and info.problem is None:
                self.split.add_finding("leak", f"{path} ({task.id}), as in {self.reports[min(splits)].file}")
        splits.add(split_index)
        return info

    def inspect(self, path: str, kind: MediaKind | None, task: Task) -> _MediaInfo:
        """Inspect a file that a task names, subtitles if `kind` is None, and report its problem; it is opened once."""
        if path not in self.media_by_path:
            self.media_by_path[path] = _inspect_file(path, kind, open_media=self.open_media)
        info = self.media_by_path[path]
        if info.problem is not None:
            self.split.add_finding(info.problem[0], f"{task.id}: {info.problem[1]}")
        return info

    def check_time_span(self, task: Task, media_infos: Sequence[_MediaInfo]) -> None:
        duration = max((info.duration for info in media_infos), default=0.0)
        if task.answer_type != AnswerType.GROUNDING or not isinstance(task.ground_truth, tuple) or not duration:
            return
        if task.ground_truth[0] < 0 or task.ground_truth[-1] > duration + video.END_TOLERANCE:
            self.split.add_finding("time", f"{task.id}: {task.ground_truth} in a video of {duration:.1f} s")

    def check_duplicates(self, task: Task, media_hash: int, demonstration_key: Sequence[Any]) -> None:
        """Check for the same question about the same media in this split, or about other media in another split."""
        split_index, texts = len(self.reports) - 1, [_fold_text(text) for text in (task.question, *task.options)]
        task_hash = _hash_value([texts, media_hash, demonstration_key, split_index])
        if task_hash in self.seen_questions:
            self.split.add_finding("repeated", task.id)
        self.seen_questions.add(task_hash)
        # With another answer it is another question: "How many?" may be asked about any clip.
        question_hash = _hash_value([texts, task.ground_truth])
        first_split, first_media = self.first_occurrences.setdefault(question_hash, (split_index, media_hash))
        if first_split != split_index and first_media != media_hash:
            message = f"{task.id}: {task.question[:80]!r}, as in {self.reports[first_split].file}"
            self.split.add_finding("shared question", message)

    def check_letter_bias(self) -> None:
        """Check that no letter is the answer too often; with few questions, one letter leads by chance."""
        letters = self.split.answer_letters
        if letters.total() >= MIN_CHOICE_TASKS:
            letter, count = letters.most_common(1)[0]
            if count > MAX_LETTER_SHARE * letters.total():
                self.split.add_finding("letter bias", f"{letter} in {count} of {letters.total()}")


def _fold_text(text: str) -> str:
    return " ".join(text.casefold().split())


def _hash_value(value: Any) -> int:
    return int(compute_digest(value)[:16], 16)


def _inspect_file(path: str, kind: MediaKind | None, *, open_media: bool) -> _MediaInfo:
    info = _MediaInfo(content_hash=_hash_value(path))
    if not os.path.isfile(path):
        info.problem = "missing", f"there is no file {path}"
    elif open_media:
        try:
            if kind is None:
                read_cues(path)
            elif kind is MediaKind.VIDEO:
                index = video.index_video(path)
                info.duration = index.info.duration
                times = sample_uniform_times(index.info.duration, min(DECODED_FRAMES, index.info.num_frames))
                video.decode_frames(index, times, size=(32, 32))  # a damaged file may have a whole timeline
            else:
                image.read_image(path)
            info.content_hash = _hash_value(hashing.compute_file_digest(path))
        except MediaError as error:
            info.problem = "unreadable", str(error)
    return info


def _find_answer_problems(item: Task | Demonstration, task: Task) -> list[str]:
    """Return the problems of a ground truth, of the options, and of a demonstration's last reply."""
    problem = find_task_problem(task)
    problems = [] if problem is None else [problem[1]]
    if isinstance(task.ground_truth, str) and not task.ground_truth.strip():
        problems.append("its ground truth is blank")
    if len({*map(_fold_text, task.options)}) < len(task.options):
        problems.append("two of its options are the same")
    if isinstance(item, Demonstration) and (not item.replies or parse_reply(item.replies[-1]).answer is None):
        problems.append("its last reply has no closed answer")
    return problems
