"""Is a data set sound? Rows, files, times, answers, repetitions, and what its splits share.

Each file is a split. Of every row only marks of eight bytes are kept, so that large files can be checked.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.data import native
from saccade.data.raw import Row, each_row
from saccade.data.rows import problem_of
from saccade.errors import DataError, MediaError
from saccade.media import files, image, video
from saccade.media.subtitles import read_cues, subtitles_path
from saccade.types import Demo, Kind, Media, MediaKind, Task, digest_of

EXAMPLES = 3  # of each finding
LEAN = 0.6  # share of one letter among the answers that is worth a note
FEW = 50  # choices below which shares say nothing

# what each finding means; those of NOTES are no mistakes, but worth knowing
FINDINGS = {
    "row": "rows that are no tasks",
    "id": "ids that were used before",
    "answer": "answers that can't be judged",
    "missing": "files that aren't there",
    "unreadable": "files that can't be opened",
    "time": "answers beyond the end of their video",
    "repeated": "questions asked before of the same files",
    "leak": "files that stand in another split, too",
    "shared question": "questions with the same answer in another split, of other files",
    "lean": "one letter is the answer too often",
}
NOTES = frozenset({"repeated", "shared question", "lean"})


@dataclass(slots=True)
class Split:
    """What was found in one file: tasks by kind, how many different files they have, findings with some examples."""

    file: str
    kinds: Counter[str] = field(default_factory=Counter)
    media: int = 0
    seconds: float = 0.0  # of its videos
    findings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    letters: Counter[str] = field(default_factory=Counter)

    def found(self, what: str, sentence: str) -> None:
        """Note a finding."""
        self.findings[what] += 1
        self.examples.setdefault(what, [])
        self.examples[what] += [sentence] if len(self.examples[what]) < EXAMPLES else []

    @property
    def problems(self) -> int:
        """How many findings are mistakes."""
        return sum(count for what, count in self.findings.items() if what not in NOTES)


def check(
    sources: Sequence[Path], *, look: bool = True, told: Callable[[str, int], None] = lambda file, rows: None
) -> list[Split]:
    """Check files of tasks or demonstrations, each a split.

    Where `look`, every file of media is opened and known by its content, else by its path. Raises DataError where a
    file of rows isn't there or holds neither.
    """
    work = _Check(look=look, names=[str(source) for source in sources])
    splits = []
    for number, source in enumerate(sources):
        split = Split(file=str(source))
        kind = native.kind_of(source)
        ids: set[int] = set()
        try:
            for place, row in enumerate(each_row(source), start=1):
                work.row(row, kind, number, split, ids)
                told(source.name, place)
        except DataError as error:  # what comes behind can't be read
            split.found("row", str(error))
        _lean(split)
        splits.append(split)
    return splits


@dataclass(slots=True)
class _Known:
    """A file of media: a mark of its content, its length in seconds, and what is wrong with it."""

    mark: int
    seconds: float = 0.0
    problem: tuple[str, str] | None = None


@dataclass(slots=True)
class _Check:
    look: bool
    names: Sequence[str]  # of the splits
    files: dict[str, _Known] = field(default_factory=dict)
    said: dict[str, tuple[str, str] | None] = field(default_factory=dict)  # what is wrong with files of subtitles
    asked: set[int] = field(default_factory=set)  # marks of files, question and split
    splits_of: dict[int, set[int]] = field(default_factory=dict)  # mark of a file -> splits
    answered: dict[int, tuple[int, int]] = field(default_factory=dict)  # mark of a question -> split, mark of files

    def row(self, row: Row | DataError, kind: type[Any], number: int, split: Split, ids: set[int]) -> None:
        """One row, as a task and against those before it."""
        if isinstance(row, DataError):
            return split.found("row", str(row))
        try:
            item = native.of_row(row, kind)
        except DataError as error:
            return split.found("row", str(error))
        task = item.task if isinstance(item, Demo) else item
        split.kinds[task.kind.value] += 1
        if _mark(task.id) in ids and not isinstance(item, Demo):  # a task may be shown in several ways
            split.found("id", f"{task.id}, row {row.number}")
        ids.add(_mark(task.id))
        for problem in _answers(item, task):
            split.found("answer", f"{task.id}: {problem}")
        if task.kind is Kind.CHOICE:
            split.letters[str(task.gold)] += 1
        folder = row.file.parent
        known = [self.medium(str(folder / one.path), one, number, split, task) for one in task.media]
        self.subtitles(task, folder, split)
        self.times(task, known, split)
        said = [item.frames, item.replies] if isinstance(item, Demo) else []
        self.question(task, _mark([each.mark for each in known]), said, number, split)
        return None

    def subtitles(self, task: Task, folder: Path, split: Split) -> None:
        """Whether the file of subtitles that a task names is there, and holds some."""
        named = subtitles_path(task)
        if named is None:
            return
        name = str(folder / named)
        if name not in self.said:
            self.said[name] = _said(name, look=self.look)
        found = self.said[name]
        if found is not None:
            split.found(found[0], f"{task.id}: {found[1]}")

    def medium(self, name: str, one: Media, number: int, split: Split, task: Task) -> _Known:
        """A file of a task, opened the first time that it is met."""
        if name not in self.files:
            self.files[name] = _opened(name, one.kind, look=self.look)
        known = self.files[name]
        seen = self.splits_of.setdefault(known.mark, set())
        if number not in seen:
            split.media += 1
            split.seconds += known.seconds
            if seen and known.problem is None:
                split.found("leak", f"{name} ({task.id}), as in {self.names[min(seen)]}")
        seen.add(number)
        if known.problem is not None:
            split.found(known.problem[0], f"{task.id}: {known.problem[1]}")
        return known

    def times(self, task: Task, known: Sequence[_Known], split: Split) -> None:
        """Whether the time that is asked for is one of the video's."""
        lengths = [each.seconds for each in known if each.seconds]
        if task.kind is not Kind.GROUNDING or not isinstance(task.gold, tuple) or not lengths:
            return
        if task.gold[0] < 0 or task.gold[-1] > max(lengths) + video.GRACE:
            split.found("time", f"{task.id}: {task.gold} of a video of {max(lengths):.1f} s")

    def question(self, task: Task, media: int, said: Sequence[Any], number: int, split: Split) -> None:
        """Whether the same was asked (and said in reply) of the same files, or in another split of others."""
        words = [" ".join(text.casefold().split()) for text in (task.question, *task.choices)]
        own = _mark([words, media, said, number])
        if own in self.asked:
            split.found("repeated", task.id)
        self.asked.add(own)
        # With another answer it is another question: "How many?" may be asked of any clip.
        alike = _mark([words, task.gold])
        before, others = self.answered.setdefault(alike, (number, media))
        if before != number and others != media:
            split.found("shared question", f"{task.id}: {task.question[:80]!r}, as in {self.names[before]}")


def _mark(value: Any) -> int:
    return int(digest_of(value)[:16], 16)


def _opened(path: str, kind: MediaKind, *, look: bool) -> _Known:
    if not os.path.isfile(path):
        return _Known(mark=_mark(path), problem=("missing", f"there is no file {path}"))
    if not look:
        return _Known(mark=_mark(path))
    try:
        mark = _mark(files.digest(path))
        if kind is MediaKind.VIDEO:
            return _Known(mark=mark, seconds=video.probe(path).duration)
        image.read(path)
    except MediaError as error:
        return _Known(mark=_mark(path), problem=("unreadable", str(error)))
    return _Known(mark=mark)


def _said(path: str, *, look: bool) -> tuple[str, str] | None:
    if not os.path.isfile(path):
        return "missing", f"there is no file {path}"
    try:
        if look:
            read_cues(path)
    except MediaError as error:
        return "unreadable", str(error)
    return None


def _answers(item: Task | Demo, task: Task) -> list[str]:
    """What is odd about the gold answer, or about how a demonstration ends."""
    found = [problem_of(task)]
    if isinstance(task.gold, str) and not task.gold.strip():
        found.append("its gold is blank")
    texts = [" ".join(choice.casefold().split()) for choice in task.choices]
    if len({*texts}) < len(texts):
        found.append("two of its choices are the same")
    if isinstance(item, Demo) and (not item.replies or "</answer>" not in item.replies[-1]):
        found.append("its last reply has no closed answer")
    return [problem for problem in found if problem]


def _lean(split: Split) -> None:
    # Of a few questions, one letter leads by chance.
    total = split.letters.total()
    if total < FEW:
        return
    letter, count = split.letters.most_common(1)[0]
    if count > LEAN * total:
        split.found("lean", f"{letter} in {count} of {total}")
