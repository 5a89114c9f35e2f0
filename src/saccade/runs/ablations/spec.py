"""What a set of runs is: what is claimed, which arms are compared, under which conditions, and what is measured.

    set ──> starts      a cold start each, made once per seed: the usual one, and others that go on from it
        ──> conditions  which start, and settings; where an effect is claimed to appear, and where not
        ──> arms        recipes and settings: what is compared in each condition, from the same weights
        ──> exams, tables, curves: what the report shows

A set is a YAML file in `sets/`, or anywhere (`./mine.yaml`). Of settings that name the same key the later ones count:
a recipe's, those of every set (`COMMON`), the set's, the condition's, the arm's, the command line's.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from saccade.config import Count, Section, Share, Whole, parsed
from saccade.errors import ConfigError
from saccade.plugins import nearest
from saccade.sections import made

PACKAGED = Path(__file__).parent / "sets"
BASE = "tiny/base"  # the recipe of worlds and cold starts
# One thread, since two runs go on side by side; 48 attempts to learn from out of 64 that are made.
COMMON = (
    "model.threads=1",
    "world.validation=1",
    "world.test=24",
    "rl.prompts=6",
    "rl.select.oversample=1.34",
    "rl.save_every=10",
    "sft.save_every=100",
)

Exam = Literal["greedy", "sampled", "tools_off", "alone"]
Measure = Literal[
    "accuracy",
    "compliance",
    "answered",
    "calls",
    "succeeded",
    "tool_share",
    "leaked",
    "turns",
    "response_tokens",
    "sampled_tokens",
    "visual_tokens",
    "seconds",
]
Settings = tuple[str, ...]


class Start(Section):
    """A cold start: `steps` of SFT on rewritten traces, from random weights or on from the start `after`.

    `direct` is the share that answers at once of the traces whose overview is enough; `leaked` and `open_think` are the
    shares of the traces that write their calls in the leaked form, or leave their thinking open; with `one_by_one`
    every call is a turn of its own.
    """

    about: str = ""
    after: str | None = None
    steps: Count = 400
    direct: Share = 0.4
    leaked: Share = 0.0
    open_think: Share = 0.0
    one_by_one: bool = False
    settings: Settings = ()


class Condition(Section):
    """What holds for all arms; `arms` names those that are compared in it (empty: all)."""

    about: str = ""
    start: str = "usual"
    settings: Settings = ()
    arms: tuple[str, ...] = ()


class Arm(Section):
    """One of what is compared: a recipe and settings; `start` stands in for the condition's."""

    about: str = ""
    recipe: str = "tiny/para_grpo"
    start: str | None = None
    settings: Settings = ()


class Table(Section):
    """A measure of an exam before and after RL, less the same measure of another exam where `less` names one.

    With `by` it is shown after RL alone, in slices of the tasks.
    """

    exam: Exam
    measure: Measure
    less: Exam | None = None
    by: Literal["", "frames", "question", "overview"] = ""


class Quick(Section):
    """What `--quick` takes of the set."""

    steps: Count = 20
    start_steps: Count = 200  # of a start from random weights; those that go on from another take a quarter
    tests: Count = 12  # clips of the test split
    arms: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


class Set(Section):
    """A set of runs. Raises ConfigError (through `read_set`) where its parts don't fit together."""

    title: str
    claim: str
    asks: str  # what the conditions are for
    settings: Settings = ()
    steps: Count
    rolled: Count = 64  # attempts that a step of RL costs as much as, for the plan alone
    baseline: str
    starts: dict[str, Start] = Field(default_factory=lambda: {"usual": Start()})
    conditions: dict[str, Condition]
    arms: dict[str, Arm] = Field(min_length=1)
    exams: tuple[Exam, ...] = ("greedy", "sampled")
    lone: Whole = 24  # tasks of the exam `alone`
    tables: tuple[Table, ...]
    curves: tuple[str, ...]  # keys of the step's metrics
    late: tuple[str, ...] = ()  # of which the mean over the last third of the steps is told
    quick: Quick = Quick()

    @model_validator(mode="after")
    def _name_folders(self) -> "Set":
        for name in (*self.arms, *self.conditions, *self.starts):
            if not re.fullmatch(r"\w[\w-]*", name):
                raise ValueError(f"{name!r} can't be a folder's name; use letters, digits, _ and -")
        taken = {"world", "model", "starts"} & self.conditions.keys()
        if taken:
            raise ValueError(f"no condition can be called {min(taken)!r}: a folder of that name is there already")
        return self

    @model_validator(mode="after")
    def _fit(self) -> "Set":
        wanted: dict[str, list[str]] = {
            "arms": [self.baseline, *self.quick.arms, *(arm for each in self.conditions.values() for arm in each.arms)],
            "conditions": list(self.quick.conditions),
            "starts": [
                "usual",
                *(each.start for each in self.conditions.values()),
                *(each.start for each in self.arms.values() if each.start),
                *(each.after for each in self.starts.values() if each.after),
            ],
            "exams": [exam for table in self.tables for exam in (table.exam, table.less) if exam is not None],
        }
        known: dict[str, Collection[str]] = {
            "arms": self.arms,
            "conditions": self.conditions,
            "starts": self.starts,
            "exams": self.exams,
        }
        for what, names in wanted.items():
            for name in names:
                if name not in known[what]:
                    raise ValueError(f"there is no {name!r} among its {what}; {nearest(name, known[what])}")
        for name, start in self.starts.items():
            if start.after is not None and self.starts[start.after].after is not None:
                raise ValueError(f"the start {name!r} can't go on from {start.after!r}, which goes on from another")
        return self

    def order(self, condition: str) -> list[str]:
        """The arms of a condition, in the order of the set."""
        chosen = self.conditions[condition].arms
        return [arm for arm in self.arms if not chosen or arm in chosen]


def set_names() -> tuple[str, ...]:
    """The packaged sets, sorted."""
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.yaml")))


def set_path(name_or_path: str) -> Path:
    """The file of a set, by packaged name or path (ending in .yaml). Raises ConfigError naming the nearest."""
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no set file {path}")
        return path
    if name_or_path not in set_names():
        raise ConfigError(f"there is no set {name_or_path!r}; {nearest(name_or_path, set_names())}")
    return PACKAGED / f"{name_or_path}.yaml"


def read_set(name_or_path: str) -> Set:
    """A set by packaged name or path. Raises ConfigError with one sentence for whatever can't be used."""
    path = set_path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the set {path} can't be read: {error}") from error
    return made(Set, parsed(text, str(path)), f"the set {path}")
