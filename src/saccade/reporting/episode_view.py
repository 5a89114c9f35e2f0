"""Episodes as what a page shows: frames, a time line, and every token with who wrote it.

Nothing here is HTML: the template escapes each text. Pictures are collected once per page in an `Album`.
"""

import base64
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import exp, isfinite
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from saccade.errors import MediaError
from saccade.ledger import Ledger, Origin, Picture, Segment
from saccade.types import TAGS, BlockKind, Call, Episode, Kind, Reply, Scored, ToolResult

Decode = Callable[[Sequence[int]], str]
Pixels = Callable[[Picture], NDArray[Any]]

THUMB = 96  # pixels of a thumbnail's longer side, at most
MOST_TOKENS = 1500  # of a reply shown one by one; the rest is one piece of text
SPLIT = "\N{REPLACEMENT CHARACTER}"  # what a token decodes to that ends within a character
_TAG = re.compile(rf"</?(?:{'|'.join(TAGS)})>")
_CONTROL = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


@dataclass(slots=True, kw_only=True)
class Album:
    """The thumbnails of a page, each kept once; `pixels` is None where no pictures can be shown."""

    pixels: Pixels | None = None
    held: dict[str, tuple[str, str]] = field(default_factory=dict)  # name and data URI by picture key
    missing: str | None = None

    def name(self, picture: Picture) -> str | None:
        """The name of a picture's thumbnail; None, with the reason in `missing`, where it can't be decoded."""
        if self.pixels is None:
            return None
        if picture.key not in self.held:
            try:
                self.held[picture.key] = (f"p{len(self.held)}", data_uri(self.pixels(picture)))
            except MediaError as error:
                self.missing = str(error)
                return None
        return self.held[picture.key][0]


def data_uri(pixels: NDArray[Any]) -> str:
    """Pixels (uint8 RGB [height, width, 3]) as a small JPEG inside a data URI."""
    picture, buffer = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((THUMB, THUMB))
    picture.save(buffer, format="JPEG", quality=72, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def shown_text(text: str) -> str:
    r"""Text for a page: control characters are made visible, half characters replaced.

    >>> shown_text("a\x00b")
    'a␀b'
    """
    return text.translate(_CONTROL).encode("utf-8", "replace").decode()


# ---- an episode ----------------------------------------------------------------------------------------------------


def view_of(scored: Scored, album: Album, decode: Decode | None) -> dict[str, Any]:
    """Everything the page says of one scored episode."""
    episode, score = scored.episode, scored.score
    task, said = episode.task, list(talks(episode.ledger))
    return {
        "id": task.id,
        "question": task.question,
        "choices": [f"{chr(65 + i)}. {choice}" for i, choice in enumerate(task.choices)],
        "kind": str(task.extras.get("question", task.kind.value)),
        "gold": answer_text(task.gold),
        "answer": episode.answer,
        "accuracy": score.parts.get("accuracy", 0.0),
        "value": score.value,
        "parts": sorted(score.parts.items()),
        "frames": episode.frames,
        "end": episode.end.value.replace("_", " "),
        "error": episode.error,
        "usage": episode.usage,
        "overview": frames_of(episode.ledger.segments[:1], album),
        "timeline": timeline(episode),
        "prompt": prompt_of(episode.ledger, decode),
        "turns": [
            turn_of(turn.reply, turn.results, own, episode.children, album, decode)
            for turn, own in zip(episode.turns, [*said, *[()] * len(episode.turns)], strict=False)
        ],
    }


def answer_text(gold: Any) -> str:
    """A gold answer for people.

    >>> answer_text((3.0, 5.0)), answer_text(2.0), answer_text("red"), answer_text((0.0, 0.0, 0.5, 1.0))
    ('3–5 s', '2', 'red', '[0.0, 0.0, 0.5, 1.0]')
    """
    if isinstance(gold, tuple | list) and len(gold) > 2:  # the sides of a box
        return str([float(f"{side:g}") for side in gold])
    if isinstance(gold, tuple | list):
        return "–".join(f"{bound:g}" for bound in gold) + " s"
    return f"{gold:g}" if isinstance(gold, float | int) else str(gold)


def talks(ledger: Ledger) -> Iterator[tuple[Segment, ...]]:
    """The segments of each reply of the model, in order: forced and sampled ones that stand together."""
    for own, segments in groupby(ledger.segments, key=lambda each: each.origin in (Origin.FORCED, Origin.SAMPLED)):
        if own:
            yield tuple(segments)


def frames_of(segments: Sequence[Segment], album: Album) -> list[dict[str, Any]]:
    """Time and thumbnail of every picture in these segments."""
    return hung([slot.picture for segment in segments for slot in segment.slots], album)


def hung(pictures: Sequence[Picture], album: Album) -> list[dict[str, Any]]:
    """Time and thumbnail of every picture."""
    return [{"time": each.time, "name": album.name(each), "size": f"{each.width}×{each.height}"} for each in pictures]


def prompt_of(ledger: Ledger, decode: Decode | None) -> dict[str, Any]:
    """What the model was told first: its text, the placeholders of pictures as they stand, and its length."""
    first = ledger.segments[:1]
    text = "" if decode is None or not first else decode(first[0].tokens)
    return {"text": text, "tokens": len(Ledger(segments=first)), "pictures": sum(len(each.slots) for each in first)}


# ---- turns ---------------------------------------------------------------------------------------------------------


def turn_of(
    reply: Reply,
    results: Sequence[ToolResult],
    segments: Sequence[Segment],
    children: Sequence[Episode],
    album: Album,
    decode: Decode | None,
) -> dict[str, Any]:
    """One reply as pieces, and its calls with what came back."""
    calls = reply.calls
    answered = [*results, *[None] * (len(calls) - len(results))]
    return {
        "forced_tokens": sum(len(each.tokens) for each in segments if each.origin is Origin.FORCED),
        "sampled_tokens": sum(len(each.tokens) for each in segments if each.sampled),
        "pieces": pieces_of(reply, segments, decode),
        "calls": [
            call_of(call, result, children, album, decode) for call, result in zip(calls, answered, strict=False)
        ],
    }


def call_of(
    call: Call, result: ToolResult | None, children: Sequence[Episode], album: Album, decode: Decode | None
) -> dict[str, Any]:
    """A call, what it showed, its result and, where a sub-agent answered it, what that one saw and said."""
    shown = () if result is None else result.pictures
    child = children[result.child] if result and result.child is not None and result.child < len(children) else None
    arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    return {
        "text": f"{call.name}({arguments})" if call.ok else f"unreadable call: {call.error}",
        "leaked": call.form.value == "leaked",
        "ok": bool(result and result.ok),
        "ran": result is not None,
        "said": "" if result is None else result.error or result.text or ("(a picture)" if shown else ""),
        "seconds": 0.0 if result is None else result.seconds,
        "frames": hung(shown, album) if child is None else frames_of(child.ledger.segments[:1], album),
        "child": None if child is None else child_of(child, decode),
    }


def child_of(child: Episode, decode: Decode | None) -> dict[str, Any]:
    """What a sub-agent was asked and said, token for token."""
    reply = child.turns[-1].reply if child.turns else Reply(text="")
    segments = next(talks(child.ledger), ())
    return {
        "question": child.task.question,
        "pieces": pieces_of(reply, segments, decode),
        "sampled_tokens": len(child.ledger.sampled_tokens()),
        "prompt_tokens": len(child.ledger) - len(child.ledger.sampled_tokens()),
        "visual_tokens": sum(slot.tokens for slot in child.ledger.slots()),
    }


def pieces_of(reply: Reply, segments: Sequence[Segment], decode: Decode | None) -> list[dict[str, Any]]:
    """A reply in pieces of at most one token: text, who wrote it, which block it stands in, its logprob if sampled.

    Without `decode` the pieces are the reply's blocks.
    """
    if decode is None or not segments:
        head, tail = reply.text[: len(reply.forced)], reply.text[len(reply.forced) :]
        told: list[tuple[str, str, float | None]] = [(head, "forced", None), (tail, "sampled", None)]
    else:
        told = [piece for segment in segments for piece in _tokens(segment, decode)]
    # Blocks have no places of their own, so they are found again in the text, in order.
    kinds = _kinds(reply, "".join(text for text, _, _ in told))
    found, at = [], 0
    for text, origin, logprob in told:
        cuts = [at, *[i for i in range(at + 1, at + len(text)) if logprob is None and kinds[i] != kinds[i - 1]]]
        for start, end in zip(cuts, [*cuts[1:], at + len(text)], strict=True):
            piece = {"text": text[start - at : end - at], "origin": origin}
            found.append({**piece, "kind": kinds[start] if start < len(kinds) else "", **_surprise(logprob)})
        at += len(text)
    return [piece for piece in found if piece["text"]]


def _surprise(logprob: float | None) -> dict[str, Any]:
    """How unlikely a token was, for its tint and its note."""
    if logprob is None or not isfinite(logprob):
        return {"tint": None, "note": None}
    chance = exp(min(logprob, 0.0))
    return {"tint": round(1 - chance, 2), "note": f"p {chance:.3g}, logprob {logprob:.3f}"}


def _tokens(segment: Segment, decode: Decode) -> Iterator[tuple[str, str, float | None]]:
    """A segment's tokens as text, those that make up one character together."""
    origin, logprobs = segment.origin.value, segment.logprobs or (None,) * len(segment.tokens)
    if not segment.sampled:
        yield decode(segment.tokens), origin, None
        return
    # A token can end within a character; such tokens wait for the next one and are shown together.
    held: list[int] = []
    total = 0.0
    for token, logprob in zip(segment.tokens[:MOST_TOKENS], logprobs, strict=False):
        held.append(token)
        total += logprob or 0.0
        text = decode(held)
        if not text.endswith(SPLIT) or len(held) > 8:
            yield text, origin, total
            held, total = [], 0.0
    rest = [*held, *segment.tokens[MOST_TOKENS:]]
    if rest:
        yield decode(rest), origin, None


def _kinds(reply: Reply, text: str) -> list[str]:
    """Per character, the kind of block that it stands in ("tag" for a structural tag, "" where that isn't known)."""
    kinds, at = [""] * len(text), 0
    for block in reply.blocks:
        start = text.find(block.body, at)
        if start < 0 or block.kind is BlockKind.STRAY:
            continue
        at = start + len(block.body)
        kinds[start:at] = [block.kind.value] * len(block.body)
    for tag in _TAG.finditer(text):
        kinds[tag.start() : tag.end()] = ["tag"] * (tag.end() - tag.start())
    return kinds


# ---- the time line -------------------------------------------------------------------------------------------------


def timeline(episode: Episode) -> dict[str, Any] | None:
    """The clip from left to right, all places in percent: frames, calls, true events, gold; None without times."""
    extras, slots = episode.task.extras, episode.ledger.segments[0].slots if episode.ledger.segments else ()
    ticks = [slot.picture.time for slot in slots if slot.picture.time is not None]
    calls = [(call, result) for turn in episode.turns for call, result in _served(turn.reply, turn.results)]
    windows = [(span, result) for call, result in calls if (span := window(call.arguments)) is not None]
    events = [event for event in _listed(extras.get("events")) if _span(event)]
    gold = _span(episode.task.gold) if episode.task.kind is Kind.GROUNDING else None
    ends = [*ticks, *(span[1] for span, _ in windows), *(event[1] for event in events), *([gold[1]] if gold else [])]
    # Without a known length the line ends with the last thing on it.
    given = extras.get("seconds")
    length = float(given) if isinstance(given, int | float) and given > 0 else max(ends, default=0.0)
    if length <= 0:
        return None

    def place(start: float, end: float) -> dict[str, float]:
        left, right = (min(max(bound / length, 0.0), 1.0) * 100 for bound in (start, end))
        return {"left": round(left, 2), "width": round(max(right - left, 0.0), 2)}

    return {
        "seconds": length,
        "ticks": [place(time, time)["left"] for time in ticks],
        "calls": [
            {**place(*span), "ok": bool(result and result.ok), "label": f"{span[0]:g}–{span[1]:g} s"}
            for span, result in windows
        ],
        "events": [{**place(event[0], event[1]), "label": _label(event), "colour": _colour(event)} for event in events],
        "gold": None if gold is None else place(*gold),
    }


def _served(reply: Reply, results: Sequence[ToolResult]) -> list[tuple[Call, ToolResult | None]]:
    return list(zip(reply.calls, [*results, *[None] * (len(reply.calls) - len(results))], strict=False))


def window(arguments: Mapping[str, Any]) -> tuple[float, float] | None:
    """The window (seconds) of a call, however wrong the model's arguments are; None where it has none.

    >>> window({"start_time": 3, "end_time": "9.5"}), window({"start_time": "soon"})
    ((3.0, 9.5), None)
    """
    bounds = []
    for name, place in (("start_time", "0"), ("end_time", "1")):
        try:
            bounds.append(float(arguments.get(name, arguments.get(place))))
        except (TypeError, ValueError, OverflowError):
            return None
    return _span(bounds)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _span(value: Any) -> tuple[float, float] | None:
    """The first two numbers of a list, if they are a stretch of time."""
    bounds = value[:2] if isinstance(value, list | tuple) else ()
    if len(bounds) < 2 or not all(isinstance(bound, int | float) and isfinite(bound) for bound in bounds):
        return None
    return (float(bounds[0]), float(bounds[1])) if bounds[0] <= bounds[1] else None


def _label(event: Sequence[Any]) -> str:
    name = f"{event[2]}, " if len(event) > 2 else ""
    return f"{name}{event[0]:g}–{event[1]:g} s"


def _colour(event: Sequence[Any]) -> str | None:
    """The event's name where it may be a colour's; whatever else it is, it is a bare word and does no harm in CSS."""
    name = str(event[2]) if len(event) > 2 else ""
    return name if name.isascii() and name.isalpha() and len(name) < 12 else None
