"""Parse VideoZoomer's calls (arXiv 2512.22315): `<video_zoom>{"segment": [4.0, 6.0], "fps": 2}</video_zoom>`.

`{"start_time": 4, "end_time": 6}` and `start=4 end=6` are accepted too, as in ParaVT's evaluation. The tool shows the
frames of the segment to the caller, so it maps to Saccade's show_frames. `<think>` and `<answer>` are native.
"""

import re
from typing import Any

from saccade.chat.parser import Grammar, normalize_json, parse_json, parse_reply
from saccade.chat.tool_formats.base import get_first, parse_seconds, parse_window
from saccade.types import BlockKind, Reply

# Possessive and only from the start of a word, so that every character is read once.
_PAIR_PATTERN = re.compile(r"(?<!\w)(\w++)\s*+=\s*+[\"']?+([^\s,\"']++)")
_EXPECTED_FORMAT = 'write {"segment": [start, end], "fps": frames per second}'


def video_zoom(text: str, prefill_length: int = 0) -> Reply:
    """Parse a reply, with each zoom as a call of show_frames; never raises."""
    return parse_reply(text, prefill_length, _GRAMMAR)


def _parse_zoom(body: str) -> tuple[str, dict[str, Any]]:
    start, end = body.find("{"), body.rfind("}") + 1
    is_object = 0 <= start < end
    given = normalize_json(parse_json(body[start:end])) if is_object else dict(_PAIR_PATTERN.findall(body))
    segment = given.get("segment")
    if segment is None:
        segment = [get_first(given, ("start_time", "start")), get_first(given, ("end_time", "end"))]
    if not isinstance(segment, list) or len(segment) != 2 or None in segment:
        raise ValueError(_EXPECTED_FORMAT)
    arguments = parse_window(*segment)
    fps = get_first(given, ("fps",))
    if fps is not None:
        arguments["fps"] = parse_seconds(fps)  # accepts the same types: a number or its text
    return "show_frames", arguments


_GRAMMAR = Grammar(
    tags={"think": BlockKind.THINK, "answer": BlockKind.ANSWER, "video_zoom": BlockKind.CALL},
    call_parsers={"video_zoom": _parse_zoom},
    call_formats={},
)
