"""Weights & Biases, configured by its own variables (WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.config.schema import Recipe
from saccade.reporting.loggers.dispatch import read_or_create_id


class Wandb:
    """One W&B run per run folder, continued after a resume; its files are stored in the run folder too."""

    package = "wandb"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        import wandb as library

        self._defined_stages: set[str] = set()
        self._run: Any = library.init(
            project=os.environ.get("WANDB_PROJECT", "saccade"),
            id=read_or_create_id(folder, folder / "wandb.json", length=16),
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
