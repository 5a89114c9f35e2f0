"""A stage's training on a terminal, redrawn after each step; in a log, a line every ten seconds.

rl ━━━━━━━━━─────────── 9/20, 6 min left
reward      1.032  ▁▂▃▅▆  format_reward 0.987, tool_use 0.350
accuracy    0.189  ▂▂▃▃▄
calls       3.354  90 % executed, format 85 %
step        43.1 s: rollout 57 %, train 38 %, reward 4 %; 258 tokens/s
validation  after step 5: greedy accuracy 0.310 [0.250, 0.380]
episode     right, reward 2.300, 4 calls: Which colour comes right before blue? -> green
"""

import contextlib
import json
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from saccade.errors import DataError
from saccade.metrics.tables import format_duration
from saccade.protocols import OnStep
from saccade.reporting.console import format_step, format_validation, print_text, show_progress_lines
from saccade.training.episode_log import list_rollout_files, read_rollout_lines
from saccade.types import BlockKind
from saccade.utils.text import escape_control_characters

SPARK_STEPS = 24  # shown as blocks, at most
PACE_STEPS = 10  # whose median time makes the remaining time
MAX_STAGES = 4  # of a step's time
BLOCKS = "▁▂▃▄▅▆▇█"
_NUMBER = re.compile(r"\d+(\.\d+)?")


@contextlib.contextmanager
def show_training(
    console: Console, stage: str, steps: int, folder: Path, *, is_graded: bool
) -> Iterator[tuple[OnStep, OnStep]]:
    """Show a stage's progress; yield its callbacks for steps and for validations.

    Without `is_graded` no reward measures correctness. `folder` is the run, whose newest episode is shown.
    """
    if console.is_terminal:
        view = TrainingView(stage, steps, folder, is_graded=is_graded)
        with Live(console=console, get_renderable=lambda: view.render(console.width), auto_refresh=False) as live:

            def on_step(step: int, metrics: Mapping[str, float]) -> None:
                view.add_step(step, metrics)
                live.refresh()

            def on_validation(step: int, metrics: Mapping[str, float]) -> None:
                view.validation = format_validation(step, metrics).removeprefix("validation ")
                print_text(console, f"{stage}: {format_validation(step, metrics)}")
                live.refresh()

            yield on_step, on_validation
        return
    with show_progress_lines(console) as add_task:
        update_progress = add_task(stage, steps)
        yield (
            lambda step, metrics: update_progress(step, format_step(metrics, is_graded=is_graded)),
            lambda step, metrics: print_text(console, f"{stage}: {format_validation(step, metrics)}"),
        )


class TrainingView:
    """What a terminal shows of a stage; `add_step` takes each step's metrics."""

    def __init__(self, stage: str, steps: int, folder: Path, *, is_graded: bool) -> None:
        self._stage, self._steps, self._folder, self._is_graded = stage, steps, folder, is_graded
        self._step, self._metrics = 0, dict[str, float]()
        self._history: dict[str, deque[float]] = {}
        self._times = deque[float](maxlen=PACE_STEPS + 1)
        self._episode = ""
        self.validation = ""

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        self._step, self._metrics = step, dict(metrics)
        self._times.append(time.monotonic())
        for key in ("loss", "reward", "accuracy", "calls"):
            if key in metrics:
                self._history.setdefault(key, deque(maxlen=SPARK_STEPS)).append(metrics[key])
        if self._stage == "rl":
            self._episode = describe_newest_episode(self._folder) or self._episode

    def render(self, width: int) -> Group:
        """Return the lines, none wider than `width` columns."""
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(self._steps, 1), completed=self._step, width=24)
        head.add_row(
            Text(self._stage, style="bold"), bar, Text(f"{self._step}/{self._steps}{self._format_remaining()}")
        )
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", no_wrap=True)
        body.add_column(no_wrap=True, overflow="ellipsis", max_width=max(width - 14, 10))
        for title, text in self._list_lines():
            body.add_row(title, Text(escape_control_characters(text)))
        return Group(head, body)

    def _format_remaining(self) -> str:
        pauses = [later - earlier for earlier, later in zip(self._times, list(self._times)[1:], strict=False)]
        if len(pauses) < 2 or self._step >= self._steps:
            return ""
        seconds = median(pauses) * (self._steps - self._step)
        return f", {format_duration(seconds)} left"

    def _list_lines(self) -> Iterator[tuple[str, str]]:
        metrics = self._metrics
        if not metrics:
            yield "", "waiting for the first step"
            return
        if "reward" in metrics:
            parts = [f"{key.partition('/')[2]} {value:.3f}" for key, value in metrics.items() if _is_part(key)]
            yield "reward", f"{self._format_number('reward')}  {', '.join(parts)}"
            if self._is_graded and "accuracy" in metrics:
                yield "accuracy", self._format_number("accuracy")
            if "calls" in metrics:
                executed, calls = metrics.get("calls/executed"), metrics["calls"]
                texts = [f"{executed / calls:.0%} executed"] if executed is not None and calls else []
                texts += [f"format {metrics['format_compliance']:.0%}"] if "format_compliance" in metrics else []
                yield "calls", f"{self._format_number('calls')}  {', '.join(texts)}"
        elif "loss" in metrics:
            yield "loss", self._format_number("loss")
        else:
            yield "", format_step(metrics)
        yield "step", format_time_by_stage(metrics)
        if self.validation:
            yield "validation", self.validation
        if self._episode:
            yield "episode", self._episode

    def _format_number(self, key: str) -> str:
        return f"{self._metrics[key]:.3f}  {draw_sparkline(self._history[key])}"


def _is_part(key: str) -> bool:
    return key.startswith("reward/") and key.count("/") == 1


def draw_sparkline(values: Any) -> str:
    """Draw values as blocks between the lowest and the highest.

    >>> draw_sparkline([0, 1, 2, 3.5]), draw_sparkline([2, 2])
    ('▁▃▅█', '▁▁')
    """
    low, high = min(values), max(values)
    if not high > low:  # also with NaN
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[min(int((value - low) / (high - low) * len(BLOCKS)), 7)] for value in values)


def format_time_by_stage(metrics: Mapping[str, float]) -> str:
    """Format a step's duration with the shares of its longest stages, and its tokens per second:
    sampled ones in RL, packed ones in SFT.

    >>> format_time_by_stage({"seconds/rollout": 3.0, "seconds/train": 1.0, "sampled_tokens_per_second": 250.4})
    '4.0 s: rollout 75%, train 25%; 250 tokens/s'
    """
    stages = {key.partition("/")[2]: value for key, value in metrics.items() if key.startswith("seconds/")}
    total = sum(stages.values())
    longest = sorted(stages.items(), key=lambda item: -item[1])[:MAX_STAGES]
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in longest if total and value / total >= 0.005)
    texts = [f"{total:.1f} s: {shares}"] if total else []
    speed = metrics.get("sampled_tokens_per_second", metrics.get("packed_tokens_per_second"))
    texts += [f"{speed:.0f} tokens/s"] if speed is not None else []
    return "; ".join(texts)


def describe_newest_episode(folder: Path) -> str:
    """Describe the last episode on disk of the newest RL step in one line; "" without any."""
    files = [path for path, stage, _ in list_rollout_files(folder) if stage == "rl"]
    try:
        record = json.loads(read_rollout_lines(files[-1])[-1])
        episode, score = record["episode"], record.get("score") or {}
        blocks = [block for turn in episode["turns"] for block in turn["reply"].get("blocks") or ()]
        answers = [block["body"].strip() for block in blocks if block["kind"] == BlockKind.ANSWER]
        calls = sum(block.get("call") is not None for block in blocks)
        question = " ".join(episode["task"]["question"].split())
    except (IndexError, OSError, DataError, ValueError, KeyError, TypeError):  # being written, or deleted
        return ""
    correct = score.get("correct")
    verdict = "ungraded" if correct is None else "right" if correct >= 0.5 else "wrong"
    reward = f", reward {score['value']:.3f}" if "value" in score else ""
    answer = answers[-1] if answers else episode["status"].replace("_", " ")
    return f"{verdict}{reward}, {calls} call{'s' * (calls != 1)}: {question[:80]} -> {answer[:40]}"


class WarningSummary(logging.Handler):
    """Prints each warning once; warnings that differ from it in numbers alone are counted, and listed by `close`."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console, self._counts, self._last = console, Counter[str](), dict[str, str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Print or count a warning."""
        text = record.getMessage()
        key = _NUMBER.sub("#", text)
        self._counts[key] += 1
        self._last[key] = text
        if self._counts[key] == 1:
            print_text(self._console, text)

    def close(self) -> None:
        """List the warnings that came more than once."""
        for key, count in self._counts.items():
            if count > 1:
                print_text(self._console, f"{count} warnings like the last of them: {self._last[key]}")
        self._counts.clear()
        super().close()


@contextlib.contextmanager
def summarize_warnings(console: Console) -> Iterator[None]:
    """Print the warnings of the package on a console, repeated ones once, with their number at the end."""
    handler, logger = WarningSummary(console), logging.getLogger("saccade")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
