"""Examples run, and do what they say."""

import asyncio
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_rl_in_one_page_earns_more_at_its_end(capsys):
    path = FOLDER / "rl_in_one_page.py"
    assert len(path.read_text().splitlines()) < 120
    rewards = asyncio.run(runpy.run_path(str(path))["main"](cold=100, steps=12))
    assert len(rewards) == 12
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("cold start: 100 steps, loss ")
    assert [line.split(":")[0] for line in said[1:]] == [f"step {number}" for number in range(1, 13)]
