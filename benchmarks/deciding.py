"""Collect what RL adds on tasks in which the model must decide where to look.

    for seed in 0 1 2; do saccade demo tiny/cue --seed $seed --out runs/cue-$seed; done
    python benchmarks/deciding.py runs/cue-* --out docs/results/deciding.json

Each run is a folder of `saccade demo`. The entries have the greedy accuracy on the held-out split before and after RL
with 95 % intervals over clips, the paired difference, the visual tokens, and the baseline policies of the split.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.config.load import read_yaml
from saccade.evaluation.compare import compare_evaluations, read_evaluations
from saccade.metrics.episode_metrics import Summary
from saccade.metrics.looking import NO_DECISION
from saccade.metrics.statistics import Estimate

BEFORE, AFTER = "after_sft_greedy", "after_rl_greedy"
STAGES = ("data", "model", "sft", "sft_evaluation", "rl", "rl_evaluation")


def collect_run(folder: Path) -> dict[str, Any]:
    """Return the entry of one run folder."""
    evaluations = {name: item for name, item in read_evaluations(folder).items() if name in (BEFORE, AFTER)}
    comparison = compare_evaluations(evaluations, pairs=[(BEFORE, AFTER)])
    (change,) = comparison.changes
    # Read as plain YAML, so that runs of an earlier version can be collected after keys were renamed.
    recipe = read_yaml(folder / "recipe.yaml", "recipe")
    stages = {stage: folder / "finished_stages" / f"{stage}.json" for stage in STAGES}
    seconds = {stage: json.loads(path.read_text("utf-8")).get("seconds") for stage, path in stages.items()}
    difference, summaries = change.difference, comparison.summaries
    return {
        "task": summarize_task(recipe),
        "seed": recipe["seed"],
        "settings": {
            "sft.steps": recipe["sft"]["steps"],
            "rl.steps": recipe["rl"]["steps"],
            "rl.prompts_per_step": recipe["rl"]["prompts_per_step"],
        },
        "tasks": difference.n,
        "clips": difference.num_clusters,
        "before": describe_summary(summaries[BEFORE]),
        "after": describe_summary(summaries[AFTER]),
        "difference": [difference.mean, difference.low, difference.high],
        "is_significant": difference.is_significant,
        "policies": {name: [policy.accuracy, policy.calls] for name, policy in summaries[AFTER].policies.items()},
        "seconds": {stage: round(value) for stage, value in seconds.items() if value is not None},
    }


def summarize_task(recipe: Mapping[str, Any]) -> str:
    """Return the name of a recipe's task: its kind, and the environment if that is Python."""
    tasks, environment = recipe["synthetic"]["tasks"], recipe["environment"]["name"]
    return f"{tasks}, Python" if environment == "python" else tasks


def describe_summary(summary: Summary) -> dict[str, Any]:
    """Return the numbers of one evaluation."""
    return {
        "accuracy": describe_estimate(summary.accuracy),
        "format": summary.format_compliance.mean,
        "calls": summary.calls,
        "visual_tokens": summary.visual_tokens,
        "looking": dict(summary.looking),
    }


def describe_estimate(estimate: Estimate) -> list[float]:
    """Return [mean, low, high]."""
    return [estimate.mean, estimate.low, estimate.high]


def format_table(entries: list[Mapping[str, Any]]) -> str:
    """Return the table of docs/experiments/deciding.md, one row per run."""
    lines = [
        "| task | seed | no decision | after SFT | after RL | RL adds | net of calls | hit rate | calls "
        "| visual tokens | tasks / media |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        before, after = entry["before"], entry["after"]
        cells = [
            entry["task"],
            str(entry["seed"]),
            f"{entry['policies'][NO_DECISION][0]:.2f}",
            format_interval(before["accuracy"]),
            format_interval(after["accuracy"]),
            format_interval(entry["difference"], sign="+"),
            format_change(before["looking"], after["looking"], "net_accuracy"),
            format_change(before["looking"], after["looking"], "frac_calls_hit"),
            format_change(before, after, "calls"),
            format_change(before, after, "visual_tokens", 1),
            f"{entry['tasks']} / {entry['clips']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_change(before: Mapping[str, Any], after: Mapping[str, Any], key: str, decimals: int = 2) -> str:
    """Format a value before and after; without calls there is no hit rate."""
    return " → ".join(f"{entry[key]:.{decimals}f}" if key in entry else "–" for entry in (before, after))


def format_interval(values: list[float], sign: str = "") -> str:
    """Format [mean, low, high]."""
    mean, low, high = (format(value, f"{sign}.2f") for value in values)
    return f"{mean} [{low}, {high}]"


def main() -> None:
    """Collect runs into a file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    entries = sorted(map(collect_run, arguments.runs), key=lambda entry: (entry["task"], entry["seed"]))
    arguments.out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(format_table(entries))


if __name__ == "__main__":
    main()
