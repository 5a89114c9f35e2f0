"""Every figure of the README's results and of the experiments page is that of a committed result file."""

import importlib
import itertools
import json
import re
from pathlib import Path
from statistics import median

import pytest

from saccade.metrics.statistics import compute_seed_interval

ROOT = Path(__file__).parents[1]
NUMBER = r"[+-]?\d+\.\d\d"
INTERVAL = re.compile(rf"(?<![\w.])({NUMBER})\s+([\[{{])({NUMBER}),\s+({NUMBER})[\]}}]")
FIGURE = re.compile(rf"(?<![\w.])({NUMBER})(?!\d|\.\d)")
VERSION = re.compile(r"(?:Python|vLLM|OpenEnv|torch|transformers) [\d.]+")
EXPERIMENTS = (ROOT / "docs" / "experiments" / "README.md").read_text()
SECTIONS = {text.partition(":")[0]: text for text in re.split(r"^## ", EXPERIMENTS, flags=re.M)[1:]}
# Figures without a committed file: those of a publication, and one whose values by task were not kept.
UNSOURCED = {"anchoring": {"0.13", "0.41"}, "turns": {"+0.10 [+0.01, +0.20]"}}


@pytest.fixture
def collect_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("collect_results")


def load_demo():
    return json.loads((ROOT / "docs" / "results" / "demo.json").read_text())


def find_unsourced_in_readme(text, demo, table):
    """Return the figures of the README that the results of the demo don't hold."""
    values = [value for run in demo["other_runs"] for figures in run["values"] for value in figures]
    gains = [gain for gain, *_ in demo["rows"]["gain of RL, sampled, paired"]]
    greedy = zip(demo["rows"]["after SFT, greedy"], demo["rows"]["after RL, greedy"], strict=True)
    values += [*gains, median(after[0] - before[0] for before, after in greedy)]
    known = {f"{value:.2f}" for value in values}
    return [figure for figure in FIGURE.findall(VERSION.sub("", text.replace(table, ""))) if figure not in known]


def test_figures_of_the_readme(collect_results):
    readme, demo = (ROOT / "README.md").read_text(), load_demo()
    table = collect_results.format_table(demo["rows"])
    assert table in readme
    assert f"{demo['tasks']} held-out questions about {demo['clips']}" in " ".join(readme.split())
    assert find_unsourced_in_readme(readme, demo, table) == []
    assert find_unsourced_in_readme(readme + "\nIt gains 0.31.", demo, table) == ["0.31"]


def list_estimates(tables):
    """Yield every estimate of an ablation, and the differences between its variants over seeds."""
    for row in tables:
        yield from (estimate for estimate in row.values() if isinstance(estimate, dict))
    for first, second in itertools.permutations(tables, 2):
        names = ("table", "condition", "slice")
        if all(first.get(name) == second.get(name) for name in names) and first["after"] and second["after"]:
            pairs = zip(first["after"]["seed_means"], second["after"]["seed_means"], strict=False)
            deltas = [one - other for one, other in pairs]
            mean = sum(deltas) / len(deltas)
            yield {"mean": mean, "seed_interval": compute_seed_interval(deltas), "seed_means": deltas}


def find_unsourced(text, estimates):
    """Return the intervals and figures of a section that belong to no estimate."""
    intervals, means = set(), set()
    for estimate in estimates:
        means |= {abs(round(value, 2)) for value in (estimate["mean"], *estimate["seed_means"])}
        # The interval over clips of present runs was one over tasks in those of older versions.
        of_clips = estimate.get("clip_interval") or estimate.get("task_interval")
        for bracket, bounds in (("[", of_clips), ("{", estimate.get("seed_interval"))):
            if bounds:
                intervals.add((abs(round(estimate["mean"], 2)), bracket, *(round(bound, 2) for bound in bounds)))
    unsourced = []
    for match in INTERVAL.finditer(text):
        mean, bracket, *bounds = match.groups()
        if (abs(float(mean)), bracket, *map(float, bounds)) not in intervals:  # "0.01 lower" has no sign
            unsourced.append(" ".join(match[0].split()))
    rest = INTERVAL.sub("", text)
    return unsourced + [figure for figure in FIGURE.findall(rest) if abs(float(figure)) not in means]


@pytest.mark.parametrize("name", SECTIONS)
def test_figures_of_experiments(name):
    results = json.loads((ROOT / "docs" / "experiments" / name / "results.json").read_text())
    estimates = list(list_estimates(results["tables"]))
    assert set(find_unsourced(SECTIONS[name], estimates)) <= UNSOURCED.get(name, set())
    wrong = "0.31 {0.29, 0.37} and 7.77"
    assert find_unsourced(wrong, estimates) == ["0.31 {0.29, 0.37}", "7.77"]


def test_every_report_has_its_section():
    assert {path.parent.name for path in ROOT.glob("docs/experiments/*/results.json")} == set(SECTIONS)


def test_figures_of_the_coverage_table():
    rows = json.loads((ROOT / "docs" / "results" / "interval_coverage.json").read_text())["rows"]
    text = (ROOT / "docs" / "metrics.md").read_text()
    for row in rows:
        clusters, *rates = row.values()
        assert f"| {clusters} | {' | '.join(f'{rate:.2f}' for rate in rates)} |" in text
        assert min(row[kind] for kind in ("binary", "skewed", "difference", "rare loss")) >= 0.9
        assert row["most false alarms"] <= 0.05
