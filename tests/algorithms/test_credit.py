"""The tokens of spans, and the credits' parts of an advantage, against numbers worked out by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms import group_advantages
from saccade.algorithms.credit import STRUCTURAL_TAGS, build_span_token_mask, build_structural_token_mask
from saccade.algorithms.group_advantages import resolve_estimator
from saccade.algorithms.group_filter import select_groups
from saccade.config.schema import AdvantageConfig
from saccade.ledger import Ledger
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Credit,
    Episode,
    EpisodeStatus,
    Group,
    Reply,
    Score,
    ScoredEpisode,
    Span,
    Task,
)

TAGS = Span(kind="tags")


def compute_group_advantages(groups, settings):
    return [advantage.every_token_G for advantage in group_advantages.compute_group_advantages(groups, settings)]


def compute_anchor_advantages(groups, settings):
    computed = group_advantages.compute_group_advantages(groups, settings)
    return [advantages.by_span.get(TAGS, np.zeros(len(advantages.every_token_G))) for advantages in computed]


def make_group(name, pairs):
    """Make a group whose scores have these values and anchors."""
    task = Task(id=name, question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    episode = Episode(task=task, environment="direct", ledger=Ledger(), turns=(), status=EpisodeStatus.ANSWERED)
    scores = [
        Score(value=value, credits=() if anchor is None else (Credit(span=TAGS, value=anchor),))
        for value, anchor in pairs
    ]
    return Group(task=task, scored_episodes=tuple(ScoredEpisode(episode=episode, score=score) for score in scores))


# ---- structural tokens -----------------------------------------------------------------------------------------------


def tokenize(pieces):
    """Return token ids that index `pieces`, and their decode function."""
    return tuple(range(len(pieces))), lambda tokens: "".join(pieces[token] for token in tokens)


@pytest.mark.parametrize(
    ("pieces", "mask"),
    [
        (["Red", "</think>", "<answer>", "red", "</answer>", "<|im_end|>"], "011010"),
        (["<think>", "x", "<tool_code>", "y"], "0000"),  # may be prefilled; not a trained tag
        (["</", "think", ">", "\n<", "tool", "_call", ">", "{"], "11111110"),
        (["so</thi", "nk> x", "</", "thin", "ks>"], "11000"),
        (["<answer>a</answer>", "b"], "10"),
        (["", "<answer>", ""], "010"),
        ([], ""),
    ],
)
def test_tags_are_found_in_one_token_and_across_tokens(pieces, mask):
    assert "".join(str(int(is_marked)) for is_marked in build_structural_token_mask(*tokenize(pieces))) == mask


@settings(deadline=None)
@given(st.lists(st.sampled_from([*STRUCTURAL_TAGS, "red", "<think>", " ", "<", "/"]), max_size=8), st.data())
def test_exactly_the_tokens_that_overlap_a_tag_are_marked(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *cuts, len(text)]
    spans = list(itertools.pairwise(edges))
    inside = {
        index
        for tag in STRUCTURAL_TAGS
        for start in range(len(text))
        if text.startswith(tag, start)
        for index in range(start, start + len(tag))
    }
    expected = tuple(any(index in inside for index in range(*span)) for span in spans)
    assert build_structural_token_mask(*tokenize([text[start:stop] for start, stop in spans])) == expected


@pytest.mark.parametrize(
    ("pieces", "body", "mask"),
    [
        (["I ", "zoom(1)", "</think>", "<code>", "zoom(1)", "</code>", "!"], "zoom(1)", "0001110"),
        (["I ", "zoom(1)", "</think>", "zo", "om(1)", "!"], "zoom(1)", "000110"),
        (["I zoom(1)", "</think>", "<code>\n", "caf\ufffd", "\ufffd(2)", "\n</code>"], "café(2)", "001111"),
        (["I zoom(1)", "</think>", "<code>", "other", "</code>"], "zoom(2)", "00000"),
    ],
)
def test_a_call_is_found_behind_a_quotation_of_it(pieces, body, mask):
    call = Call(name="zoom", arguments={}, call_format=CallFormat.NATIVE)
    think = Block(kind=BlockKind.THINK, body="I zoom(1)", is_closed=True)
    reply = Reply(text="", blocks=(think, Block(kind=BlockKind.CALL, body=body, is_closed=True, call=call)))
    span = Span(kind="call", turn=2, call=0)
    tokens, decode = tokenize(pieces)
    marked = build_span_token_mask(span, tokens, decode, turn=2, reply=reply)
    assert "".join(str(int(is_marked)) for is_marked in marked) == mask
    assert not any(build_span_token_mask(span, tokens, decode, turn=1, reply=reply))
    assert all(build_span_token_mask(Span(kind="turn", turn=1), tokens, decode, turn=1, reply=reply))


def test_credits_of_several_spans_by_hand():
    """Values 1 and 0, tags 0.2 and 0, turn 0 0 and 0.4: three parts, each relative to its own mean."""
    turn = Span(kind="turn", turn=0)
    scores = [
        Score(value=1.0, credits=(Credit(span=TAGS, value=0.2),)),
        Score(value=0.0, credits=(Credit(span=turn, value=0.4),)),
    ]
    group = make_group("a", [(1.0, None), (0.0, None)])
    pairs = zip(group.scored_episodes, scores, strict=True)
    group = replace(group, scored_episodes=tuple(replace(episode, score=score) for episode, score in pairs))
    [found] = group_advantages.compute_group_advantages([group], AdvantageConfig(estimator="dr_grpo"))
    assert found.every_token_G == pytest.approx([0.5, -0.5])
    assert found.by_span[TAGS] == pytest.approx([0.1, -0.1])
    assert found.by_span[turn] == pytest.approx([-0.2, 0.2])
    assert found.total_G == pytest.approx([0.4, -0.4])
    [white] = group_advantages.compute_group_advantages(
        [group], AdvantageConfig(estimator="dr_grpo", whiten="episodes")
    )
    assert white.total_G == pytest.approx([1.0, -1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "whiten", "every_token", "tags"),
    [
        ("accuracy_baseline", "none", [0.5, -0.5], [0.2, 0.1]),  # minus the mean correctness 0.5; credits in full
        ("remax", "none", [0.6, -0.4], [-0.1, -0.2]),  # minus the greedy episode's value 0.4 and credit 0.3
        ("reinforce_plus_plus", "tokens", [1.0, 0.0], [0.2, 0.1]),
    ],
)
def test_credits_with_baselines_other_than_the_groups_mean_by_hand(estimator, whiten, every_token, tags):
    group, greedy = make_group("a", [(1.0, 0.2), (0.0, 0.1)]), make_group("a", [(0.4, 0.3)])
    episodes = [replace(item, score=replace(item.score, correct=item.score.value)) for item in group.scored_episodes]
    group = replace(group, scored_episodes=tuple(episodes), greedy_baseline=greedy.scored_episodes[0])
    [found] = group_advantages.compute_group_advantages([group], AdvantageConfig(estimator=estimator, whiten=whiten))
    assert found.every_token_G == pytest.approx(every_token)
    assert found.by_span[TAGS] == pytest.approx(tags)


# ---- anchor advantages -----------------------------------------------------------------------------------------------


def test_anchor_advantages_by_hand():
    """Values 1, 0, 1, 0 and anchors 0.2, 0.2, 0, 0: totals 1.2, 0.2, 1, 0, of mean 0.6 and variance 0.26."""
    group = make_group("a", [(1.0, 0.2), (0.0, 0.2), (1.0, 0.0), (0.0, 0.0)])
    assert group.total_rewards == pytest.approx([1.2, 0.2, 1.0, 0.0])
    plain = AdvantageConfig(estimator="dr_grpo")
    assert compute_group_advantages([group], plain)[0] == pytest.approx([0.5, -0.5, 0.5, -0.5])
    assert compute_anchor_advantages([group], plain)[0] == pytest.approx([0.1, 0.1, -0.1, -0.1])
    std = 0.26**0.5
    scaled = AdvantageConfig(estimator="grpo")
    assert compute_group_advantages([group], scaled)[0] == pytest.approx(
        [0.5 / std, -0.5 / std, 0.5 / std, -0.5 / std], abs=1e-5
    )
    assert compute_anchor_advantages([group], scaled)[0] == pytest.approx(
        [0.1 / std, 0.1 / std, -0.1 / std, -0.1 / std], abs=1e-5
    )
    assert compute_anchor_advantages([group], AdvantageConfig(estimator="rloo"))[0] == pytest.approx(
        [0.4 / 3] * 2 + [-0.4 / 3] * 2
    )


def test_shaping_applies_to_the_total_reward():
    """Ten times (R - 0.2) up to 8: totals 12 and 1 become 8 and -1, values 8 and -2."""
    group = make_group("a", [(1.2, 0.2), (0.0, 0.1)])
    chosen = AdvantageConfig(estimator="dr_grpo", reward_scale=10.0, reward_bias=-0.2, reward_clip=8.0)
    assert compute_group_advantages([group], chosen)[0] == pytest.approx([5.0, -5.0])
    # The clip removes all of the anchor 0.2, and nothing of 0.1.
    assert compute_anchor_advantages([group], chosen)[0] == pytest.approx([-0.5, 0.5])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-2, 2), st.floats(-1, 1)), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from(["dr_grpo", "grpo", "rloo"]),
    st.sampled_from(["none", "episodes"]),
)
def test_value_and_anchor_advantages_sum_to_that_of_the_total(drawn, estimator, whiten):
    chosen = AdvantageConfig(estimator=estimator, whiten=whiten)
    anchored = [make_group(str(index), pairs) for index, pairs in enumerate(drawn)]
    joined = [make_group(str(index), [(sum(pair), None) for pair in pairs]) for index, pairs in enumerate(drawn)]
    arrays = zip(
        compute_group_advantages(anchored, chosen),
        compute_anchor_advantages(anchored, chosen),
        compute_group_advantages(joined, chosen),
        strict=True,
    )
    for value_G, anchor_G, total_G in arrays:
        assert value_G + anchor_G == pytest.approx(total_G, abs=1e-5)
    assert not any(values.any() for values in compute_anchor_advantages(joined, chosen))


def test_a_group_of_one_has_no_anchor_advantage():
    group = make_group("a", [(1.0, 0.5)])
    assert (
        compute_group_advantages([group], AdvantageConfig())[0].tolist()
        == compute_anchor_advantages([group], AdvantageConfig())[0].tolist()
        == [0.0]
    )


def test_a_group_that_differs_only_in_its_anchors_is_kept():
    groups = [make_group("flat", [(1.0, 0.1), (1.0, 0.1)]), make_group("anchored", [(1.0, 0.2), (1.0, 0.0)])]
    chosen = select_groups(groups, {"reward_std": {}}, rank_by="reward_std", target=2)
    assert [group.task.id for group in chosen.kept_groups] == ["anchored"]
    assert np.allclose(resolve_estimator("dr_grpo", {})(chosen.kept_groups[0].total_rewards), [0.1, -0.1])
