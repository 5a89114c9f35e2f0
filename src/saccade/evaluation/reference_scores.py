"""Values that others published, to stand beside ours: `published.json` holds them, each with its source.

They were measured by others, with other prompts, frames, decoding and answer parsing. They say where a result lies,
and prove no difference.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from saccade.data.record import typed

WARNING = (
    "Published values are others' measurements under other conditions (prompts, frames, decoding, parsing of answers): "
    "they show where a result lies, and no difference from them is shown to be real."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A value in percent with its source; an `ablation` is of a part of a system.

    >>> Published(benchmark="lvbench", metric="accuracy", model="ParaVT-8B", value=39.8, source="ParaVT").value
    39.8
    """

    benchmark: str
    metric: str
    model: str
    value: float
    source: str
    ablation: bool = False
    visual_tokens: float | None = None  # per question, where it is known
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    sources: Mapping[str, str]
    values: tuple[Published, ...]


@cache
def _read() -> _File:
    path = Path(__file__).with_suffix(".json")
    return typed(json.loads(path.read_text(encoding="utf-8")), _File, path.name)


def published(benchmark: str) -> tuple[Published, ...]:
    """What was published of a benchmark, with the source's whole name; () where nothing is known."""
    known = _read()
    return tuple(_named(each, known.sources) for each in known.values if each.benchmark == benchmark)


def _named(value: Published, sources: Mapping[str, str]) -> Published:
    return replace(value, source=sources[value.source])
