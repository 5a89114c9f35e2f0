"""Weights & Biases. Its own variables say where to and with which key (WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT)."""

import os
from collections.abc import Mapping
from typing import Any

from saccade.runlog import Run
from saccade.types import digest_of


class wandb:
    """One run of W&B for a run folder, gone on with after a resume; its files lie in the run folder, too."""

    package = "wandb"

    def __init__(self, run: Run) -> None:
        import wandb as library

        self._stages: set[str] = set()
        # Kept in the folder: where a path is used again for another run, that is another run of W&B.
        if not (run.path / "wandb.json").exists():
            run.write_json("wandb.json", {"id": digest_of(str(run.path.resolve()), os.urandom(8).hex())[:16]})
        self._run: Any = library.init(
            project=os.environ.get("WANDB_PROJECT", "saccade"),
            id=run.read_json("wandb.json")["id"],
            name=run.path.resolve().name,
            dir=str(run.path),
            config=run.recipe.model_dump(mode="json"),
            resume="allow",
            settings=library.Settings(silent=True, console="off"),
        )

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send a step; the values of each stage are drawn over the steps of that stage."""
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/{name}": value for name, value in {**values, "step": step}.items()})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
