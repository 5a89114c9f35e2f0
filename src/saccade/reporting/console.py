"""Watching: a job as one line per part, and an attempt at a question while it happens, on a terminal or in a log.

What models and files say is shown as text, never as markup, and without control characters.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from saccade.types import BlockKind, Call, Episode, Reply, ToolResult

QUIET_SECONDS = 10.0  # between two lines of progress where there is no terminal
CALL_WIDTH = (20, 44)  # least and most columns of a terminal


class Advance(Protocol):
    """How work tells how far it is."""

    def __call__(self, done: int | None, remark: str, total: int | None = None) -> None:
        """What is done (None: all of it), with a remark, and the total where it wasn't known before."""


@contextlib.contextmanager
def lines(console: Console) -> Iterator[Callable[..., Advance]]:
    """A line with a bar per part, begun by `begin(label, total)`; without a terminal a line of text now and then.

    Both say how long the rest takes, by what was done since the first word of it.
    """
    columns = (BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn(compact=True, elapsed_when_finished=True))
    texts = [TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[remark]")]
    with Progress(texts[0], *columns, texts[1], console=console, disable=not console.is_terminal) as bar:

        def begin(label: str, total: int | None = None) -> Advance:
            task, told, known = bar.add_task(label, total=total, remark=""), time.monotonic(), total
            start: tuple[int, float] | None = None  # what was done already, when the first word of it came

            def advance(done: int | None, remark: str, total: int | None = None) -> None:
                nonlocal told, known, start
                known, now = total or known, time.monotonic()
                # Of an evaluation that goes on, most may have been done before: that says nothing of the pace.
                start = start or (done or 0, now)
                ended = done is None or done == known
                bar.update(task, completed=(known or 1) if done is None else done, total=known or 1, remark=remark)
                if not console.is_terminal and (ended or now - told > QUIET_SECONDS):
                    told = now
                    count = "" if done is None else f"{done}/{known} "
                    left = "" if ended else remaining(done or 0, known, start, now)
                    say(console, f"{label} {count}{', '.join(filter(None, (remark, left)))}".rstrip())

            return advance

        yield begin


def remaining(done: int, total: int | None, start: tuple[int, float], now: float) -> str:
    """How long the rest takes at the pace since `start`, which is what was done then and when; "" while nobody knows.

    >>> remaining(30, 50, (20, 100.0), 160.0)
    '2:00 left'
    """
    gained, seconds = done - start[0], now - start[1]
    if total is None or gained <= 0:
        return ""
    whole = math.ceil((total - done) * seconds / gained)
    hours, minutes = divmod(whole // 60, 60)
    clock = f"{hours}:{minutes:02}" if hours else f"{minutes}"
    return f"{clock}:{whole % 60:02} left"


def say(console: Console, text: str, style: str = "") -> None:
    """One piece of plain text, not cut to the terminal's width."""
    console.print(Text(clean(text), style=style), soft_wrap=True)


def clean(text: str) -> str:
    r"""The text without anything that could move a cursor.

    >>> clean("red\x1b[2J")
    'red�[2J'
    """
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)


# ---- one attempt ---------------------------------------------------------------------------------------------------


class Watcher:
    """Shows an episode's events as they come; give it as `watch` of a context, and `close` it at the end.

    On a terminal the calls of a turn stand side by side and fill as their sub-agents answer; in a log each result is a
    line of its own.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._panels: list[Panel] = []
        self._width = 0
        self._said: set[int] = set()

    def __call__(self, event: str, data: Mapping[str, Any]) -> None:
        """Be told of an event; see agents/_loop.py for what there is."""
        if event == "reply":
            self._reply(data["reply"])
        elif event == "calls":
            self._calls(data["calls"])
        elif event == "result":
            self._result(data["index"], data["call"], data["result"])
        elif event == "results":
            self._refused(data["results"])
            self.close()

    def close(self) -> None:
        """Leave the screen as it is."""
        if self._live is not None:
            self._live.stop()
        self._live = None

    def _reply(self, reply: Reply) -> None:
        for block in reply.blocks:
            if block.kind in (BlockKind.THINK, BlockKind.TEXT, BlockKind.STRAY) and block.body.strip():
                say(self.console, block.body.strip(), style="italic cyan")

    def _calls(self, calls: tuple[Call, ...]) -> None:
        self._said, self._width = set(), self.console.width // max(1, len(calls)) - 1
        self._panels = [panel(call, None, self._width) for call in calls]
        if self.console.is_terminal and calls:
            self._live = Live(self._side_by_side(), console=self.console, auto_refresh=False)
            self._live.start(refresh=True)

    def _result(self, index: int, call: Call, result: ToolResult) -> None:
        self._said.add(index)
        self._panels[index] = panel(call, result, self._width)
        # A log has no cursor to go back with: there each result is a line.
        if self._live is not None:
            self._live.update(self._side_by_side(), refresh=True)
        else:
            title, question = described(call)
            said = f"error: {result.error}" if result.error is not None else shown(result)
            say(self.console, f"  {title}  {question}  ->  {said}  ({result.seconds:.2f} s)")

    def _refused(self, results: tuple[ToolResult, ...]) -> None:
        """Calls that were not run told nobody: they are shown when the turn is over."""
        for index, result in enumerate(results):
            if index not in self._said and result.error is not None:
                if self._live is not None:
                    self._panels[index].renderable = Text(clean(result.error), style="red")
                    self._live.update(self._side_by_side(), refresh=True)
                else:
                    say(self.console, f"  not run: {result.error}")

    def _side_by_side(self) -> RenderableType:
        return Columns(self._panels, equal=True)


def panel(call: Call, result: ToolResult | None, width: int) -> Panel:
    """A call: its window, its question, and what came back, if anything did yet; about `width` columns wide."""
    title, question = described(call)
    body = Text(clean(question), style="bold")
    if result is None:
        body.append("\n…", style="not bold dim")
    elif result.error is not None:
        body.append(f"\n{clean(result.error)}", style="not bold red")
    else:
        body.append(f"\n{clean(shown(result)) or '(nothing)'}", style="not bold green")
    taken = None if result is None else f"{result.seconds:.2f} s"
    least, most = CALL_WIDTH
    return Panel(body, title=Text(clean(title)), subtitle=taken, width=min(max(width, least), most))


def shown(result: ToolResult) -> str:
    """What came back: the text, and the size of each picture."""
    return " ".join([*filter(None, [result.text]), *(f"[{each.width}x{each.height}]" for each in result.pictures)])


def described(call: Call) -> tuple[str, str]:
    """The window (or else the tool) of a call, and what it asks.

    >>> from saccade.types import Form
    >>> arguments = {"start_time": 0, "end_time": 16.0, "question": "Which red?"}
    >>> described(Call(name="crop_video", arguments=arguments, form=Form.TRAINED))
    ('0-16 s', 'Which red?')
    """
    rest = dict(call.arguments)
    start, end = rest.pop("start_time", None), rest.pop("end_time", None)
    question = str(rest.pop("question", ""))
    asked = [question, *(f"{key}: {value}" for key, value in rest.items())]
    window = f"{_number(start)}-{_number(end)} s" if start is not None and end is not None else call.name or "a call"
    return window, "\n".join(filter(None, asked))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def summary(episode: Episode) -> str:
    """What an episode cost, in one line."""
    usage = episode.usage
    calls = len(episode.results)
    return (
        f"{len(episode.turns)} turns, {calls} calls, {usage.prompt_tokens - usage.visual_tokens} text + "
        f"{usage.visual_tokens} visual tokens read, {usage.sampled_tokens} sampled, {usage.seconds:.2f} s"
    )
