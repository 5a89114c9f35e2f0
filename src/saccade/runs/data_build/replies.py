"""Read JSON from the teacher's replies, and reject what isn't as requested."""

import json
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from saccade.chat.tokenizer import replace_surrogates
from saccade.errors import DataError
from saccade.types import Completion, FinishReason
from saccade.utils.jsonl import validate_as

T = TypeVar("T")
_JSON_START = re.compile(r"[\[{]")
_MAX_DETAIL_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Something that was dropped: at which stage, what, a reason that is counted, and details."""

    stage: str
    item: str
    reason: str
    detail: str = ""


class InvalidReply(ValueError):
    """A reply, or a part of it, can't be used; `reason` is counted, `detail` is for the reader of one row."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, " ".join(str(detail).split())[:_MAX_DETAIL_CHARS]


def parse_json(completion: Completion) -> list[Any]:
    """Return the JSON lists and objects of a complete reply after its reasoning, in order, at least one.

    Lone surrogates, which no file in UTF-8 can hold, become question marks. Raises InvalidReply.
    """
    if completion.finish_reason is FinishReason.LENGTH:
        raise InvalidReply("the reply was truncated", (completion.text or "")[-_MAX_DETAIL_CHARS:])
    # Reasoning that doesn't end is no reply.
    text = (completion.text or "").rpartition("</think>")[2].partition("<think>")[0]
    values, end = [], 0
    while start := _JSON_START.search(text, end):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start.start())
            values.append(json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False))))
        except ValueError:
            end = start.end()
        except RecursionError:  # so would all brackets inside, each after as long a time
            break
    if not values:
        raise InvalidReply("the reply holds no JSON", text)
    return values


def validate(value: Any, item_type: type[T], reason: str) -> T:
    """Convert a value to a dataclass; further fields are ignored. Raises InvalidReply with the reason."""
    try:
        return validate_as(value, item_type, "the reply")
    except DataError as error:
        raise InvalidReply(reason, error) from error
