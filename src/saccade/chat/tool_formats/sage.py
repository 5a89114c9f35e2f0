"""One JSON object per reply, between `<json>` and `</json>` or in a fence: SAGE (Context VLM and iterative reasoner).

    <json>{"final_answer": null, "recommended_tools": {"needed": true, "tool_calls": [
        {"name": "extract_parts_from_timestamp", "arguments": {"timestamp_start": "00:01:00", …}}]}}</json>

`final_answer`, where it isn't null, is the answer; else the tool calls are the calls. Of SAGE's tools, those that look
are ours: parts that are extracted are shown (show_frames); an event that is to be located, and a query about frames or
the video, are asked of a sub-agent that sees the window (crop_video). Search on the web, parsing of pages and
transcripts of speech have no counterpart. The names in its paper and those in its code are read alike.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from saccade.chat.parse import bad_call, json_value, parse, plain
from saccade.chat.syntaxes._syntax import first_of, foreign, window
from saccade.types import Block, BlockKind, Call, Form, Reply

_HOLD = re.compile(r"<json>(.*?)(?:</json>|\Z)|```json(.*?)(?:```|\Z)", re.DOTALL)
_FRAME = re.compile(r"frame_(\d{1,9}(?:\.\d{1,9})?)\.png")
_WHOLE = {"start_time": 0.0, "end_time": 1e6}  # a window is cut where the video ends
_NOTHING = ("", "null", "none")


def sage(text: str, forced_length: int = 0) -> Reply:
    """The reply that `text` is: an answer, or calls of show_frames and crop_video; never raises."""
    found = _HOLD.search(text)
    # Without its tags the object is what stands between the outermost braces.
    start, end = found.span() if found else (max(text.find("{"), 0), text.rfind("}") + 1 or len(text))
    body = text[start:end] if found is None else next(group for group in found.groups() if group is not None)
    before = parse(text[:start]).of(BlockKind.THINK)
    closed = found is None or found[0].endswith(("</json>", "```"))
    after = (Block(kind=BlockKind.TEXT, body=text[end:], closed=True),) if text[end:].strip() else ()
    return Reply(text=text, blocks=(*before, *_acts(body, closed=closed), *after), forced=text[:forced_length])


def _acts(body: str, *, closed: bool) -> tuple[Block, ...]:
    """The answer in an object, else its calls, else one call that says what is wrong with it."""
    try:
        action = _plain_keys(plain(json_value(body, strict=False)))
        if not isinstance(action, Mapping):
            raise ValueError("it must be an object")
        answer = action.get("final_answer")
        if answer is not None and str(answer).strip().lower() not in _NOTHING:
            return (Block(kind=BlockKind.ANSWER, body=str(answer), closed=True),)
        calls = [_call(each) for each in _named(action)]
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deeply"
        calls = [bad_call(f"there is no action that can be read between <json> and </json>: {reason}", Form.FOREIGN)]
    return tuple(Block(kind=BlockKind.CALL, body=body, closed=closed, call=call) for call in calls)


def _plain_keys(value: Any) -> Any:
    """The names as the code writes them, `final_answer`, where the paper's prompts have `final-answer`."""
    if not isinstance(value, Mapping):
        return value
    return {name.replace("-", "_"): _plain_keys(each) for name, each in value.items()}


def _named(action: Mapping[str, Any]) -> list[Any]:
    tools = first_of(action, ("recommended_tools", "recommended_tool"))
    calls = tools.get("tool_calls", [tools]) if isinstance(tools, Mapping) else tools
    if not isinstance(calls, list) or not calls:
        raise ValueError("give a final_answer, or tool_calls in recommended_tools")
    return calls


def _call(asked: Any) -> Call:
    asked = _plain_keys(asked)
    name = first_of(asked, ("name", "tool_name")) if isinstance(asked, Mapping) else None
    if not isinstance(name, str):
        return bad_call('a tool call must be {"name": …, "arguments": {…}}', Form.FOREIGN)
    rule = _TOOLS.get(name.strip().replace("-", "_"))
    if rule is None:
        return bad_call(f"{name[:40]} can't be used here; there is {', '.join(_OFFERED)}", Form.FOREIGN)
    arguments = asked.get("arguments", {})
    try:
        if not isinstance(arguments, Mapping):
            raise ValueError(f"the arguments of {name[:40]} must be an object")
        return rule(arguments)
    except ValueError as error:
        return bad_call(str(error), Form.FOREIGN)


# ---- its tools as ours ---------------------------------------------------------------------------------------------


def _stretch(arguments: Mapping[str, Any]) -> dict[str, Any]:
    start = first_of(arguments, ("timestamp_start", "start"))
    end = first_of(arguments, ("timestamp_end", "end"))
    if start is None or end is None:
        raise ValueError("give timestamp_start and timestamp_end as HH:MM:SS")
    return window(start, end)


def _extract(arguments: Mapping[str, Any]) -> Call:
    return foreign("show_frames", _stretch(arguments))


def _locate(arguments: Mapping[str, Any]) -> Call:
    event = _words(arguments, "event")
    question = f"When does this happen: {event}? Give its start and its end in seconds, or say that it isn't shown."
    return foreign("crop_video", {**_stretch(arguments), "question": question})


def _reason(arguments: Mapping[str, Any]) -> Call:
    """Asked of the frames that its paths name, a little around them, or of the whole video."""
    query, paths = _words(arguments, "query"), arguments.get("media_paths")
    if not isinstance(paths, list) or not paths:
        raise ValueError("give media_paths: frames that you were shown, or the video")
    times = [float(time) for path in paths for time in _FRAME.findall(str(path))]
    seen = window(max(min(times) - 0.5, 0.0), max(times) + 0.5) if times else _WHOLE
    return foreign("crop_video", {**seen, "question": query})


def _words(arguments: Mapping[str, Any], name: str) -> str:
    words = arguments.get(name)
    if not isinstance(words, str) or not words.strip():
        raise ValueError(f"give {name} as text")
    return words.strip()


_OFFERED = ("identify_timestamps_visually", "extract_parts_from_timestamp", "perform_reasoning")
_TOOLS: Mapping[str, Callable[[Mapping[str, Any]], Call]] = {
    **{"identify_timestamps_visually": _locate, "ground_event": _locate},
    **{"extract_parts_from_timestamp": _extract, "extract_video_parts": _extract},
    **{"perform_reasoning": _reason, "analyze": _reason},
}
