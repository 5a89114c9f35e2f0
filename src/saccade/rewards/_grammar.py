"""The strict grammar of one turn: a closed think, then calls or one answer, and nothing else."""

from saccade.types import Block, BlockKind, Episode, Form, Reply


def compliant_turns(episode: Episode) -> list[bool]:
    """For each turn of the main agent, in order, whether it keeps the grammar; sub-agents are not read."""
    return [_compliant(turn.reply) for turn in episode.turns]


def _compliant(reply: Reply) -> bool:
    """Blank text may stand between blocks; all other text, a stray tag or an open block breaks the grammar."""
    blocks = [block for block in reply.blocks if block.kind is not BlockKind.TEXT or block.body.strip()]
    if not blocks or blocks[0].kind is not BlockKind.THINK or not blocks[0].closed:
        return False
    # one answer or calls: an answer beside calls, or a second think, is neither
    rest = blocks[1:]
    if len(rest) == 1 and rest[0].kind is BlockKind.ANSWER:
        return rest[0].closed and bool(rest[0].body.strip())
    return bool(rest) and all(_trained_call(block) for block in rest)


def _trained_call(block: Block) -> bool:
    call = block.call
    return block.kind is BlockKind.CALL and block.closed and call is not None and call.ok and call.form is Form.TRAINED
