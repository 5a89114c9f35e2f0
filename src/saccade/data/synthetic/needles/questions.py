"""The question about a clip with one needle, and its extras.

`Task.extras` holds, besides those of `synthetic/questions.py`:

    place, num_places   of the needle, from 0         is_shown   whether the overview shows the needle
    policies            [accuracy, calls] of baseline policies by name (`policy_baselines.py`)
    tool_call_penalty           what a call costs, in units of accuracy
"""

import random
from typing import Any

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic.needles.clip import NeedleClip
from saccade.data.synthetic.questions import Question
from saccade.types import AnswerType, Task

QUESTION_TEMPLATES = {
    "opening": "Which colour does the opening announce?",
    "marker": "Which colour follows the marker?",
    "counter": "Which colour is shown where the counter jumps?",
    "search": "Which colour is shown when the gauge is half full?",
    "cost": "Which colour is shown at some time, or at the beginning?",
}
ANSWER_TYPES = dict.fromkeys(QUESTION_TEMPLATES, AnswerType.OPEN)


def build_candidates(kind: str, clip: NeedleClip, rng: random.Random) -> list[Question]:
    """Build the question about a clip."""
    return [Question(kind=kind, answer=clip.needle.color)]


def describe_question(question: Question, clip: NeedleClip, config: SyntheticConfig) -> tuple[str, dict[str, Any]]:
    """Return the text of a question, and the extras of its task."""
    extras = {"question": question.kind, "target": None, "second": None, **clip.extras}
    return QUESTION_TEMPLATES[question.kind], extras


def compute_ground_truth(task: Task, clip: NeedleClip) -> str:
    """Compute the ground truth of a task again from the labels of its clip."""
    return clip.needle.color
