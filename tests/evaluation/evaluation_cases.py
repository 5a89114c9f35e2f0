"""Build scored episodes in one line each."""

from hypothesis import strategies as st

from saccade.ledger import ImageRef, ImageSlot, Ledger
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Episode,
    EpisodeStatus,
    Media,
    Reply,
    Score,
    ScoredEpisode,
    Task,
    ToolResult,
    Turn,
    Usage,
)

# Of the tasks of `build_tasks`: their tables, and the labels in the first.
STRATA = (lambda task: task.extras["a"], lambda task: task.extras["b"])
NAMES = st.sampled_from([None, "x", "y", "z", ["x", "y"]])
EVENTS = [[4.0, 6.0, "red"], [20.0, 22.0, "blue"]]


def build_tasks(rows):
    """Return tasks with labels in two tables; a label may be several names, or None."""
    return [
        Task(
            id=f"t-{i}",
            question="?",
            media=(),
            answer_type=AnswerType.OPEN,
            ground_truth="red",
            extras={"a": a, "b": b},
        )
        for i, (a, b) in enumerate(rows)
    ]


def task(name, *, question="at", kind=AnswerType.OPEN, ground_truth="red", second=5.0, clip=None):
    extras = {
        "question": question,
        "target": None,
        "second": second,
        "events": EVENTS,
        "evidence": [[4.0, 6.0]],
        "cover": [0.0, 0.0],
        "seconds": 64.0,
        "event_seconds": 2.0,
    }
    return Task(
        id=name,
        question=f"Question {name}?",
        media=(Media(path=f"{clip or name}.mp4"),),
        answer_type=kind,
        ground_truth=ground_truth,
        extras=extras,
    )


def frame(time):
    return ImageRef(path="clip.mp4", digest="d", time=time, width=16, height=16)


def prompt(times):
    tokens = (1, *(9,) * len(times), 2)
    slots = tuple(ImageSlot(index=1 + i, image=frame(time), num_tokens=1) for i, time in enumerate(times))
    return Ledger().observe(tokens, slots=slots)


def make_scored(
    of,
    accuracy,
    *,
    frames=4,
    calls=0,
    failing=0,
    answer="red",
    end=EpisodeStatus.ANSWERED,
    error=None,
    value=None,
    times=(8.0, 24.0),
):
    """Return a scored episode with `calls` successful calls and `failing` failed ones, then an answer."""
    turns = []
    blocks = tuple(
        Block(
            kind=BlockKind.CALL,
            body="",
            is_closed=True,
            call=Call(name="crop_video", arguments={"start_time": 0, "end_time": 8}, call_format=CallFormat.NATIVE),
        )
        for _ in range(calls + failing)
    )
    results = (ToolResult(text="red", was_executed=True),) * calls + (ToolResult(error="no"),) * failing
    if blocks:
        turns.append(Turn(reply=Reply(text="", blocks=blocks), results=results))
    if answer is not None:
        turns.append(
            Turn(reply=Reply(text=answer, blocks=(Block(kind=BlockKind.ANSWER, body=answer, is_closed=True),)))
        )
    episode = Episode(
        task=of,
        environment="parallel",
        ledger=prompt(times).append_completion((5, 6, 7), logprobs=(-0.1, -0.2, -0.3), version=0),
        turns=tuple(turns),
        status=end,
        usage=Usage(unsampled_tokens=10, sampled_tokens=6, visual_tokens=2, seconds=1.0),
        frame_budget=frames,
        error=error,
    )
    parts = {"accuracy": accuracy, "format_reward": 1.0, "format_compliance": float(answer is not None)}
    score = Score(value=accuracy + 0.5 if value is None else value, parts=parts, correct=accuracy)
    return ScoredEpisode(episode=episode, score=score)
