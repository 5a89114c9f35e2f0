"""Made-up episodes of the real types: bytes for tokens, painted frames."""

import numpy as np

from saccade.errors import MediaError
from saccade.ledger import Ledger, Origin, Picture, Slot
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

NASTY = "</style></script><script>alert('x')</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}\x00\u202e\ud800"
PLACE = 0  # the placeholder's id


def decode(tokens):
    return bytes(token for token in tokens).decode("utf-8", "replace")


def encode(text):
    return tuple(text.encode("utf-8", "replace"))


def pixels(picture):
    if picture.path == "gone.mp4":
        raise MediaError("gone.mp4 is gone")
    return np.full((picture.height, picture.width, 3), int(picture.time) * 3 % 256, dtype=np.uint8)


def prompt(text, times, path="clip.mp4"):
    pictures = [Picture(path=path, digest=path, time=time, width=32, height=16) for time in times]
    said = encode(text)
    slots = [Slot(at=i, picture=picture, tokens=2) for i, picture in enumerate(pictures)]
    return Ledger().observe((PLACE,) * len(times) + said, slots=slots)


def act(ledger, text):
    tokens = encode(text)
    return ledger.act(tokens, logprobs=tuple(-0.1 * (i % 7) for i in range(len(tokens))), version=3)


def reply(think, *, calls=(), answer=None, forced="<think>"):
    blocks = [Block(kind=BlockKind.THINK, body=think, closed=True)]
    text = f"{forced}{think}</think>"
    for call in calls:
        body = f"look {len(blocks)}"
        blocks.append(Block(kind=BlockKind.CALL, body=body, closed=True, call=call))
        text += f"<tool_call>{body}</tool_call>"
    if answer is not None:
        blocks.append(Block(kind=BlockKind.ANSWER, body=answer, closed=True))
        text += f"<answer>{answer}</answer>"
    return Reply(text=text, blocks=tuple(blocks), forced=forced)


def call(**arguments):
    return Call(name="crop_video", arguments=arguments, form=Form.TRAINED)


def example(
    *,
    name="w-1",
    think="I look.",
    said="red",
    answer="red",
    question="What?",
    path="clip.mp4",
    accuracy=1.0,
    error=None,
):
    """An episode of two turns: one call that a sub-agent answers, one that fails, then the answer."""
    extras = {"question": "at", "events": [[4.0, 6.0, "red"], [20.0, 22.0, "blue"]], "seconds": 64.0}
    task = Task(id=name, question=question, media=(Media(path=path),), kind=Kind.OPEN, gold="red", extras=extras)
    first = reply(think, calls=(call(start_time=0.0, end_time=8.0, question=said), call(start_time="soon", end_time=9)))
    last = reply("I see.", answer=answer)
    child = Episode(
        task=Task(id=f"{name}/0.0", question=said, media=task.media, kind=Kind.OPEN, gold=""),
        agent="sub",
        ledger=act(prompt(said, (1.5, 4.5), path), said),
        turns=(Turn(reply=Reply(text=said, blocks=(Block(kind=BlockKind.TEXT, body=said, closed=True),))),),
        end=End.ANSWERED,
    )
    results = (
        ToolResult(text=said, executed=True, child=0, seconds=0.25),
        ToolResult(error=f"start_time must be a number, not {said}"),
    )
    ledger = prompt(question, (8.0, 24.0, 40.0, 56.0), path)
    for turn in (first, last):
        ledger = act(ledger.force(encode(turn.forced)), turn.text[len(turn.forced) :])
        if turn is first:
            ledger = ledger.observe(encode(said), origin=Origin.TOOL)
    episode = Episode(
        task=task,
        agent="parallel",
        ledger=ledger,
        turns=(Turn(reply=first, results=results), Turn(reply=last)),
        end=End.ANSWERED if error is None else End.TOOL_BROKEN,
        children=(child,),
        usage=Usage(prompt_tokens=40, sampled_tokens=30, visual_tokens=12, seconds=0.4),
        frames=4,
        error=error,
    )
    return Scored(episode=episode, score=Score(value=1.4, parts={"accuracy": accuracy, "format": 0.8}))


def comparison(*names):
    """What `Comparison.as_dict` gives, for evaluations of these names."""
    estimate = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}
    rows = [{"name": row, "accuracy": estimate, "floor": 0.2, "calls": 1.0} for row in ("at", "when")]
    numbers = {"calls": 1.0, "tool_share": 0.5, "visual_tokens": 12.0, "errors": 0, "unanswered": 1}
    counts = {"tasks": 8, "episodes": 16, "whole_tasks": 32}
    summary = {"accuracy": estimate, "whole": estimate, "floor": 0.2, "compliance": estimate, **counts, **numbers}
    delta = {**estimate, "better": 3, "worse": 1, "unpaired": 2}
    return {
        "summaries": {name: {**summary, "slices": {"question": rows}, "at_k": {"pass@2": 0.75}} for name in names},
        "changes": [{"before": names[0], "after": names[-1], "difference": delta, "sure": False}],
    }
