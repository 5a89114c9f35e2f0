"""Measure format compliance, one definition for every recipe: a closed think block, then calls or one answer."""

import re

from saccade.rewards.text_normalization import strip_invisible
from saccade.types import TAG_KINDS, Block, BlockKind, CallFormat, Episode, Reply

_ANY_TAG = re.compile(f"</?(?:{'|'.join(TAG_KINDS)})>")
_PAIRED_KINDS = frozenset({BlockKind.THINK, BlockKind.CALL, BlockKind.ANSWER})


def format_compliance(episode: Episode) -> float:
    """Return 1.0 if every turn of the main agent is well formed, else 0.0; an episode without turns scores 0.0.

    A well-formed turn is exactly one closed think block (opened by the model or by the prefill), followed either by one
    or more closed calls that parsed and are in the native format, or by one closed non-blank answer; all other text is
    blank. A think block may quote tags if they open and close; an answer contains none; a call is data and may contain
    any.
    """
    turns = check_turns(episode)
    return float(bool(turns) and all(turns))


def check_turns(episode: Episode) -> list[bool]:
    """Return for each turn of the main agent, in order, whether it follows the grammar; sub-agents are not read."""
    return [_is_compliant(turn.reply) for turn in episode.turns]


def is_balanced(block: Block) -> bool:
    """Return whether a block is closed, matched, and (except a call) quotes as many opening as closing tags."""
    if block.kind is BlockKind.UNMATCHED_TAG or (block.kind in _PAIRED_KINDS and not block.is_closed):
        return False
    return block.kind is BlockKind.CALL or all(
        block.body.count(f"<{tag}>") == block.body.count(f"</{tag}>") for tag in TAG_KINDS
    )


def _is_compliant(reply: Reply) -> bool:
    """Allow blank text between blocks; other text, an unmatched tag or an open block breaks the grammar."""
    blocks = [block for block in reply.blocks if block.kind is not BlockKind.TEXT or block.body.strip()]
    if not blocks or blocks[0].kind is not BlockKind.THINK or not all(is_balanced(block) for block in blocks):
        return False
    # Either one answer or calls alone: an answer next to calls, or a second think block, is neither.
    rest = blocks[1:]
    if len(rest) == 1 and rest[0].kind is BlockKind.ANSWER:
        return bool(strip_invisible(rest[0].body)) and not _ANY_TAG.search(rest[0].body)
    calls = [block.call for block in rest if block.kind is BlockKind.CALL]
    is_native = [call is not None and call.ok and call.call_format is CallFormat.NATIVE for call in calls]
    return bool(rest) and len(calls) == len(rest) and all(is_native)
