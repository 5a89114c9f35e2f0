"""The format reward: Exploration Anchoring (ParaVT, arXiv 2605.20342), or a strict grammar per turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from saccade.rewards._grammar import balanced, compliant_turns
from saccade.rewards._text import visible
from saccade.types import Block, BlockKind, Episode, Reply, Score, Task

_SUBSTANTIVE = 10  # characters


def format(
    episode: Episode,
    task: Task,
    *,
    mode: Literal["anchored", "grammar"] = "anchored",
    think_prefix: bool = True,
    answer_suffix: bool = True,
    lam: float = 0.5,
    alpha: float = 0.4,
    beta: float = 0.3,
    gamma: float = 0.3,
    anchor_credit: Literal["episode", "tokens"] = "episode",
) -> float | Score:
    """R_fmt (ParaVT, arXiv 2605.20342), read off the blocks of the main agent's turns; at most 1.0, perhaps below 0.

    `anchored` = base + `lam` * anchor + balance, where `lam` = 0 is the vanilla reward. It is the sum of
      base     0.2 substantive think, 0.3 non-blank answer opened, 0.2 the same closed (without `answer_suffix` 0.3,
               0.2 and 0.1), 0.3 think precedes a parseable call;
      anchor   `alpha` think closed and substantive, `beta` full flow, minus `gamma` think left open;
      balance  0.1 if balanced and the rest is above 0.
    The words mean, each judged over all turns of the episode:
      substantive  a THINK block, open or closed, of 10 or more characters without the blanks around them;
      answer       an ANSWER block whose body is not blank; its opening tag was seen, its closing tag if `closed`;
      precedes     in ONE turn a closed non-blank THINK block stands before a CALL block whose call parsed, in either
                   form; whether the call ran makes no difference here;
      left open    a THINK block that is not closed, in any turn; then no think counts as closed for the anchor;
      full flow    nothing left open, and in one turn a closed non-blank THINK before a closed non-blank answer;
      balanced     every THINK, CALL and ANSWER block is closed, there is no STRAY tag, and the bodies (but for those
                   of calls) quote as many opening as closing tags, in every turn.
    What can't be seen, such as a zero-width space, is no character, and a body of that alone is blank.
    A THINK block that the forced prefix opened counts like any other; with `think_prefix` false the prefix is hidden
    from this reward: such a block is a stray closing tag, or plain text if it was left open.

    With `anchor_credit: tokens` the anchor is credited apart, on the structural tokens alone: the reward is a `Score`
    whose value is base + balance, without `lam` * anchor, and whose part `anchor` is `lam` * anchor, uncapped. In the
    episode's score the value leaves it out, and the part `anchor` is this times the weight of the format term.

    `grammar` is the share of turns that keep the strict grammar of the reward compliance; the weights are not used, and
    there is no anchor.
    """
    if mode == "grammar":
        turns = compliant_turns(episode)
        return sum(turns) / max(1, len(turns))
    replies = [turn.reply.blocks if think_prefix else _unforced(turn.reply) for turn in episode.turns]
    anchor = lam * _anchor(replies, alpha, beta, gamma)
    apart = anchor_credit == "tokens"
    total = _base(replies, answer_suffix) + (0.0 if apart else anchor)
    whole = all(balanced(block) for blocks in replies for block in blocks)
    capped = min(1.0, total + 0.1 * (total > 0 and whole))
    return Score(value=capped, parts={"anchor": anchor}) if apart else capped


def _base(replies: list[tuple[Block, ...]], answer_suffix: bool) -> float:
    blocks = [block for reply in replies for block in reply]
    think, opened, closed = (0.2, 0.3, 0.2) if answer_suffix else (0.3, 0.2, 0.1)
    answers = [block for block in blocks if block.kind is BlockKind.ANSWER and visible(block.body)]
    # booleans are weights of 0 or 1 here
    total = think * any(_substantive(block) for block in blocks)
    total += opened * bool(answers) + closed * any(block.closed for block in answers)
    return total + 0.3 * any(_thought_before(reply, _parsed) for reply in replies)


def _anchor(replies: list[tuple[Block, ...]], alpha: float, beta: float, gamma: float) -> float:
    thinks = [block for reply in replies for block in reply if block.kind is BlockKind.THINK]
    if not all(block.closed for block in thinks):  # so that no good turn can buy off one that was left open
        return -gamma
    flow = any(_thought_before(reply, _answered) for reply in replies)
    return alpha * any(_substantive(block) for block in thinks) + beta * flow


def _thought_before(reply: tuple[Block, ...], wanted: Callable[[Block], bool]) -> bool:
    """Whether a closed non-blank think stands before a wanted block of the same turn."""
    thought = False
    for block in reply:
        if thought and wanted(block):
            return True
        thought = thought or (block.kind is BlockKind.THINK and block.closed and bool(visible(block.body)))
    return False


def _substantive(block: Block) -> bool:
    return block.kind is BlockKind.THINK and len(visible(block.body)) >= _SUBSTANTIVE


def _parsed(block: Block) -> bool:
    return block.kind is BlockKind.CALL and block.call is not None and block.call.ok


def _answered(block: Block) -> bool:
    return block.kind is BlockKind.ANSWER and block.closed and bool(visible(block.body))


def _unforced(reply: Reply) -> tuple[Block, ...]:
    """The blocks as they would be, had the forced prefix not been read."""
    if not reply.forced.strip() or not reply.blocks or reply.blocks[0].kind is not BlockKind.THINK:
        return reply.blocks
    kind = BlockKind.STRAY if reply.blocks[0].closed else BlockKind.TEXT
    return (replace(reply.blocks[0], kind=kind), *reply.blocks[1:])
