"""Generate a synthetic image dataset: images with small cards, tasks with exact labels, demonstrations.

A demonstration has the replies of a perfect agent. The first thought names the cards of the overview and their
positions. If that is sufficient (counting all cards), the agent answers directly; otherwise it zooms into the cards
that the question is about, several in parallel, and copies their symbols. In the "direct" style it never zooms, because
the overview is sharp. Grid images train perception.
"""

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic.dataset import SPLITS, ContentT, SyntheticDataset
from saccade.data.synthetic.demonstrations import format_answer as format_video_answer
from saccade.data.synthetic.image import questions, text_templates
from saccade.data.synthetic.image.objects import ImageScene, PixelBox, sample_grid_scene, sample_scene
from saccade.data.synthetic.image.render import Pixels, render_image
from saccade.data.synthetic.text_templates import LOOK_CLOSER, format_answer_reply
from saccade.types import AnswerType, Demonstration, Media, MediaKind, Task
from saccade.utils.files import write_atomically
from saccade.utils.hashing import derive_seed

MAX_CALLS_PER_TURN = 5  # the limit of the environments

LookReplyFormatter = Callable[[str, Sequence[PixelBox], int], str]  # (thought, boxes in pixels, image side) -> reply
LOOK_REPLY_FORMATTERS = {  # by `synthetic.demonstrations`
    "tool_calls": text_templates.format_zoom_reply,
    "python": text_templates.format_crop_code_reply,
    "direct": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GridText:
    """What the demonstration of a grid image says."""

    question: str
    thought: str
    answer: str


class PictureDataset(SyntheticDataset[ContentT]):
    """A dataset of rendered PNG files."""

    media_kind, media_folder, suffix, labels_filename = MediaKind.IMAGE, "pictures", ".png", "objects.json"
    packages = ("pillow", "numpy")
    used_settings: frozenset[str]  # of `synthetic`, besides the sizes of the splits: what the files depend on

    @abstractmethod
    def render(self, content: ContentT, seed: int) -> Pixels:
        """Render a picture: uint8 RGB [height, width, 3]."""

    def describe(self) -> dict[str, Any]:
        """Return the settings that the files depend on."""
        return {"settings": self.config.model_dump(mode="json", include={*self.used_settings, *SPLITS})}

    def write_media(self, path: Path, content: ContentT, split: str, index: int) -> dict[str, Any]:
        """Write a picture unless it exists, and return its labels."""
        if not path.exists():
            pixels = self.render(content, derive_seed("pixels", self.seed, split, index))
            with write_atomically(path) as partial:
                Image.fromarray(pixels).save(partial, format="PNG", compress_level=6)
        return asdict(content)  # type: ignore[call-overload]

    @abstractmethod
    def sample_grid(self, rng: random.Random) -> tuple[ContentT, GridText]:
        """Sample a grid image, and what its demonstration says."""

    def build_grid_demonstrations(self, contents: list[ContentT]) -> list[Demonstration]:
        """Build an auxiliary demonstration per grid image, which `contents` gets."""
        demonstrations = []
        for index in range(self.config.num_grid_images):
            grid, text = self.sample_grid(random.Random(derive_seed("chart", self.seed, index)))
            media = Media(path=f"{self.media_folder}/{self.format_name(len(contents))}", kind=MediaKind.IMAGE)
            task = Task(
                id=f"train-{len(contents):05d}",
                question=text.question,
                media=(media,),
                answer_type=AnswerType.OPEN,
                ground_truth=text.answer,
            )
            replies = (format_answer_reply(text.thought, text.answer),)
            demonstrations.append(Demonstration(task=task, frame_budget=None, replies=replies, is_auxiliary=True))
            contents.append(grid)
        return demonstrations


class ImageDataset(PictureDataset[ImageScene]):
    """A dataset of images."""

    contents_seed, noun, count_key = "cards", "cards", "synthetic.image.objects"
    used_settings = frozenset({"media", "image", "demonstrations"})
    content_type = ImageScene
    sample_content = staticmethod(sample_scene)
    questions = questions

    def __init__(self, config: SyntheticConfig, *, seed: int) -> None:
        super().__init__(config, config.image, tasks_per_file=config.image.tasks_per_image, seed=seed)

    def build_demonstrations(self, tasks: Sequence[Task], contents: list[ImageScene]) -> list[Demonstration]:
        """Build one demonstration per task and one per grid image, which `contents` gets."""
        format_look = LOOK_REPLY_FORMATTERS[self.config.demonstrations]
        demonstrations = [build_demonstration(task, format_look=format_look) for task in tasks]
        return demonstrations + self.build_grid_demonstrations(contents)

    def sample_grid(self, rng: random.Random) -> tuple[ImageScene, GridText]:
        """Sample a grid of cards, and a thought that reads every card, since the question is about the last."""
        grid = sample_grid_scene(self.settings, rng)
        answer = text_templates.format_objects(grid.objects[-1:])
        thought = text_templates.format_observation(grid.objects)
        return grid, GridText(question=text_templates.LAST_OBJECT_QUESTION, thought=thought, answer=answer)

    def render(self, content: ImageScene, seed: int) -> Pixels:
        """Render the cards."""
        return render_image(content, seed)


def build_demonstration(
    task: Task, *, format_look: LookReplyFormatter | None = text_templates.format_zoom_reply
) -> Demonstration:
    """Build a correct demonstration; `format_look` writes the replies that inspect boxes (None: there are none)."""
    cards, side = questions.parse_objects(task), int(task.extras["width"])
    inspected = [cards[index] for index in task.extras["looks"]]
    overview, replies = text_templates.format_overview(cards, side), []
    if format_look is not None:
        for start in range(0, len(inspected), MAX_CALLS_PER_TURN):
            boxes = [card.box for card in inspected[start : start + MAX_CALLS_PER_TURN]]
            replies.append(format_look(LOOK_CLOSER if start else overview, boxes, side))
    last_thought = text_templates.format_observation(inspected) if inspected else overview
    answer_reply = format_answer_reply(last_thought, format_answer(task))
    return Demonstration(task=task, frame_budget=None, replies=(*replies, answer_reply))


def format_answer(task: Task) -> str:
    """Return the ground truth as the model should write it; for a choice that is the option's text, not its letter."""
    if isinstance(task.ground_truth, tuple):
        return text_templates.format_box(text_templates.normalize_box(task.ground_truth, task.extras["width"]))
    return format_video_answer(task)
