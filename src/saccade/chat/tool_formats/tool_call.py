"""`<tool_call>{"name": "crop_video", "arguments": {"video_path": …, "start_time": …, "end_time": …}}</tool_call>`.

What ParaVT's evaluation and LongVT write, and the `<tool_code>` that leaks from pretraining. Their crop_video shows the
frames of a window to the caller itself, so it is our show_frames; the path says nothing, since a task has its video.
Calls by other names are left as they are, for whoever offers such a tool.
"""

from typing import Any

from saccade.chat.parse import parse
from saccade.chat.syntaxes._syntax import first_of, foreign, translated, window
from saccade.types import Call, Reply


def tool_call(text: str, forced_length: int = 0) -> Reply:
    """The reply that `text` is, its calls of crop_video put as calls of show_frames; never raises."""
    return translated(parse(text, forced_length), _crop)


def _crop(call: Call) -> Call:
    if call.name != "crop_video":
        return call
    given: dict[str, Any] = {name: value for name, value in call.arguments.items() if not name.isdecimal()}
    placed = [value for name, value in call.arguments.items() if name.isdecimal()]
    # By place the path comes first, and is often left out.
    given |= dict(zip(("start_time", "end_time"), placed[1:] if len(placed) > 2 else placed, strict=False))
    start, end = first_of(given, ("start_time", "start")), first_of(given, ("end_time", "end"))
    if start is None or end is None:
        raise ValueError("crop_video needs start_time and end_time, in seconds")
    return foreign("show_frames", window(start, end))
