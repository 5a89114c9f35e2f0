"""`<video_zoom>{"segment": [4.0, 6.0], "fps": 2}</video_zoom>`: VideoZoomer, arXiv 2512.22315.

Also read are `{"start_time": 4, "end_time": 6}` and `start=4 end=6`, which ParaVT's evaluation accepts of it. It shows
the frames of the segment to the caller: our show_frames. `<think>` and `<answer>` are as in our own form.
"""

import re
from typing import Any

from saccade.chat.parse import Grammar, json_value, parse, plain
from saccade.chat.syntaxes._syntax import first_of, seconds, window
from saccade.types import BlockKind, Reply

_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_PAIR = re.compile(r"(\w+)\s*=\s*[\"']?([^\s,\"']+)")
_FORM = 'write {"segment": [start, end], "fps": frames per second}'


def video_zoom(text: str, forced_length: int = 0) -> Reply:
    """The reply that `text` is, each zoom a call of show_frames; never raises."""
    return parse(text, forced_length, _GRAMMAR)


def _read(body: str) -> tuple[str, dict[str, Any]]:
    found = _OBJECT.search(body)
    given = plain(json_value(found[0])) if found else dict(_PAIR.findall(body))
    segment = given.get("segment")
    if segment is None:
        segment = [first_of(given, ("start_time", "start")), first_of(given, ("end_time", "end"))]
    if not isinstance(segment, list) or len(segment) != 2 or None in segment:
        raise ValueError(_FORM)
    arguments = window(*segment)
    rate = first_of(given, ("fps",))
    if rate is not None:
        arguments["fps"] = seconds(rate)  # of the same spellings: a number, or its text
    return "show_frames", arguments


_GRAMMAR = Grammar(
    tags={"think": BlockKind.THINK, "answer": BlockKind.ANSWER, "video_zoom": BlockKind.CALL},
    readers={"video_zoom": _read},
    forms={},
)
