"""An ablation and its jobs: recipes, dependencies, and estimated time. Job names are folders (seed-0/…):

    data ──> initial_checkpoints/base_sft ─┬─> initial_checkpoints/base_sft/before-1f2e3d4c    evaluations before RL
    (and model)      │                     └─> <condition>/<variant>                        RL, and evaluations after it
                     └─> initial_checkpoints/<other> ──> …

Within a seed all variants share the data, and the initial weights unless their initial checkpoints differ.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from saccade.config.load import load_recipe
from saccade.config.schema import PositiveInt, Recipe, Section, SyntheticConfig, parse_section
from saccade.errors import ConfigError, RunError
from saccade.plugins import suggest
from saccade.runs.ablations.spec import COMMON_SETTINGS, AblationSpec, EvaluationMode, load_spec
from saccade.utils.files import read_text
from saccade.utils.hashing import compute_digest

NUM_PROCESSES = 2
DEFAULT_NUM_SEEDS = 3
# The recipe sections that initial checkpoints depend on; rewards and RL belong to the variants.
INITIAL_CHECKPOINT_SECTIONS = ("model", "synthetic", "environment", "sampling", "sft")
# Measured with one thread beside another such process, on two shared x86 cores.
SECONDS_PER_VIDEO = 0.05
SECONDS_PER_SFT_STEP = 1.05
SECONDS_PER_ROLLOUT = 0.066
SECONDS_PER_EVALUATION_EPISODE = 0.055
SECONDS_PER_BATCH1_EPISODE = 0.6
SECONDS_PER_PROCESS_START = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process's work; its name is its folder in the ablation's, and it waits for the jobs in `depends_on`."""

    name: str
    stage: Literal["data", "initial_checkpoint", "initial_evaluation", "variant"]
    seed: int
    depends_on: tuple[str, ...]
    expected_seconds: float
    initial_checkpoint: str = ""
    condition: str = ""
    variant: str = ""


class Ablation(Section):
    """A spec as it is run, with seeds, conditions and settings from the command line; the fields of ablation.json."""

    format: Literal[1] = 1
    name: str
    quick: bool = False
    settings: tuple[str, ...] = ()
    seeds: PositiveInt = DEFAULT_NUM_SEEDS
    conditions: tuple[str, ...]
    spec: AblationSpec

    @classmethod
    def from_spec(
        cls,
        name_or_path: str,
        *,
        spec: AblationSpec | None = None,
        quick: bool = False,
        settings: Sequence[str] = (),
        seeds: int | None = None,
        conditions: Sequence[str] = (),
        checks_recipes: bool = True,
    ) -> "Ablation":
        """Build the ablation of a spec. Raises ConfigError for a spec, condition or setting that can't be used.

        `spec` is that of the name, if it is already loaded. Without `checks_recipes`, as for a list of the sets, no
        plugin is imported.
        """
        spec = spec or load_spec(name_or_path)
        seeds = (1 if quick else DEFAULT_NUM_SEEDS) if seeds is None else seeds
        if seeds < 1:
            raise ConfigError(f"--seeds can't be {seeds}: a comparison needs at least 1", key="--seeds", value=seeds)
        for name in conditions:
            if name not in spec.conditions:
                message = f"{name_or_path} has no condition {name!r}; {suggest(name, spec.conditions)}"
                raise ConfigError(message, key="--condition", value=name)
        chosen = conditions or (spec.quick.conditions if quick else ()) or spec.conditions
        ablation = cls(
            name=Path(name_or_path).stem,
            spec=spec,
            quick=quick,
            settings=tuple(settings),
            seeds=seeds,
            conditions=tuple(name for name in spec.conditions if name in chosen),
        )
        if checks_recipes:
            ablation.check_recipes()
        return ablation

    @classmethod
    def load(cls, folder: Path) -> "Ablation":
        """Load the ablation of a folder. Raises RunError if there is none, or if it can't be read."""
        path = folder / "ablation.json"
        if not path.is_file():
            raise RunError(f"there is no ablation at {folder}: it has no ablation.json", key=str(folder))
        try:
            return parse_section(cls, json.loads(read_text(path)), str(path))
        except (OSError, ValueError, ConfigError) as error:
            message = f"{path} can't be read; delete the folder and start again: {error}"
            raise RunError(message, key=str(path)) from error

    def list_cells(self) -> list[tuple[str, str]]:
        """Return every pair of condition and variant that is run, in the order of the spec."""
        chosen = (self.spec.quick.variants if self.quick else ()) or self.spec.variants
        return [
            (condition, variant)
            for condition in self.conditions
            for variant in self.spec.variants
            if variant in (self.spec.conditions[condition].variants or self.spec.variants) and variant in chosen
        ]

    def find_initial_checkpoint(self, condition: str, variant: str) -> str:
        """Return the name of a variant's initial checkpoint in a condition."""
        return self.spec.variants[variant].initial_checkpoint or self.spec.conditions[condition].initial_checkpoint

    def list_initial_checkpoints(self) -> list[str]:
        """Return the names of the initial checkpoints in use, those that others continue from first."""
        checkpoints = self.spec.initial_checkpoints
        used = {self.find_initial_checkpoint(condition, variant) for condition, variant in self.list_cells()}
        used |= {parent for name in used if (parent := checkpoints[name].continues_from) is not None}
        return sorted(
            (name for name in checkpoints if name in used),
            key=lambda name: checkpoints[name].continues_from is not None,
        )

    def build_recipe(self, condition: str, variant: str, seed: int = 0) -> Recipe:
        """Build the recipe of a variant in a condition."""
        spec = self.spec.variants[variant]
        settings = (*self.spec.conditions[condition].settings, *spec.settings)
        return self._build_recipe(self.spec.get_recipe(variant), settings, seed)

    def build_initial_checkpoint_recipe(self, name: str, seed: int = 0) -> Recipe:
        """Build the SFT recipe of an initial checkpoint; without a prefilled think tag, so that the model learns it."""
        checkpoint, steps = self.spec.initial_checkpoints[name], self.spec.initial_checkpoints[name].steps
        if self.quick:
            most = self.spec.quick.initial_checkpoint_steps
            steps = min(steps, most if checkpoint.continues_from is None else max(1, most // 4))
        settings = (f"sft.steps={steps}", *checkpoint.settings, "environment.settings.force_think=false")
        return self._build_recipe(self.spec.base_recipe, settings, seed, sections=INITIAL_CHECKPOINT_SECTIONS)

    def _build_recipe(self, name: str, settings: Sequence[str], seed: int, sections: Sequence[str] = ()) -> Recipe:
        quick = self.spec.quick
        size = [f"rl.steps={quick.steps if self.quick else self.spec.steps}"]
        size += [f"synthetic.test={quick.test_videos}"] if self.quick else []
        overrides = tuple(
            override
            for override in (*COMMON_SETTINGS, *self.spec.settings, *size, *settings, *self.settings)
            if not sections or override.partition(".")[0] in sections
        )
        return _load_recipe_cached(name, overrides).with_values({"seed": seed})

    def check_recipes(self) -> None:
        """Check that every recipe can be used, and that all variants share one dataset. Raises ConfigError."""
        from saccade.checks.run_checks import check_recipe  # imports torch, which a list of the sets needn't

        if not self.list_cells():
            where = f"{' or '.join(self.conditions)}{' with --quick' if self.quick else ''}"
            message = f"{self.name} has no variant in {where}, so there is nothing to compare"
            raise ConfigError(message, key="--condition", value=self.conditions)
        shared = self.build_initial_checkpoint_recipe("base_sft").synthetic
        for name in self.list_initial_checkpoints():
            recipe = self.build_initial_checkpoint_recipe(name)
            check_recipe(recipe, ["sft"])
            _require_equal_synthetic(recipe, shared, f"initial checkpoint {name}")
        for condition, variant in self.list_cells():
            recipe = self.build_recipe(condition, variant)
            check_recipe(recipe)
            _require_equal_synthetic(recipe, shared, f"variant {variant} in {condition}")

    def build_jobs(self) -> list[Job]:
        """Build every job, dependencies first; variants that are evaluated alike before RL share one job for it."""
        jobs: dict[str, Job] = {}

        def add(name: str, stage: Any, seed: int, depends_on: Sequence[str], seconds: float, **names: str) -> None:
            seconds += SECONDS_PER_PROCESS_START
            job = Job(name=name, stage=stage, seed=seed, depends_on=(*depends_on,), expected_seconds=seconds, **names)
            jobs.setdefault(name, job)

        for seed in range(self.seeds):
            data = f"seed-{seed}/data"
            num_files = self.build_initial_checkpoint_recipe("base_sft").synthetic.num_files
            add(data, "data", seed, (), SECONDS_PER_VIDEO * num_files)
            for name in self.list_initial_checkpoints():
                parent = self.spec.initial_checkpoints[name].continues_from
                depends_on = [data, *([get_initial_checkpoint_folder(seed, parent)] if parent else [])]
                seconds = SECONDS_PER_SFT_STEP * self.build_initial_checkpoint_recipe(name).sft.steps
                folder = get_initial_checkpoint_folder(seed, name)
                add(folder, "initial_checkpoint", seed, depends_on, seconds, initial_checkpoint=name)
        for seed in range(self.seeds):
            for stage in ("initial_evaluation", "variant"):
                for condition, variant in self.list_cells():
                    recipe = self.build_recipe(condition, variant)
                    seconds, folder = self._estimate_evaluation_seconds(recipe), f"seed-{seed}/{condition}/{variant}"
                    if stage == "variant":
                        seconds += recipe.rl.steps * self.spec.rollouts_per_step * SECONDS_PER_ROLLOUT
                    else:
                        folder = self.get_initial_evaluation_folder(condition, variant, seed)
                    name = self.find_initial_checkpoint(condition, variant)
                    depends_on = [get_initial_checkpoint_folder(seed, name)]
                    names = {"initial_checkpoint": name, "condition": condition, "variant": variant}
                    add(folder, stage, seed, depends_on, seconds, **names)
        return list(jobs.values())

    def count_tasks(self, recipe: Recipe) -> int:
        """Return the number of held-out tasks of a seed."""
        num_tasks = recipe.synthetic.num_test_tasks
        return min(num_tasks, recipe.evaluation.num_tasks or num_tasks)

    def _estimate_evaluation_seconds(self, recipe: Recipe) -> float:
        num_episodes = self.count_tasks(recipe) * recipe.evaluation.num_samples
        return sum(
            SECONDS_PER_BATCH1_EPISODE * min(num_episodes, self.spec.batch1_tasks)
            if mode == "batch_size_1"
            else SECONDS_PER_EVALUATION_EPISODE * num_episodes
            for mode in self.spec.evaluations
        )

    def get_initial_evaluation_folder(self, condition: str, variant: str, seed: int) -> str:
        """Return the folder of a variant's evaluations before RL, shared by all variants that are evaluated alike."""
        folder = get_initial_checkpoint_folder(seed, self.find_initial_checkpoint(condition, variant))
        recipe = configure_evaluation(self.build_recipe(condition, variant), "greedy", self.spec.batch1_tasks)
        digest = compute_digest(recipe.model_dump(mode="json", exclude={"rl", "frame_budgets", "sft"}))
        return f"{folder}/before-{digest[:8]}"


_load_recipe_cached = functools.lru_cache(maxsize=256)(load_recipe)  # building the jobs needs each recipe many times


def _require_equal_synthetic(recipe: Recipe, shared: SyntheticConfig, name: str) -> None:
    if recipe.synthetic != shared:
        raise ConfigError(
            f"the {name} changes `synthetic`, the data and the model's size, which all runs share; set it in the "
            "spec's `settings`",
            key="synthetic",
        )


def get_initial_checkpoint_folder(seed: int, initial_checkpoint: str) -> str:
    """Return the folder of an initial checkpoint."""
    return f"seed-{seed}/initial_checkpoints/{initial_checkpoint}"


def configure_evaluation(recipe: Recipe, mode: EvaluationMode, batch1_tasks: int) -> Recipe:
    """Return the recipe of an evaluation, with accuracy as the only reward for all variants alike."""
    values: dict[str, object] = {"evaluation.temperature": recipe.sampling.temperature if mode == "sampled" else 0.0}
    if mode == "tools_off":
        values["evaluation.use_tools"] = False
    if mode == "batch_size_1":
        values["evaluation.num_tasks"] = min(batch1_tasks, recipe.evaluation.num_tasks or batch1_tasks)
    values["rewards"] = {name: term for name, term in recipe.rewards.items() if term.is_accuracy}
    return recipe.with_values(values)


def estimate_minutes(jobs: Sequence[Job], finished_names: Sequence[str] = ()) -> float:
    """Estimate the minutes of all jobs but the finished ones, with NUM_PROCESSES at a time.

    A process takes the first job that can start earliest; a job whose dependencies are lost never starts.

    >>> jobs = [Job(name=name, stage="data", seed=0, depends_on=(), expected_seconds=60.0) for name in "abc"]
    >>> estimate_minutes(jobs)
    2.0
    """
    ends = dict.fromkeys(finished_names, 0.0)
    free = [0.0] * NUM_PROCESSES
    waiting = [job for job in jobs if job.name not in ends]
    while ready := [job for job in waiting if ends.keys() >= set(job.depends_on)]:
        starts = [max(min(free), *(ends[name] for name in job.depends_on), 0.0) for job in ready]
        job = ready[starts.index(min(starts))]
        waiting.remove(job)
        ends[job.name] = free[free.index(min(free))] = min(starts) + job.expected_seconds
    return max(free) / 60
