"""The reward of the environment itself, summed over turns."""

import pytest

from saccade.ledger import Ledger
from saccade.rewards.environment_return import environment_return
from saccade.types import AnswerType, Episode, EpisodeStatus, Reply, Task, Turn, Ungraded

TASK = Task(id="t", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="")


def build_episode(status, *rewards):
    turns = tuple(Turn(reply=Reply(text=""), reward=reward) for reward in rewards)
    return Episode(task=TASK, environment="game", ledger=Ledger(), turns=turns, status=status)


@pytest.mark.parametrize(
    ("rewards", "expected"), [((0.5, None, 1.0), 1.5), ((0.0,), 0.0), ((-1.0, 0.25), -0.75), ((True,), 1.0)]
)
def test_rewards_of_turns_are_summed(rewards, expected):
    assert environment_return(build_episode(EpisodeStatus.ANSWERED, *rewards)) == expected


def test_without_rewards_the_return_is_unknown_unless_the_reply_was_cut_short():
    assert isinstance(environment_return(build_episode(EpisodeStatus.ANSWERED, None)), Ungraded)
    assert environment_return(build_episode(EpisodeStatus.LENGTH, None)) == 0.0
    assert environment_return(build_episode(EpisodeStatus.CONTEXT_FULL)) == 0.0
