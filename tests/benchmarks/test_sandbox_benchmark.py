"""The sandbox benchmark runs at a size that takes seconds; its soak finds no leaks."""

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest

from saccade.sandbox import ForkServerClient

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("sandbox")
    for name in ("sandbox", "_common"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("starts_interpreters", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_every_figure_is_measured(benchmark, monkeypatch, tmp_path, starts_interpreters):
    if not starts_interpreters:  # they take most of the time
        monkeypatch.setattr(benchmark, "run_fresh", lambda code, timeout=30: None)
    out = tmp_path / "figures.json"
    benchmark.main(["--rounds", "1", "--alive", "6", "--sandboxes", "10", "--calls", "3", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    figures = {row["figure"]: row["p50"] for row in rows}
    assert figures["ready, with an image of 1000x1000"] > 0
    assert figures["interrupted after its limit, state kept"] > 0
    assert figures["killed after its limit"] > 1500
    assert figures["the host killed, until all are gone"] > 0
    alternatives = {row["figure"]: (row["fork"], row["fresh"]) for row in rows}
    for figure in ("calls per second of 10, no runaways", "calls per second of 10, one in ten a runaway"):
        assert figures[figure] > 0
        assert min(alternatives[figure]) > 0
    assert min(alternatives["ready, with an image of 1000x1000"]) > 0
    assert alternatives["opening one of 6 alive at once"][0] > 0
    assert alternatives["MB of an idle one, unshared"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disabled_layers", "episodes"),
    [
        ((), 12),
        pytest.param(("namespaces",), 12, marks=pytest.mark.soak),
        pytest.param((), 2000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
def test_a_soak_finds_no_leaks(benchmark, disabled_layers, episodes):
    server = ForkServerClient.start(disabled_layers=disabled_layers)
    growth = asyncio.run(benchmark.soak(server, episodes))
    server.close()
    assert growth["calls"] == 5 * episodes
    assert growth["frames"] > 0
    assert (growth["workers"], growth["descriptors"], growth["folders"]) == (0, 0, 0)
    assert growth["host MB"] < 200
    assert growth["zygote MB"] < 20
