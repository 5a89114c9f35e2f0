"""Score temporal grounding: the IoU of a time span with the ground-truth span."""

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from saccade.rewards.answer_types.base import BaseAnswerType, parse_numbers, quote_answer, unwrap_answer
from saccade.rewards.answer_types.reader import read_span
from saccade.rewards.text_normalization import normalize_text
from saccade.types import Episode
from saccade.utils.numbers import parse_clock

# A comma begins the fraction of a subtitle's time alone: elsewhere it separates two times.
_PUBLISHED_TIME = re.compile(r"\d+:\d{1,2}:\d{1,2},\d{3}(?![\d:])|\d+(?::\d{1,2}){0,2}(?:\.\d+)?")


class GroundingAnswer(BaseAnswerType):
    """Temporal grounding: the IoU, in [0, 1], of the first well-formed span in the final answer and the true span.

    A span is two times with `-`, `to`, `and`, `until`, a comma or `, end:` between them; a time is seconds (`12.5`,
    `12.5s`), `mm:ss` or `hh:mm:ss`, with an optional fraction. Later spans are ignored, so that listing several gains
    nothing. An empty or inverted span, a negative time, other units, a denial and a missing span score 0.
    """

    names = ("grounding", "tvg", "temporal_grounding", "temporal-grounding")
    expected = "a start and a later end in seconds, such as [3.5, 9]"
    example = ((3.0, 5.0), "3.0-5.0")

    def __call__(self, episode: Episode) -> float:
        """Return the score of an episode. Raises DataError if the ground truth is not a pair of seconds in order."""
        self.require_valid(episode.task)
        true_start, true_end = cast(tuple[float, float], episode.task.ground_truth)
        start, end = read_span(episode.answer or "") or (0.0, 0.0)
        if start >= end:
            return 0.0
        return max(0.0, min(end, true_end) - max(start, true_start)) / (max(end, true_end) - min(start, true_start))

    def explain(self, episode: Episode) -> str:
        """Return the span that was read, and the right one."""
        span = read_span(episode.answer or "")
        read = f"{span[0]:g} to {span[1]:g} s" if span else "no span"
        start, end = cast(tuple[float, float], episode.task.ground_truth)
        return f"{quote_answer(episode)} read as {read}, ground truth {start:g} to {end:g} s"

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is a start and a later end."""
        if not isinstance(ground_truth, tuple) or len(ground_truth) != 2:
            return False
        return -math.inf < ground_truth[0] < ground_truth[1] < math.inf

    @classmethod
    def parse_ground_truth(cls, value: Any) -> tuple[float, float] | None:
        """Parse a pair, a mapping with `start` and `end`, or two times in a text.

        >>> parse = GroundingAnswer.parse_ground_truth
        >>> parse([3, "5.5"]), parse("From 00:10 to 00:12.5"), parse("9 to 3")
        ((3.0, 5.5), (10.0, 12.5), None)
        """
        if isinstance(value, Mapping):
            value = [item for name in ("start", "end") for key, item in value.items() if str(key).startswith(name)]
        if isinstance(value, list | tuple) and len(value) == 1:
            return cls.parse_ground_truth(value[0])
        if isinstance(value, str):
            times = tuple(map(parse_clock, _PUBLISHED_TIME.findall(normalize_text(unwrap_answer(value)))))
        else:
            items = [_parse_text_time(item) for item in value] if isinstance(value, list | tuple) else [value]
            times = parse_numbers(items)
            times = times if len(times) == len(items) else ()
        return (times[0], times[1]) if len(times) == 2 and times[0] < times[1] else None


grounding = GroundingAnswer


def _parse_text_time(value: Any) -> Any:
    """Return the seconds of a time that is written as a text, and any other value as it is."""
    is_time = isinstance(value, str) and _PUBLISHED_TIME.fullmatch(value.strip())
    return parse_clock(value.strip()) if is_time else value
