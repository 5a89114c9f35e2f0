"""The strict grammar of one turn: a closed think, then calls or one answer, and nothing else."""

import re

from saccade.rewards._text import visible
from saccade.types import TAGS, Block, BlockKind, Episode, Form, Reply

_ANY = re.compile(f"</?(?:{'|'.join(TAGS)})>")
_PAIRED = frozenset({BlockKind.THINK, BlockKind.CALL, BlockKind.ANSWER})


def compliant_turns(episode: Episode) -> list[bool]:
    """For each turn of the main agent, in order, whether it keeps the grammar; sub-agents are not read."""
    return [_compliant(turn.reply) for turn in episode.turns]


def balanced(block: Block) -> bool:
    """Whether a block is closed, and quotes no more opening tags than closing ones; a STRAY tag is not balanced.

    The body of a call is data, so that what it quotes makes no difference.
    """
    if block.kind is BlockKind.STRAY or (block.kind in _PAIRED and not block.closed):
        return False
    return block.kind is BlockKind.CALL or all(
        block.body.count(f"<{tag}>") == block.body.count(f"</{tag}>") for tag in TAGS
    )


def _compliant(reply: Reply) -> bool:
    """Blank text may stand between blocks; all other text, a stray tag or an open block breaks the grammar."""
    blocks = [block for block in reply.blocks if block.kind is not BlockKind.TEXT or block.body.strip()]
    if not blocks or blocks[0].kind is not BlockKind.THINK or not all(balanced(block) for block in blocks):
        return False
    # one answer or calls: an answer beside calls, or a second think, is neither
    rest = blocks[1:]
    if len(rest) == 1 and rest[0].kind is BlockKind.ANSWER:
        return bool(visible(rest[0].body)) and not _ANY.search(rest[0].body)
    return bool(rest) and all(_trained_call(block) for block in rest)


def _trained_call(block: Block) -> bool:
    call = block.call
    return block.kind is BlockKind.CALL and call is not None and call.ok and call.form is Form.TRAINED
