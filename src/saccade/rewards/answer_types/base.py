"""The contract of an answer type, and finding one by the name that a task has."""

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar

from saccade import plugins
from saccade.errors import ConfigError, DataError
from saccade.protocols import RewardResult
from saccade.rewards.text_normalization import extract_boxed, normalize_text
from saccade.types import Episode, Task

GroundTruth = str | float | tuple[float, ...]
FOLDER = "rewards.answer_types"
_MAX_QUOTED_CHARS = 120
_MAX_NUMBER = 1e308  # a JSON integer may have any number of digits
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?")


class BaseAnswerType(ABC):
    """An answer type. An instance, made with the type's settings, scores episodes; it may be called concurrently."""

    names: ClassVar[tuple[str, ...]]  # as tasks name the type, then what published datasets call it
    expected: ClassVar[str]  # a description of a valid ground truth, for errors
    example: ClassVar[tuple[GroundTruth, str]]  # a ground truth, and an answer that scores 1.0
    example_options: ClassVar[tuple[str, ...]] = ()  # the options of the example's task

    @abstractmethod
    def __call__(self, episode: Episode) -> RewardResult | Awaitable[RewardResult]:
        """Return how right the episode's final answer is, in [0, 1]; raise DataError for an invalid ground truth."""

    def explain(self, episode: Episode) -> str:
        """Return why an episode has its score, a phrase for people: what the answer was read as, and the truth."""
        return f"{quote_answer(episode)}, ground truth {episode.task.ground_truth!r}"

    @classmethod
    @abstractmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether a task may have this ground truth."""

    @classmethod
    @abstractmethod
    def parse_ground_truth(cls, value: Any) -> GroundTruth | None:
        """Return the ground truth that a published row writes as `value`; None if it is none."""

    @classmethod
    def find_problem(cls, task: Task) -> tuple[str, str] | None:
        """Return the field that makes a task impossible to grade, and a sentence about it; None for a valid task."""
        if cls.is_valid(task.ground_truth):
            return None
        return "ground_truth", f"ground truth {task.ground_truth!r} is not {cls.expected}"

    @classmethod
    def require_valid(cls, task: Task) -> None:
        """Raise DataError if a task can't be graded."""
        if problem := cls.find_problem(task):
            field, sentence = problem
            raise DataError(f"task {task.id}: {sentence}; correct the row", key=field, value=getattr(task, field))


def quote_answer(episode: Episode) -> str:
    """Return the final answer as a phrase, shortened."""
    answer = episode.answer
    if answer is None:
        return "no answer"
    return f"answer {answer[:_MAX_QUOTED_CHARS]!r}{'…' if len(answer) > _MAX_QUOTED_CHARS else ''}"


_registered: dict[str, type[BaseAnswerType]] = {}  # those of files that a recipe or a program names, by path


def list_answer_types() -> Mapping[str, type[BaseAnswerType]]:
    """Return the packaged, installed and registered answer types by plugin name, a file's by its path."""
    return _load_packaged() | _registered


@functools.cache
def _load_packaged() -> dict[str, type[BaseAnswerType]]:
    return {name: plugins.load(FOLDER, name) for name in plugins.list_plugins(FOLDER)}


def register_file(path: str) -> type[BaseAnswerType]:
    """Load an answer type from a file, so that tasks may name it. Raises ConfigError if the file defines none.

    Only recipes and programs name files: a dataset that could would execute code when it is loaded.
    """
    plugin = plugins.load(FOLDER, path)
    if not (isinstance(plugin, type) and issubclass(plugin, BaseAnswerType)):
        raise ConfigError(f"{path} must define a subclass of BaseAnswerType, not {plugin!r}", key=path, value=plugin)
    if plugin.names[0] in {packaged.names[0] for packaged in _load_packaged().values()}:
        message = f"{path} defines the answer type {plugin.names[0]!r}, which exists already; choose another name"
        raise ConfigError(message, key=path, value=plugin.names[0])
    _registered[path] = plugin
    return plugin


def find_plugin(answer_type: str) -> str:
    """Return the plugin of a task's answer type. Raises DataError for an unknown one."""
    by_name = {plugin.names[0]: name for name, plugin in list_answer_types().items()}
    if answer_type not in by_name:
        hint = (
            "a dataset can't name a file; list the file in rewards.accuracy.settings.answer_types, and name its type"
            if ".py" in answer_type
            else suggest_answer_type(answer_type)
        )
        raise DataError(f"there is no answer type {answer_type!r}; {hint}", key="answer_type", value=answer_type)
    return by_name[answer_type]


def find_answer_type(declared: str) -> str | None:
    """Return the answer type that a dataset calls `declared`, None for any other name."""
    names = {name: plugin.names[0] for plugin in list_answer_types().values() for name in plugin.names}
    return names.get(declared.strip().lower())


def suggest_answer_type(name: str) -> str:
    """Return the end of an error about an unknown answer type: the type of that other name, or the nearest one."""
    if answer_type := find_answer_type(name):
        return f"write {answer_type!r}"
    return plugins.suggest(name, (plugin.names[0] for plugin in list_answer_types().values()))


def get_answer_type(answer_type: str) -> type[BaseAnswerType]:
    """Return the class of a task's answer type. Raises DataError for an unknown one."""
    return list_answer_types()[find_plugin(answer_type)]


def unwrap_answer(text: str) -> str:
    r"""Remove `<answer>` tags and a `\boxed{...}` around a published answer.

    >>> unwrap_answer("<answer>\n\\boxed{red}\n</answer>")
    'red'
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))  # the last closed one; a regex would take quadratic time
    answer = (text if start < 0 else text[start + len("<answer>") : end]).strip()
    boxed = extract_boxed(answer)
    return boxed[-1].strip() if boxed and answer.startswith("\\boxed") else answer


def parse_text(value: Any) -> str | None:
    """Return the text of a published answer, which may be a number; None if it is blank."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return unwrap_answer(str(value)) or None


def parse_numbers(value: Any) -> tuple[float, ...]:
    """Return every finite number of a published answer, in order."""
    if isinstance(value, str):
        text = normalize_text(unwrap_answer(value))
        # A comma between digits separates thousands only before exactly three digits, and outside a list.
        is_list = text.lstrip().startswith(("[", "("))
        text = text.replace(",", ", ") if is_list else re.sub(r",(?!\d{3}(?!\d))", ", ", text)
        numbers = [float(number.rstrip("%").replace(",", "")) for number in _NUMBER.findall(text)]
    else:
        values = value if isinstance(value, list | tuple) else [value]
        numbers = [
            float(item)
            for item in values
            if isinstance(item, int | float) and not isinstance(item, bool) and abs(item) < _MAX_NUMBER
        ]
    return tuple(number for number in numbers if math.isfinite(number))
