"""Console output: side by side on a terminal, line by line in a log, and without control characters."""

import io

import pytest
from rich.console import Console

from saccade.ledger import ImageRef
from saccade.reporting.console import (
    CALL_PANEL_WIDTH,
    EpisodePrinter,
    build_call_panel,
    show_progress_lines,
    summarize_usage,
)
from saccade.types import Block, BlockKind, Call, CallFormat, Reply, ToolResult


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, legacy_windows=False)


def call(start, end, **more):
    arguments = {"start_time": start, "end_time": end, "question": "Which red?"}
    return Call(name="crop_video", arguments=arguments, call_format=CallFormat.NATIVE, **more)


def print_episode(screen):
    calls = (call(0, 16), call(16, 32), call(32, 48, error="the call is not closed"))
    think = Block(kind=BlockKind.THINK, body="\nI [b]look\x1b[2J", is_closed=True)
    results = (
        ToolResult(text="red\x07", was_executed=True, seconds=0.5),
        ToolResult(error="no such window"),
        ToolResult(error="the call is not closed"),
    )
    printer = EpisodePrinter(screen)
    printer("turn", {"turn": 0})
    printer("reply", {"turn": 0, "reply": Reply(text="", blocks=(think,))})
    printer("calls", {"turn": 0, "calls": calls})
    for index in (1, 0):
        printer("result", {"turn": 0, "index": index, "call": calls[index], "result": results[index], "child": None})
    printer("results", {"turn": 0, "results": results})
    printer.close()
    return screen.file.getvalue()


def test_log_has_a_line_per_result():
    output = print_episode(console(terminal=False)).splitlines()
    assert output[0] == "I [b]look␛[2J"
    assert output[1].startswith("  16-32 s  Which red?  ->  error: no such window")
    assert output[2].startswith("  0-16 s  Which red?  ->  red␇")
    assert output[3].endswith("the call is not closed")  # the error of the call


def test_terminal_shows_calls_side_by_side():
    output = print_episode(console(terminal=True))
    last = output[output.rindex("0-16 s") :]
    first_row = last.splitlines()[0]
    assert "16-32 s" in first_row
    assert "32-48 s" in first_row
    assert all(words in last for words in ("no such window", "0.50 s", "the call is not", "red"))
    assert "\x1b[2J" not in output
    assert "\x07" not in output


def test_panel_names_the_images_of_a_result():
    image = ImageRef(path="a.png", digest="d", time=None, width=64, height=48, box=(0, 0, 9, 9))
    zoom = Call(name="zoom_image", arguments={"left": 0.5, "top": 0}, call_format=CallFormat.NATIVE)
    for result, output in (
        (ToolResult(images=(image, image), was_executed=True), "[64x48] [64x48]"),
        (ToolResult(text="cut", images=(image,), was_executed=True), "cut [64x48]"),
        (ToolResult(was_executed=True), "(nothing)"),
    ):
        screen = console(terminal=False)
        screen.print(build_call_panel(zoom, result, 40))
        assert output in screen.file.getvalue()
        assert "zoom_image" in screen.file.getvalue()


@pytest.mark.parametrize("width", [1, 30, 500])
def test_panel_width_is_bounded(width):
    assert CALL_PANEL_WIDTH[0] <= build_call_panel(call(0, 1), None, width).width <= CALL_PANEL_WIDTH[1]


def test_progress_is_lines_in_a_log():
    screen = console(terminal=False)
    with show_progress_lines(screen) as add_task:
        update_progress = add_task("1/2 Data")
        update_progress(1, "train", 3)  # too soon for a line
        update_progress(3, "test", 3)
        update_progress(None, "done, 2 s")
        add_task("2/2 Model", 4)(4, "[loss] 0.5")
    assert screen.file.getvalue().splitlines() == [
        "1/2 Data 3/3 test",
        "1/2 Data done, 2 s",
        "2/2 Model 4/4 [loss] 0.5",
    ]


def test_remaining_time_uses_the_pace_since_the_first_update(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("saccade.reporting.console.time.monotonic", lambda: now[0])
    screen = console(terminal=False)
    with show_progress_lines(screen) as add_task:
        update_progress = add_task("eval test")
        update_progress(500, "accuracy 0.500", 1000)  # a resumed evaluation
        for done, seconds in ((500, 20.0), (501, 40.0), (510, 60.0), (700, 80.0), (1000, 120.0)):
            now[0] = 100.0 + seconds
            update_progress(done, "" if done == 700 else "accuracy 0.510")
    assert screen.file.getvalue().splitlines() == [
        "eval test 500/1000 accuracy 0.510",
        "eval test 501/1000 accuracy 0.510",  # one item is no pace
        "eval test 510/1000 accuracy 0.510, 49:00 left",
        "eval test 700/1000 2:00 left",
        "eval test 1000/1000 accuracy 0.510",
    ]


def test_remaining_time_counts_the_first_requests(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("saccade.reporting.console.time.monotonic", lambda: now[0])
    screen = console(terminal=False)
    with show_progress_lines(screen) as add_task:
        update_progress = add_task("eval test", 1000)
        for done, seconds in ((0, 0.0), (100, 100.0), (1000, 150.0)):
            now[0] = seconds
            update_progress(done, "")
    assert screen.file.getvalue().splitlines()[0] == "eval test 100/1000 15:00 left"


def test_progress_is_bars_on_a_terminal():
    screen = console(terminal=True)
    with show_progress_lines(screen) as add_task:
        add_task("1/2 [Data]")(3, "test", 4)
    assert "1/2 [Data]" in screen.file.getvalue()
    assert "3/4" in screen.file.getvalue()


def test_usage_summary(episode):
    assert summarize_usage(episode) == "1 turn, 0 calls, 100 text + 20 visual tokens unsampled, 30 sampled, 0.40 s"


@pytest.fixture
def episode():
    from saccade.ledger import Ledger
    from saccade.types import AnswerType, Episode, EpisodeStatus, Task, Turn, Usage

    task = Task(id="w", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    usage = Usage(unsampled_tokens=120, visual_tokens=20, sampled_tokens=30, seconds=0.4)
    turns = (Turn(reply=Reply(text="")),)
    return Episode(
        task=task, environment="a", ledger=Ledger(), turns=turns, status=EpisodeStatus.NO_ANSWER, usage=usage
    )
