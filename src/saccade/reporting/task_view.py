"""Show a row of a dataset as text, and as one self-contained HTML page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.errors import MediaError
from saccade.media import image, video
from saccade.media.frame_sampling import sample_uniform_times
from saccade.reporting.episode_view import encode_data_uri
from saccade.reporting.report import render_template
from saccade.types import Demonstration, Media, MediaKind, Task
from saccade.utils.text import escape_control_characters

MAX_FRAMES = 8  # of a video


def format_item(item: Task | Demonstration) -> str:
    r"""Format a task or a demonstration, one line per field.

    >>> from saccade.types import AnswerType
    >>> kind, options = AnswerType.CHOICE, ("red", "blue")
    >>> task = Task(id="w-1", question="Which?", media=(), answer_type=kind, ground_truth="B", options=options)
    >>> print(format_item(task))
    w-1  choice
    Question: Which?
      A. red
    * B. blue
    """
    return "\n".join(escape_control_characters(line) for line in _format_lines(item))


def _format_lines(item: Task | Demonstration) -> Iterator[str]:
    task = item.task if isinstance(item, Demonstration) else item
    yield f"{task.id}  {task.answer_type}"
    yield from (f"{media.kind.value.capitalize()}: {media.path}{_describe_media(media)}" for media in task.media)
    yield f"Question: {task.question}"
    for letter, option in zip("ABCDEFGHIJ", task.options, strict=False):
        yield f"{'*' if letter == task.ground_truth else ' '} {letter}. {option}"
    if not task.options:
        yield f"Ground truth: {task.ground_truth}"
    yield from (f"{name}: {value}" for name, value in task.extras.items())
    if not isinstance(item, Demonstration):
        return
    yield f"Frames: {'set by the environment' if item.frame_budget is None else item.frame_budget}"
    for number, (title, text) in enumerate(_iterate_turns(item), 1):
        yield f"{number}. {title}: {text}"


def _iterate_turns(demonstration: Demonstration) -> Iterator[tuple[str, str]]:
    for number, reply in enumerate(demonstration.replies):
        yield "reply", reply
        answers = demonstration.children[number] if number < len(demonstration.children) else ()
        yield from (("sub-agent", answer) for answer in answers)
        results = demonstration.results[number] if number < len(demonstration.results) else ()
        for result in results:
            images = ", ".join(image.path for image in result.images)
            yield "result", "\n".join(filter(None, (result.text, result.error, images)))


def _describe_media(media: Media) -> str:
    """Describe a media file, or why it can't be opened."""
    try:
        if media.kind is MediaKind.IMAGE:
            pixels = image.read_image(media.path)
            return f" ({pixels.width}x{pixels.height})"
        info = video.probe_video(media.path)
    except MediaError as error:
        return f" ({str(error).removeprefix(f'{media.path} ')})"
    return f" ({info.width}x{info.height}, {info.duration:.1f} s, {info.num_frames} frames)"


def render_item_page(item: Task | Demonstration, source_path: Path) -> str:
    """Render the row as a page: media (MAX_FRAMES of a video), question, options, ground truth and replies."""
    task = item.task if isinstance(item, Demonstration) else item
    return render_template(
        "task.html.j2",
        source=source_path.name,
        task=task,
        media=[_build_media_view(media) for media in task.media],
        turns=[*_iterate_turns(item)] if isinstance(item, Demonstration) else [],
    )


def _build_media_view(media: Media) -> dict[str, Any]:
    """Return a file's name, description, and frames with their times."""
    name, frames = Path(media.path).name, list[tuple[str, str]]()
    try:
        if media.kind is MediaKind.IMAGE:
            pixels = image.read_image(media.path)
            frames.append(("", encode_data_uri(image.resize_image(pixels, pixels.width, pixels.height))))
        else:
            index = video.index_video(media.path)
            times = sample_uniform_times(index.info.duration, min(MAX_FRAMES, index.info.num_frames))
            frames = [
                (f"{frame.time:.1f} s", encode_data_uri(frame.pixels)) for frame in video.decode_frames(index, times)
            ]
    except MediaError as error:
        return {"name": name, "description": str(error), "frames": []}
    return {"name": name, "description": _describe_media(media).strip(" ()"), "frames": frames}
