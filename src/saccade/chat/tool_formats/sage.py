"""Parse SAGE's replies (Context VLM and iterative reasoner): one JSON object, in `<json>` tags or in a fence.

    <json>{"final_answer": null, "recommended_tools": {"needed": true, "tool_calls": [
        {"name": "extract_parts_from_timestamp", "arguments": {"timestamp_start": "00:01:00", …}}]}}</json>

`final_answer` is the answer unless it is null; then the tool calls are the calls. SAGE's visual tools map to Saccade's:
extracting parts to show_frames; locating an event, and a query about frames or the video, to crop_video, whose
sub-agent sees the window. Web search, page parsing and speech transcripts have no counterpart. Both the names of the
paper and those of the code are accepted.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from saccade.chat.parser import build_invalid_call, normalize_json, parse_json, parse_reply
from saccade.chat.tool_formats.base import build_external_call, get_first, parse_window
from saccade.types import Block, BlockKind, Call, CallFormat, Reply

_JSON_PATTERN = re.compile(r"<json>(.*?)(?:</json>|\Z)|```json(.*?)(?:```|\Z)", re.DOTALL)
_FRAME_PATTERN = re.compile(r"frame_(\d{1,9}(?:\.\d{1,9})?)\.png")
_WHOLE_VIDEO = {"start_time": 0.0, "end_time": 1e6}  # tools clip a window to the end of the video
_NULL_ANSWERS = ("", "null", "none")


def sage(text: str, prefill_length: int = 0) -> Reply:
    """Parse a reply: an answer, or calls of show_frames and crop_video; never raises."""
    match = _JSON_PATTERN.search(text)
    # Without tags, the object is the text between the outermost braces.
    start, end = match.span() if match else (max(text.find("{"), 0), text.rfind("}") + 1 or len(text))
    body = text[start:end] if match is None else next(group for group in match.groups() if group is not None)
    before = parse_reply(text[:start]).find_blocks(BlockKind.THINK)
    is_closed = match is None or match[0].endswith(("</json>", "```"))
    after = (Block(kind=BlockKind.TEXT, body=text[end:], is_closed=True),) if text[end:].strip() else ()
    blocks = (*before, *_parse_action(body, is_closed=is_closed), *after)
    return Reply(text=text, blocks=blocks, prefill=text[:prefill_length])


def _parse_action(body: str, *, is_closed: bool) -> tuple[Block, ...]:
    """Return the object's answer, else its calls, else one call with the parse error."""
    try:
        action = _normalize_keys(normalize_json(parse_json(body, strict=False)))
        if not isinstance(action, Mapping):
            raise ValueError("it must be an object")
        answer = action.get("final_answer")
        if answer is not None and str(answer).strip().lower() not in _NULL_ANSWERS:
            return (Block(kind=BlockKind.ANSWER, body=str(answer), is_closed=True),)
        calls = [_convert_call(raw_call) for raw_call in _find_calls(action)]
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deeply"
        problem = f"there is no action that can be read between <json> and </json>: {reason}"
        calls = [build_invalid_call(problem, CallFormat.THIRD_PARTY)]
    return tuple(Block(kind=BlockKind.CALL, body=body, is_closed=is_closed, call=call) for call in calls)


def _normalize_keys(value: Any) -> Any:
    """Rename keys of the paper's prompts (`final-answer`) to those of the code (`final_answer`)."""
    if not isinstance(value, Mapping):
        return value
    return {name.replace("-", "_"): _normalize_keys(inner) for name, inner in value.items()}


def _find_calls(action: Mapping[str, Any]) -> list[Any]:
    tools = get_first(action, ("recommended_tools", "recommended_tool"))
    calls = tools.get("tool_calls", [tools]) if isinstance(tools, Mapping) else tools
    if not isinstance(calls, list) or not calls:
        raise ValueError("give a final_answer, or tool_calls in recommended_tools")
    return calls


def _convert_call(raw_call: Any) -> Call:
    raw_call = _normalize_keys(raw_call)
    name = get_first(raw_call, ("name", "tool_name")) if isinstance(raw_call, Mapping) else None
    try:
        if not isinstance(name, str):
            raise ValueError('a tool call must be {"name": …, "arguments": {…}}')
        converter, arguments = _CONVERTERS.get(name.strip().replace("-", "_")), raw_call.get("arguments", {})
        if converter is None:
            raise ValueError(f"{name[:40]} can't be used here; there is {', '.join(_SUPPORTED_TOOLS)}")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"the arguments of {name[:40]} must be an object")
        return converter(arguments)
    except ValueError as error:
        return build_invalid_call(str(error), CallFormat.THIRD_PARTY)


def _parse_timestamps(arguments: Mapping[str, Any]) -> dict[str, Any]:
    start = get_first(arguments, ("timestamp_start", "start"))
    end = get_first(arguments, ("timestamp_end", "end"))
    if start is None or end is None:
        raise ValueError("give timestamp_start and timestamp_end as HH:MM:SS")
    return parse_window(start, end)


def _convert_extract(arguments: Mapping[str, Any]) -> Call:
    return build_external_call("show_frames", _parse_timestamps(arguments))


def _convert_locate(arguments: Mapping[str, Any]) -> Call:
    event = _require_text(arguments, "event")
    question = f"When does this happen: {event}? Give its start and its end in seconds, or say that it isn't shown."
    return build_external_call("crop_video", {**_parse_timestamps(arguments), "question": question})


def _convert_reasoning(arguments: Mapping[str, Any]) -> Call:
    """Convert a query about frames to a window around them, any other query to the whole video."""
    query, paths = _require_text(arguments, "query"), arguments.get("media_paths")
    if not isinstance(paths, list) or not paths:
        raise ValueError("give media_paths: frames that you were shown, or the video")
    times = [float(time) for path in paths for time in _FRAME_PATTERN.findall(str(path))]
    window = parse_window(max(min(times) - 0.5, 0.0), max(times) + 0.5) if times else _WHOLE_VIDEO
    return build_external_call("crop_video", {**window, "question": query})


def _require_text(arguments: Mapping[str, Any], name: str) -> str:
    text = arguments.get(name)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"give {name} as text")
    return text.strip()


_SUPPORTED_TOOLS = ("identify_timestamps_visually", "extract_parts_from_timestamp", "perform_reasoning")
_CONVERTERS: Mapping[str, Callable[[Mapping[str, Any]], Call]] = {
    **{"identify_timestamps_visually": _convert_locate, "ground_event": _convert_locate},
    **{"extract_parts_from_timestamp": _convert_extract, "extract_video_parts": _convert_extract},
    **{"perform_reasoning": _convert_reasoning, "analyze": _convert_reasoning},
}
