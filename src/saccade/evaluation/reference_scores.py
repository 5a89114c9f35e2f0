"""Provide published scores for comparison: `reference_scores.json` holds them, each with its source.

Others measured them with other prompts, frames, decoding and answer parsing. They give orientation and prove no
difference.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COMPARABILITY_WARNING = (
    "Published values were measured by others under other conditions (prompts, frames, decoding, answer parsing): "
    "use them for orientation; a difference from them proves nothing."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScore:
    """Record a published value in percent with its source; `is_ablation` marks a variant of a system."""

    benchmark: str
    metric: str
    model: str
    value: float
    source: str
    is_ablation: bool = False
    visual_tokens: float | None = None  # per question; None if unknown
    note: str = ""


@cache
def _load_references() -> list[ReferenceScore]:
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return [ReferenceScore(**{**score, "source": content["sources"][score["source"]]}) for score in content["values"]]


def get_reference_scores(benchmark: str) -> tuple[ReferenceScore, ...]:
    """Return the published scores of a benchmark, each with its source's full name; () if there are none."""
    return tuple(score for score in _load_references() if score.benchmark == benchmark)
