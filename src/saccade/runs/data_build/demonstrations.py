"""The stage of demonstrations: episodes of the teacher in the recipe's environment, kept if right and well formed.

Crops of consecutive turns become the parallel calls of one turn. The rule, in `merge_turns`: a turn joins the turns
before it if all calls together are within `max_calls_per_turn`, and each of its calls

1. has a time window (`start_time`, `end_time`) that overlaps none of theirs: looking again depends on what was seen;
2. contains no time that their results name: the window may have been chosen for it;
3. has no word in its other arguments that their results contain, unless the question or their own calls do.

The merged turn keeps the reasoning of its first turn. That of the others refers to results that aren't known yet, and
is left out. Whether to look at all is never counted as a dependency.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from saccade.chat.tool_formats.base import get_first, parse_seconds
from saccade.config.schema import Recipe
from saccade.environments.base import THINK_PREFILL
from saccade.environments.prompt import format_question
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import EngineError
from saccade.metrics.episode_metrics import ERROR_STATUSES
from saccade.protocols import Context, EnvironmentFactory, ScoreFn
from saccade.rewards.format_compliance import format_compliance
from saccade.rollouts.components import apply_sft_settings
from saccade.rollouts.runner import run_episode
from saccade.runs.data_build.filters import is_right
from saccade.runs.data_build.replies import Rejection
from saccade.training.demonstrations import check_demonstrations
from saccade.types import BlockKind, Call, Demonstration, Episode, EpisodeStatus, Task, Turn
from saccade.utils.hashing import derive_seed

STAGE = "demonstrations"
_WORD = re.compile(r"[^\W_]{3,}")
_TIME = re.compile(r"(?<![\w.:])\d+(?::\d{1,2}){0,2}(?:\.\d+)?")
_WINDOW_ARGUMENTS = ("start_time", "start"), ("end_time", "end")  # with their aliases
_FUNCTION_WORDS = (
    "about after all and any are before between both but can could does for from has have how into its not now off one "
    "only other out over should that the their them then there these they this those through under was were what when "
    "where which while who whose why will with would you your"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationTurn:
    """A turn of a demonstration: the reply, its calls, the texts of their results, and the sub-agents' replies."""

    text: str
    calls: tuple[Call, ...] = ()
    call_bodies: tuple[str, ...] = ()  # what the tags of the calls hold
    results: tuple[str, ...] = ()
    children: tuple[str, ...] = ()  # one per call; empty if no sub-agent answered


async def demonstrate(
    task: Task,
    make_environment: EnvironmentFactory,
    ctx: Context,
    score_fn: ScoreFn,
    *,
    attempts: int,
    require_call: bool,
    max_merged_calls: int,
) -> Demonstration | Rejection:
    """Return the first of the teacher's episodes that can be learned from, or why the last one can't.

    Turns are merged up to `max_merged_calls` calls; with 0 none are. Raises EngineError if a request failed.
    """
    reason = ""
    for index in range(attempts):
        seed = derive_seed(ctx.seed, STAGE, task.digest, index)
        episode = await run_episode(task, make_environment, replace(ctx, seed=seed))
        reason = await find_problem(episode, score_fn, require_call=require_call)
        if not reason:
            turns = [_read_turn(turn, episode) for turn in episode.turns]
            if max_merged_calls:
                turns = merge_turns(turns, format_question(task), max_calls_per_turn=max_merged_calls)
            return build_demonstration(task, turns, ctx.frame_budget)
    return Rejection(stage=STAGE, item=task.id, reason=reason)


async def find_problem(episode: Episode, score_fn: ScoreFn, *, require_call: bool) -> str:
    """Return why an episode can't be learned from, "" if it can. Raises EngineError if a request failed."""
    if episode.status in ERROR_STATUSES:
        raise EngineError(episode.error or f"the episode ended as {episode.status.value}", key="episode")
    if episode.status is not EpisodeStatus.ANSWERED:
        return f"the episode ended as {episode.status.value}"
    if not await is_right(episode, score_fn):
        return "the answer is wrong"
    if any(not result.ok for result in episode.results):
        return "a call failed"
    if require_call and not episode.results:
        return "it calls no tool"
    if any(child.status is not EpisodeStatus.ANSWERED for child in episode.children):
        return "a sub-agent's reply was truncated"
    if not all(child.turns[-1].reply.text.strip() for child in episode.children):
        return "a sub-agent's reply is blank"
    return "" if format_compliance(episode).value else "a reply is not well formed"


def _read_turn(turn: Turn, episode: Episode) -> DemonstrationTurn:
    """Return a turn of an episode whose calls all succeeded."""
    blocks = [block for block in turn.reply.find_blocks(BlockKind.CALL) if block.call is not None]
    children = [
        "" if result.child_index is None else episode.children[result.child_index].turns[-1].reply.text
        for result in turn.results
    ]
    text = turn.reply.text.strip()
    if text.startswith("<think>"):  # as the environment prefills it, whether or not it did for the teacher
        text = THINK_PREFILL + text.removeprefix("<think>").lstrip()
    return DemonstrationTurn(
        text=text,
        calls=turn.reply.calls,
        call_bodies=tuple(block.body for block in blocks),
        results=tuple(result.text for result in turn.results),
        children=tuple(children) if any(children) else (),
    )


def merge_turns(
    turns: Sequence[DemonstrationTurn], question: str, *, max_calls_per_turn: int
) -> list[DemonstrationTurn]:
    """Merge consecutive turns by the rule above; `question` is what the prompt asks, options included."""
    merged: list[DemonstrationTurn] = []
    for turn in turns:
        if merged and turn.calls and is_independent(turn, merged[-1], question, max_calls_per_turn=max_calls_per_turn):
            first = merged[-1]
            calls = "".join(f"\n<tool_call>{body}</tool_call>" for body in turn.call_bodies)
            merged[-1] = DemonstrationTurn(
                text=first.text + calls,
                calls=first.calls + turn.calls,
                call_bodies=first.call_bodies + turn.call_bodies,
                results=first.results + turn.results,
                children=first.children + turn.children,
            )
        else:
            merged.append(turn)
    return merged


def is_independent(
    turn: DemonstrationTurn, before: DemonstrationTurn, question: str, *, max_calls_per_turn: int
) -> bool:
    """Return whether all calls of a turn could have been written together with the calls of the turn before it."""
    if not before.calls or len(before.calls) + len(turn.calls) > max_calls_per_turn:
        return False
    if len(turn.children) != len(turn.calls) or len(before.children) != len(before.calls):
        return False
    windows = [_read_window(call) for call in before.calls]
    times = [time for result in before.results for time in _find_times(result)]
    words = {word for result in before.results for word in _find_words(result)}
    words -= _find_words(question).union(*map(_find_argument_words, before.calls))
    for call in turn.calls:
        window = _read_window(call)
        if window is None or any(other is None or _overlap(window, other) for other in windows):
            return False
        if any(window[0] < time < window[1] for time in times) or words & _find_argument_words(call):
            return False
    return True


def _read_window(call: Call) -> tuple[float, float] | None:
    """Return the window of a call, in seconds; None for a call without one."""
    try:
        start, end = (parse_seconds(get_first(call.arguments, names)) for names in _WINDOW_ARGUMENTS)
    except ValueError:
        return None
    return start, end


def _overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return min(first[1], second[1]) > max(first[0], second[0])


def _find_times(text: str) -> list[float]:
    """Return the numbers of a text as times, in seconds; those that are too long for one are left out."""
    times = []
    for match in _TIME.findall(text):
        with contextlib.suppress(ValueError):
            times.append(parse_seconds(match))
    return times


def _find_words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold())) - {*_FUNCTION_WORDS.split()}


def _find_argument_words(call: Call) -> set[str]:
    values = (value for name, value in call.arguments.items() if not any(name in names for names in _WINDOW_ARGUMENTS))
    return {word for value in values for word in _find_words(str(value))}


def build_demonstration(task: Task, turns: Sequence[DemonstrationTurn], frame_budget: int | None) -> Demonstration:
    """Return the turns as a demonstration."""
    children = [turn.children for turn in turns]
    while children and not children[-1]:
        children.pop()
    return Demonstration(
        task=task,
        frame_budget=frame_budget,
        replies=tuple(turn.text for turn in turns),
        children=tuple(children),
    )


async def find_all_problems(demonstrations: Sequence[Demonstration], recipe: Recipe, ctx: Context) -> Mapping[int, str]:
    """Return by index why SFT with the recipe would refuse a demonstration; see training.demonstrations."""
    environments = TaskEnvironments.from_recipe(apply_sft_settings(recipe))
    report = await check_demonstrations(dict(enumerate(demonstrations)), environments, ctx)
    return report.reasons_by_row
