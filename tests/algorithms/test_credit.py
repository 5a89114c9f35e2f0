"""Structural tokens, and the anchor's share of an advantage, against numbers worked out by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.advantages import advantages, anchor_credit, credit
from saccade.algorithms.anchoring import TAGS, rewards, structural
from saccade.algorithms.select import select
from saccade.config import Advantage, Select
from saccade.ledger import Ledger
from saccade.types import End, Episode, Group, Kind, Score, Scored, Task


def make_group(name, pairs):
    """A group of (value, anchor)."""
    task = Task(id=name, question="?", media=(), kind=Kind.OPEN, gold="red")
    episode = Episode(task=task, agent="direct", ledger=Ledger(), turns=(), end=End.ANSWERED)
    scores = [Score(value=value, parts={} if anchor is None else {"anchor": anchor}) for value, anchor in pairs]
    return Group(task=task, members=tuple(Scored(episode=episode, score=score) for score in scores))


# ---- which tokens --------------------------------------------------------------------------------------------------


def spell(pieces):
    """Tokens that are indices into `pieces`, and how they are decoded."""
    return tuple(range(len(pieces))), lambda tokens: "".join(pieces[token] for token in tokens)


@pytest.mark.parametrize(
    ("pieces", "marked"),
    [
        (["Red", "</think>", "<answer>", "red", "</answer>", "<|im_end|>"], "011010"),
        (["<think>", "x", "<tool_code>", "y"], "0000"),  # what may be forced, and what was never trained
        (["</", "think", ">", "\n<", "tool", "_call", ">", "{"], "11111110"),
        (["so</thi", "nk> x", "</", "thin", "ks>"], "11000"),
        (["<answer>a</answer>", "b"], "10"),
        (["", "<answer>", ""], "010"),
        ([], ""),
    ],
)
def test_tags_are_found_in_one_token_and_in_many(pieces, marked):
    assert "".join(str(int(mark)) for mark in structural(*spell(pieces))) == marked


@settings(deadline=None)
@given(st.lists(st.sampled_from([*TAGS, "red", "<think>", " ", "<", "/"]), max_size=8), st.data())
def test_a_tag_counts_however_it_is_cut_into_tokens(parts, data):
    """Every token that overlaps a tag is marked, and no other."""
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *cuts, len(text)]
    spans = list(itertools.pairwise(edges))
    inside = {
        at
        for tag in TAGS
        for start in range(len(text))
        if text.startswith(tag, start)
        for at in range(start, start + len(tag))
    }
    expected = tuple(any(at in inside for at in range(*span)) for span in spans)
    assert structural(*spell([text[start:stop] for start, stop in spans])) == expected


# ---- how much ------------------------------------------------------------------------------------------------------


def test_the_anchors_share_by_hand():
    """Values 1, 0, 1, 0 and anchors 0.2, 0.2, 0, 0: wholes 1.2, 0.2, 1, 0, of mean 0.6 and variance 0.26."""
    group = make_group("a", [(1.0, 0.2), (0.0, 0.2), (1.0, 0.0), (0.0, 0.0)])
    assert rewards(group) == pytest.approx([1.2, 0.2, 1.0, 0.0])
    plain = Advantage(estimator="mean")
    assert credit([group], plain)[0] == pytest.approx([0.5, -0.5, 0.5, -0.5])
    assert anchor_credit([group], plain)[0] == pytest.approx([0.1, 0.1, -0.1, -0.1])
    std = 0.26**0.5
    scaled = Advantage(estimator="mean_std")
    assert credit([group], scaled)[0] == pytest.approx([0.5 / std, -0.5 / std, 0.5 / std, -0.5 / std], abs=1e-5)
    assert anchor_credit([group], scaled)[0] == pytest.approx([0.1 / std, 0.1 / std, -0.1 / std, -0.1 / std], abs=1e-5)
    assert anchor_credit([group], Advantage(estimator="leave_one_out"))[0] == pytest.approx(
        [0.4 / 3] * 2 + [-0.4 / 3] * 2
    )


def test_shaping_meets_the_anchor_as_it_meets_the_rest():
    """Ten times (R - 0.2) up to 8: wholes 12 and 1 become 8 and -1, values 8 and -2."""
    group = make_group("a", [(1.2, 0.2), (0.0, 0.1)])
    chosen = Advantage(estimator="mean", reward_scale=10.0, reward_bias=-0.2, reward_clip=8.0)
    assert credit([group], chosen)[0] == pytest.approx([5.0, -5.0])
    assert anchor_credit([group], chosen)[0] == pytest.approx(
        [-0.5, 0.5]
    )  # the clip left nothing of 0.2, and all of 0.1


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-2, 2), st.floats(-1, 1)), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from(["mean", "mean_std", "leave_one_out"]),
    st.booleans(),
)
def test_both_together_are_the_advantage_of_the_whole(drawn, estimator, whiten):
    chosen = Advantage(estimator=estimator, whiten=whiten)
    apart = [make_group(str(index), pairs) for index, pairs in enumerate(drawn)]
    joined = [make_group(str(index), [(sum(pair), None) for pair in pairs]) for index, pairs in enumerate(drawn)]
    both = zip(credit(apart, chosen), anchor_credit(apart, chosen), credit(joined, chosen), strict=True)
    for everywhere, anchor, whole in both:
        assert everywhere + anchor == pytest.approx(whole, abs=1e-5)
    assert not any(values.any() for values in anchor_credit(joined, chosen))


def test_a_group_of_one_has_no_anchor_either():
    group = make_group("a", [(1.0, 0.5)])
    assert credit([group], Advantage())[0].tolist() == anchor_credit([group], Advantage())[0].tolist() == [0.0]


def test_a_group_that_differs_in_its_anchors_alone_is_learned_from():
    groups = [make_group("flat", [(1.0, 0.1), (1.0, 0.1)]), make_group("anchored", [(1.0, 0.2), (1.0, 0.0)])]
    chosen = select(groups, Select(rank="std"), target=2)
    assert [group.task.id for group in chosen.kept] == ["anchored"]
    assert np.allclose(advantages(rewards(chosen.kept[0]), "mean"), [0.1, -0.1])
