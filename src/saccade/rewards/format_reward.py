"""Reward format: Exploration Anchoring (ParaVT, arXiv 2605.20342), or a strict grammar per turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from saccade.rewards.format_compliance import describe_violations, find_violations, is_balanced
from saccade.rewards.text_normalization import strip_invisible
from saccade.types import Block, BlockKind, Credit, Episode, Reply, Score, Span

_MIN_SUBSTANTIVE_CHARS = 10


def format_reward(
    episode: Episode,
    *,
    # anchored, or grammar: the fraction of turns that follow the grammar of `format_compliance`
    mode: Literal["anchored", "grammar"] = "anchored",
    count_prefilled_think: bool = True,  # count a think block that the prefill opened; false hides the prefill
    answer_suffix: bool = True,  # weights for prompts that end with the answer instruction
    anchor_weight: float = 0.5,  # weight of the anchor; 0 = the vanilla reward
    alpha: float = 0.4,  # think closed and substantive
    beta: float = 0.3,  # full flow
    gamma: float = 0.3,  # penalty for a think left open
    # tokens = the anchor is credited to the structural tokens alone
    anchor_credit: Literal["episode", "tokens"] = "episode",
) -> Score:
    """Return R_fmt (ParaVT, arXiv 2605.20342) from the blocks of the main agent's turns: at most 1.0, possibly
    negative.

    With `mode: anchored` the reward is base + `anchor_weight` * anchor + balance. `anchor_weight` = 0 is the vanilla
    reward.

      base     + 0.2 if some think block is substantive
               + 0.5 if some answer block is complete (without `answer_suffix` 0.3 for each of these two)
               + 0.3 if in some turn a complete think block precedes a call that parses, in any call format, run or not
      anchor   - `gamma` if a think block of any turn is open, and nothing else; otherwise
               + `alpha` if some think block is substantive
               + `beta` if in some turn a complete think block precedes a complete answer block
      balance  0.1 if base + anchor is above 0 and every turn is balanced

    A block is open if its end tag is missing. It is complete if it has its end tag and its body is not blank. A think
    block, open or not, is substantive if its body has at least 10 characters, surrounding blanks not counted. A turn is
    balanced if no think, call or answer block is open, no end tag is unmatched, and every body, calls excepted,
    has as many opening as closing tags of each kind.

    Invisible characters, such as a zero-width space, don't count, and a body of those alone is blank. A THINK block
    that the prefill opened counts like any other; with `count_prefilled_think` false the prefill is hidden from this
    reward: such a block is an unmatched closing tag, or plain text if it was left open.

    With `anchor_credit: tokens` the anchor is credited separately, on the structural tokens alone: the result is a
    `Score` whose value is base + balance, without the anchor, and which credits `anchor_weight` * anchor, uncapped, to
    the tags. The episode's score leaves the credit out of its value and holds it times the weight of the format term.

    `grammar` is the fraction of turns that follow the strict grammar of `format_compliance`; it uses no weights and has
    no anchor.
    """
    if mode == "grammar":
        violations = find_violations(episode)
        value = sum(not violation for violation in violations) / max(1, len(violations))
        return Score(value=value, reason=describe_violations(violations))
    replies = [turn.reply.blocks if count_prefilled_think else _hide_prefill(turn.reply) for turn in episode.turns]
    anchor = anchor_weight * _compute_anchor(replies, alpha, beta, gamma)
    is_separate = anchor_credit == "tokens"
    base = _compute_base(replies, answer_suffix)
    total = sum(base.values()) + (0.0 if is_separate else anchor)
    is_balanced_everywhere = all(is_balanced(block) for blocks in replies for block in blocks)
    balance = 0.1 * (total > 0 and is_balanced_everywhere)
    shown = {**base, "credited anchor" if is_separate else "anchor": anchor, "balanced": balance}
    return Score(
        value=min(1.0, total + balance),
        credits=(Credit(span=Span(kind="tags"), value=anchor),) if is_separate else (),
        reason=", ".join(f"{name} {value:.3g}" for name, value in shown.items()),
    )


def _compute_base(replies: list[tuple[Block, ...]], answer_suffix: bool) -> dict[str, float]:
    """Return the terms of the base by name."""
    blocks = [block for reply in replies for block in reply]
    think, answer = (0.2, 0.5) if answer_suffix else (0.3, 0.3)
    # Booleans act as 0 or 1.
    return {
        "substantive think": think * any(_is_substantive(block) for block in blocks),
        "closed answer": answer * any(map(_is_closed_answer, blocks)),
        "think before a call": 0.3 * any(_has_think_before(reply, _is_parsed_call) for reply in replies),
    }


def _compute_anchor(replies: list[tuple[Block, ...]], alpha: float, beta: float, gamma: float) -> float:
    thinks = [block for reply in replies for block in reply if block.kind is BlockKind.THINK]
    if not all(block.is_closed for block in thinks):  # a good turn can't compensate for one left open
        return -gamma
    flow = any(_has_think_before(reply, _is_closed_answer) for reply in replies)
    return alpha * any(_is_substantive(block) for block in thinks) + beta * flow


def _has_think_before(reply: tuple[Block, ...], predicate: Callable[[Block], bool]) -> bool:
    """Return whether a closed non-blank think block precedes a block of the same turn that fits `predicate`."""
    thought = False
    for block in reply:
        if thought and predicate(block):
            return True
        thought = thought or (block.kind is BlockKind.THINK and block.is_closed and bool(strip_invisible(block.body)))
    return False


def _is_substantive(block: Block) -> bool:
    return block.kind is BlockKind.THINK and len(strip_invisible(block.body)) >= _MIN_SUBSTANTIVE_CHARS


def _is_parsed_call(block: Block) -> bool:
    return block.kind is BlockKind.CALL and block.call is not None and block.call.ok


def _is_closed_answer(block: Block) -> bool:
    return block.kind is BlockKind.ANSWER and block.is_closed and bool(strip_invisible(block.body))


def _hide_prefill(reply: Reply) -> tuple[Block, ...]:
    """Return the blocks as they would be without the prefill."""
    if not reply.prefill.strip() or not reply.blocks or reply.blocks[0].kind is not BlockKind.THINK:
        return reply.blocks
    kind = BlockKind.UNMATCHED_TAG if reply.blocks[0].is_closed else BlockKind.TEXT
    return (replace(reply.blocks[0], kind=kind), *reply.blocks[1:])
