"""Write src/saccade/models/known_sizes.json: the sizes of published and tiny models, as transformers has them."""

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.models.config_sizes import PUBLISHED_MODELS, compute_published_sizes, compute_tiny_sizes
from saccade.models.model_sizes import ModelSizes
from saccade.models.tiny import FAMILIES

TARGET = Path(__file__).resolve().parents[1] / "src" / "saccade" / "models" / "known_sizes.json"
LAYER = re.compile(r"(?<=\.layers\.)\d+|(?<=\.blocks\.)\d+|(?<=_list\.)\d+")
LIST = re.compile(r"\[\s*\d+,\s*\[[^\]]*\]\s*\]")  # a count and a shape


def pack(sizes: ModelSizes) -> dict[str, Any]:
    """Return sizes with the shapes of equal layers once: their number, and the shape, by name with `*` for the layer.

    Raises ValueError if layers differ.
    """
    shapes = {LAYER.sub("*", name): shape for name, shape in sizes.shapes.items()}
    counts = Counter(LAYER.sub("*", name) for name in sizes.shapes)
    if wrong := [name for name, shape in sizes.shapes.items() if shapes[LAYER.sub("*", name)] != shape]:
        raise ValueError(f"{sizes.name}: the layers differ in {wrong[0]}")
    fields = {key: value for key, value in asdict(sizes).items() if key != "shapes"}
    return {**fields, "shapes": {name: [counts[name], list(shape)] for name, shape in shapes.items()}}


def render_sizes() -> str:
    """Return the file, with a line for each field and each shape."""
    known = {
        "published": {name: pack(compute_published_sizes(name)) for name in PUBLISHED_MODELS},
        "tiny": {family: pack(compute_tiny_sizes(family)) for family in FAMILIES},
    }
    return LIST.sub(lambda match: re.sub(r"\s+", "", match[0]).replace(",", ", "), json.dumps(known, indent=1)) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render_sizes(), encoding="utf-8")
