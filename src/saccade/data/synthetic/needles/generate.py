"""Generate a dataset of clips with one needle each, tasks with the scores of baseline policies, demonstrations."""

import random
from collections.abc import Sequence

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic.generate import ClipDataset
from saccade.data.synthetic.needles import questions
from saccade.data.synthetic.needles.clip import NeedleClip, require_few_calls, require_places, sample_clip
from saccade.data.synthetic.needles.demonstrations import build_needle_demonstrations
from saccade.data.synthetic.policy_baselines import PolicyDataset
from saccade.data.synthetic.render import Frames, draw_events, draw_gauge
from saccade.types import Demonstration, Task
from saccade.utils.hashing import derive_seed


class NeedleDataset(PolicyDataset[NeedleClip], ClipDataset[NeedleClip]):
    """A dataset of clips with one needle each."""

    contents_seed, noun, count_key = "needles", "needles", "synthetic.clip_seconds"
    unused_settings = frozenset({"media", "image", "events", "distractors", "questions", "tasks_per_video"})
    content_type = NeedleClip
    questions = questions

    def __init__(self, config: SyntheticConfig, *, seed: int) -> None:
        require_places(config)
        require_few_calls(config)
        super().__init__(config, tasks_per_file=1, seed=seed)

    @property
    def question_kinds(self) -> tuple[str, ...]:
        """Return the one kind of question."""
        return (self.config.needles.cue if self.config.tasks == "cue" else self.config.tasks,)

    def sample_for_index(self, rng: random.Random, index: int) -> NeedleClip:
        """Sample the clip with this number in its split."""
        return sample_clip(self.config, rng, index)

    def build_demonstrations(self, tasks: Sequence[Task], contents: list[NeedleClip]) -> list[Demonstration]:
        """Build demonstrations that don't show where to look."""
        demonstrations = []
        for task, clip in zip(tasks, contents, strict=True):
            rng = random.Random(derive_seed("trace", self.seed, task.id))
            demonstrations += build_needle_demonstrations(task, clip, self.config.needles, rng)
        return demonstrations

    def draw(self, frames: Frames, content: NeedleClip, *, first_frame: int) -> None:
        """Draw gauges, cues and the needle."""
        settings, fps = self.config.needles, self.config.fps
        for place, level in enumerate(content.levels):
            start = place * content.place_seconds
            span = (start, start + settings.window_seconds)
            draw_gauge(frames, settings.gauge, level, span, fps, first_frame=first_frame)
        draw_events(frames, (*content.marks, content.needle), fps, first_frame=first_frame)
