"""What synthetic video and image datasets share: splits without duplicates, resuming, files, validation.

```
folder/dataset.json                   settings, seed, versions
folder/{train,validation,test}/
    clips/00000.mp4 …                 the videos (pictures/00000.png … of an image dataset)
    events.json                       per file: its digest, and what it shows (objects.json of an image dataset)
    tasks.jsonl                       `Task` rows (see questions.py for their extras)
    demonstrations.jsonl              only in train: `Demonstration` rows
```
"""

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import saccade
from saccade.config.schema import SyntheticConfig
from saccade.data.constant_baseline import compute_constant_baselines
from saccade.data.dataset import load_tasks, write_items
from saccade.data.synthetic.questions import AnswerBalancer
from saccade.errors import ConfigError, DataError
from saccade.media import hashing
from saccade.types import AnswerType, Demonstration, Media, MediaKind, Task
from saccade.utils.hashing import derive_seed
from saccade.utils.jsonl import read_json, validate_as, write_json, write_jsonl

SPLITS = ("train", "validation", "test")
FORMAT_VERSION = 2
MAX_DRAWS = 200  # to sample content that no other file shows

ProgressCallback = Callable[[str, int, int], None]  # split, number of files done, number of files


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """The counts, baselines and problems of a dataset; a valid one has no `problems`."""

    num_media: dict[str, int]  # videos or images per split
    num_tasks: dict[str, int]
    constant_baselines: dict[str, dict[str, float]]  # score of the best constant answer per split and question kind
    problems: tuple[str, ...] = ()


class Content(Protocol):
    """What a media file shows: a dataclass whose fields are its labels."""

    @property
    def signature(self) -> str:
        """A digest that is equal for files with the same answers."""

    @property
    def extras(self) -> dict[str, Any]:
        """The labels in the extras of tasks."""


ContentT = TypeVar("ContentT", bound=Content)


class SyntheticDataset(ABC, Generic[ContentT]):
    """A kind of dataset; everything in it follows from the settings and the seed."""

    media_kind: MediaKind
    media_folder: str  # of each split
    suffix: str  # of a media file
    labels_filename: str
    contents_seed: str  # part of the seeds of contents; frozen, as the files depend on it
    noun: str  # of what a file shows, such as "events"
    count_key: str  # the recipe's key of how many of them a file shows
    packages: tuple[str, ...]  # that the files depend on
    content_type: type[ContentT]
    sample_content: Callable[[Any, random.Random], ContentT]  # (settings, rng)
    questions: ModuleType  # ANSWER_TYPES, build_candidates, describe_question, compute_ground_truth

    def __init__(self, config: SyntheticConfig, settings: Any, *, tasks_per_file: int, seed: int) -> None:
        self.config, self.settings, self.tasks_per_file, self.seed = config, settings, tasks_per_file, seed

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the settings on which the files depend, for the manifest."""

    @abstractmethod
    def build_demonstrations(self, tasks: Sequence[Task], contents: list[ContentT]) -> list[Demonstration]:
        """Build the demonstrations of the training split; auxiliary ones may append their files to `contents`."""

    @abstractmethod
    def write_media(self, path: Path, content: ContentT, split: str, index: int) -> dict[str, Any]:
        """Write a media file unless it exists, and return its labels."""

    def sample_contents(self) -> dict[str, list[ContentT]]:
        """Sample the content of every file; no two files have the same signature. Raises ConfigError if that fails."""
        # Shared by all splits: no test file may occur in training.
        seen: set[str] = set()

        def sample_unique(rng: random.Random, index: int) -> ContentT:
            for _ in range(MAX_DRAWS):
                content = self.sample_for_index(rng, index)
                if content.signature not in seen:
                    seen.add(content.signature)
                    return content
            problem = f"so few {self.noun} fit into a file that files would repeat; increase {self.count_key}"
            raise ConfigError(problem, key=self.count_key)

        sizes = {"train": self.config.train, "validation": self.config.validation, "test": self.config.test}
        contents = {}
        for split in reversed(SPLITS):  # test first, so that it doesn't depend on the size of the training split
            seeds = (derive_seed(self.contents_seed, self.seed, split, index) for index in range(sizes[split]))
            contents[split] = [sample_unique(random.Random(seed), index) for index, seed in enumerate(seeds)]
        return contents

    def sample_for_index(self, rng: random.Random, index: int) -> ContentT:
        """Sample the content of the file with this number in its split."""
        return self.sample_content(self.settings, rng)

    @property
    def question_kinds(self) -> tuple[str, ...]:
        """Return the kinds of questions."""
        return tuple(self.settings.questions)

    def build_tasks(self, contents: Sequence[ContentT], split: str) -> list[Task]:
        """Build the tasks of a split, with answers balanced over all its files."""
        rng = random.Random(derive_seed("questions", self.seed, split))
        balancer = AnswerBalancer(rng)
        tasks: list[Task] = []
        for index, content in enumerate(contents):
            pools = {kind: self.questions.build_candidates(kind, content, rng) for kind in self.question_kinds}
            media = (Media(path=f"{self.media_folder}/{self.format_name(index)}", kind=self.media_kind),)
            for number, question in enumerate(balancer.select(pools, self.tasks_per_file)):
                text, extras = self.questions.describe_question(question, content, self.settings)
                task = Task(
                    id=f"{split}-{index:05d}-{number}",
                    question=text,
                    media=media,
                    answer_type=AnswerType.CHOICE if question.options else self.questions.ANSWER_TYPES[question.kind],
                    ground_truth=question.answer,
                    options=question.options,
                    extras=extras,
                )
                tasks.append(task)
        if not tasks:
            key, questions = f"{self.count_key.rpartition('.')[0]}.questions", self.question_kinds
            problem = f"no file of the split {split} allows such a question; increase {self.count_key}"
            raise ConfigError(f"{key}={list(questions)}: {problem}", key=key, value=questions)
        return tasks

    @classmethod
    def format_name(cls, index: int) -> str:
        """Return the name of a media file."""
        return f"{index:05d}{cls.suffix}"

    def generate(self, root: Path, progress: ProgressCallback | None = None) -> None:
        """Generate the dataset in a folder, or resume an interrupted call; see `generate_dataset`."""
        # before anything is written, so that the same command works with other settings
        contents = self.sample_contents()
        tasks = {split: self.build_tasks(contents[split], split) for split in SPLITS}
        demonstrations = self.build_demonstrations(tasks["train"], contents["train"])
        self._write_or_check_manifest(root)
        for split in SPLITS:
            folder = root / split / self.media_folder
            folder.mkdir(parents=True, exist_ok=True)
            entries = {}
            for index, content in enumerate(contents[split]):
                path = folder / self.format_name(index)
                labels = self.write_media(path, content, split, index)
                entries[path.name] = {"digest": hashing.compute_file_digest(str(path)), **labels}
                if progress:
                    progress(split, index + 1, len(contents[split]))
            # Rows are cheap and follow from the seed: every call writes them again.
            write_json(root / split / self.labels_filename, entries)
            if split == "train":
                write_jsonl(root / split / "demonstrations.jsonl", demonstrations)
            write_items(root / split / "tasks.jsonl", tasks[split])  # last: a split with tasks is complete

    def _write_or_check_manifest(self, root: Path) -> None:
        """Write dataset.json, or raise DataError for a folder with another dataset or with other files."""
        identity = {"format": FORMAT_VERSION, "seed": self.seed, **self.describe()}
        path = root / "dataset.json"
        if path.exists():
            existing = read_dataset_file(path)
            changed = [key for key, value in identity.items() if existing.get(key) != value]
            if changed:
                problem = f"{root} holds another dataset (different {', '.join(changed)})"
                raise DataError(f"{problem}; choose a new folder", key=str(root), value=tuple(changed))
            return
        # Never write into a folder with other files.
        if root.exists() and any(root.iterdir()):
            raise DataError(f"{root} is not empty and holds no dataset; choose a new folder", key=str(root))
        root.mkdir(parents=True, exist_ok=True)
        versions = {"saccade": saccade.__version__, **{package: version(package) for package in self.packages}}
        write_json(path, {**identity, "versions": versions})

    @classmethod
    def read_labels(cls, root: str | os.PathLike[str], split: str) -> dict[str, tuple[str, ContentT]]:
        """Read the digest and the content of every file of a split, by file name. Raises DataError."""
        path = Path(root) / split / cls.labels_filename
        return {
            name: (entry["digest"], validate_as(entry, cls.content_type, f"{path}, {name}"))
            for name, entry in read_dataset_file(path).items()
        }

    @classmethod
    def validate(cls, root: Path) -> ValidationReport:
        """Check a dataset; see `validate_dataset`."""
        labels = {split: cls.read_labels(root, split) for split in SPLITS}
        tasks = {split: load_tasks(root / split / "tasks.jsonl") for split in SPLITS}
        problems = cls.find_leaks(root, labels)
        for split in SPLITS:
            for name, (digest, _) in labels[split].items():
                path = root / split / cls.media_folder / name
                if not path.is_file() or hashing.compute_file_digest(str(path)) != digest:
                    file = path.relative_to(root).as_posix()
                    problems.append(f"{file}: missing, or not the file that the labels were made for")
            for task in tasks[split]:
                problems += [f"task {task.id}: {problem}" for problem in cls._find_task_problems(task, labels[split])]
            problems += [f"{split}: {problem}" for problem in cls.find_split_problems(root, tasks[split])]
        return ValidationReport(
            num_media={split: len(labels[split]) for split in SPLITS},
            num_tasks={split: len(tasks[split]) for split in SPLITS},
            constant_baselines={split: compute_constant_baselines(tasks[split]) for split in SPLITS},
            problems=tuple(problems),
        )

    @classmethod
    def find_split_problems(cls, root: Path, tasks: Sequence[Task]) -> list[str]:
        """Find what is wrong with the tasks of a split as a whole."""
        return []

    @classmethod
    def find_leaks(cls, root: Path, labels: Mapping[str, Mapping[str, tuple[str, ContentT]]]) -> list[str]:
        """Find files and contents that occur in more than one split."""
        files_by_key: dict[str, list[str]] = {}
        for split, entries in labels.items():
            for name, (digest, content) in entries.items():
                for key in (f"file {digest}", f"{cls.noun} {content.signature}"):
                    files_by_key.setdefault(key, []).append(f"{split}/{cls.media_folder}/{name}")
        # Equal content within one split is a duplicate, not a leak.
        shared = {key: names for key, names in files_by_key.items() if len({name.split("/")[0] for name in names}) > 1}
        return [
            f"{', '.join(names)}: the same {key.split()[0]} in more than one split" for key, names in shared.items()
        ]

    @classmethod
    def _find_task_problems(cls, task: Task, labels: Mapping[str, tuple[str, ContentT]]) -> list[str]:
        name = Path(task.media[0].path).name
        if name not in labels:
            return [f"its file {name} has no labels"]
        content = labels[name][1]
        problems, expected = [], cls.questions.compute_ground_truth(task, content)
        if any(task.extras[key] != value for key, value in content.extras.items()):
            problems.append(f"its {cls.noun} differ from those of its file")
        if expected != task.ground_truth:
            problems.append(f"ground truth {task.ground_truth!r}, but the labels give {expected!r}")
        return problems


def read_dataset_kind(folder: str | os.PathLike[str]) -> str:
    """Return the kind of the dataset in a folder: video, needles, image or map."""
    settings = read_dataset_file(Path(folder) / "dataset.json").get("settings")
    settings = settings if isinstance(settings, dict) else {}
    tasks = str(settings.get("tasks", "tiling"))
    # Manifests of clips have no `media`, and those of tiling have no `tasks`.
    if settings.get("media", "video") == "image":
        return "map" if tasks == "map" else "image"
    return "video" if tasks == "tiling" else "needles"


def read_dataset_file(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file in a dataset folder. Raises DataError."""
    return read_json(path, dict[str, Any], hint="if the dataset is incomplete, generate it again in the same folder")
