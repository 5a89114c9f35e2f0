"""Generate a synthetic image dataset: images with small cards, tasks with exact labels, demonstrations."""

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic.dataset import SPLITS, SyntheticDataset
from saccade.data.synthetic.image import questions, text_templates
from saccade.data.synthetic.image.demonstrations import build_demonstration, build_grid_demonstration
from saccade.data.synthetic.image.objects import Scene, sample_grid_scene, sample_scene
from saccade.data.synthetic.image.render import render_image
from saccade.types import Demonstration, MediaKind, Task
from saccade.utils.hashing import derive_seed
from saccade.utils.jsonl import atomic_write

LOOK_REPLY_FORMATTERS = {  # by `synthetic.demonstrations`
    "tool_calls": text_templates.format_zoom_reply,
    "python": text_templates.format_crop_code_reply,
    "direct": None,
}


class ImageDataset(SyntheticDataset[Scene]):
    """A dataset of images."""

    media_kind, media_folder, suffix, labels_filename = MediaKind.IMAGE, "pictures", ".png", "objects.json"
    contents_seed, noun, count_key = "cards", "cards", "synthetic.image.objects"
    packages = ("pillow", "numpy")
    content_type = Scene
    sample_content = staticmethod(sample_scene)
    answer_types = questions.ANSWER_TYPES
    build_candidates = staticmethod(questions.build_candidates)
    describe_question = staticmethod(questions.describe_question)
    compute_ground_truth = staticmethod(questions.compute_ground_truth)

    def __init__(self, config: SyntheticConfig, *, seed: int) -> None:
        super().__init__(config, config.image, tasks_per_file=config.image.tasks_per_image, seed=seed)

    def build_demonstrations(self, tasks: Sequence[Task], contents: list[Scene]) -> list[Demonstration]:
        """Build one demonstration per task and one per grid image, which `contents` gets."""
        format_look = LOOK_REPLY_FORMATTERS[self.config.demonstrations]
        demonstrations = [build_demonstration(task, format_look=format_look) for task in tasks]
        for index in range(self.config.num_grid_images):
            grid = sample_grid_scene(self.settings, random.Random(derive_seed("chart", self.seed, index)))
            path, task_id = f"{self.media_folder}/{self.format_name(len(contents))}", f"train-{len(contents):05d}"
            demonstrations.append(build_grid_demonstration(grid.objects, image_path=path, task_id=task_id))
            contents.append(grid)
        return demonstrations

    def describe(self) -> dict[str, Any]:
        """Return the settings of images."""
        include = {"media", "image", "demonstrations", *SPLITS}
        return {"settings": self.config.model_dump(mode="json", include=include)}

    def write_media(self, path: Path, content: Scene, split: str, index: int) -> dict[str, Any]:
        """Write an image unless it exists, and return its labels."""
        if not path.exists():
            pixels = render_image(content, derive_seed("pixels", self.seed, split, index))
            with atomic_write(path) as partial:
                Image.fromarray(pixels).save(partial, format="PNG", compress_level=6)
        return asdict(content)
