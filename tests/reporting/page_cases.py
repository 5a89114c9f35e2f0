"""Hand-written episodes of the real types, with bytes for tokens and plain frames."""

from functools import partial
from pathlib import Path

import numpy as np

from saccade.errors import MediaError
from saccade.evaluation.compare import Change, Comparison
from saccade.ledger import ImageRef, ImageSlot, Ledger, Origin
from saccade.media.hashing import compute_file_digest
from saccade.metrics.episode_metrics import Difference, SliceRow, Summary
from saccade.metrics.statistics import Estimate
from saccade.reporting.report import Plot
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

NASTY = "</style></script><script>alert('x')</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}\x00\u202e\ud800"
PLACEHOLDER = 0  # an image token's id


def decode(tokens):
    return bytes(token for token in tokens).decode("utf-8", "replace")


def draw_svg(plot_fn, *args, **kwargs):
    return Plot(title="", draw=partial(plot_fn, *args, **kwargs)).encode("svg")


def encode(text):
    return tuple(text.encode("utf-8", "replace"))


def load_pixels(image):
    if image.path == "gone.mp4":
        raise MediaError("gone.mp4 does not exist")
    return np.full((image.height, image.width, 3), int(image.time) * 3 % 256, dtype=np.uint8)


def prompt(text, times, path="clip.mp4"):
    digest = compute_file_digest(path) if Path(path).is_file() else path
    images = [ImageRef(path=path, digest=digest, time=time, width=32, height=16) for time in times]
    response = encode(text)
    slots = [ImageSlot(index=i, image=image, num_tokens=2) for i, image in enumerate(images)]
    return Ledger().observe((PLACEHOLDER,) * len(times) + response, slots=slots)


def append_reply(ledger, text):
    tokens = encode(text)
    return ledger.append_completion(tokens, logprobs=tuple(-0.1 * (i % 7) for i in range(len(tokens))), version=3)


def reply(think, *, calls=(), answer=None, prefill="<think>"):
    blocks = [Block(kind=BlockKind.THINK, body=think, is_closed=True)]
    text = f"{prefill}{think}</think>"
    for call in calls:
        body = f"look {len(blocks)}"
        blocks.append(Block(kind=BlockKind.CALL, body=body, is_closed=True, call=call))
        text += f"<tool_call>{body}</tool_call>"
    if answer is not None:
        blocks.append(Block(kind=BlockKind.ANSWER, body=answer, is_closed=True))
        text += f"<answer>{answer}</answer>"
    return Reply(text=text, blocks=tuple(blocks), prefill=prefill)


def call(**arguments):
    return Call(name="crop_video", arguments=arguments, call_format=CallFormat.NATIVE)


def example(
    *,
    name="w-1",
    think="I look.",
    response="red",
    answer="red",
    question="What?",
    path="clip.mp4",
    accuracy=1.0,
    error=None,
):
    """Return an episode of two turns: a call that a sub-agent answers and one that fails, then the answer."""
    extras = {"question": "at", "events": [[4.0, 6.0, "red"], [20.0, 22.0, "blue"]], "seconds": 64.0}
    task = Task(
        id=name,
        question=question,
        media=(Media(path=path),),
        answer_type=AnswerType.OPEN,
        ground_truth="red",
        extras=extras,
    )
    first = reply(
        think, calls=(call(start_time=0.0, end_time=8.0, question=response), call(start_time="soon", end_time=9))
    )
    last = reply("I see.", answer=answer)
    child = Episode(
        task=Task(id=f"{name}/0.0", question=response, media=task.media, answer_type=AnswerType.OPEN, ground_truth=""),
        environment="sub_agent",
        ledger=append_reply(prompt(response, (1.5, 4.5), path), response),
        turns=(Turn(reply=Reply(text=response, blocks=(Block(kind=BlockKind.TEXT, body=response, is_closed=True),))),),
        status=EpisodeStatus.ANSWERED,
    )
    results = (
        ToolResult(text=response, was_executed=True, child_index=0, seconds=0.25),
        ToolResult(error=f"start_time must be a number, not {response}"),
    )
    ledger = prompt(question, (8.0, 24.0, 40.0, 56.0), path)
    for turn in (first, last):
        prefill = turn.prefill
        ledger = append_reply(ledger.prefill(encode(prefill)), turn.text[len(prefill) :])
        if turn is first:
            ledger = ledger.observe(encode(response), origin=Origin.OBSERVATION)
    episode = Episode(
        task=task,
        environment="parallel",
        ledger=ledger,
        turns=(Turn(reply=first, results=results), Turn(reply=last)),
        status=EpisodeStatus.ANSWERED if error is None else EpisodeStatus.ENVIRONMENT_ERROR,
        children=(child,),
        usage=Usage(unsampled_tokens=40, sampled_tokens=30, visual_tokens=12, seconds=0.4),
        frame_budget=4,
        error=error,
    )
    return ScoredEpisode(
        episode=episode, score=Score(value=1.4, parts={"accuracy": accuracy, "format": 0.8}, correct=accuracy)
    )


def comparison(*names):
    """Return a comparison of evaluations of these names."""
    estimate = Estimate(mean=0.5, low=0.25, high=0.75, n=8, num_clusters=4)
    rows = tuple(SliceRow(name=row, accuracy=estimate, constant_baseline=0.2, calls=1.0) for row in ("at", "when"))
    behavior = ("calls", "executed", "succeeded", "turns", "sampled_tokens", "visual_tokens", "seconds")
    summary = Summary(
        num_tasks=8,
        num_clusters=4,
        num_episodes=16,
        accuracy=estimate,
        constant_baseline=0.2,
        format_compliance=estimate,
        **dict.fromkeys(behavior, 1.0),
        frac_with_tool_call=0.5,
        errors=0,
        unanswered=1,
        ungraded=0,
        statuses={"answered": 1.0},
        slices={"question_type": rows},
        at_k={"pass@2": 0.75},
        full_set_accuracy=estimate,
        full_set_size=32,
    )
    difference = Difference(
        mean=0.5,
        low=-0.25,
        high=0.75,
        n=8,
        num_clusters=4,
        is_significant=False,
        insignificance_reason="4 clusters, fewer than 6",
        better=3,
        worse=1,
        unpaired=2,
    )
    change = Change(
        before=names[0],
        after=names[-1],
        difference=difference,
        only_before=1,
        only_after=3,
        p_value=0.6,
    )
    return Comparison(summaries=dict.fromkeys(names, summary), changes=(change,))
