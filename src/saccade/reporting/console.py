"""Progress of a command's stages, and an episode while it runs, on a terminal or in a log.

Text from models and files is printed as text, never as markup, and without control characters.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from saccade.types import BlockKind, Call, Episode, EpisodeStatus, ToolResult
from saccade.utils.text import escape_control_characters, pluralize

LOG_INTERVAL_SECONDS = 10.0  # between two lines of progress without a terminal
CALL_PANEL_WIDTH = (20, 44)  # at least and at most, in columns


MAX_PACE_ITEMS = 10  # items since a task's first update that make a pace, at most; a twentieth of a smaller task

# Reports what is done (None: all), a remark, and, as an optional third argument, the total if it is now known.
UpdateProgress = Callable[..., None]


class RemainingTime(TimeRemainingColumn):
    """The remaining time, shown once enough items were done to know the pace; at the end the elapsed time."""

    def render(self, task: Task) -> Text:
        """Return the time of a task, or dashes."""
        if not task.finished and not task.fields["has_pace"]:
            return Text("--:--", style="progress.remaining")
        return super().render(task)


@contextlib.contextmanager
def show_progress_lines(console: Console) -> Iterator[Callable[..., UpdateProgress]]:
    """Yield `add_task(label, total)`, which adds a progress bar; without a terminal, a line of text now and then.

    Both show the remaining time, estimated from the pace since the task's first update: the episodes that a
    resumed evaluation reads from its file take no time. Before some items were done there is no estimate.
    """
    description, remarks = (
        TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[remark]")
    )
    remaining_time = RemainingTime(compact=True, elapsed_when_finished=True)
    with Progress(
        *(description, BarColumn(10), MofNCompleteColumn(), remaining_time, remarks),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=math.inf,
        get_time=time.monotonic,
    ) as bar:

        def add_task(label: str, total: int | None = None) -> UpdateProgress:
            bar.add_task(label, total=total, remark="", has_pace=False)
            task, last_line, first_done = bar.tasks[-1], time.monotonic(), None

            def update_progress(done: int | None, remark: str, total: int | None = None) -> None:
                nonlocal last_line, first_done
                total = total or (None if task.total is None else int(task.total)) or (1 if done is None else None)
                # rich measures the pace from the first progress above 0, which leaves out the first requests.
                completed = total if done is None else done or 1e-300
                first_done = done if first_done is None else first_done
                num_items = min(MAX_PACE_ITEMS, max(2, (total or 0) // 20))
                has_pace = done is not None and first_done is not None and done - first_done >= num_items
                bar.update(task.id, completed=completed, total=total, remark=remark, has_pace=has_pace)
                is_finished, now = done is None or done == total, time.monotonic()
                if not console.is_terminal and (is_finished or now - last_line > LOG_INTERVAL_SECONDS):
                    last_line = now
                    count = "" if done is None else f"{done}/{total} "
                    is_estimated = has_pace and not is_finished and task.time_remaining
                    left = f"{remaining_time.render(task)} left" if is_estimated else ""
                    text = ", ".join(filter(None, (remark, left.removeprefix("0"))))
                    print_text(console, f"{label} {count}{text}".rstrip())

            return update_progress

        yield add_task


def format_step(metrics: Mapping[str, float], *, is_graded: bool = True) -> str:
    """Format the metrics of a training step: the loss, or else the reward with its parts, and the accuracy.

    Without `is_graded` no reward measures correctness, and there is no accuracy to show.

    >>> format_step({"step": 3, "loss": 0.5, "reward": 0.75, "reward/format": 0.25, "accuracy": 0.5})
    'reward 0.750 (format 0.250), accuracy 0.500'
    >>> format_step({"step": 3, "loss": 0.5}), format_step({"step": 3})
    ('loss 0.500', 'no episode was graded')
    """
    if "reward" not in metrics:
        return f"loss {metrics['loss']:.3f}" if "loss" in metrics else "no episode was graded"
    parts = [f"{key.partition('/')[2]} {value:.3f}" for key, value in metrics.items() if key.startswith("reward/")]
    reward = f"reward {metrics['reward']:.3f}" + (f" ({', '.join(parts)})" if parts else "")
    return f"{reward}, accuracy {metrics['accuracy']:.3f}" if is_graded else reward


def format_validation(step: int, metrics: Mapping[str, float]) -> str:
    """Format a validation: of each mode the accuracy with its interval.

    >>> format_validation(20, {"greedy/episodes": 8, "greedy/accuracy": 0.5, "sampled/episodes": 0})
    'validation after step 20: greedy accuracy 0.500, sampled: no episode was graded'
    """
    texts = []
    for mode in (key.removesuffix("/episodes") for key in metrics if key.endswith("/episodes")):
        mean, low, high = (metrics.get(f"{mode}/accuracy{end}") for end in ("", "/low", "/high"))
        interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        texts.append(f"{mode}: no episode was graded" if mean is None else f"{mode} accuracy {mean:.3f}{interval}")
    return f"validation after step {step}: {', '.join(texts)}"


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print plain text without wrapping it to the terminal's width."""
    console.print(Text(escape_control_characters(text), style=style), soft_wrap=True)


class EpisodePrinter:
    """Prints an episode's events as they come; pass it as a context's `on_event`, and `close` it at the end.

    A terminal shows the calls of a turn side by side and fills in results as they arrive; a log has a line per result.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._panels: list[Panel] = []
        self._width = 0
        self._shown_results: set[int] = set()

    def __call__(self, event: str, data: Mapping[str, Any]) -> None:
        """Print an event of the rollout."""
        if event == "reply":
            for block in data["reply"].blocks:
                if block.kind in (BlockKind.THINK, BlockKind.TEXT, BlockKind.UNMATCHED_TAG) and block.body.strip():
                    print_text(self.console, block.body.strip(), style="italic cyan")
        elif event == "calls":
            self._show_calls(data["calls"])
        elif event == "result":
            self._show_result(data["index"], data["call"], data["result"])
        elif event == "results":
            self._show_refused_calls(data["results"])
            self.close()

    def close(self) -> None:
        """Stop updating the screen."""
        if self._live is not None:
            self._live.stop()
        self._live = None

    def _show_calls(self, calls: tuple[Call, ...]) -> None:
        self._shown_results, self._width = set(), self.console.width // max(1, len(calls)) - 1
        self._panels = [build_call_panel(call, None, self._width) for call in calls]
        if self.console.is_terminal and calls:
            self._live = Live(
                console=self.console, auto_refresh=False, get_renderable=lambda: Columns(self._panels, equal=True)
            )
            self._live.start(refresh=True)

    def _show_result(self, index: int, call: Call, result: ToolResult) -> None:
        self._shown_results.add(index)
        self._panels[index] = build_call_panel(call, result, self._width)
        if self._live is not None:
            self._live.refresh()
        else:
            title, question = describe_call(call)
            text = f"error: {result.error}" if result.error is not None else format_tool_result(result)
            print_text(self.console, f"  {title}  {question}  ->  {text}  ({result.seconds:.2f} s)")

    def _show_refused_calls(self, results: tuple[ToolResult, ...]) -> None:
        """Show the calls that were not run, for which no result event came."""
        for index, result in enumerate(results):
            if index not in self._shown_results and result.error is not None:
                if self._live is not None:
                    self._panels[index].renderable = Text(escape_control_characters(result.error), style="red")
                    self._live.refresh()
                else:
                    print_text(self.console, f"  not run: {result.error}")


def build_call_panel(call: Call, result: ToolResult | None, width: int) -> Panel:
    """Return a panel, about `width` columns wide, of a call: its window, its question, and its result if any."""
    title, question = describe_call(call)
    if result is None:
        text, style = "…", "dim"
    elif result.error is not None:
        text, style = result.error, "red"
    else:
        text, style = format_tool_result(result) or "(nothing)", "green"
    body = Text(escape_control_characters(question), style="bold")
    body.append(f"\n{escape_control_characters(text)}", style=f"not bold {style}")
    seconds = None if result is None else f"{result.seconds:.2f} s"
    least, most = CALL_PANEL_WIDTH
    return Panel(
        body, title=Text(escape_control_characters(title)), subtitle=seconds, width=min(max(width, least), most)
    )


def format_tool_result(result: ToolResult) -> str:
    """Return a result's text and the size of each image."""
    return " ".join([*filter(None, [result.text]), *(f"[{image.width}x{image.height}]" for image in result.images)])


def describe_call(call: Call) -> tuple[str, str]:
    """Return the window (or else the tool) of a call, and its question and other arguments."""
    rest = dict(call.arguments)
    start, end = rest.pop("start_time", None), rest.pop("end_time", None)
    question = str(rest.pop("question", ""))
    lines = [question, *(f"{key}: {value}" for key, value in rest.items())]
    times = [f"{time:g}" if isinstance(time, int | float) else str(time) for time in (start, end)]
    window = f"{times[0]}-{times[1]} s" if start is not None and end is not None else call.name or "a call"
    return window, "\n".join(filter(None, lines))


def explain_missing_answer(status: EpisodeStatus) -> str:
    """Return why an episode of this status has no answer, and what would change it."""
    reasons = {
        EpisodeStatus.NO_ANSWER: "the model stopped without a tool call and without a closed <answer>; train it, or "
        "give the recipe it was trained with (--recipe)",
        EpisodeStatus.MAX_TURNS: "the turns ran out; raise environment.settings.max_tool_turns",
        EpisodeStatus.LENGTH: "a reply reached the limit of tokens; raise sampling.max_tokens",
        EpisodeStatus.CONTEXT_FULL: "the conversation filled the context; raise "
        "environment.settings.max_context_tokens, or show fewer frames",
    }
    return reasons.get(status, f"the episode ended as {status.value}")


def summarize_usage(episode: Episode) -> str:
    """Return an episode's turns, calls, tokens and seconds in one line."""
    usage = episode.usage
    return (
        f"{pluralize(len(episode.turns), 'turn')}, {pluralize(len(episode.results), 'call')}, "
        f"{usage.unsampled_tokens - usage.visual_tokens} text + "
        f"{usage.visual_tokens} visual tokens unsampled, {usage.sampled_tokens} sampled, {usage.seconds:.2f} s"
    )
