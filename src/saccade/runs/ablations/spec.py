"""The specification of an ablation: a claim, the variants compared, the conditions, and the measurements.

    spec ──> initial_checkpoints    SFT, once per seed: `base_sft`, and others that continue from it
         ──> conditions             an initial checkpoint and settings: where an effect is claimed, and where not
         ──> variants               recipes and settings compared in each condition, from the same weights
         ──> evaluations, tables, curves of the report

A spec is a YAML file in `sets/`, or anywhere (`./mine.yaml`). Later settings override earlier ones: the recipe's, those
of every ablation (`COMMON_SETTINGS`), the spec's, the condition's, the variant's, the command line's.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from saccade.config.load import find_yaml_file, list_yaml_files, read_yaml
from saccade.config.schema import Fraction, NonNegativeInt, PositiveInt, Section, parse_section
from saccade.errors import ConfigError
from saccade.plugins import suggest

PACKAGED_FOLDER = Path(__file__).parent / "sets"
# One thread, since two runs share the machine; 48 episodes to train on out of 64 rollouts.
COMMON_SETTINGS = (
    "model.num_threads=1",
    "rollouts.executor=local",
    "synthetic.validation=1",
    "synthetic.test=24",
    "rl.prompts_per_step=6",
    "rl.selection.oversample=1.34",
    "rl.save_every=10",
    "sft.save_every=100",
)

EvaluationMode = Literal["greedy", "sampled", "tools_off", "batch_size_1"]
Metric = Literal[
    "accuracy",
    "format_compliance",
    "answered",
    "calls",
    "succeeded",
    "frac_with_tool_call",
    "python_style",
    "turns",
    "response_tokens",
    "sampled_tokens",
    "visual_tokens",
    "seconds",
]
Settings = tuple[str, ...]


class InitialCheckpoint(Section):
    """`steps` of SFT on rewritten demonstrations, from random weights or from the checkpoint `continues_from`."""

    description: str = ""
    continues_from: str | None = None
    steps: PositiveInt = 400
    python_style_fraction: Fraction = 0.0  # demonstrations with Python-style calls
    unclosed_think_fraction: Fraction = 0.0  # demonstrations that leave the think tag open
    one_call_per_turn: bool = False
    settings: Settings = ()


class Condition(Section):
    """An initial checkpoint and settings for all variants; `variants` restricts which are compared (empty: all)."""

    description: str = ""
    initial_checkpoint: str = "base_sft"
    settings: Settings = ()
    variants: tuple[str, ...] = ()


class Variant(Section):
    """A recipe and settings to compare; `initial_checkpoint` overrides the condition's."""

    description: str = ""
    recipe: str | None = None  # null = the spec's `base_recipe`
    initial_checkpoint: str | None = None
    settings: Settings = ()


class TableSpec(Section):
    """A metric before and after RL, optionally minus that of another evaluation, or after RL by slices of the tasks."""

    evaluation: EvaluationMode
    metric: Metric
    minus: EvaluationMode | None = None
    group_by: Literal["", "frame_budget", "question_type", "overview"] = ""


class QuickSettings(Section):
    """The reduced spec of `--quick`."""

    steps: PositiveInt = 20
    initial_checkpoint_steps: PositiveInt = 200  # from random weights; a quarter if it continues from another
    test_videos: PositiveInt = 12  # clips of the test split
    variants: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


class AblationSpec(Section):
    """An ablation. Inconsistent parts raise ConfigError through `load_spec`."""

    title: str
    claim: str
    hypothesis: str  # what the conditions test
    base_recipe: str = "tiny/base"  # of synthetic data, initial checkpoints, and variants that name none
    settings: Settings = ()
    steps: PositiveInt
    rollouts_per_step: PositiveInt = 64  # for the estimate of time: episodes that cost as much as an RL step
    baseline: str
    initial_checkpoints: dict[str, InitialCheckpoint] = Field(default_factory=lambda: {"base_sft": InitialCheckpoint()})
    conditions: dict[str, Condition]
    variants: dict[str, Variant] = Field(min_length=1)
    evaluations: tuple[EvaluationMode, ...] = ("greedy", "sampled")
    batch1_tasks: NonNegativeInt = 24  # tasks of the evaluation `batch_size_1`
    tables: tuple[TableSpec, ...]
    curves: tuple[str, ...]  # keys of the step's metrics
    final_metrics: tuple[str, ...] = ()  # reported as means over the last third of the steps
    quick: QuickSettings = QuickSettings()

    def get_recipe(self, variant: str) -> str:
        """Return the name of a variant's recipe."""
        return self.variants[variant].recipe or self.base_recipe

    @model_validator(mode="after")
    def _validate_names(self) -> "AblationSpec":
        conditions, variants, checkpoints = self.conditions, self.variants, self.initial_checkpoints
        defined: dict[str, Collection[str]] = {
            "variants": variants,
            "conditions": conditions,
            "initial_checkpoints": checkpoints,
            "evaluations": self.evaluations,
        }
        for kind, names in defined.items():
            for name in names:
                if not re.fullmatch(r"\w[\w-]*", name):
                    message = f"{name!r} can't be a folder's name; use letters, digits, _ and -"
                    raise ConfigError(message, key=kind, value=name)
                if kind == "conditions" and name in ("data", "model", "initial_checkpoints"):
                    message = f"a condition can't be called {name!r}, the name of another folder; rename it"
                    raise ConfigError(message, key=kind, value=name)
        references: dict[str, list[str]] = {
            "variants": [
                self.baseline,
                *self.quick.variants,
                *(name for condition in conditions.values() for name in condition.variants),
            ],
            "conditions": list(self.quick.conditions),
            "initial_checkpoints": [
                "base_sft",
                *(condition.initial_checkpoint for condition in conditions.values()),
                *(variant.initial_checkpoint for variant in variants.values() if variant.initial_checkpoint),
                *(checkpoint.continues_from for checkpoint in checkpoints.values() if checkpoint.continues_from),
            ],
            "evaluations": [mode for table in self.tables for mode in (table.evaluation, table.minus) if mode],
        }
        for kind, referenced in references.items():
            for name in referenced:
                if name not in defined[kind]:
                    message = f"there is no {name!r} among its {kind}; {suggest(name, defined[kind])}"
                    raise ConfigError(message, key=kind, value=name)
        for name, checkpoint in checkpoints.items():
            parent = checkpoint.continues_from
            if parent is not None and checkpoints[parent].continues_from is not None:
                message = f"the initial checkpoint {name!r} can't continue from {parent!r}, as that continues another"
                raise ConfigError(message, key="continues_from", value=parent)
        return self


def list_spec_names() -> tuple[str, ...]:
    """Return the names of the packaged specs, sorted."""
    return list_yaml_files(PACKAGED_FOLDER)


def load_spec(name_or_path: str) -> AblationSpec:
    """Load a spec by packaged name or path. Raises ConfigError if it can't be used."""
    path = find_yaml_file(name_or_path, PACKAGED_FOLDER, kind="ablation")
    return parse_section(AblationSpec, read_yaml(path, "ablation file"), f"the ablation file {path}")
