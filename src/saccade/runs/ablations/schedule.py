"""A lab and its jobs: which recipes, in what order, and about how long it will take.

    seed-0/world ──> seed-0/starts/usual ─┬─> seed-0/starts/usual/before-1f2e3d4c      the exams before RL
      (and model)         │               ├─> seed-0/<condition>/<arm>                 RL, and the exams after it
                          └─> seed-0/starts/<other>  ──> …

Within a seed all arms have the same world, and the same weights to begin with unless their starts differ.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from saccade import preflight
from saccade.config import Recipe, load_recipe
from saccade.errors import ConfigError, RunError, boundary
from saccade.lab.design import BASE, COMMON, Exam, Set, Start, read_set
from saccade.plugins import nearest
from saccade.rollouts.stage import trainable
from saccade.sections import made
from saccade.types import digest_of

PROCESSES = 2
FORMAT = 1
SEEDS = 3
# Of a recipe's parts those that matter to a cold start; rewards and RL are the arms' own.
OF_STARTS = ("model", "world", "agent", "sampling", "sft")
# Seconds with one thread, another such process beside, as measured on two shared x86 cores.
PER_CLIP, PER_SFT_STEP, PER_ROLLED, PER_EXAMINED, PER_LONE, PER_PROCESS = 0.05, 1.05, 0.066, 0.055, 0.6, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process's work: its name is its folder below the lab's; it waits for the jobs it `needs`.

    >>> Job(name="seed-0/world", kind="world", seed=0, needs=(), seconds=20.0).arm
    ''
    """

    name: str
    kind: Literal["world", "start", "before", "arm"]
    seed: int
    needs: tuple[str, ...]
    seconds: float  # about how long it will take
    start: str = ""
    condition: str = ""
    arm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A set as it is run: quick or whole, with settings from the command line."""

    name: str
    set: Set
    quick: bool
    settings: tuple[str, ...]
    seeds: int
    conditions: tuple[str, ...]

    @classmethod
    def of(
        cls,
        name_or_path: str,
        *,
        quick: bool = False,
        settings: Sequence[str] = (),
        seeds: int | None = None,
        conditions: Sequence[str] = (),
    ) -> "Lab":
        """A lab of a set. Raises ConfigError for a set, a condition or a setting that can't be used."""
        found = read_set(name_or_path)
        seeds = (1 if quick else SEEDS) if seeds is None else seeds
        if seeds < 1:
            raise ConfigError(f"--seeds can't be {seeds}: a comparison needs at least 1")
        for each in conditions:
            if each not in found.conditions:
                raise ConfigError(
                    f"{name_or_path} has no condition {each!r}; {nearest(each, found.conditions)}",
                )
        usual = found.quick.conditions if quick and found.quick.conditions else tuple(found.conditions)
        chosen = tuple(name for name in found.conditions if name in (conditions or usual))
        lab = cls(
            name=Path(name_or_path).stem,
            set=found,
            quick=quick,
            settings=tuple(settings),
            seeds=seeds,
            conditions=chosen,
        )
        lab.check()
        return lab

    @classmethod
    def open(cls, folder: Path) -> "Lab":
        """The lab of a folder. Raises RunError where there is none."""
        path = folder / "lab.json"
        if not path.is_file():
            raise RunError(f"there is no lab at {folder}: it has no lab.json")
        with boundary(RunError, f"{path} can't be read; delete the folder and start again"):
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                name=found["name"],
                set=made(Set, found["set"], str(path)),
                quick=found["quick"],
                settings=tuple(found["settings"]),
                seeds=found["seeds"],
                conditions=tuple(found["conditions"]),
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for lab.json."""
        own = {"name": self.name, "quick": self.quick, "settings": list(self.settings)}
        return {
            "format": FORMAT,
            **own,
            "seeds": self.seeds,
            "conditions": list(self.conditions),
            "set": self.set.model_dump(mode="json"),
        }

    # ---- what is run -----------------------------------------------------------------------------------------------

    def arms(self, condition: str) -> list[str]:
        """The arms of a condition, in the order of the set."""
        some = self.set.quick.arms if self.quick else ()
        return [arm for arm in self.set.order(condition) if not some or arm in some]

    def cells(self) -> list[tuple[str, str]]:
        """Every condition and arm that is run."""
        return [(condition, arm) for condition in self.conditions for arm in self.arms(condition)]

    def start_of(self, condition: str, arm: str) -> str:
        """The start of an arm in a condition."""
        return self.set.arms[arm].start or self.set.conditions[condition].start

    def recipe(self, condition: str, arm: str, seed: int = 0) -> Recipe:
        """The recipe of an arm in a condition."""
        own = self.set.arms[arm]
        return self._recipe(own.recipe, (*self.set.conditions[condition].settings, *own.settings), seed)

    def start_recipe(self, name: str, seed: int = 0) -> Recipe:
        """The recipe of a start; its agent is not forced to think, so that it learns to of itself."""
        start = self.set.starts[name]
        settings = (f"sft.steps={self.steps_of(start)}", *start.settings, "agent.settings.think_prefix=false")
        return self._recipe(BASE, settings, seed, parts=OF_STARTS)

    def steps_of(self, start: Start) -> int:
        """The steps of a start."""
        if not self.quick:
            return start.steps
        few = self.set.quick.start_steps
        return min(start.steps, few if start.after is None else max(1, few // 4))

    def _recipe(self, name: str, own: Sequence[str], seed: int, parts: Sequence[str] = ()) -> Recipe:
        quick = self.set.quick
        size = [f"rl.steps={quick.steps if self.quick else self.set.steps}"]
        size += [f"world.test={quick.tests}"] if self.quick else []
        every = [*COMMON, *self.set.settings, *size, *own, *self.settings]
        kept = [each for each in every if not parts or each.partition(".")[0] in parts]
        return _loaded(name, tuple(kept)).model_copy(update={"seed": seed})

    def check(self) -> None:
        """See that every recipe can be used, and that all arms share one world. Raises ConfigError."""
        if not self.cells():
            where = f"{' or '.join(self.conditions)}{' with --quick' if self.quick else ''}"
            raise ConfigError(f"{self.name} has no arm in {where}, so there is nothing to compare")
        world = self.start_recipe("usual").world
        for start in self.starts():
            preflight.check(self.start_recipe(start))
        for condition, arm in self.cells():
            recipe = self.recipe(condition, arm)
            preflight.check(trainable(recipe))
            if recipe.world != world:
                raise ConfigError(
                    f"{arm} in {condition} has a world of its own; give world settings to the set as a whole"
                )

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """Every job, what others wait for first."""
        seeds = range(self.seeds)
        found = [job for seed in seeds for job in (self._world(seed), *self._start_jobs(seed))]
        return [*found, *(job for seed in seeds for job in (*self._before(seed), *self._arm_jobs(seed)))]

    def starts(self) -> list[str]:
        """The starts that are needed, those that others go on from first."""
        used = {self.start_of(condition, arm) for condition, arm in self.cells()}
        used |= {after for name in used if (after := self.set.starts[name].after) is not None}
        return sorted(used, key=lambda name: (self.set.starts[name].after is not None, [*self.set.starts].index(name)))

    def _world(self, seed: int) -> Job:
        clips = self.start_recipe("usual").world.files
        return Job(name=world_of(seed), kind="world", seed=seed, needs=(), seconds=PER_PROCESS + PER_CLIP * clips)

    def _start_jobs(self, seed: int) -> Iterator[Job]:
        for name in self.starts():
            start = self.set.starts[name]
            needs = (world_of(seed), *((start_folder(seed, start.after),) if start.after else ()))
            seconds = PER_PROCESS + PER_SFT_STEP * self.start_recipe(name).sft.steps
            yield Job(name=start_folder(seed, name), kind="start", seed=seed, needs=needs, seconds=seconds, start=name)

    def _before(self, seed: int) -> Iterator[Job]:
        """Exams of the starts: one job for all arms that would be examined alike."""
        known = set()
        for condition, arm in self.cells():
            name = self.before(condition, arm, seed)
            if name not in known:
                known.add(name)
                start = self.start_of(condition, arm)
                yield Job(
                    name=name,
                    kind="before",
                    seed=seed,
                    needs=(start_folder(seed, start),),
                    seconds=PER_PROCESS + self._examining(self.recipe(condition, arm)),
                    start=start,
                    condition=condition,
                    arm=arm,
                )

    def _arm_jobs(self, seed: int) -> Iterator[Job]:
        for condition, arm in self.cells():
            recipe, start = self.recipe(condition, arm), self.start_of(condition, arm)
            learning = recipe.rl.steps * self.set.rolled * PER_ROLLED
            yield Job(
                name=arm_folder(seed, condition, arm),
                kind="arm",
                seed=seed,
                needs=(start_folder(seed, start),),
                seconds=PER_PROCESS + learning + self._examining(recipe),
                start=start,
                condition=condition,
                arm=arm,
            )

    def _examining(self, recipe: Recipe) -> float:
        tasks = recipe.world.test * recipe.world.tasks_per_video
        count = min(tasks, recipe.evaluation.limit or tasks) * recipe.evaluation.repeat
        alone = min(count, self.set.lone)
        return sum(PER_LONE * alone if exam == "alone" else PER_EXAMINED * count for exam in self.set.exams)

    def before(self, condition: str, arm: str, seed: int) -> str:
        """The folder of the exams before RL of an arm: the same for all arms that would be examined alike."""
        return f"{start_folder(seed, self.start_of(condition, arm))}/before-{self._exam_key(condition, arm)}"

    def _exam_key(self, condition: str, arm: str) -> str:
        recipe = examined(self.recipe(condition, arm), "greedy", self.set.lone)
        return digest_of(recipe.model_dump(mode="json", exclude={"rl", "gating", "sft"}))[:8]


@functools.lru_cache(maxsize=256)  # a plan asks for each many times
def _loaded(name: str, settings: tuple[str, ...]) -> Recipe:
    return load_recipe(name, settings)


def world_of(seed: int) -> str:
    """The folder of a seed's world."""
    return f"seed-{seed}/world"


def start_folder(seed: int, start: str) -> str:
    """The folder of a start."""
    return f"seed-{seed}/starts/{start}"


def arm_folder(seed: int, condition: str, arm: str) -> str:
    """The folder of an arm's run."""
    return f"seed-{seed}/{condition}/{arm}"


def examined(recipe: Recipe, exam: Exam, lone: int) -> Recipe:
    """The recipe with which a model is examined: accuracy alone is graded, for all arms alike."""
    settings: dict[str, Any] = {"temperature": 0.0}
    if exam == "sampled":
        settings = {"temperature": recipe.sampling.temperature}
    if exam == "tools_off":
        settings |= {"tools": False}
    if exam == "alone":
        settings |= {"limit": min(lone, recipe.evaluation.limit or lone)}
    evaluation = recipe.evaluation.model_copy(update=settings)
    rewards = {name: term for name, term in recipe.rewards.items() if name == "accuracy"}
    return recipe.model_copy(update={"evaluation": evaluation, "rewards": rewards})


def minutes(jobs: Sequence[Job], done: Sequence[str] = ()) -> float:
    """About how many minutes the jobs that are not `done` will take, `PROCESSES` at a time.

    >>> minutes([Job(name=name, kind="world", seed=0, needs=(), seconds=60.0) for name in "abc"])
    2.0
    """
    ends: dict[str, float] = dict.fromkeys(done, 0.0)
    free = [0.0] * PROCESSES
    waiting = [job for job in jobs if job.name not in ends]
    while waiting:
        at = min(free)
        ready = [job for job in waiting if all(ends.get(name, float("inf")) <= at for name in job.needs)]
        place = free.index(at)
        if not ready:  # wait for whatever ends next
            later = [end for end in ends.values() if end > at]
            if not later:  # what they need is nowhere
                break
            free[place] = min(later)
            continue
        job = ready[0]
        waiting.remove(job)
        ends[job.name] = free[place] = at + job.seconds
    return max(free, default=0.0) / 60
