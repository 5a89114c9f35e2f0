"""Build the page's view of an episode: frames, a timeline, and every token with its origin; the template escapes it."""

import base64
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from math import exp, isfinite
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from saccade.errors import MediaError
from saccade.ledger import ImageRef, Ledger, Origin, Segment
from saccade.metrics.episode_metrics import get_overview_times
from saccade.metrics.looking import parse_evidence, parse_window
from saccade.types import (
    TAG_KINDS,
    AnswerType,
    BlockKind,
    Call,
    CallFormat,
    Episode,
    Reply,
    ScoredEpisode,
    ToolResult,
    Turn,
)
from saccade.utils.numbers import to_finite, to_span

DecodeFn = Callable[[Sequence[int]], str]
PixelLoader = Callable[[ImageRef], NDArray[Any]]

THUMBNAIL_PIXELS = 192  # of a thumbnail's longer side, at most; the page shows it small until it is clicked
MAX_TOKENS_SHOWN = 1500  # shown one by one per reply; the rest is one piece of text
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # a token that ends within a character decodes to it
_TAG_PATTERN = re.compile(rf"</?(?:{'|'.join(TAG_KINDS)})>")


def encode_thumbnail(pixels: NDArray[Any], max_side: int = THUMBNAIL_PIXELS) -> bytes:
    """Encode pixels (uint8 RGB [height, width, 3]) as a small JPEG, of at most `max_side` pixels by side."""
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((max_side, max_side))
    image.save(buffer, format="JPEG", quality=72, optimize=True)
    return buffer.getvalue()


def encode_data_uri(pixels: NDArray[Any]) -> str:
    """Encode pixels (uint8 RGB [height, width, 3]) as a small JPEG in a data URI."""
    return "data:image/jpeg;base64," + base64.b64encode(encode_thumbnail(pixels)).decode()


class EpisodeViewer:
    """Build the views of a page's episodes; `thumbnails` holds the name and data URI of each image by its key, and may
    be that of another viewer of the page.

    `decode` (a renderer's) shows replies token by token, `load_pixels` (a media loader's) shows images; `error` is why
    one can't be shown.
    """

    def __init__(
        self,
        decode: DecodeFn | None = None,
        load_pixels: PixelLoader | None = None,
        thumbnails: dict[str, tuple[str, str]] | None = None,
    ) -> None:
        self._decode, self._load_pixels = decode, load_pixels
        self.thumbnails = {} if thumbnails is None else thumbnails
        self.error: str | None = None

    def build_view(self, scored: ScoredEpisode) -> dict[str, Any]:
        """Return the view of one scored episode."""
        episode, prompt = scored.episode, scored.episode.ledger.segments[:1]
        replies = [*group_reply_segments(episode.ledger), *[()] * len(episode.turns)]
        return {
            "scored": scored,
            "timeline": build_timeline(episode),
            "overview": self._build_frames(list_prompt_images(episode)),
            "prompt": "" if self._decode is None or not prompt else self._decode(prompt[0].tokens),
            "prompt_tokens": len(Ledger(segments=prompt)),
            "turns": [
                {
                    "prefill_tokens": sum(part.num_tokens for part in segments if part.origin is Origin.PREFILL),
                    "sampled_tokens": sum(part.num_tokens for part in segments if part.is_sampled),
                    "pieces": build_token_pieces(turn.reply, segments, self._decode),
                    "calls": [self.build_call(*pair, episode.children) for pair in pair_calls_with_results(turn)],
                }
                for turn, segments in zip(episode.turns, replies, strict=False)
            ],
        }

    def build_call(self, call: Call, result: ToolResult | None, children: Sequence[Episode]) -> dict[str, Any]:
        """Return a call, its images, its result and, if a sub-agent answered it, the sub-agent's reply."""
        child = find_child(result, children)
        images = () if result is None else result.images
        return {
            "text": format_call(call),
            "is_python_style": call.call_format is CallFormat.PYTHON_STYLE,
            "ok": bool(result and result.ok),
            "seconds": None if result is None else result.seconds,
            "result": "" if result is None else result.error or result.text or ("(an image)" if images else ""),
            "frames": self._build_frames(list_call_images(result, children)),
            "child": None if child is None else self._build_child(child),
        }

    def _build_child(self, child: Episode) -> dict[str, Any]:
        reply = child.turns[-1].reply if child.turns else Reply(text="")
        return {
            "question": child.task.question,
            "pieces": build_token_pieces(reply, next(group_reply_segments(child.ledger), ()), self._decode),
            "sampled_tokens": child.ledger.num_sampled_tokens,
            "visual_tokens": sum(slot.num_tokens for slot in child.ledger.slots()),
        }

    def _build_frames(self, images: Sequence[ImageRef]) -> list[dict[str, Any]]:
        """Return time, size and thumbnail of every image."""
        return [
            {"time": image.time, "size": f"{image.width}×{image.height}", "name": self._add_thumbnail(image)}
            for image in images
        ]

    def _add_thumbnail(self, image: ImageRef) -> str | None:
        """Return the name of an image's thumbnail; None if there is no loader, or it can't be decoded."""
        if self._load_pixels is not None and image.key not in self.thumbnails:
            try:
                uri = encode_data_uri(self._load_pixels(image))
            except MediaError as error:
                self.error = str(error)
            else:
                self.thumbnails[image.key] = (f"p{len(self.thumbnails)}", uri)
        name, _ = self.thumbnails.get(image.key, (None, None))
        return name


def list_prompt_images(episode: Episode) -> list[ImageRef]:
    """Return the images and frames of an episode's prompt, in order; of a pair both frames."""
    return [frame for segment in episode.ledger.segments[:1] for slot in segment.slots for frame in slot.image.frames]


def find_child(result: ToolResult | None, children: Sequence[Episode]) -> Episode | None:
    """Return the episode of the sub-agent that answered a call; None if none did."""
    index = None if result is None else result.child_index
    return children[index] if index is not None and index < len(children) else None


def list_call_images(result: ToolResult | None, children: Sequence[Episode]) -> list[ImageRef]:
    """Return the images and frames that a call showed: to its sub-agent, or else in its result."""
    child = find_child(result, children)
    if child is not None:
        return list_prompt_images(child)
    return [] if result is None else [frame for image in result.images for frame in image.frames]


def format_answer(answer: Any) -> str:
    """Format an answer or ground truth.

    >>> format_answer((3.0, 5.0)), format_answer(2.0), format_answer("red"), format_answer((0.0, 0.0, 0.5, 1.0))
    ('3–5 s', '2', 'red', '[0.0, 0.0, 0.5, 1.0]')
    """
    if isinstance(answer, tuple | list) and len(answer) > 2:  # the sides of a box
        return str([float(f"{side:g}") for side in answer])
    if isinstance(answer, tuple | list):
        return "–".join(f"{bound:g}" for bound in answer) + " s"
    return f"{answer:g}" if isinstance(answer, float | int) else str(answer)


def group_reply_segments(ledger: Ledger) -> Iterator[tuple[Segment, ...]]:
    """Yield the consecutive prefilled and sampled segments of each reply, in order."""
    reply_origins = (Origin.PREFILL, Origin.SAMPLED)
    for is_reply, segments in groupby(ledger.segments, key=lambda segment: segment.origin in reply_origins):
        if is_reply:
            yield tuple(segments)


def build_token_pieces(reply: Reply, segments: Sequence[Segment], decode: DecodeFn | None) -> list[dict[str, Any]]:
    """Split a reply into tokens or, without `decode`, blocks: text, origin, kind, and the probability if sampled."""
    if decode is None or not segments:
        head, tail = reply.text[: len(reply.prefill)], reply.text[len(reply.prefill) :]
        tokens: list[tuple[str, str, float | None]] = [(head, "prefill", None), (tail, "sampled", None)]
    else:
        tokens = [
            (token.text, segment.origin.value, token.logprob)
            for segment in segments
            for token in decode_tokens(segment, decode)
        ]
    kinds = _label_characters(reply, "".join(text for text, _, _ in tokens))
    pieces, offset = [], 0
    for text, origin, logprob in tokens:
        stop = offset + len(text)
        starts = [offset, *[i for i in range(offset + 1, stop) if logprob is None and kinds[i] != kinds[i - 1]]]
        for start, end in zip(starts, [*starts[1:], stop], strict=True):
            kind, tint, note = kinds[start] if start < len(kinds) else "", None, None
            if logprob is not None and isfinite(logprob):
                probability = exp(min(logprob, 0.0))
                tint, note = round(1 - probability, 2), f"p {probability:.3g}, logprob {logprob:.3f}"
            body = text[start - offset : end - offset]
            pieces.append({"text": body, "origin": origin, "kind": kind, "tint": tint, "note": note})
        offset = stop
    return [piece for piece in pieces if piece["text"]]


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of the unexpanded tokens from `start` to `stop` of a segment, and their logprob if they were sampled."""

    text: str
    start: int
    stop: int
    logprob: float | None = None


def decode_tokens(segment: Segment, decode: DecodeFn) -> Iterator[TokenText]:
    """Yield the texts of a segment: of sampled tokens one by one, joined within a character; of others at once."""
    num_tokens = len(segment.tokens)
    if not segment.is_sampled:
        yield TokenText(decode(segment.tokens), 0, num_tokens)
        return
    # A token can end within a character; it is joined with the tokens that complete the character.
    logprobs = segment.logprobs or (None,) * num_tokens
    start, total = 0, 0.0
    for stop, logprob in enumerate(logprobs[:MAX_TOKENS_SHOWN], start=1):
        total += logprob or 0.0
        text = decode(segment.tokens[start:stop])
        if not text.endswith(REPLACEMENT_CHARACTER) or stop - start > 8:
            yield TokenText(text, start, stop, total)
            start, total = stop, 0.0
    if start < num_tokens:
        yield TokenText(decode(segment.tokens[start:]), start, num_tokens)


def _label_characters(reply: Reply, text: str) -> list[str]:
    """Return each character's block kind ("tag" for a structural tag, "" if unknown)."""
    # Blocks have no offsets, so their bodies are searched in the text, in order.
    kinds, offset = [""] * len(text), 0
    for block in reply.blocks:
        start = text.find(block.body, offset)
        if start < 0 or block.kind is BlockKind.UNMATCHED_TAG:
            continue
        offset = start + len(block.body)
        kinds[start:offset] = [block.kind.value] * len(block.body)
    for tag in _TAG_PATTERN.finditer(text):
        kinds[tag.start() : tag.end()] = ["tag"] * (tag.end() - tag.start())
    return kinds


def build_timeline(episode: Episode) -> dict[str, Any] | None:
    """Return what a video's timeline shows, in seconds; None without times.

    Frames of the prompt, windows of the calls with the times of their frames, labeled events, the spans that the task
    needs to be seen, and a ground truth that is a window.
    """
    extras, frames = episode.task.extras, list(get_overview_times(episode))
    listed = extras.get("events")
    windows: list[dict[str, Any]] = []
    for turn_number, turn in enumerate(episode.turns):
        for call_number, (call, result) in enumerate(pair_calls_with_results(turn)):
            span = parse_window(call.arguments)
            if span is None:
                continue
            images = list_call_images(result, episode.children)
            windows.append(
                {
                    "start": span[0],
                    "end": span[1],
                    "turn": turn_number,
                    "call": call_number,
                    "ok": bool(result and result.ok),
                    "frames": [image.time for image in images if image.time is not None],
                }
            )
    events: list[dict[str, Any]] = [
        {"start": span[0], "end": span[1], **describe_event(event)}
        for event in (listed if isinstance(listed, list | tuple) else ())
        if (span := to_span(event))
    ]
    evidence: list[dict[str, Any]] = [
        {"start": region[0], "end": region[1]} for region in parse_evidence(episode.task) if len(region) == 2
    ]
    truth = to_span(episode.task.ground_truth) if episode.task.answer_type == AnswerType.GROUNDING else None
    ends = [*frames, *(item["end"] for item in (*windows, *events, *evidence)), *([truth[1]] if truth else [])]
    # Without a known duration the timeline ends with the last item on it.
    seconds = to_finite(extras.get("seconds"))
    duration = seconds if seconds and seconds > 0 else max(ends, default=0.0)
    if duration <= 0:
        return None
    return {
        "seconds": duration,
        "frames": frames,
        "windows": windows,
        "events": events,
        "evidence": evidence,
        "ground_truth": truth,
    }


def to_percent(time: float, duration: float) -> float:
    """Return where a time stands on a timeline, in percent of its length.

    >>> to_percent(16.0, 64.0), to_percent(70.0, 64.0)
    (25.0, 100.0)
    """
    return round(min(max(time / duration, 0.0), 1.0) * 100, 2)


def format_call(call: Call) -> str:
    """Return a call as Python would write it, or why it can't be read."""
    if not call.ok:
        return f"unreadable call: {call.error}"
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def pair_calls_with_results(turn: Turn) -> list[tuple[Call, ToolResult | None]]:
    """Return each call of a reply with its result; None for a call without one."""
    return list(zip_longest(turn.reply.calls, turn.results[: len(turn.reply.calls)]))


def describe_event(event: Sequence[Any]) -> dict[str, str | None]:
    """Return the event's label, and its name if it may be a color; any bare word is harmless in CSS."""
    start, end, *names = event
    label = ", ".join([*map(str, names[:1]), f"{start:g}–{end:g} s"])
    name = str(names[0]) if names else ""
    return {"label": label, "color": name if name.isascii() and name.isalpha() and len(name) < 12 else None}
