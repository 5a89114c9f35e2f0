"""What is watched: side by side on a terminal, line by line in a log, and never an order to the terminal."""

import io

import pytest
from rich.console import Console

from saccade.ledger import Picture
from saccade.types import Block, BlockKind, Call, Form, Reply, ToolResult
from saccade.view.live import CALL_WIDTH, Watcher, lines, panel, remaining, summary


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, legacy_windows=False)


def call(start, end, **more):
    arguments = {"start_time": start, "end_time": end, "question": "Which red?"}
    return Call(name="crop_video", arguments=arguments, form=Form.TRAINED, **more)


def watched(screen):
    calls = (call(0, 16), call(16, 32), call(32, 48, error="the call is not closed"))
    think = Block(kind=BlockKind.THINK, body="\nI [b]look\x1b[2J", closed=True)
    results = (
        ToolResult(text="red\x07", executed=True, seconds=0.5),
        ToolResult(error="no such window"),
        ToolResult(error="the call is not closed"),
    )
    watcher = Watcher(screen)
    watcher("turn", {"turn": 0})
    watcher("reply", {"turn": 0, "reply": Reply(text="", blocks=(think,))})
    watcher("calls", {"turn": 0, "calls": calls})
    for index in (1, 0):
        watcher("result", {"turn": 0, "index": index, "call": calls[index], "result": results[index], "child": None})
    watcher("results", {"turn": 0, "results": results})
    watcher.close()
    return screen.file.getvalue()


def test_in_a_log_every_result_is_a_line_as_it_comes():
    said = watched(console(terminal=False)).splitlines()
    assert said[0] == "I [b]look\N{REPLACEMENT CHARACTER}[2J"
    assert said[1].startswith("  16-32 s  Which red?  ->  error: no such window")
    assert said[2].startswith("  0-16 s  Which red?  ->  red\N{REPLACEMENT CHARACTER}")
    assert said[3] == "  not run: the call is not closed"


def test_on_a_terminal_calls_stand_side_by_side():
    said = watched(console(terminal=True))
    last = said[said.rindex("0-16 s") :]
    first_row = last.splitlines()[0]
    assert "16-32 s" in first_row
    assert "32-48 s" in first_row
    assert all(words in last for words in ("no such window", "0.50 s", "the call is not", "red"))
    assert "\x1b[2J" not in said
    assert "\x07" not in said


def test_what_a_tool_showed_is_named():
    picture = Picture(path="a.png", digest="d", time=None, width=64, height=48, box=(0, 0, 9, 9))
    zoom = Call(name="zoom_image", arguments={"left": 0.5, "top": 0}, form=Form.TRAINED)
    for result, said in (
        (ToolResult(pictures=(picture, picture), executed=True), "[64x48] [64x48]"),
        (ToolResult(text="cut", pictures=(picture,), executed=True), "cut [64x48]"),
        (ToolResult(executed=True), "(nothing)"),
    ):
        screen = console(terminal=False)
        screen.print(panel(zoom, result, 40))
        assert said in screen.file.getvalue()
        assert "zoom_image" in screen.file.getvalue()


@pytest.mark.parametrize("width", [1, 30, 500])
def test_calls_are_neither_slivers_nor_bill_boards(width):
    assert CALL_WIDTH[0] <= panel(call(0, 1), None, width).width <= CALL_WIDTH[1]


def test_parts_of_a_job_are_lines_of_text_without_a_terminal():
    screen = console(terminal=False)
    with lines(screen) as begin:
        tell = begin("1/2 World")
        tell(1, "train", 3)  # too soon after the beginning to be worth a line
        tell(3, "test", 3)
        tell(None, "done, 2 s")
        begin("2/2 Model", 4)(4, "[loss] 0.5")
    assert screen.file.getvalue().splitlines() == [
        "1/2 World 3/3 test",
        "1/2 World done, 2 s",
        "2/2 Model 4/4 [loss] 0.5",
    ]


def test_a_log_says_how_long_the_rest_takes_by_the_pace_since_the_beginning(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("saccade.view.live.time.monotonic", lambda: now[0])
    screen = console(terminal=False)
    with lines(screen) as begin:
        tell = begin("eval test")
        tell(500, "accuracy 0.500", 1000)  # of an evaluation that goes on
        for done, seconds in ((500, 20.0), (510, 60.0), (700, 80.0), (1000, 120.0)):
            now[0] = 100.0 + seconds
            tell(done, "" if done == 700 else "accuracy 0.510")
    assert screen.file.getvalue().splitlines() == [
        "eval test 500/1000 accuracy 0.510",
        "eval test 510/1000 accuracy 0.510, 49:00 left",
        "eval test 700/1000 2:00 left",
        "eval test 1000/1000 accuracy 0.510",
    ]
    assert remaining(1, 3601, (0, 0.0), 1.0) == "1:00:00 left"
    assert remaining(1, None, (0, 0.0), 1.0) == ""


def test_parts_of_a_job_are_bars_on_a_terminal():
    screen = console(terminal=True)
    with lines(screen) as begin:
        begin("1/2 [World]")(3, "test", 4)
    assert "1/2 [World]" in screen.file.getvalue()
    assert "3/4" in screen.file.getvalue()


def test_a_summary_counts_everything_once(watched_episode):
    assert summary(watched_episode) == "1 turns, 0 calls, 100 text + 20 visual tokens read, 30 sampled, 0.40 s"


@pytest.fixture
def watched_episode():
    from saccade.ledger import Ledger
    from saccade.types import End, Episode, Kind, Task, Turn, Usage

    task = Task(id="w", question="?", media=(), kind=Kind.OPEN, gold="red")
    usage = Usage(prompt_tokens=120, visual_tokens=20, sampled_tokens=30, seconds=0.4)
    turns = (Turn(reply=Reply(text="")),)
    return Episode(task=task, agent="a", ledger=Ledger(), turns=turns, end=End.NO_ANSWER, usage=usage)
