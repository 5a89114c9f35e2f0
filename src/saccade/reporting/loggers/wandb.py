"""Weights & Biases, configured by its own variables (WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.config.schema import Recipe
from saccade.utils.files import read_text, write_text
from saccade.utils.hashing import compute_digest


class Wandb:
    """One W&B run per run folder, continued after a resume; its files are stored in the run folder too."""

    package = "wandb"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        import wandb as library

        self._defined_stages: set[str] = set()
        # The id is stored in the folder: a new run at the same path is a new W&B run.
        id_file = folder / "wandb.json"
        if not id_file.exists():
            run_id = compute_digest(str(folder.resolve()), os.urandom(8).hex())[:16]
            write_text(id_file, json.dumps({"id": run_id}) + "\n")
        self._run: Any = library.init(
            project=os.environ.get("WANDB_PROJECT", "saccade"),
            id=json.loads(read_text(id_file))["id"],
            name=folder.resolve().name,
            dir=str(folder),
            config=recipe.model_dump(mode="json"),
            resume="allow",
            settings=library.Settings(silent=True, console="off"),
        )

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send a step; each stage's values are plotted over that stage's steps."""
        if stage not in self._defined_stages:
            self._defined_stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/{name}": value for name, value in {**values, "step": step}.items()})

    def close(self) -> None:
        """Send the remaining values."""
        self._run.finish()


wandb = Wandb
