"""Parse the calls of ParaVT's evaluation and of LongVT, and the `<tool_code>` calls of pretrained models.

    <tool_call>{"name": "crop_video", "arguments": {"video_path": …, "start_time": …, "end_time": …}}</tool_call>

Their crop_video shows the frames of a window to the caller itself, so it maps to Saccade's show_frames; the path is
ignored, since the task has its video. Calls of other tools are unchanged.
"""

from dataclasses import replace
from typing import Any

from saccade.chat.parser import build_invalid_call, parse_reply
from saccade.chat.tool_formats.base import build_external_call, get_first, parse_window
from saccade.types import Call, Reply


def tool_call(text: str, prefill_length: int = 0) -> Reply:
    """Parse a reply, with calls of crop_video translated to show_frames; never raises."""
    reply = parse_reply(text, prefill_length)
    return replace(reply, blocks=tuple(replace(block, call=_convert_crop(block.call)) for block in reply.blocks))


def _convert_crop(call: Call | None) -> Call | None:
    if call is None or not call.ok or call.name != "crop_video":
        return call
    given: dict[str, Any] = {name: value for name, value in call.arguments.items() if not name.isdecimal()}
    positional = [value for name, value in call.arguments.items() if name.isdecimal()]
    # The first positional argument is the path, which is often omitted.
    times = positional[1:] if len(positional) > 2 else positional
    given |= dict(zip(("start_time", "end_time"), times, strict=False))
    start, end = get_first(given, ("start_time", "start")), get_first(given, ("end_time", "end"))
    try:
        if start is None or end is None:
            raise ValueError("crop_video needs start_time and end_time, in seconds")
        return build_external_call("show_frames", parse_window(start, end))
    except ValueError as error:
        return build_invalid_call(str(error), call.call_format)
