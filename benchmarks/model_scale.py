"""Collect what RL adds at several sizes of the tiny model, after a quarter of the steps (1x) and after all (4x).

    for size in "64 2" "128 4" "192 6" "320 8"; do for seed in 0 1 2; do
      set -- $size; run=runs/scale/$1x$2-$seed
      saccade demo tiny/quick --seed $seed --out $run synthetic.model.hidden_size=$1 synthetic.model.num_layers=$2 \
        rl.optim.schedule=constant 'rl.checkpoints.keep_steps=[25]' model.num_threads=1
      saccade eval $run --model $run/rl/step-000025 --name rl_step_25_greedy evaluation.temperature=0
    done; done
    python benchmarks/model_scale.py runs/scale/* --out docs/results/scale.json --plot docs/images/scale.svg

The entries have the greedy accuracy on the held-out split before RL, after 1x and after 4x the steps with 95 %
intervals over clips, the paired differences, and the accuracy of the sampled episodes during RL. Without runs the plot
and the tables are made of the file.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from deciding import describe_estimate, describe_summary, format_interval
from matplotlib import colormaps
from matplotlib.figure import Figure

from saccade.config.load import read_yaml
from saccade.evaluation.compare import compare_evaluations, read_evaluations
from saccade.metrics.looking import NO_DECISION
from saccade.metrics.statistics import compute_seed_interval
from saccade.models.config_sizes import read_sizes
from saccade.reporting.plots import encode_figure

QUARTER = 25  # steps of 1x; 4x are all
EVALUATIONS = {"before": "after_sft_greedy", "1x": f"rl_step_{QUARTER}_greedy", "4x": "after_rl_greedy"}
PAIRS = {"gain_1x": ("before", "1x"), "gain_4x": ("before", "4x"), "gain_1x_to_4x": ("1x", "4x")}
WINDOW = 5  # steps over which the accuracy of sampled episodes is averaged

Entry = Mapping[str, Any]


def collect_run(folder: Path) -> dict[str, Any]:
    """Return the entry of one run folder."""
    recipe = read_yaml(folder / "recipe.yaml", "recipe")
    read = read_evaluations(folder)
    evaluations = {name: read[file] for name, file in EVALUATIONS.items()}
    comparison = compare_evaluations(evaluations, pairs=list(PAIRS.values()))
    differences = dict(zip(PAIRS, (change.difference for change in comparison.changes), strict=True))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    sampled = [row["accuracy"] for row in lines if "accuracy" in row]
    seconds = json.loads((folder / "seconds.json").read_text("utf-8"))
    return {
        **{key: recipe["synthetic"]["model"][key] for key in ("hidden_size", "num_layers")},
        "parameters": read_sizes(str(folder / "model")).num_parameters,
        "seed": recipe["seed"],
        "settings": {
            "synthetic.train": recipe["synthetic"]["train"],
            "synthetic.test": recipe["synthetic"]["test"],
            "sft.steps": recipe["sft"]["steps"],
            "rl.steps": recipe["rl"]["steps"],
            "rl.prompts_per_step": recipe["rl"]["prompts_per_step"],
            "rl.group_size": recipe["rl"]["group_size"],
            "rl.optim.lr": recipe["rl"]["optim"]["lr"],
            "rl.optim.schedule": recipe["rl"]["optim"]["schedule"],
        },
        "steps_1x": QUARTER,
        "tasks": differences["gain_4x"].n,
        "clips": differences["gain_4x"].num_clusters,
        "no_decision": comparison.summaries["4x"].policies[NO_DECISION].accuracy,
        "constant": comparison.summaries["4x"].policies["constant"].accuracy,
        **{name: describe_summary(comparison.summaries[name]) for name in EVALUATIONS},
        **{name: describe_estimate(difference) for name, difference in differences.items()},
        "sampled_accuracy": [round(fmean(sampled[step : step + WINDOW]), 4) for step in range(0, len(sampled), WINDOW)],
        "seconds": {stage: round(value) for stage, value in seconds.items()},
    }


def group_by_size(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """Return the entries of each number of parameters, the smallest first."""
    sizes: dict[int, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry["parameters"], entry["seed"])):
        sizes.setdefault(entry["parameters"], []).append(entry)
    return sizes


def format_runs(entries: Iterable[Entry]) -> str:
    """Return the table of runs."""
    lines = [
        "| parameters | width × layers | seed | after SFT | after 1× | after 4× | 1× adds | 4× add | 4× beyond 1× "
        "| calls after SFT, 1×, 4× | tasks / media |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group in group_by_size(entries).values():
        for entry in group:
            cells = [
                format_millions(entry["parameters"]),
                f"{entry['hidden_size']} × {entry['num_layers']}",
                str(entry["seed"]),
                *(format_interval(entry[name]["accuracy"]) for name in EVALUATIONS),
                *(format_interval(entry[name], sign="+") for name in PAIRS),
                ", ".join(f"{entry[name]['calls']:.2f}" for name in EVALUATIONS),
                f"{entry['tasks']} / {entry['clips']}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_sizes(entries: Iterable[Entry]) -> str:
    """Return the table of sizes: means over seeds, with intervals over seeds where there are two or more."""
    lines = [
        "| parameters | seeds | after SFT | 1× adds | 4× add | 4× beyond 1× "
        "| RL step at which sampled accuracy is 0.9 |",
        "|---|---|---|---|---|---|---|",
    ]
    for parameters, group in group_by_size(entries).items():
        steps = [find_step(entry["sampled_accuracy"], 0.9) for entry in group]
        cells = [
            format_millions(parameters),
            str(len(group)),
            format_seeds([entry["before"]["accuracy"][0] for entry in group]),
            *(format_seeds([entry[name][0] for entry in group], sign="+") for name in PAIRS),
            ", ".join("never" if step is None else str(step) for step in steps),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def find_step(accuracy: Sequence[float], level: float) -> int | None:
    """Return the step at which the mean over a window of steps first reaches a level; None if it never does."""
    return next(((i + 1) * WINDOW for i, value in enumerate(accuracy) if value >= level), None)


def format_millions(parameters: int) -> str:
    """Format a number of parameters."""
    return f"{parameters / 1e6:.2f} M"


def format_seeds(values: Sequence[float], sign: str = "") -> str:
    """Format a mean over seeds with its interval, which one seed doesn't have."""
    interval = compute_seed_interval(values)
    ends = "" if interval is None else f" {{{', '.join(format(value, f'{sign}.2f') for value in interval)}}}"
    return f"{fmean(values):{sign}.2f}{ends}"


def draw(entries: Iterable[Entry]) -> bytes:
    """Return an SVG of the gain by size, and the accuracy of sampled episodes during RL."""
    sizes = group_by_size(entries)
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label, marker in (("gain_1x", "1× (25 steps)", "o"), ("gain_4x", "4× (100 steps)", "s")):
        gains = [[entry[name][0] for entry in group] for group in sizes.values()]
        (line,) = left.plot([*sizes], [fmean(values) for values in gains], "-", label=label)
        left.fill_between([*sizes], [min(values) for values in gains], [max(values) for values in gains], alpha=0.2)
        for parameters, values in zip(sizes, gains, strict=True):
            left.plot([parameters] * len(values), values, marker, color=line.get_color(), markersize=4, alpha=0.7)
    left.axhline(0, color="gray", linewidth=0.8)
    left.set_xscale("log")
    left.set_xticks([*sizes], [format_millions(parameters) for parameters in sizes])
    left.minorticks_off()
    left.set(xlabel="parameters", ylabel="greedy accuracy that RL adds")
    left.legend(frameon=False, loc="lower right")
    for index, (parameters, group) in enumerate(sizes.items()):
        color = colormaps["viridis"](index / len(sizes))
        curves = [entry["sampled_accuracy"] for entry in group]
        steps = [(i + 1) * WINDOW for i in range(len(curves[0]))]
        columns = [*zip(*curves, strict=True)]
        label = f"{format_millions(parameters)}, {len(group)} seed{'s' if len(group) > 1 else ''}"
        right.plot(steps, [fmean(column) for column in columns], color=color, label=label)
        lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
        right.fill_between(steps, lowest, highest, color=color, alpha=0.2, linewidth=0)
    right.set(xlabel="RL step", ylabel="accuracy of sampled episodes", ylim=(0, 1.02))
    right.legend(frameon=False, loc="center right")
    return encode_figure(figure, "svg")


def main() -> None:
    """Collect runs into a file, draw the plot, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.runs:
        entries = [entry for group in group_by_size(map(collect_run, arguments.runs)).values() for entry in group]
        arguments.out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    entries = json.loads(arguments.out.read_text("utf-8"))
    if arguments.plot:
        arguments.plot.write_bytes(draw(entries))
    print(format_sizes(entries), format_runs(entries), sep="\n\n")


if __name__ == "__main__":
    main()
