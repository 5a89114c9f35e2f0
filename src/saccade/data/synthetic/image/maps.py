"""Generate a dataset of maps: pictures whose legend calls can't cover, tasks, demonstrations.

As with clips (`needles/demonstrations.py`), demonstrations look at random entries, or where the question says: they
teach the format, boxes and perception, and leave where to look to RL.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.config.schema import NeedlesConfig, SyntheticConfig
from saccade.data.synthetic.events import PALETTE, Event
from saccade.data.synthetic.image.generate import LOOK_REPLY_FORMATTERS, GridText, PictureDataset
from saccade.data.synthetic.image.map_scene import MapScene, sample_grid_map, sample_map
from saccade.data.synthetic.image.objects import DIGIT, DISTRACTOR_COLOR, PixelBox, SceneObject
from saccade.data.synthetic.image.render import GLYPHS, Pixels, compute_glyph_mask, render_backdrop
from saccade.data.synthetic.image.text_templates import normalize_box
from saccade.data.synthetic.needles.clip import require_few_calls
from saccade.data.synthetic.needles.demonstrations import NAMED_PER_CLIP, NEEDLE_SHARE
from saccade.data.synthetic.policy_baselines import PolicyDataset
from saccade.data.synthetic.questions import Question
from saccade.data.synthetic.render import INK, WHITE, draw_events
from saccade.data.synthetic.text_templates import LOOK_CLOSER, NONE_TEXT, format_answer_reply
from saccade.errors import ConfigError
from saccade.types import AnswerType, Demonstration, Task
from saccade.utils.hashing import derive_seed

QUESTION = "Which number does the legend give for the label?"
NAMED_QUESTION = "Which number is at {places}?"
LABEL_QUESTION = "What is the label?"
GRID_QUESTION = "What is the last entry?"
MAX_NAMED_ENTRIES = 4  # each entry that is read trains perception
ANSWER_TYPES = {"map": AnswerType.OPEN}
TOKENIZER_PIECES = (QUESTION, "Which number is at ", LABEL_QUESTION, GRID_QUESTION, " disc", " square")


def build_candidates(kind: str, scene: MapScene, rng: random.Random) -> list[Question]:
    """Build the question about a picture."""
    return [Question(kind=kind, answer=scene.entries[scene.place].symbol)]


def describe_question(question: Question, scene: MapScene, _: Any) -> tuple[str, dict[str, Any]]:
    """Return the text of a question, and the extras of its task."""
    return QUESTION, {"question": question.kind, "target": None, **scene.extras}


def compute_ground_truth(task: Task, scene: MapScene) -> str:
    """Compute the ground truth of a task again from the labels of its picture."""
    return scene.entries[scene.place].symbol


class MapDataset(PolicyDataset[MapScene], PictureDataset[MapScene]):
    """A dataset of maps."""

    contents_seed, noun, count_key = "maps", "entries", "synthetic.needles.num_places"
    used_settings = frozenset({"media", "image", "tasks", "needles", "demonstrations"})
    content_type = MapScene
    questions = sys.modules[__name__]

    def __init__(self, config: SyntheticConfig, *, seed: int) -> None:
        require_few_calls(config)
        if LOOK_REPLY_FORMATTERS[config.demonstrations] is None:
            message = f"synthetic.demonstrations={config.demonstrations}: the overview of a map doesn't show the answer"
            message += "; set tool_calls or python"
            raise ConfigError(message, key="synthetic.demonstrations", value=config.demonstrations)
        super().__init__(config, config, tasks_per_file=1, seed=seed)

    @property
    def question_kinds(self) -> tuple[str, ...]:
        """Return the one kind of question."""
        return tuple(ANSWER_TYPES)

    def sample_for_index(self, rng: random.Random, index: int) -> MapScene:
        """Sample the picture with this number in its split."""
        return sample_map(self.config, rng, index)

    def build_demonstrations(self, tasks: Sequence[Task], contents: list[MapScene]) -> list[Demonstration]:
        """Build demonstrations that don't show where to look."""
        demonstrations = []
        for task, scene in zip(tasks, contents, strict=True):
            rng = random.Random(derive_seed("trace", self.seed, task.id))
            builder = _MapDemonstrations(task, scene, self.config.needles, self.config.demonstrations, rng)
            demonstrations += builder.build()
        return demonstrations + self.build_grid_demonstrations(contents)

    def sample_grid(self, rng: random.Random) -> tuple[MapScene, GridText]:
        """Sample a grid of entries without a label, and a thought that reads every entry."""
        grid = sample_grid_map(self.config, rng)
        symbols = [
            entry.symbol if entry.color == DISTRACTOR_COLOR else f"{entry.color} {entry.symbol}"
            for entry in grid.entries
        ]
        return grid, GridText(question=GRID_QUESTION, thought=f"I see: {', '.join(symbols)}", answer=symbols[-1])

    def render(self, content: MapScene, seed: int) -> Pixels:
        """Render the label and the legend."""
        return render_map(content, seed)


class _MapDemonstrations:
    """The demonstrations about one picture."""

    def __init__(self, task: Task, scene: MapScene, settings: NeedlesConfig, style: str, rng: random.Random) -> None:
        self.task, self.scene, self.settings, self.rng = task, scene, settings, rng
        self.format_look = LOOK_REPLY_FORMATTERS[style]

    def build(self) -> list[Demonstration]:
        """Build a demonstration of the task, some whose question names entries, and one about the label."""
        return [
            self._build_random(),
            *(self._build_named(number) for number in range(NAMED_PER_CLIP)),
            *([self._build_label()] if self.scene.look else []),
        ]

    def _build_random(self) -> Demonstration:
        """Look at random boxes; if none shows the digit, the answer is a random one."""
        budget, width = self.settings.num_calls, self.settings.calls_per_turn
        # A small label is one more thing to look at.
        cards = [*self.scene.entries, *([self.scene.card] if self.scene.card else [])]
        drawn = self.rng.sample(cards, min(budget, len(cards)))
        looks: list[list[SceneObject]] = []
        for start in range(0, len(drawn), width):
            looks.append(drawn[start : start + width])
            if any(card.symbol_class == DIGIT for card in looks[-1]):
                break
        found = [card.symbol for cards in looks for card in cards if card.symbol_class == DIGIT]
        return self._build_demonstration(self.task, looks, found[0] if found else str(self.rng.randrange(10)))

    def _build_named(self, number: int) -> Demonstration:
        """Look at the entries whose left and top the question names, often more than the task allows."""
        others = [entry for index, entry in enumerate(self.scene.entries) if index != self.scene.place]
        cards = self.rng.sample(others, min(self.rng.randint(1, MAX_NAMED_ENTRIES), len(others)))
        answer = NONE_TEXT
        if self.rng.random() < NEEDLE_SHARE:
            needle = self.scene.entries[self.scene.place]
            cards[self.rng.randrange(len(cards))], answer = needle, needle.symbol
        places = ", ".join("{:g} {:g}".format(*normalize_box(card.box, self.scene.pixels)[:2]) for card in cards)
        question = NAMED_QUESTION.format(places=places)
        named = replace(
            self.task, id=f"{self.task.id}-named-{number}", question=question, ground_truth=answer, extras={}
        )
        return self._build_demonstration(named, [cards], answer)

    def _build_label(self) -> Demonstration:
        """Name the label, which the overview shows."""
        answer = " ".join(self.scene.look or ())
        task = replace(self.task, id=f"{self.task.id}-label", question=LABEL_QUESTION, ground_truth=answer, extras={})
        return self._build_demonstration(task, [], answer)

    def _build_demonstration(self, task: Task, looks: Sequence[Sequence[SceneObject]], answer: str) -> Demonstration:
        replies, seen = list[str](), list[str]()
        for cards in looks:
            boxes: list[PixelBox] = [card.box for card in cards]
            assert self.format_look is not None
            replies.append(self.format_look(LOOK_CLOSER, boxes, self.scene.pixels))
            seen += [card.symbol for card in cards]
        thought = f"I see: {' '.join(seen)}" if looks else f"I see: {answer}"
        replies.append(format_answer_reply(thought, answer))
        return Demonstration(task=task, frame_budget=None, replies=tuple(replies))


def render_map(scene: MapScene, seed: int) -> Pixels:
    """Render a map: uint8 RGB [pixels, pixels, 3]."""
    pixels = render_backdrop(scene.pixels, seed)
    if scene.look:
        left, top, right, bottom = scene.label_box
        label = Event(start=0.0, end=1.0, color=scene.look[0], shape=scene.look[1], size=0.95)
        draw_events(pixels[None, top:bottom, left:right], [label], 1.0)
    for card in (*scene.entries, *([scene.card] if scene.card else [])):
        left, top, right, bottom = card.box
        region, axis = pixels[top:bottom, left:right], (np.arange(card.side) + 0.5) / card.side - 0.5
        region[:] = PALETTE.get(card.color, WHITE)
        region[compute_glyph_mask(GLYPHS[card.symbol_class][card.symbol], axis / card.symbol_scale)] = INK
    return pixels
