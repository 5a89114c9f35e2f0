"""Small builders of typed episodes."""

from saccade.ledger import Ledger
from saccade.types import Block, BlockKind, Call, End, Episode, Form, Kind, Reply, Task, ToolResult, Turn

RAN = ToolResult(text="red", executed=True)
SILENT = ToolResult(executed=True)
RAISED = ToolResult(text="Traceback", error="NameError", executed=True)
REFUSED = ToolResult(error="too many calls")


def task(gold, kind=Kind.OPEN, choices=()):
    return Task(id="t", question="?", media=(), kind=kind, gold=gold, choices=choices)


def think(body="I should look closer.", closed=True):
    return Block(kind=BlockKind.THINK, body=body, closed=closed)


def answer(body="red", closed=True):
    return Block(kind=BlockKind.ANSWER, body=body, closed=closed)


def text(body):
    return Block(kind=BlockKind.TEXT, body=body, closed=True)


def stray(body="</think>"):
    return Block(kind=BlockKind.STRAY, body=body, closed=False)


def call(form=Form.TRAINED, error=None, closed=True):
    made = Call(name="crop_video", arguments={"start_time": 1, "end_time": 2}, form=form, error=error)
    return Block(kind=BlockKind.CALL, body="{}", closed=closed, call=made)


def turn(*blocks, results=(), forced=""):
    return Turn(reply=Reply(text="", blocks=blocks, forced=forced), results=tuple(results))


def episode(*turns, of=None, end=End.ANSWERED):
    return Episode(task=of or task("red"), agent="parallel", ledger=Ledger(), turns=turns, end=end)


def said(body, **task_settings):
    """An episode that gave one answer, and its task."""
    of = task(**task_settings)
    return episode(turn(think(), answer(body)), of=of), of
