"""Read one episode of a run and describe it for its page: turns, calls, frames, time line, tokens.

A description is plain JSON. Images are numbers into `list_images`, which the page requests one by one; media are
numbers into the task's files. So the browser never names a path.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade.errors import DataError
from saccade.evaluation.records import parse_record
from saccade.ledger import ImageRef, Ledger
from saccade.metrics.looking import parse_evidence, parse_window
from saccade.reporting.episode_view import (
    DecodeFn,
    build_timeline,
    build_token_pieces,
    decode_tokens,
    find_child,
    format_answer,
    list_prompt_images,
    pair_calls_with_results,
)
from saccade.reporting.viewer.index import Location
from saccade.training.episode_log import parse_rollout, read_rollout_lines
from saccade.training.token_log import StoredValues, identify_conversation
from saccade.types import Call, CallFormat, Episode, Score, ScoredEpisode, ToolResult, Turn
from saccade.utils.files import open_file

MAX_EXTRA_CHARS = 2000  # of a field of a task's row
CODE_ARGUMENTS = ("code", "0")  # of a call whose only argument is a program


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisode:
    """An episode of a run with its score, and what became of it."""

    episode: Episode
    score: Score | None
    outcome: str
    reason: str = ""


def read_episode(location: Location) -> StoredEpisode:
    """Read an episode. Raises DataError, or OSError if its file was deleted."""
    if location.kind == "evaluation":
        with open_file(location.path) as file:
            file.seek(location.start)
            outcome = parse_record(file.read(location.length), location.path).outcome
        if isinstance(outcome, ScoredEpisode):
            return StoredEpisode(episode=outcome.episode, score=outcome.score, outcome="scored")
        return StoredEpisode(episode=outcome.episode, score=None, outcome="ungraded", reason=outcome.reason)
    lines = _read_lines(location.path, location.path.stat().st_mtime_ns)
    if location.start >= len(lines):
        raise DataError(f"{location.path} has changed; reload the page", key=str(location.path))
    record = parse_rollout(lines[location.start], location.path, f"line {location.start + 1}")
    return StoredEpisode(episode=record.episode, score=record.score, outcome=record.outcome, reason=record.reason)


@lru_cache(maxsize=8)
def _read_lines(path: Path, modified_ns: int) -> list[bytes]:
    return read_rollout_lines(path)


def list_images(episode: Episode) -> list[ImageRef]:
    """Return every image and frame of an episode and its sub-agents by the number that its description uses."""
    images: list[ImageRef] = []
    for part in episode.walk():
        images += part.ledger.images()
        images += [image for result in part.results for image in result.images]
        for message in part.ledger.messages():
            images += [piece for piece in message.parts if isinstance(piece, ImageRef)]
    return list(dict.fromkeys(frame for image in images for frame in image.frames))


class Describer:
    """Builds the description of one episode."""

    def __init__(self, stored: StoredEpisode) -> None:
        self._stored, self._images = stored, list_images(stored.episode)
        self._numbers = {image: number for number, image in enumerate(self._images)}

    def describe(self) -> dict[str, Any]:
        """Return the whole description: task, outcome, score, images, time line, turns."""
        episode, score, task = self._stored.episode, self._stored.score, self._stored.episode.task
        return {
            "task": {
                "id": task.id,
                "question": task.question,
                "options": list(task.options),
                "answer_type": str(task.answer_type),
                "ground_truth": format_answer(task.ground_truth),
                "media": [
                    {"kind": media.kind.value, "name": Path(media.path).name, "exists": os.path.isfile(media.path)}
                    for media in task.media
                ],
                "extras": {name: _shorten(value) for name, value in task.extras.items()},
            },
            "status": episode.status.value,
            "answer": episode.answer,
            "error": episode.error,
            "environment": episode.environment,
            "frame_budget": episode.frame_budget,
            "outcome": self._stored.outcome,
            "reason": self._stored.reason,
            "usage": {
                "unsampled tokens": episode.usage.unsampled_tokens,
                "visual tokens": episode.usage.visual_tokens,
                "sampled tokens": episode.usage.sampled_tokens,
                "seconds": round(episode.usage.seconds, 3),
            },
            "score": None
            if score is None
            else {
                "value": score.value,
                "parts": dict(score.parts),
                "reasons": dict(score.reasons),
                "correct": score.correct,
                "credits": [
                    {"span": _name_span(credit.span.kind, credit.span.turn, credit.span.call), "value": credit.value}
                    for credit in score.credits
                ],
            },
            "images": [
                {
                    "time": image.time,
                    "size": f"{image.width}×{image.height}",
                    "box": None if image.box is None else list(image.box),
                    "name": Path(image.path).name,
                }
                for image in self._images
            ],
            "timeline": build_timeline(episode),
            "evidence_boxes": [list(region) for region in parse_evidence(task) if len(region) == 4],
            "conversation": self._describe_conversation(episode),
        }

    def _describe_conversation(self, episode: Episode) -> dict[str, Any]:
        prompt = Ledger(segments=episode.ledger.segments[:1])
        return {
            "question": episode.task.question,
            "status": episode.status.value,
            "prompt": {"images": self._number(list_prompt_images(episode)), "tokens": len(prompt)},
            "turns": [self._describe_turn(turn, episode.children) for turn in episode.turns],
            "messages": [
                {
                    "role": message.role,
                    "text": message.text,
                    "images": self._number([part for part in message.parts if isinstance(part, ImageRef)]),
                }
                for message in episode.ledger.messages()
            ],
        }

    def _describe_turn(self, turn: Turn, children: Sequence[Episode]) -> dict[str, Any]:
        return {
            "pieces": [
                {"text": piece["text"], "origin": piece["origin"], "kind": piece["kind"]}
                for piece in build_token_pieces(turn.reply, (), None)
            ],
            "calls": [self._describe_call(*pair, children) for pair in pair_calls_with_results(turn)],
            "reward": turn.reward,
        }

    def _describe_call(self, call: Call, result: ToolResult | None, children: Sequence[Episode]) -> dict[str, Any]:
        child = find_child(result, children)
        code = next((call.arguments[name] for name in CODE_ARGUMENTS if list(call.arguments) == [name]), None)
        arguments = {name: value if isinstance(value, str) else repr(value) for name, value in call.arguments.items()}
        return {
            "name": call.name,
            "arguments": {} if isinstance(code, str) else arguments,
            "code": code if isinstance(code, str) else None,
            "window": parse_window(call.arguments),
            "malformed": call.error,
            "is_python_style": call.call_format is CallFormat.PYTHON_STYLE,
            "executed": result is not None and result.was_executed,
            "ok": bool(result and result.ok),
            "error": None if result is None else result.error,
            "text": "" if result is None else result.text,
            "images": [] if result is None else self._number(result.images),
            "seconds": None if result is None else result.seconds,
            "child": None if child is None else self._describe_conversation(child),
        }

    def _number(self, images: Sequence[ImageRef]) -> list[int]:
        return [self._numbers[frame] for image in images for frame in image.frames]


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_EXTRA_CHARS else f"{text[:MAX_EXTRA_CHARS]}…"


def _name_span(kind: str, turn: int | None, call: int | None) -> str:
    numbers = [f"turn {turn + 1}" for turn in (turn,) if turn is not None]
    numbers += [f"call {call + 1}" for call in (call,) if call is not None]
    return ", ".join(numbers) or kind


def describe_tokens(
    episode: Episode,
    decode: DecodeFn,
    advantages: Mapping[int, Sequence[float]] | None = None,
    trained: Mapping[str, StoredValues] | None = None,
) -> list[dict[str, Any]]:
    """Return the conversations of an episode and its sub-agents as segments of tokens.

    `advantages` has those of each trained conversation, one per expanded token, by its number in `Episode.walk`;
    `trained` what the trainer computed for the step's tokens.
    """
    conversations = []
    for number, part in enumerate(episode.walk()):
        values, segments, offset = (advantages or {}).get(number), [], 0
        stored = trained.get(identify_conversation(part.ledger)) if trained else None
        by_position = {} if stored is None else stored.by_position()
        for segment in part.ledger.segments:
            starts = [0]  # of each unexpanded token among the segment's expanded ones
            for count in segment.repeat_counts:
                starts.append(starts[-1] + count)
            pieces = []
            for token in decode_tokens(segment, decode):
                position = offset + starts[token.start]
                advantage = values[position] if values is not None and segment.is_sampled else None
                logprob_diff, entropy = by_position.get(position, (None, None))
                pieces.append(
                    {
                        "text": token.text,
                        "logprob": token.logprob,
                        "advantage": advantage,
                        "entropy": entropy,
                        "logprob_diff": logprob_diff,
                    }
                )
            segments.append(
                {
                    "origin": segment.origin.value,
                    "version": segment.version,
                    "tokens": segment.num_tokens,
                    "visual": sum(slot.num_tokens for slot in segment.slots),
                    "pieces": pieces,
                }
            )
            offset += segment.num_tokens
        title = "conversation" if number == 0 else f"sub-agent {number}: {part.task.question}"
        conversations.append({"title": title, "segments": segments})
    return conversations
