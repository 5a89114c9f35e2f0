"""The model card of an exported checkpoint (README.md): how it was trained, the recipe, and the scores it was given.

Every number is one that the run recorded, with its n and its interval.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.config.schema import Recipe
from saccade.evaluation.benchmark_result import BenchmarkResult
from saccade.evaluation.compare import Evaluation, compare_evaluations
from saccade.metrics.tables import Table, format_interval
from saccade.reporting.benchmark_report import READING_GUIDE, build_overview_tables
from saccade.reporting.evaluation_report import build_tables
from saccade.reporting.report import Report, ReportSection, format_markdown
from saccade.reporting.run_report import RESULTS_NOTE

_STAGES = {"sft": "supervised fine-tuning", "rl": "reinforcement learning"}
_LOAD_MODEL = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("PATH", dtype="auto")
processor = AutoProcessor.from_pretrained("PATH")  # its processor of videos needs torchvision
"""
_LOAD_ADAPTERS = """\
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

base = AutoModelForImageTextToText.from_pretrained("BASE", dtype="auto")  # the weights that were adapted
model = PeftModel.from_pretrained(base, "PATH")
processor = AutoProcessor.from_pretrained("PATH")  # its processor of videos needs torchvision
"""
_VALIDATION_NOTE = (
    "On held-out tasks during the training. Intervals are 95 %, over clips. A step that was chosen by its validation "
    "scores better there than on new tasks."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a card says: `stage`, "sft" or "rl", and `step` name the checkpoint of a `run`.

    `evaluations` and `benchmark_results` are by name, and of these weights alone; `validation` is the row that
    the run logged for the step, {} for none. `metadata` are seed, versions and machine of the training.
    """

    run: str
    stage: str
    step: int
    recipe: Recipe
    recipe_text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    benchmark_results: Mapping[str, BenchmarkResult] = field(default_factory=dict)
    validation: Mapping[str, Any] = field(default_factory=dict)
    is_adapter: bool = False


def format_model_card(card: ModelCard) -> str:
    """Format a card as Markdown with the head that the Hugging Face hub reads."""
    recipe = card.recipe
    num_steps = (recipe.sft if card.stage == "sft" else recipe.rl).steps
    adapters = "LoRA adapters of rank {}" if card.is_adapter else "LoRA of rank {}, merged into the weights"
    metadata = {
        "run": card.run,
        "step": f"{card.step} of {num_steps}, {_STAGES[card.stage]}",
        **({"initial weights": Path(recipe.model.path).name} if recipe.model.path else {}),
        "weights": recipe.model.dtype,
        **({"trained": adapters.format(recipe.model.lora_rank)} if recipe.model.lora_rank else {}),
        "environment": recipe.environment.name,
        **card.metadata,
    }
    report = Report(
        kind="model",
        title=f"{card.run}, {card.stage} step {card.step}",
        metadata=metadata,
        sections=tuple(_build_scores(card)),
    )
    head = {
        "library_name": "peft" if card.is_adapter else "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["saccade", *(["lora"] if card.is_adapter else [])],
    }
    front_matter = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    load = _format_block(_LOAD_ADAPTERS if card.is_adapter else _LOAD_MODEL, "python")
    parts = [
        f"---\n{front_matter}\n---",
        format_markdown(report).rstrip("\n"),
        *([] if report.sections else ["## Scores", "These weights have no evaluation and no validation."]),
        f"## Use\n\n{load}",
        "The model was trained with the prompt, the tools and the sampling of the recipe below. `saccade ask` with "
        "`--model PATH` uses them, from `saccade_recipe.yaml`.",
        f"## Recipe\n\n<details><summary>Every setting of the run</summary>\n\n"
        f"{_format_block(card.recipe_text, 'yaml')}\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _format_block(text: str, language: str) -> str:
    """Return a fenced block, whose fence is longer than any in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _build_scores(card: ModelCard) -> list[ReportSection]:
    sections = []
    if card.evaluations:
        summary = build_tables(compare_evaluations(card.evaluations, pairs=()))[0]
        sections.append(ReportSection(title=summary.title, notes=(RESULTS_NOTE,), tables=(summary,)))
    if card.benchmark_results:
        scores, costs = build_overview_tables(card.benchmark_results, {})
        sections.append(ReportSection(title="Benchmarks", notes=(READING_GUIDE,), tables=(scores, costs)))
    if rows := _build_validation_rows(card.validation):
        header = ("", "accuracy", "tasks / media / episodes")
        table = Table(title="Validation", header=header, rows=rows)
        sections.append(ReportSection(title=table.title, notes=(_VALIDATION_NOTE,), tables=(table,)))
    return sections


def _build_validation_rows(row: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return a row per mode, such as greedy decoding, that could be graded."""
    modes = [name.removesuffix("/accuracy") for name in row if name.endswith("/accuracy")]
    rows = []
    for mode in modes:
        mean, low, high = (float(row[f"{mode}/accuracy{suffix}"]) for suffix in ("", "/low", "/high"))
        counts = " / ".join(f"{row[f'{mode}/{name}']:.0f}" for name in ("tasks", "clusters", "episodes"))
        rows.append((mode, format_interval(mean, (low, high)), counts))
    return tuple(rows)
