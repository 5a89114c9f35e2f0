"""Scored episodes in one line each."""

from saccade.ledger import Ledger, Picture, Slot
from saccade.types import (
    Block,
    BlockKind,
    Call,
    End,
    Episode,
    Form,
    Kind,
    Media,
    Reply,
    Score,
    Scored,
    Task,
    ToolResult,
    Turn,
    Usage,
)

EVENTS = [[4.0, 6.0, "red"], [20.0, 22.0, "blue"]]


def task(name, *, question="at", kind=Kind.OPEN, gold="red", second=5.0, clip=None):
    extras = {
        "question": question,
        "target": None,
        "second": second,
        "events": EVENTS,
        "needs": [[4.0, 6.0]],
        "cover": [0.0, 0.0],
        "seconds": 64.0,
        "event_seconds": 2.0,
    }
    return Task(
        id=name,
        question=f"Question {name}?",
        media=(Media(path=f"{clip or name}.mp4"),),
        kind=kind,
        gold=gold,
        extras=extras,
    )


def frame(time):
    return Picture(path="clip.mp4", digest="d", time=time, width=16, height=16)


def prompt(times):
    tokens = (1, *(9,) * len(times), 2)
    slots = tuple(Slot(at=1 + i, picture=frame(time), tokens=1) for i, time in enumerate(times))
    return Ledger().observe(tokens, slots=slots)


def scored(
    of,
    accuracy,
    *,
    frames=4,
    calls=0,
    failing=0,
    answer="red",
    end=End.ANSWERED,
    error=None,
    value=None,
    times=(8.0, 24.0),
):
    """One scored episode: `calls` that succeed, `failing` that don't, then an answer."""
    turns = []
    made = tuple(
        Block(
            kind=BlockKind.CALL,
            body="",
            closed=True,
            call=Call(name="crop_video", arguments={"start_time": 0, "end_time": 8}, form=Form.TRAINED),
        )
        for _ in range(calls + failing)
    )
    results = (ToolResult(text="red", executed=True),) * calls + (ToolResult(error="no"),) * failing
    if made:
        turns.append(Turn(reply=Reply(text="", blocks=made), results=results))
    if answer is not None:
        turns.append(Turn(reply=Reply(text=answer, blocks=(Block(kind=BlockKind.ANSWER, body=answer, closed=True),))))
    episode = Episode(
        task=of,
        agent="parallel",
        ledger=prompt(times).act((5, 6, 7), logprobs=(-0.1, -0.2, -0.3), version=0),
        turns=tuple(turns),
        end=end,
        usage=Usage(prompt_tokens=10, sampled_tokens=6, visual_tokens=2, seconds=1.0),
        frames=frames,
        error=error,
    )
    parts = {"accuracy": accuracy, "format": 1.0, "compliance": float(answer is not None)}
    return Scored(episode=episode, score=Score(value=accuracy + 0.5 if value is None else value, parts=parts))
