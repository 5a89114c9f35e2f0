"""Build typed episodes for tests."""

from saccade.ledger import Ledger
from saccade.rewards.compose import resolve_reward
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Episode,
    EpisodeStatus,
    Reply,
    Score,
    Task,
    ToolResult,
    Turn,
)

RAN = ToolResult(text="red", was_executed=True)
SILENT = ToolResult(was_executed=True)
RAISED = ToolResult(text="Traceback", error="NameError", was_executed=True)
REFUSED = ToolResult(error="too many calls")


def task(ground_truth, kind=AnswerType.OPEN, choices=()):
    return Task(id="t", question="?", media=(), answer_type=kind, ground_truth=ground_truth, options=choices)


def think(body="I should look closer.", closed=True):
    return Block(kind=BlockKind.THINK, body=body, is_closed=closed)


def answer(body="red", closed=True):
    return Block(kind=BlockKind.ANSWER, body=body, is_closed=closed)


def text(body):
    return Block(kind=BlockKind.TEXT, body=body, is_closed=True)


def stray(body="</think>"):
    return Block(kind=BlockKind.UNMATCHED_TAG, body=body, is_closed=False)


def call(form=CallFormat.NATIVE, error=None, closed=True, name="crop_video", **arguments):
    arguments = arguments or {"start_time": 1, "end_time": 2}
    made = Call(name=name, arguments=arguments, call_format=form, error=error)
    return Block(kind=BlockKind.CALL, body="{}", is_closed=closed, call=made)


def turn(*blocks, results=(), forced=""):
    return Turn(reply=Reply(text="", blocks=blocks, prefill=forced), results=tuple(results))


def episode(*turns, of=None, end=EpisodeStatus.ANSWERED):
    return Episode(task=of or task("red"), environment="parallel", ledger=Ledger(), turns=turns, status=end)


def answer_episode(body, **task_settings):
    """Return an episode with one answer."""
    return episode(turn(think(), answer(body)), of=task(**task_settings))


def load_judge(**settings):
    """Return a judge whose grades are values, or Ungraded."""
    judge = resolve_reward("judge", settings)

    async def grade(attempt):
        result = await judge(attempt)
        return result.value if isinstance(result, Score) else result

    return grade
