"""Convert scored groups to training samples: select the conversations, and assign advantages to their tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from saccade.algorithms.credit import Decode, build_span_token_mask
from saccade.algorithms.group_advantages import GroupAdvantages
from saccade.config.schema import SubAgentAdvantage
from saccade.ledger import Ledger, Origin
from saccade.rewards.text_normalization import normalize_and_casefold
from saccade.types import Episode, Group, Span, TrainingSample


def build_samples(
    groups: Sequence[Group],
    advantages: Sequence[GroupAdvantages],
    sub_agent_advantage: SubAgentAdvantage,
    *,
    decode: Decode | None = None,
    masks: Sequence[Sequence[bool]] | None = None,
) -> list[TrainingSample]:
    """Return one sample per trained conversation of the episodes that `masks` select (None: all).

    Each conversation has the advantage of its episode; see `list_trained_conversations`. The advantages of spans are
    added on their tokens, which `decode` identifies; turns and calls are those of the main conversation.
    """
    masks = [[True] * len(group.scored_episodes) for group in groups] if masks is None else masks
    samples = []
    for number, (group, group_advantages, mask) in enumerate(zip(groups, advantages, masks, strict=True)):
        rows = zip(group.scored_episodes, group_advantages.every_token_G.tolist(), mask, strict=True)
        for index, (scored, advantage, is_kept) in enumerate(rows):
            by_span = {span: float(value_G[index]) for span, value_G in group_advantages.by_span.items()}
            tags = {span: value for span, value in by_span.items() if span.kind == "tags"}
            for conversation in list_trained_conversations(scored.episode, sub_agent_advantage) if is_kept else []:
                if conversation.ledger.sampled_tokens():
                    own = by_span if conversation is scored.episode else tags
                    sample = build_sample(conversation, advantage, by_span=own, decode=decode)
                    samples.append(replace(sample, group=number))
    return samples


def list_trained_conversations(episode: Episode, sub_agent_advantage: SubAgentAdvantage) -> list[Episode]:
    """Return the conversations of an episode that are trained: its own first, then those of its sub-agents.

    With "supporting" a sub-agent takes part if its reply contains the words of the episode's answer: it shares the
    credit, or the blame, for what was answered, and neither for what the main agent disregarded.
    """
    if sub_agent_advantage == "none":
        return [episode]
    if sub_agent_advantage == "shared":
        return list(episode.walk())
    answer = _split_words(episode.answer or "")
    return [
        part
        for part in episode.walk()
        if part is episode or (part.turns and answer.strip() and answer in _split_words(part.turns[-1].reply.text))
    ]


def _split_words(text: str) -> str:
    """Return the words of a text, each between blanks, so that one text contains another's words but no half words."""
    words = re.findall(r"[^\W_]+", normalize_and_casefold(text))
    return f" {' '.join(words)} "


def mask_stale_tokens(samples: Sequence[TrainingSample], min_version: int) -> tuple[list[TrainingSample], int]:
    """Return samples that don't train the tokens of weights before `min_version`, and the number of these tokens.

    They become context of the later tokens. Samples of which no token is left are left out.
    """
    kept, num_stale = list[TrainingSample](), 0
    for sample in samples:
        segments = [
            replace(segment, origin=Origin.PREFILL, logprobs=(), version=None)
            if segment.version is not None and segment.version < min_version
            else segment
            for segment in sample.ledger.segments
        ]
        ledger = Ledger(segments=tuple(segments))
        num_stale += sample.ledger.num_sampled_tokens - ledger.num_sampled_tokens
        if ledger.num_sampled_tokens:
            pairs = zip(sample.advantages, ledger.loss_mask(), strict=True)
            advantages = tuple(value if is_trained else 0.0 for value, is_trained in pairs)
            kept.append(replace(sample, ledger=ledger, advantages=advantages))
    return kept, num_stale


def split_mini_batches(samples: Sequence[TrainingSample], num: int) -> list[list[TrainingSample]]:
    """Divide samples into mini-batches of whole groups: the i-th group with samples is in mini-batch i modulo `num`.

    Groups may be sorted, by their reward's std or by the kind of media: dealing them out in turn gives every mini-batch
    the same mix. The numbers of groups differ by at most one. There are fewer mini-batches if there are fewer groups.
    """
    order = {group: index for index, group in enumerate(sorted({sample.group for sample in samples}))}
    mini_batches: list[list[TrainingSample]] = [[] for _ in range(min(num, len(order)))]
    for sample in samples:
        mini_batches[order[sample.group] % len(mini_batches)].append(sample)
    return mini_batches


def build_sample(
    episode: Episode, advantage: float, *, by_span: Mapping[Span, float] | None = None, decode: Decode | None = None
) -> TrainingSample:
    """Return an episode's main conversation: `advantage` on every sampled token, plus those of spans on their tokens.

    Raises ValueError for an advantage of a span without `decode`, which identifies its tokens.
    """
    credited = {span: value for span, value in (by_span or {}).items() if value}
    if credited and decode is None:
        raise ValueError(f"by_span={credited} needs decode to find the tokens; got None")
    return TrainingSample(
        ledger=episode.ledger, advantages=tuple(_compute_token_advantages(episode, advantage, credited, decode))
    )


def _compute_token_advantages(
    episode: Episode, advantage: float, by_span: Mapping[Span, float], decode: Decode | None
) -> Iterator[float]:
    turn = 0
    # A reply sampled by several weight versions has one segment per version; tags may cross these.
    for is_sampled, segments in groupby(episode.ledger.segments, key=lambda segment: segment.is_sampled):
        tokens = tuple(token for segment in segments for token in segment.input_ids())
        values = np.full(len(tokens), advantage if is_sampled else 0.0)
        if is_sampled:
            reply = episode.turns[turn].reply if turn < len(episode.turns) else None
            for span, value in by_span.items() if decode else ():
                assert decode is not None
                values += value * np.array(
                    build_span_token_mask(span, tokens, decode, turn=turn, reply=reply), dtype=bool
                )
            turn += 1
        yield from values.tolist()
