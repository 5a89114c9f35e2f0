"""Choose the episodes that a report shows, by one rule for every format, and describe each one as text.

evaluations, newest rollouts ──choose_examples_of_runs──> Example ──describe_example──> ExampleText: Markdown, PDF
                                                             └──────EpisodeViewer─────> the HTML page, token by token
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from saccade.errors import MediaError
from saccade.evaluation.compare import Evaluation
from saccade.ledger import ImageRef
from saccade.metrics.episode_metrics import has_run_tools
from saccade.metrics.looking import parse_window
from saccade.reporting.episode_view import (
    PixelLoader,
    find_child,
    format_answer,
    format_call,
    list_call_images,
    list_prompt_images,
    pair_calls_with_results,
)
from saccade.reporting.plots import plot_frames
from saccade.reporting.report import ExampleText
from saccade.training.episode_log import RolloutRecord
from saccade.types import Call, Episode, Score, ScoredEpisode, ToolResult

NUM_EXAMPLES = 12  # episodes of a report
MIN_EXAMPLES_PER_RUN = 2
MAX_OTHERS = 4  # other answers to an example's task
MAX_CHARS = 500  # of a text in Markdown and PDF
NUM_FRAMES = 8  # in a row of frames: evenly spaced ones
NUM_FRAME_ROWS = 4  # the prompt's, and those of the first calls with frames
RULE = (
    "Wrong and right episodes with calls, wrong and right ones without calls, and failed ones take turns; within each, "
    "question types take turns. Nothing else decides."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An episode that a report shows: its run, the evaluation or step that it is of, and what became of it there."""

    scored: ScoredEpisode
    source: str
    run: str = ""  # "" in the report of one run
    note: str = ""  # of a training episode: kept or dropped, and why
    others: tuple[tuple[str, str, float], ...] = ()  # who else answered the task: name, answer, correctness
    weights: Mapping[str, float] = field(default_factory=dict)  # of the reward terms, by the names of the score's parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The chosen episodes, and the sentences that say how they were chosen."""

    items: tuple[Example, ...] = ()
    note: str = ""


def choose_examples(scored: Sequence[ScoredEpisode], count: int) -> list[ScoredEpisode]:
    """Choose examples round-robin over correct and wrong, with and without calls, failed; question types mixed."""
    categories: defaultdict[tuple[bool, bool, bool], list[tuple[int, ScoredEpisode]]] = defaultdict(list)
    counts = Counter[tuple[Any, ...]]()
    for item in sorted(scored, key=lambda item: item.episode.task.digest):
        category = (item.episode.error is not None, not item.episode.results, item.score.is_correct)
        question = (*category, str(item.episode.task.extras.get("question")))
        categories[category].append((counts[question], item))
        counts[question] += 1
    groups = (sorted(categories[category], key=lambda ranked: ranked[0]) for category in sorted(categories))
    # Round-robin, so that a few examples already show every category.
    return [ranked[1] for round_ in itertools.zip_longest(*groups) for ranked in round_ if ranked is not None][:count]


def choose_examples_of_runs(
    evaluations: Mapping[str, Mapping[str, Evaluation]],
    rollouts: Mapping[str, Sequence[RolloutRecord]],
    *,
    weights: Mapping[str, Mapping[str, float]],
) -> Examples:
    """Choose the examples of runs, as many of each, by the runs' names. In the report of one run its name is "".

    They are those of a run's last evaluation that used tools, or else of its newest rollouts.
    """
    names = list(evaluations)
    count = max(MIN_EXAMPLES_PER_RUN, NUM_EXAMPLES // max(1, len(names)))
    items, counts = list[Example](), list[str]()
    answers = _index_answers(evaluations)
    for name in names:
        source, scored, notes = _find_scored(evaluations[name], rollouts[name])
        chosen = choose_examples(scored, count)
        for item in chosen:
            given = answers[item.episode.task.digest] if source in evaluations[name] else []
            others = tuple(  # the run's other evaluations; of several runs, the same evaluation of the others
                (run or evaluation, answer, correct)
                for run, evaluation, answer, correct in given
                if (run != name and evaluation == source if name else evaluation != source)
            )
            items.append(
                Example(
                    scored=item,
                    source=source,
                    run=name,
                    note=notes.get(id(item.episode), ""),
                    others=others[:MAX_OTHERS],
                    weights=weights.get(name, {}),
                )
            )
        if chosen:
            counts.append(f"{name + ': ' if name else ''}{len(chosen)} of {len(scored)} episodes of “{source}”")
    return Examples(items=tuple(items), note=f"{'; '.join(counts)}. {RULE}" if items else "")


def _find_scored(
    evaluations: Mapping[str, Evaluation], rollouts: Sequence[RolloutRecord]
) -> tuple[str, list[ScoredEpisode], dict[int, str]]:
    """Return the name of what the examples are of, its scored episodes, and notes by the episodes' ids."""
    # Rejected calls, as with tools off, don't count. The last evaluation with tools is that of the newest weights.
    with_tools = [name for name, evaluation in evaluations.items() if has_run_tools(evaluation.scored)]
    if names := with_tools or list(evaluations):
        return names[-1], list(evaluations[names[-1]].scored), {}
    records = [record for record in rollouts if record.score is not None]
    scored = [ScoredEpisode(episode=record.episode, score=record.score) for record in records if record.score]
    notes = {
        id(record.episode): f"{record.outcome}: {record.reason}" if record.reason else record.outcome
        for record in records
    }
    return f"{records[0].stage}, step {records[0].step}" if records else "", scored, notes


def _index_answers(
    evaluations: Mapping[str, Mapping[str, Evaluation]],
) -> defaultdict[str, list[tuple[str, str, str, float]]]:
    """Return the answers to each task by its digest: run, evaluation, answer and correctness."""
    answers: defaultdict[str, list[tuple[str, str, str, float]]] = defaultdict(list)
    for run, own in evaluations.items():
        for name, evaluation in own.items():
            for item in evaluation.scored:
                answer = "no answer" if item.episode.answer is None else format_answer(item.episode.answer)
                answers[item.episode.task.digest].append((run, name, answer, item.score.correct or 0.0))
    return answers


def describe_verdict(scored: ScoredEpisode) -> str:
    """Return whether an episode is right, wrong or failed."""
    return "failed" if scored.episode.error is not None else "right" if scored.score.is_correct else "wrong"


def describe_example(example: Example, load_pixels: PixelLoader | None = None) -> ExampleText:
    """Describe an example as text; with a media loader it has the frames that the model saw."""
    episode, score = example.scored.episode, example.scored.score
    task, usage = episode.task, episode.usage
    source = f"{example.run}, {example.source}" if example.run else example.source
    others = [
        f"{name}: {answer} ({'right' if correct >= 0.5 else 'wrong'})" for name, answer, correct in example.others
    ]
    cost = f"{usage.unsampled_tokens} unsampled, {usage.sampled_tokens} sampled, {usage.visual_tokens} visual tokens"
    facts = [
        ("task", f"{task.id} ({source}{'; ' + example.note if example.note else ''})"),
        ("options", "; ".join(f"{chr(65 + index)}. {option}" for index, option in enumerate(task.options))),
        ("answer", "none" if episode.answer is None else format_answer(episode.answer)),
        ("ground truth", format_answer(task.ground_truth)),
        ("other answers", "; ".join(others)),
        ("reward", _describe_reward(score, example.weights)),
        ("error", episode.error or ""),
        ("cost", f"{cost}, {usage.seconds:.2f} s"),
    ]
    steps = list(_list_steps(episode))
    return ExampleText(
        title=f"{describe_verdict(example.scored).capitalize()}: {shorten(task.question)}",
        facts=tuple((label, shorten(text)) for label, text in facts if text),
        steps=tuple((label, shorten(text) or "(nothing)") for label, text in steps),
        draw_frames=None if load_pixels is None else partial(draw_frames, episode, load_pixels),
    )


def summarize_example(scored: ScoredEpisode) -> str:
    """Return an episode's question, calls, answer and verdict in one line."""
    episode = scored.episode
    calls = [format_call(call) for turn in episode.turns for call in turn.reply.calls]
    answer = "no answer" if episode.answer is None else f"answers “{format_answer(episode.answer)}”"
    truth = format_answer(episode.task.ground_truth)
    verdict = f"{describe_verdict(scored)}; the answer is “{truth}”"
    texts = [f"“{episode.task.question}”", *(calls or ["no call"]), f"{answer} ({verdict})"]
    return shorten("; ".join(texts))


def shorten(text: str) -> str:
    """Return a text in one line of at most MAX_CHARS characters, with the number of those that are left out."""
    line = " ".join(text[: 8 * MAX_CHARS].split())
    rest = len(text) - MAX_CHARS
    return line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]} … ({rest} more characters)"


def _describe_reward(score: Score, weights: Mapping[str, float]) -> str:
    parts = []
    for name, value in sorted(score.parts.items()):
        weight = f" × {weights[name]:g}" if name in weights else ""
        reason = score.reasons.get(name, "")
        parts.append(f"{name} {value:.2f}{weight}{f' ({reason})' if reason else ''}")
    return f"{score.value:.2f}" + (f": {', '.join(parts)}" if parts else "")


def _list_steps(episode: Episode) -> Iterator[tuple[str, str]]:
    """Yield what the model wrote, its calls with their windows, and their results, each with a label."""
    images = list_prompt_images(episode)
    times = [image.time for image in images if image.time is not None]
    if images:
        span = f", {times[0]:.4g} to {times[-1]:.4g} s" if times else ""
        yield "prompt", f"{len(images)} {'frames' if times else 'images'}{span}"
    for number, turn in enumerate(episode.turns, 1):
        yield f"reply {number}", turn.reply.text
        for index, (call, result) in enumerate(pair_calls_with_results(turn), 1):
            yield f"call {number}.{index}", _describe_call(call)
            yield f"result {number}.{index}", _describe_result(result, episode.children)


def _describe_call(call: Call) -> str:
    window = parse_window(call.arguments) if call.ok else None
    return f"{f'window {window[0]:g} to {window[1]:g} s: ' if window else ''}{format_call(call)}"


def _describe_result(result: ToolResult | None, children: Sequence[Episode]) -> str:
    if result is None:
        return "not run"
    if result.error is not None:
        return f"failed: {result.error}"
    count, is_sub_agent = len(list_call_images(result, children)), find_child(result, children) is not None
    images = f"sub-agent, {count} frames, " if is_sub_agent else f"{count} images, " if count else ""
    return f"{images}{result.seconds:.2f} s: {result.text}"


def draw_frames(episode: Episode, load_pixels: PixelLoader) -> bytes | None:
    """Draw what the model saw, a row for the prompt and for each call, as JPEG; None without an image."""
    rows = [("prompt", list_prompt_images(episode))]
    for number, turn in enumerate(episode.turns, 1):
        for index, (_, result) in enumerate(pair_calls_with_results(turn), 1):
            rows.append((f"call {number}.{index}", list_call_images(result, episode.children)))
    shown = [(label, _take_evenly(images)) for label, images in rows if images][:NUM_FRAME_ROWS]
    try:
        pixels = [
            (label, [(None if image.time is None else f"{image.time:.4g} s", load_pixels(image)) for image in images])
            for label, images in shown
        ]
    except MediaError:  # a file that was moved
        return None
    return plot_frames(pixels) if pixels else None


def _take_evenly(images: Sequence[ImageRef]) -> list[ImageRef]:
    if len(images) <= NUM_FRAMES:
        return list(images)
    return [images[round(index * (len(images) - 1) / (NUM_FRAMES - 1))] for index in range(NUM_FRAMES)]
