"""Texts from outside can't control the terminal, wherever they come from."""

import io

import pytest
from chat_server import completion, server
from commands import bad, good, run
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from saccade.cli.terminal import SafeConsole
from saccade.metrics.tables import Table as TextTable
from saccade.reporting.report import Report, ReportSection, format_markdown

NASTY = "red\x1b]0;title\x07\x1b[2J\x9b31m\u202eder\u2066\rgone\x08\x7f\udc00"
CONTROLS = set("\x00\x07\x08\x0d\x1b\x7f\x9b\u202e\u2066\udc00")


def build_table():
    table = Table(NASTY.replace("\x07", ""), title=Text(NASTY))
    table.add_row(escape(NASTY))
    return table


@pytest.mark.parametrize("renderable", [escape(NASTY), Text(NASTY, style="bold"), build_table()], ids=type)
def test_the_console_prints_no_control_characters(renderable):
    console = SafeConsole(file=io.StringIO(), width=200)
    console.print(renderable, soft_wrap=True)
    printed = console.file.getvalue()
    assert CONTROLS.isdisjoint(printed), repr(printed)
    assert "red␛]0;title" in printed


def test_progress_shows_no_control_characters():
    console = SafeConsole(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    plain = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    for target, text in ((console, NASTY), (plain, "red")):
        with Progress(console=target) as progress:
            progress.add_task(text, total=1)
    # rich's own control codes, of cursor and lines, stay.
    assert "\x1b[2J" in NASTY
    assert "\x1b[2J" not in console.file.getvalue()
    assert console.file.getvalue().count("\x1b") == plain.file.getvalue().count("\x1b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", f"runs/{NASTY[:-1]}"],
        ["recipes", "show", NASTY[:-1]],
        ["rl", "tiny/base", f"rl.{NASTY[:-1]}=1"],
        ["report", NASTY[:-1]],
        ["data", "check", NASTY[:-1]],
    ],
)
def test_names_in_errors_have_no_control_characters(arguments):
    result = run(*arguments)
    assert result.exit_code == 1
    assert CONTROLS.isdisjoint(result.output), repr(result.output)


def test_answers_and_errors_of_servers_have_no_control_characters(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    ask = ["ask", "Which?", "--image", tmp_path / "a.png", "--recipe", "tiny/zoom_image"]
    ask += ["environment.settings.force_think=false", "engine.settings.max_retries=0"]
    text = f"<think>{NASTY[:-1]}</think><answer>{NASTY[:-1]}</answer>"
    with server(lambda number, body: completion(text)) as served:
        output = good(*ask, "--model", served.url)
    assert CONTROLS.isdisjoint(output), repr(output)
    assert "Answer: red␛" in output
    with server(lambda number, body: (400, NASTY[:-1])) as served:
        error = bad(*ask, "--model", served.url)
    assert CONTROLS.isdisjoint(error), repr(error)


def test_markdown_reports_have_no_control_characters_and_no_links():
    link = f"[x](javascript:alert(1)) <javascript:alert(1)> <b>{NASTY}"
    table = TextTable(title=link, header=(link,), rows=((link,),))
    report = Report(
        kind="run",
        title=link,
        warnings=(link,),
        statements={link: link},
        metadata={link: link},
        sections=(ReportSection(title=link, notes=(link,), tables=(table,)),),
    )
    text = format_markdown(report)
    assert CONTROLS.isdisjoint(text), repr(text)
    assert "](" not in text.replace("\\](", "")
    assert "<" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["NASTY"],
        ["--NASTY"],
        ["doctor", "--NASTY"],
        ["recipes", "NASTY"],
        ["model", "tiny", "a", "NASTY"],
    ],
    ids=" ".join,
)
def test_usage_errors_show_no_control_characters(arguments):
    words = [word.replace("NASTY", "red\x1b]0;title\x07\x9b31m\u202eder\u2066\rgone") for word in arguments]
    done = run(*words)
    assert done.exit_code == 2
    assert "red" in done.stderr
    assert CONTROLS.isdisjoint(done.stdout + done.stderr), repr(done.stderr)
