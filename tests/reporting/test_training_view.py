"""The view of a training: all numbers on a terminal, plain lines in a log, repeated warnings once."""

import io
import logging

from page_cases import NASTY
from rich.console import Console
from viewer_cases import build_rollouts, make_run, write_rollouts

from saccade.reporting.training_view import TrainingView, describe_newest_episode, show_training, summarize_warnings

METRICS = {
    "reward": 1.25,
    "accuracy": 0.5,
    "reward/accuracy": 0.5,
    "calls": 4.0,
    "calls/executed": 3.0,
    "format_compliance": 0.75,
    "seconds/rollout": 3.0,
    "seconds/train": 1.0,
    "sampled_tokens_per_second": 250.0,
}


def build_console(*, is_terminal, width=100):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=width, color_system=None, legacy_windows=False)


def train(console, folder, *, steps=3):
    with show_training(console, "rl", steps, folder, is_graded=True) as (on_step, on_validation):
        for step in range(1, steps + 1):
            on_step(step, METRICS | {"step": step, "reward": 1.0 + step})
            on_validation(step, {"greedy/episodes": 8, "greedy/accuracy": 0.5})
    return console.file.getvalue()


def test_a_terminal_shows_every_number_and_the_newest_episode(tmp_path):
    folder = make_run(tmp_path / "a")
    output = train(build_console(is_terminal=True), folder)
    last = output[output.rindex("3/3") :]
    for text in ("4.000", "▁▅█", "accuracy", "75% executed", "format 75%", "rollout 75%", "250 tokens/s", "0.500"):
        assert text in last, text
    assert "What is it, 1?" in last
    assert "after step 3: greedy" in last


def test_a_log_has_plain_lines(tmp_path):
    output = train(build_console(is_terminal=False), tmp_path)
    assert "\x1b" not in output
    assert [line for line in output.splitlines() if line.startswith("rl 3/3 reward 4.000")]
    assert len(output.splitlines()) == 4  # the last step and three validations


def test_lines_are_as_wide_as_the_terminal_and_hold_no_control_characters(tmp_path):
    records = build_rollouts(1, "clip.mp4", groups=1, size=1)
    object.__setattr__(records[0].episode.task, "question", NASTY)
    write_rollouts(tmp_path, 1, records)
    assert describe_newest_episode(tmp_path)
    view = TrainingView("rl", 10, tmp_path, is_graded=True)
    for width in (30, 80):
        console = build_console(is_terminal=True, width=width)
        view.add_step(1, METRICS)
        console.print(view.render(width))
        output = console.file.getvalue()
        assert max(map(len, output.splitlines())) <= width
        assert not {"\x07", "\u202e", "\ud800"} & set(output)


def test_no_episode_is_described_without_files(tmp_path):
    assert describe_newest_episode(tmp_path) == ""
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "rl-000001.jsonl.gz").write_bytes(b"no gzip")
    assert describe_newest_episode(tmp_path) == ""


def test_repeated_warnings_are_counted():
    console, logger = build_console(is_terminal=False), logging.getLogger("saccade.test")
    with summarize_warnings(console):
        for step in range(5):
            logger.warning("step %d has few groups", step)
        logger.warning("another")
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["step 0 has few groups", "another"]
    assert len(lines) == 3
    assert "5 warnings" in lines[2]
    assert "step 4" in lines[2]
