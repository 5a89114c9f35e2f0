"""Measure format compliance, one definition for every recipe: a closed think block, then calls or one answer."""

import re
from collections.abc import Sequence

from saccade.rewards.text_normalization import strip_invisible
from saccade.types import TAG_KINDS, Block, BlockKind, CallFormat, Episode, Reply, Score

_ANY_TAG = re.compile(f"</?(?:{'|'.join(TAG_KINDS)})>")
_PAIRED_KINDS = frozenset({BlockKind.THINK, BlockKind.CALL, BlockKind.ANSWER})


def format_compliance(episode: Episode) -> Score:
    """Return 1.0 if every turn of the main agent is well formed, else 0.0; an episode without turns scores 0.0.

    A well-formed turn is exactly one closed think block (opened by the model or by the prefill), followed either by one
    or more closed calls that parsed and are in the native format, or by one closed non-blank answer; all other text is
    blank. A think block may quote tags if they open and close; an answer contains none; a call is data and may contain
    any.
    """
    violations = find_violations(episode)
    return Score(value=float(bool(violations) and not any(violations)), reason=describe_violations(violations))


def find_violations(episode: Episode) -> list[str]:
    """Return for each turn of the main agent, in order, how it violates the grammar, or ""; sub-agents are not read."""
    return [_find_violation(turn.reply) for turn in episode.turns]


def describe_violations(violations: Sequence[str]) -> str:
    """Return a phrase with the violations of the turns."""
    named = [f"turn {number}: {violation}" for number, violation in enumerate(violations, start=1) if violation]
    return "; ".join(named) if violations else "no turn"


def is_balanced(block: Block) -> bool:
    """Return whether a block is closed, matched, and (except a call) quotes as many opening as closing tags."""
    if block.kind is BlockKind.UNMATCHED_TAG or (block.kind in _PAIRED_KINDS and not block.is_closed):
        return False
    return block.kind is BlockKind.CALL or all(
        block.body.count(f"<{tag}>") == block.body.count(f"</{tag}>") for tag in TAG_KINDS
    )


def _find_violation(reply: Reply) -> str:
    """Return how a reply violates the grammar, "" if it doesn't; blank text between blocks is allowed."""
    blocks = [block for block in reply.blocks if block.kind is not BlockKind.TEXT or block.body.strip()]
    if not blocks or blocks[0].kind is not BlockKind.THINK:
        return "it doesn't begin with a think block"
    if not all(is_balanced(block) for block in blocks):
        return "a tag is open or unmatched"
    # Either one answer or calls alone: an answer next to calls, or a second think block, is neither.
    rest = blocks[1:]
    if not rest:
        return "nothing follows the think block"
    if len(rest) == 1 and rest[0].kind is BlockKind.ANSWER:
        if not strip_invisible(rest[0].body):
            return "the answer is blank"
        return "the answer contains a tag" if _ANY_TAG.search(rest[0].body) else ""
    calls = [block.call for block in rest if block.kind is BlockKind.CALL]
    if len(calls) != len(rest):
        return "neither calls alone nor one answer follow the think block"
    is_native = [call is not None and call.ok and call.call_format is CallFormat.NATIVE for call in calls]
    return "" if all(is_native) else "a call is malformed or not in the native format"
