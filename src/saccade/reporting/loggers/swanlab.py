"""SwanLab, configured by its own variables (SWANLAB_API_KEY, SWANLAB_MODE, SWANLAB_PROJ_NAME)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.config.schema import Recipe
from saccade.reporting.loggers.dispatch import read_or_create_id


class Swanlab:
    """One SwanLab run per run folder, continued after a resume; its files are stored in the run folder too.

    SwanLab keeps the first value of a repeated step. Offline it starts new files at every resume, with the same id.
    """

    package = "swanlab"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        import swanlab as library

        self._run: Any = library.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "saccade"),
            id=read_or_create_id(folder, folder / "swanlab.json", length=20),
            name=folder.resolve().name,
            log_dir=str(folder / "swanlab"),
            config=recipe.model_dump(mode="json"),
            resume="allow",
            settings=library.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send a step; each stage's metrics have steps of their own."""
        self._run.log({f"{stage}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Send the remaining values."""
        self._run.finish()


swanlab = Swanlab
