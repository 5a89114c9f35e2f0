"""The sandbox's benchmark runs at a size that takes seconds; its soak finds nothing left behind."""

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest

from saccade.tools._sandbox.server import Server

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def sandbox(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("sandbox")
    for name in ("sandbox", "_common"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_every_figure_is_measured(sandbox, tmp_path):
    out = tmp_path / "figures.json"
    sandbox.main(["--rounds", "1", "--alive", "6", "--boxes", "10", "--calls", "3", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    figures = {row["figure"]: row["p50"] for row in rows}
    assert figures["ready, with a picture of 1000x1000"] > 0
    assert figures["stopped after its limit, state kept"] > 0
    assert figures["killed after its limit"] > 1500
    assert figures["the host killed, until all are gone"] > 0
    beside = {row["figure"]: (row["fork"], row["fresh"]) for row in rows}
    for figure in ("calls per second of 10, all well", "calls per second of 10, one in ten runs away"):
        assert figures[figure] > 0
        assert min(beside[figure]) > 0
    assert min(beside["ready, with a picture of 1000x1000"]) > 0
    assert beside["opening one of 6 alive at once"][0] > 0
    assert beside["MB of an idle one, unshared"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("without", [(), ("namespaces",)])
def test_a_soak_leaves_nothing_behind(sandbox, without):
    server = Server.start(without=without)
    grown = asyncio.run(sandbox.soak(server, 12))
    server.close()
    assert grown["calls"] == 5 * 12
    assert grown["frames"] > 0
    assert (grown["guests"], grown["descriptors"], grown["folders"]) == (0, 0, 0)
    assert grown["host MB"] < 200
    assert grown["zygote MB"] < 20
