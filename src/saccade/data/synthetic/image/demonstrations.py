"""Build demonstrations for the SFT cold start on images: the replies of a perfect agent.

The first thought names the cards of the overview and their positions. If that is sufficient (counting all cards), the
agent answers directly; otherwise it zooms into the cards that the question is about, several in parallel, and copies
their symbols. In the "direct" style it never zooms, because the overview is sharp. Grid images train perception.
"""

from collections.abc import Callable, Sequence

from saccade.data.synthetic.demonstrations import format_answer as format_video_answer
from saccade.data.synthetic.image import text_templates
from saccade.data.synthetic.image.objects import PixelBox, SceneObject
from saccade.data.synthetic.image.questions import parse_objects
from saccade.types import AnswerType, Demonstration, Media, MediaKind, Task

MAX_CALLS_PER_TURN = 5  # the limit of the environments

LookReplyFormatter = Callable[[str, Sequence[PixelBox], int], str]  # (thought, boxes in pixels, image side) -> reply


def build_demonstration(
    task: Task, *, format_look: LookReplyFormatter | None = text_templates.format_zoom_reply
) -> Demonstration:
    """Build a correct demonstration; `format_look` formats the replies that inspect boxes, for the agent's tools.

    With None the agent reads everything from the overview.
    """
    cards, side = parse_objects(task), int(task.extras["width"])
    inspected = [cards[index] for index in task.extras["looks"]]
    overview, replies = text_templates.format_overview(cards, side), []
    if format_look is not None:
        for start in range(0, len(inspected), MAX_CALLS_PER_TURN):
            boxes = [card.box for card in inspected[start : start + MAX_CALLS_PER_TURN]]
            replies.append(format_look(text_templates.LOOK_CLOSER if start else overview, boxes, side))
    last_thought = text_templates.format_observation(inspected) if inspected else overview
    answer_reply = text_templates.format_answer_reply(last_thought, format_answer(task))
    return Demonstration(task=task, frame_budget=None, replies=(*replies, answer_reply))


def build_grid_demonstration(objects: Sequence[SceneObject], *, image_path: str, task_id: str) -> Demonstration:
    """Build an auxiliary demonstration that reads every card of a grid image, since the question is about the last."""
    answer = text_templates.format_objects(objects[-1:])
    task = Task(
        id=task_id,
        question=text_templates.LAST_OBJECT_QUESTION,
        media=(Media(path=image_path, kind=MediaKind.IMAGE),),
        answer_type=AnswerType.OPEN,
        ground_truth=answer,
    )
    return Demonstration(
        task=task,
        frame_budget=None,
        replies=(text_templates.format_answer_reply(text_templates.format_observation(objects), answer),),
        is_auxiliary=True,
    )


def format_answer(task: Task) -> str:
    """Return the ground truth as the model should write it; for a choice that is the option's text, not its letter."""
    if isinstance(task.ground_truth, tuple):
        return text_templates.format_box(text_templates.normalize_box(task.ground_truth, task.extras["width"]))
    return format_video_answer(task)
