"""Every figure of the README's results and of the experiments page is that of a committed result file.

docs/results/figures.json lists, for each section, its figures in order, each with its source in the section's file:

    ["0.23 {-0.00, 0.46}", "TABLE | CONDITION | VARIANT | after"]       of docs/experiments/NAME/results.json
    ["+0.06 {-0.02, +0.15}", "TABLE | CONDITION | VARIANT − OTHER | after"]   a difference, paired by seed
    ["0.66", "other_runs/0/values/0"]                                   of docs/results/demo.json
    ["+0.69 [+0.59, +0.77]", "deciding/cue 0/difference"]                   of docs/results/deciding.json
    ["0.58 [0.49, 0.67]", "64 × 2, seed 1/4x/accuracy"]                 of docs/results/scale.json
    ["0.04", "rows/after RL, greedy/1/0 − rows/after SFT, greedy/1/0"]  a difference
    ["0.41", "published: …"], ["38", "setting: …"], ["0.78", "not kept: …"]     of no run, or of one without a file
"""

import functools
import importlib
import json
import math
import re
from pathlib import Path
from statistics import fmean

import pytest

from saccade.metrics.statistics import DIFFERENCE_BOUNDS, compute_interval, compute_seed_interval

ROOT = Path(__file__).parents[1]
NUMBER = r"[+-]?\d+\.\d+"
FIGURE = re.compile(
    rf"(?<![\w.])({NUMBER})(?:\s+[\[{{]({NUMBER}),\s+({NUMBER})[\]}}])?(?!\d|\.\d|e-)"
    r"|(?<![\w.-])\d+(?![\w.]*\w)(?!-)"
)
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")  # settings and links hold no figures
WITHOUT_FILE = ("published: ", "setting: ", "not kept: ")
TRACES = json.loads((ROOT / "docs" / "results" / "figures.json").read_text())
EXPERIMENTS = (ROOT / "docs" / "experiments" / "README.md").read_text()
SECTIONS = {text.partition(":")[0]: text for text in re.split(r"^## ", EXPERIMENTS, flags=re.M)[1:]}


@pytest.fixture
def collect_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("collect_results")


def list_figures(text):
    """Return the figures of a text in order, with single blanks: 0.23 {-0.00, 0.46}."""
    return [" ".join(match[0].split()) for match in FIGURE.finditer(CODE.sub(" ", text))]


def is_value(text, value, *, can_drop_sign=True):
    """Return whether a number of the text is the value, rounded to as many decimals; prose often drops the sign."""
    rounded = float(f"{value:.{len(text.partition('.')[2])}f}")
    return float(text) == (abs(rounded) if can_drop_sign and text[0] not in "+-" else rounded)


def is_estimate(figure, values):
    """Return whether a figure, which may have an interval, is a mean or [mean, low, high]."""
    mean, *interval = re.findall(r"[+-]?\d+(?:\.\d+)?", figure)
    known = [values] if isinstance(values, int | float) else values
    pairs = zip(interval, known[1:], strict=True) if interval else ()
    return is_value(mean, known[0]) and all(is_value(text, value, can_drop_sign=False) for text, value in pairs)


def find_errors(text, trace, lookup):
    """Return how a text differs from its trace: a figure without an entry, or an entry whose source has another value.

    `lookup` returns the value of a figure's source, [mean, low, high] if the figure has an interval.
    """
    figures = list_figures(text)
    errors = [
        f"{figure} is not in the trace, which has {entry}"
        for figure, (entry, _) in zip(figures, trace, strict=False)
        if figure != entry
    ]
    errors += [f"{len(figures)} figures, {len(trace)} in the trace"] if len(figures) != len(trace) else []
    for figure, source in trace:
        if not source.startswith(WITHOUT_FILE) and not is_estimate(figure, lookup(source, figure)):
            errors.append(f"{figure} is not {source}")
    return errors


# ---- the README ----------------------------------------------------------------------------------------------------


def load_demo():
    return json.loads((ROOT / "docs" / "results" / "demo.json").read_text())


def look_up_demo(source, figure):
    if " − " in source:
        after, before = (look_up_demo(part, figure) for part in source.split(" − "))
        return after - before
    value, path = load_demo(), source
    if source.startswith("deciding/"):
        entries = json.loads((ROOT / "docs" / "results" / "deciding.json").read_text())
        value = {f"{entry['task']} {entry['seed']}": entry for entry in entries}
        path = source.removeprefix("deciding/")
    for part in path.split("/"):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def read_results(collect_results):
    """Return the README's results without its table, which is generated from the file."""
    readme, table = (ROOT / "README.md").read_text(), collect_results.format_table(load_demo()["rows"])
    assert table in readme
    return readme.replace(table, "").partition("## Results")[2].partition("\n## ")[0]


def test_figures_of_the_readme(collect_results):
    assert find_errors(read_results(collect_results), TRACES["README.md"], look_up_demo) == []


# ---- the sizes of the model ----------------------------------------------------------------------------------------

SCALE, LONGER_SFT = (
    json.loads((ROOT / "docs" / "results" / name).read_text()) for name in ("scale.json", "scale_450_sft_steps.json")
)


@pytest.fixture
def model_scale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("model_scale")


def list_scale_entries():
    entries = {f"{entry['hidden_size']} × {entry['num_layers']}, seed {entry['seed']}": entry for entry in SCALE}
    return entries | {f"450 steps of SFT, seed {entry['seed']}": entry for entry in LONGER_SFT}


def look_up_scale(find_step, source, figure):
    if source.startswith("seeds of "):  # [mean, low, high]
        label, _, key = source.removeprefix("seeds of ").partition("/")
        gains = [entry[key][0] for name, entry in list_scale_entries().items() if name.startswith(f"{label}, seed ")]
        return [fmean(gains), *compute_seed_interval(gains)]
    value = list_scale_entries()
    if source.endswith("/step of 0.9"):
        return find_step(value[source.partition("/")[0]]["sampled_accuracy"], 0.9)
    for part in source.split("/"):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value / 1e6 if source.endswith("/parameters") else value


def read_scale(model_scale):
    """Return the page on sizes without its tables, which are generated from the file."""
    text = (ROOT / "docs" / "experiments" / "scale.md").read_text()
    for table in (model_scale.format_sizes(SCALE), *map(model_scale.format_runs, (SCALE, LONGER_SFT))):
        assert table in text
        text = text.replace(table, "")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def test_figures_of_the_page_on_sizes(model_scale):
    lookup = functools.partial(look_up_scale, model_scale.find_step)
    assert find_errors(read_scale(model_scale), TRACES["scale.md"], lookup) == []


def test_runs_of_several_sizes_differ_in_size_and_seed_alone():
    for entries, num_sft_steps in ((SCALE, 150), (LONGER_SFT, 450)):
        assert len({(entry["parameters"], entry["seed"]) for entry in entries}) == len(entries)
        settings = [{**entry["settings"], "tasks": entry["tasks"], "clips": entry["clips"]} for entry in entries]
        assert all(each == {**settings[0], "sft.steps": num_sft_steps} for each in settings)
    for entry in SCALE + LONGER_SFT:
        assert entry["tasks"] == entry["clips"] == entry["settings"]["synthetic.test"]
        for name, (first, second) in {"gain_1x": ("before", "1x"), "gain_4x": ("before", "4x")}.items():
            assert entry[name][0] == pytest.approx(entry[second]["accuracy"][0] - entry[first]["accuracy"][0])
        assert entry["gain_1x_to_4x"][0] == pytest.approx(entry["gain_4x"][0] - entry["gain_1x"][0])


def test_the_plot_of_the_page_on_sizes_is_that_of_the_file(model_scale):
    plots = model_scale.draw(SCALE).decode(), (ROOT / "docs" / "images" / "scale.svg").read_text()
    drawn, committed = (re.findall(r'<path d="[^"]*"', text) for text in plots)
    assert drawn == committed


# ---- the experiments -----------------------------------------------------------------------------------------------


@functools.cache
def load_results(name):
    return json.loads((ROOT / "docs" / "experiments" / name / "results.json").read_text())


def look_up_experiment(name, source, figure):
    results = load_results(name)
    if source == "seeds":
        return results["ablation"]["seeds"]
    if source == "tasks of a seed":
        # Some tables are of a part of the tasks.
        estimates = [row["after"] for row in results["tables"] if row["after"]]
        return max(estimate["num_tasks"] / len(estimate["seed_means"]) for estimate in estimates)
    table, condition, variant, *rest = source.split(" | ")
    seed = int(rest.pop().removeprefix("seed ")) if rest[-1].startswith("seed ") else None
    column = rest.pop()
    names = variant.split(" − ")
    estimates = [
        row[column]
        for variant_name in names
        for row in results["tables"]
        if (row["table"], row["condition"], row["variant"], [row[key] for key in ("slice",) if key in row])
        == (table, condition, variant_name, rest)
    ]
    assert len(estimates) == len(names), f"{name}: {source} is {len(estimates)} rows"
    means = [estimate["seed_means"] for estimate in estimates]
    if seed is not None:
        return means[0][seed]
    if len(means) == 2:
        deltas = [first - second for first, second in zip(*means, strict=True)]
        mean, by_seed, over_clips = fmean(deltas), compute_seed_interval(deltas), None
    else:
        # The interval over clips of present runs was one over tasks in those of older versions.
        (estimate,) = estimates
        over_clips = estimate.get("clip_interval") or estimate.get("task_interval")
        mean, by_seed = estimate["mean"], estimate.get("seed_interval")
    interval = by_seed if "{" in figure else over_clips if "[" in figure else ()
    scale = 100 if figure.isdecimal() and "Share" in table else 1  # a percentage
    return [scale * mean, *interval]


@pytest.mark.parametrize("name", SECTIONS)
def test_figures_of_experiments(name):
    assert find_errors(SECTIONS[name], TRACES[name], functools.partial(look_up_experiment, name)) == []


def test_every_report_has_its_section():
    run = {name for name, text in SECTIONS.items() if "Seen: not run yet." not in text}
    assert {path.parent.name for path in ROOT.glob("docs/experiments/*/results.json")} == run
    assert set(TRACES) == {*SECTIONS, "README.md", "scale.md"}


def test_every_altered_digit_is_an_error(collect_results, model_scale):
    texts = SECTIONS | {"README.md": read_results(collect_results), "scale.md": read_scale(model_scale)}
    lookups = {"README.md": look_up_demo, "scale.md": functools.partial(look_up_scale, model_scale.find_step)}
    for name, text in texts.items():
        trace = TRACES[name]
        lookup = lookups.get(name) or functools.partial(look_up_experiment, name)
        hidden = CODE.sub(lambda match: " " * len(match[0]), text)
        for match in FIGURE.finditer(hidden):
            digits = [match.start() + i for i, character in enumerate(match[0]) if character.isdigit()]
            for index in (digits[0], digits[-1]):
                altered = f"{text[:index]}{(int(text[index]) + 1) % 10}{text[index + 1 :]}"
                assert list_figures(altered) != [figure for figure, _ in trace], f"{name}: {match[0]}"
        # An entry that is altered together with the text disagrees with its source.
        for index, (figure, source) in enumerate(trace):
            if not source.startswith(WITHOUT_FILE):
                last = max(i for i, character in enumerate(figure) if character.isdigit())
                wrong = f"{figure[:last]}{(int(figure[last]) + 1) % 10}{figure[last + 1 :]}"
                assert not is_estimate(wrong, lookup(source, wrong)), f"{name}: entry {index} {wrong} of {source}"


# ---- intervals -----------------------------------------------------------------------------------------------------


def test_figures_of_the_coverage_table():
    results = json.loads((ROOT / "docs" / "results" / "interval_coverage.json").read_text())
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert rows == [
        f"| {clusters} | {' | '.join(f'{rate:.2f}' for rate in rates)} |"
        for clusters, *rates in (row.values() for row in results["rows"])
    ]
    for row in results["rows"]:
        assert min(row[kind] for kind in ("binary", "skewed", "difference", "rare loss")) >= 0.9
        assert row["most false alarms"] <= 0.05
    designs = results["coverage by design"].values()
    by_clusters = dict(zip(results["clusters"], zip(*designs, strict=True), strict=True))
    for row in results["rows"]:
        kinds = (row[kind] for kind in ("binary", "skewed", "difference", "rare loss"))
        assert min(by_clusters[row["clusters"]]) == min(kinds)
    assert f"{int(results['machine']['repeats']):,} repeats" in text


def test_figures_of_the_text_on_intervals():
    text = " ".join((ROOT / "docs" / "metrics.md").read_text().split())

    def count_clips(gain):
        return next(n for n in range(6, 100) if compute_interval([gain] * n, bounds=DIFFERENCE_BOUNDS)[0] > 0)

    low, high = compute_interval([0.1] * 8, bounds=DIFFERENCE_BOUNDS)
    assert f"8 clips that all gain 0.1 have an interval of {low:.2f} to {high:.2f}" in text
    assert f"unseen in {math.floor(100 * 0.9**8)} % of such samples" in text
    assert f"from {count_clips(0.1)} clips on for a gain of 0.1, from {count_clips(0.3)} for one of 0.3" in text
