"""Rewrite demonstrations for an initial checkpoint: other call formats, open think tags, one call per turn."""

import random
import re
from dataclasses import replace
from pathlib import Path

from saccade.chat.parser import parse_reply
from saccade.data.dataset import load_demonstrations
from saccade.media.relocation import map_media_paths
from saccade.runs.ablations.spec import InitialCheckpoint
from saccade.types import Demonstration
from saccade.utils.hashing import derive_seed
from saccade.utils.jsonl import relativize_path


def build_demonstrations(
    dataset_path: Path, folder: Path, seed: int, initial_checkpoint: InitialCheckpoint
) -> list[Demonstration]:
    """Rewrite the demonstrations of a dataset for an initial checkpoint, with media paths relative to `folder`."""
    demonstrations = load_demonstrations(dataset_path)
    rewritten = (rewrite_demonstration(item, initial_checkpoint, seed) for item in demonstrations)
    return [map_media_paths(item, lambda path: relativize_path(folder, path, folder.parents[1])) for item in rewritten]


def rewrite_demonstration(
    demonstration: Demonstration, initial_checkpoint: InitialCheckpoint, seed: int
) -> Demonstration:
    """Return the demonstration in styles drawn once for it; sub-agents' replies and auxiliary ones are unchanged."""
    if demonstration.is_auxiliary:
        return demonstration
    if initial_checkpoint.one_call_per_turn:
        demonstration = split_calls_into_turns(demonstration)
    rng = random.Random(derive_seed("habits", seed, demonstration.task.id, demonstration.frame_budget))
    replies = demonstration.replies
    if rng.random() < initial_checkpoint.python_style_fraction:
        replies = tuple(map(to_python_style, replies))
    if rng.random() < initial_checkpoint.unclosed_think_fraction:
        replies = tuple(reply.replace("</think>", "", 1) for reply in replies)
    return replace(demonstration, replies=replies)


def split_calls_into_turns(demonstration: Demonstration) -> Demonstration:
    """Return the demonstration with one call per turn, in the same order, each after the same thought."""
    replies: list[str] = []
    for reply in demonstration.replies:
        calls = re.findall(r"<tool_call>.*?</tool_call>", reply)
        before = reply.partition("<tool_call>")[0]
        replies += [before + call for call in calls] or [reply]
    children = tuple((text,) for turn in demonstration.children for text in turn)
    return replace(demonstration, replies=tuple(replies), children=children)


def to_python_style(reply: str) -> str:
    """Return the reply with its calls in the Python-style format.

    >>> call = '{"name": "crop_video", "arguments": {"start_time": 0, "question": "Which?"}}'
    >>> to_python_style(f"<tool_call>{call}</tool_call>")
    "<tool_code>crop_video(start_time=0, question='Which?')</tool_code>"
    """

    def format_call(match: re.Match[str]) -> str:
        (call,) = parse_reply(match[0]).calls
        arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        return f"<tool_code>{call.name}({arguments})</tool_code>"

    return re.sub(r"<tool_call>.*?</tool_call>", format_call, reply)
