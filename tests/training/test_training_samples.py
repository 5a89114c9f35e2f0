"""Which conversations are trained, and the tokens their advantage lies on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.ledger import Ledger, Origin, Picture, Slot
from saccade.training.credit import sample_of, samples_of
from saccade.types import End, Episode, Group, Kind, Sample, Score, Scored, Task

TASK = Task(id="t", question="?", media=(), kind=Kind.OPEN, gold="red")
FRAME = Picture(path="a", digest="d", time=0.0, width=32, height=32)


def conversation(mark: int) -> Ledger:
    """Prompt with a picture of three tokens, forced prefix, reply, tool result, forced prefix, reply."""
    ledger = Ledger().observe((mark, 9, 2), slots=(Slot(at=1, picture=FRAME, tokens=3),)).force((6,))
    ledger = ledger.act((5, 7), logprobs=(-0.1, -2.0), version=0)
    ledger = ledger.observe((8, 8), origin=Origin.TOOL).force((6,))
    return ledger.act((4,), logprobs=(-0.3,), version=0)


def episode(mark: int, *children: Episode, ledger: Ledger | None = None, end: End = End.ANSWERED) -> Episode:
    own = conversation(mark) if ledger is None else ledger
    return Episode(task=TASK, agent="test", ledger=own, turns=(), end=end, children=children)


def group(*episodes: Episode) -> Group:
    members = tuple(Scored(episode=each, score=Score(value=0.0, parts={})) for each in episodes)
    return Group(task=TASK, members=members)


def test_an_advantage_lies_on_sampled_tokens_alone():
    sample = sample_of(episode(1), 0.5)
    #                             mark picture        2    <think> reply   tool      <think> reply
    assert sample.advantages == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.5)
    assert sample.ledger.mask() == tuple(value != 0 for value in sample.advantages)


@pytest.mark.parametrize("children", ["none", "shared"])
def test_children_bear_their_parents_advantage_or_none(children):
    parent = episode(1, episode(2), episode(3, episode(4)))
    samples = samples_of([group(parent, episode(5))], [np.array([2.0, -1.0])], children)
    found = [(sample.ledger.compact()[0], max(sample.advantages, key=abs)) for sample in samples]
    shared = [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, -1.0)]
    assert found == (shared if children == "shared" else [(1, 2.0), (5, -1.0)])


SPELLED = {5: "<ans", 7: "wer>", 4: "red"}


def spell(tokens):
    return "".join(SPELLED.get(token, "") for token in tokens)


def test_an_anchor_lies_on_structural_tokens_on_top():
    sample = sample_of(episode(1), 0.5, anchor=0.25, decode=spell)
    #                             mark picture        2    <think> <ans  wer>  tool      <think> red
    assert sample.advantages == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.75, 0.75, 0.0, 0.0, 0.0, 0.5)
    with pytest.raises(ValueError, match="how tokens are spelled"):
        sample_of(episode(1), 0.5, anchor=0.25)


def test_anchors_go_where_their_parents_advantage_goes():
    parent = episode(1, episode(2))
    samples = samples_of([group(parent, episode(3))], [[1.0, -1.0]], "shared", anchors=[[0.5, -0.5]], decode=spell)
    found = [
        (sample.ledger.compact()[0], sorted({value for value in sample.advantages if value})) for sample in samples
    ]
    assert found == [(1, [1.0, 1.5]), (2, [1.0, 1.5]), (3, [-1.5, -1.0])]


def test_members_can_be_left_out():
    """By the advantage of their structural tokens: 0.2 - 0.3 < 0."""
    given = {"anchors": [np.array([-0.3, 0.0])], "decode": spell, "leave_out": lambda member, value: value < 0}
    samples = samples_of([group(episode(1), episode(2))], [np.array([0.2, 0.2])], "none", **given)
    assert [sample.ledger.compact()[0] for sample in samples] == [2]


def test_each_group_has_its_own_credits():
    samples = samples_of([group(episode(1), episode(2)), group(episode(3))], [np.array([1.0, -1.0]), [0.25]], "none")
    assert [max(sample.advantages, key=abs) for sample in samples] == [1.0, -1.0, 0.25]


def test_what_was_never_sampled_is_no_sample():
    """An aborted episode has no ledger; one whose prompt filled the context has no reply."""
    aborted = episode(1, ledger=Ledger(), end=End.ABORTED)
    full = episode(2, ledger=Ledger().observe((2, 2)), end=End.CONTEXT_FULL)
    samples = samples_of([group(aborted, full, episode(3))], [np.array([-1.0, -1.0, 2.0])], "shared")
    assert [sample.ledger.compact()[0] for sample in samples] == [3]


def test_groups_and_credits_must_match():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        samples_of([group(episode(1))], [], "none")
    with pytest.raises(ValueError, match=r"shorter|longer"):
        samples_of([group(episode(1))], [np.array([1.0, 2.0])], "none")


def test_a_sample_refuses_an_advantage_on_what_was_not_sampled():
    ledger = Ledger().observe((1,)).act((2,), logprobs=(-1.0,), version=0)
    with pytest.raises(ValueError, match="not sampled"):
        Sample(ledger=ledger, advantages=(1.0, 1.0))


segments_st = st.lists(
    st.tuples(
        st.sampled_from(["observe", "force", "act"]), st.lists(st.sampled_from([4, 5, 7]), min_size=1, max_size=5)
    ),
    max_size=6,
)


@settings(deadline=None)
@given(segments_st, st.floats(0.1, 2), st.floats(0.1, 2))
def test_what_bears_an_advantage_is_exactly_what_was_sampled(drawn, advantage, anchor):
    ledger = Ledger()
    for verb, tokens in drawn:
        given = {"logprobs": (-1.0,) * len(tokens), "version": 0} if verb == "act" else {}
        ledger = getattr(ledger, verb)(tokens, **given)
    sample = sample_of(episode(1, ledger=ledger), advantage, anchor=anchor, decode=spell)
    assert tuple(value > 0 for value in sample.advantages) == ledger.mask()
    assert {round(value, 9) for value in sample.advantages} <= {0.0, round(advantage, 9), round(advantage + anchor, 9)}
    # Without an anchor, and with one where nothing is a tag, all bear the same.
    plain = sample_of(episode(1, ledger=ledger), advantage)
    blind = sample_of(episode(1, ledger=ledger), advantage, anchor=anchor, decode=lambda tokens: "x" * len(tokens))
    assert plain == blind
