"""Training samples: which conversations are trained, and which tokens get their advantage."""

from dataclasses import replace

import numpy as np
import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.group_advantages import GroupAdvantages
from saccade.chat.parser import parse_reply
from saccade.ledger import ImageRef, ImageSlot, Ledger, Origin
from saccade.training.training_samples import build_sample, build_samples, mask_stale_tokens, split_mini_batches
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Episode,
    EpisodeStatus,
    Group,
    Reply,
    Score,
    ScoredEpisode,
    Span,
    Task,
    TrainingSample,
    Turn,
)

TASK = Task(id="t", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
FRAME = ImageRef(path="a", digest="d", time=0.0, width=32, height=32)


def make_ledger(first_token: int) -> Ledger:
    """Build a prompt with an image of three tokens, prefill, reply, tool result, prefill, reply."""
    ledger = Ledger().observe((first_token, 9, 2), slots=(ImageSlot(index=1, image=FRAME, num_tokens=3),)).prefill((6,))
    ledger = ledger.append_completion((5, 7), logprobs=(-0.1, -2.0), version=0)
    ledger = ledger.observe((8, 8), origin=Origin.OBSERVATION).prefill((6,))
    return ledger.append_completion((4,), logprobs=(-0.3,), version=0)


def make_episode(
    first_token: int, *children: Episode, ledger: Ledger | None = None, status: EpisodeStatus = EpisodeStatus.ANSWERED
) -> Episode:
    ledger = make_ledger(first_token) if ledger is None else ledger
    return Episode(task=TASK, environment="test", ledger=ledger, turns=(), status=status, children=children)


def make_group(*episodes: Episode) -> Group:
    scored = tuple(ScoredEpisode(episode=episode, score=Score(value=0.0)) for episode in episodes)
    return Group(task=TASK, scored_episodes=scored)


TAGS = Span(kind="tags")


def advantages_of(*values, tags=None):
    """Return the advantages of a group: of every token, and added on the structural tags."""
    by_span = {} if tags is None else {TAGS: np.array(tags, dtype=float)}
    return GroupAdvantages(every_token_G=np.array(values, dtype=float), by_span=by_span)


def get_first_token(sample: TrainingSample) -> int:
    return sample.ledger.unexpanded_ids()[0]


def test_exactly_the_sampled_tokens_get_the_advantage():
    sample = build_sample(make_episode(1), 0.5)
    #                            first  image         2    <think> reply   tool      <think> reply
    assert sample.advantages == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.5)
    assert sample.ledger.loss_mask() == tuple(value != 0 for value in sample.advantages)


@pytest.mark.parametrize("sub_agent_advantage", ["none", "shared"])
def test_sub_agents_share_their_parents_advantage(sub_agent_advantage):
    parent = make_episode(1, make_episode(2), make_episode(3, make_episode(4)))
    samples = build_samples([make_group(parent, make_episode(5))], [advantages_of(2.0, -1.0)], sub_agent_advantage)
    advantages = [(get_first_token(sample), max(sample.advantages, key=abs)) for sample in samples]
    shared = [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, -1.0)]
    assert advantages == (shared if sub_agent_advantage == "shared" else [(1, 2.0), (5, -1.0)])


def test_a_sub_agent_that_supports_the_answer_shares_its_advantage():
    def answer(first_token, text, *children):
        return replace(make_episode(first_token, *children), turns=(Turn(reply=parse_reply(text)),))

    children = [answer(2, "It's red."), answer(3, "A REDDISH one"), answer(4, "none", answer(5, "Red, I think"))]
    for text, expected in (
        ("<answer>red</answer>", [1, 2, 5]),
        ("<answer>**Red.**</answer>", [1, 2, 5]),
        ("<answer>red one</answer>", [1]),
        ("<answer>?</answer>", [1]),  # without a word
        ("red", [1]),  # no answer
    ):
        samples = build_samples([make_group(answer(1, text, *children))], [advantages_of(-1.5)], "supporting")
        assert [get_first_token(sample) for sample in samples] == expected, text
        assert all(min(sample.advantages) == -1.5 for sample in samples)


VOCABULARY = {5: "<ans", 7: "wer>", 4: "red"}


def decode(tokens):
    return "".join(VOCABULARY.get(token, "") for token in tokens)


def test_anchor_advantages_are_added_on_structural_tokens():
    sample = build_sample(make_episode(1), 0.5, by_span={TAGS: 0.25}, decode=decode)
    #                            first  image         2    <think> <ans  wer>  tool      <think> red
    assert sample.advantages == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.75, 0.75, 0.0, 0.0, 0.0, 0.5)
    with raises(ValueError, by=build_sample):
        build_sample(make_episode(1), 0.5, by_span={TAGS: 0.25})


def test_sub_agents_share_their_parents_anchor_advantage():
    parent = make_episode(1, make_episode(2))
    samples = build_samples(
        [make_group(parent, make_episode(3))], [advantages_of(1.0, -1.0, tags=[0.5, -0.5])], "shared", decode=decode
    )
    advantages = [
        (get_first_token(sample), sorted({value for value in sample.advantages if value})) for sample in samples
    ]
    assert advantages == [(1, [1.0, 1.5]), (2, [1.0, 1.5]), (3, [-1.5, -1.0])]


def test_episodes_that_a_mask_leaves_out_are_not_trained():
    groups, advantages = [make_group(make_episode(1), make_episode(2))], [advantages_of(0.2, 0.2)]
    samples = build_samples(groups, advantages, "none", masks=[[False, True]])
    assert [get_first_token(sample) for sample in samples] == [2]


def test_credits_of_a_turn_and_of_a_call_reach_their_tokens_of_the_main_conversation():
    """The replies are `<ans` `wer>` and `red`; the call is `red`, in the second turn."""
    call = Call(name="zoom", arguments={}, call_format=CallFormat.NATIVE)
    block = Block(kind=BlockKind.CALL, body="red", is_closed=True, call=call)
    turns = (Turn(reply=Reply(text="<answer>")), Turn(reply=Reply(text="red", blocks=(block,))))
    parent = replace(make_episode(1, make_episode(2)), turns=turns)
    spans = {Span(kind="turn", turn=0): np.array([0.25]), Span(kind="call", turn=1, call=0): np.array([2.0])}
    advantages = GroupAdvantages(every_token_G=np.array([0.5]), by_span=spans)
    main, child = build_samples([make_group(parent)], [advantages], "shared", decode=decode)
    assert main.advantages == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.75, 0.75, 0.0, 0.0, 0.0, 2.5)
    assert {value for value in child.advantages if value} == {0.5}


def test_each_group_has_its_own_advantages():
    groups = [make_group(make_episode(1), make_episode(2)), make_group(make_episode(3))]
    samples = build_samples(groups, [advantages_of(1.0, -1.0), advantages_of(0.25)], "none")
    assert [max(sample.advantages, key=abs) for sample in samples] == [1.0, -1.0, 0.25]
    assert [sample.group for sample in samples] == [0, 0, 1]


def test_mini_batches_hold_whole_groups_in_turn():
    """Group 2 has no samples, so groups 0, 1, 3, 4 and 5 are dealt out; sub-agents stay with their group."""
    groups = [make_group(make_episode(number, make_episode(10 + number))) for number in range(6)]
    masks = [[number != 2] for number in range(6)]
    samples = build_samples(groups, [advantages_of(1.0)] * 6, "shared", masks=masks)
    first_tokens = [[get_first_token(sample) for sample in part] for part in split_mini_batches(samples, 2)]
    assert first_tokens == [[0, 10, 3, 13, 5, 15], [1, 11, 4, 14]]
    assert split_mini_batches(samples, 1) == [samples]
    assert [len(part) for part in split_mini_batches(samples, 9)] == [2] * 5


def test_conversations_without_sampled_tokens_are_skipped():
    """An aborted episode has no ledger; one whose prompt filled the context has no reply."""
    aborted = make_episode(1, ledger=Ledger(), status=EpisodeStatus.ABORTED)
    full = make_episode(2, ledger=Ledger().observe((2, 2)), status=EpisodeStatus.CONTEXT_FULL)
    samples = build_samples([make_group(aborted, full, make_episode(3))], [advantages_of(-1.0, -1.0, 2.0)], "shared")
    assert [get_first_token(sample) for sample in samples] == [3]


def test_groups_and_advantages_must_have_equal_lengths():
    with raises(ValueError, by=build_samples):
        build_samples([make_group(make_episode(1))], [], "none")
    with raises(ValueError, by=build_samples):
        build_samples([make_group(make_episode(1))], [advantages_of(1.0, 2.0)], "none")


def test_a_sample_rejects_an_advantage_on_a_token_that_was_not_sampled():
    ledger = Ledger().observe((1,)).append_completion((2,), logprobs=(-1.0,), version=0)
    with raises(ValueError, by=TrainingSample.__post_init__):
        TrainingSample(ledger=ledger, advantages=(1.0, 1.0))


segments_st = st.lists(
    st.tuples(
        st.sampled_from(["observe", "prefill", "append_completion"]),
        st.lists(st.sampled_from([4, 5, 7]), min_size=1, max_size=5),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(segments_st, st.floats(0.1, 2), st.floats(0.1, 2))
def test_exactly_the_sampled_tokens_of_any_ledger_get_an_advantage(drawn, advantage, anchor):
    ledger = Ledger()
    for method, tokens in drawn:
        arguments = {"logprobs": (-1.0,) * len(tokens), "version": 0} if method == "append_completion" else {}
        ledger = getattr(ledger, method)(tokens, **arguments)
    sample = build_sample(make_episode(1, ledger=ledger), advantage, by_span={TAGS: anchor}, decode=decode)
    assert tuple(value > 0 for value in sample.advantages) == ledger.loss_mask()
    assert {round(value, 9) for value in sample.advantages} <= {0.0, round(advantage, 9), round(advantage + anchor, 9)}
    # Without an anchor, and with one but no structural token, all sampled tokens get the same.
    plain = build_sample(make_episode(1, ledger=ledger), advantage)
    untagged = build_sample(
        make_episode(1, ledger=ledger), advantage, by_span={TAGS: anchor}, decode=lambda tokens: "x" * len(tokens)
    )
    assert plain == untagged


def test_stale_tokens_become_context():
    """A reply sampled by versions 1 and 3 with a tool result, then one of version 3; another sample is of version 1."""
    ledger = Ledger().observe((1, 2)).append_completion((5, 7), logprobs=(-0.1, -2.0), version=1)
    ledger = ledger.append_completion((4,), logprobs=(-0.3,), version=3).observe((8, 8), origin=Origin.OBSERVATION)
    ledger = ledger.append_completion((6, 9), logprobs=(-0.5, -0.6), version=3)
    old = Ledger().observe((1, 2)).append_completion((5,), logprobs=(-0.1,), version=1)
    samples = [
        TrainingSample(ledger=ledger, advantages=(0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.25, 0.25), group=4),
        TrainingSample(ledger=old, advantages=(0.0, 0.0, 0.5)),
    ]
    assert mask_stale_tokens(samples, 1) == (samples, 0)
    [sample], num_stale = mask_stale_tokens(samples, 2)
    assert num_stale == 3
    assert sample.ledger.input_ids() == ledger.input_ids()
    assert sample.ledger.loss_mask() == tuple(version == 3 for version in ledger.versions())
    assert sample.ledger.logprobs()[4] == -0.3
    assert sample.advantages == (0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.25, 0.25)
    assert sample.group == 4
    assert mask_stale_tokens(samples, 4) == ([], 6)
