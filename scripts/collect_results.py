"""Write docs/results/demo.json from runs of `saccade demo tiny/para_grpo`, one per seed; print the README's table.

.venv/bin/python scripts/collect_results.py "the commit and the machine" runs/demo-0 runs/demo-1 runs/demo-2
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "demo.json"
Figures = list[float]  # a mean, or a mean with its interval


def collect_figures(run: Path) -> tuple[dict[str, Figures], int, int]:
    """Return the figures of a run by row, and the numbers of its tasks and clips."""
    comparison = json.loads((run / "comparison.json").read_text())
    summaries = comparison["summaries"]
    changes = {
        (change["before"], change["after"], change["visibility"]): change["difference"]
        for change in comparison["changes"]
    }
    tools = changes["after_rl_no_tools", "after_rl_greedy", "not shown"]
    last = summaries["after_rl_greedy"]
    rows = {
        f"after {stage.upper()}, {mode}": _get_figures(summaries[f"after_{stage}_{mode}"]["accuracy"])
        for mode in ("greedy", "sampled")
        for stage in ("sft", "rl")
    }
    rows["gain of RL, sampled, paired"] = _get_figures(changes["after_sft_sampled", "after_rl_sampled", ""])
    rows["with tools − without, answer not in the overview"] = _get_figures(tools)
    rows["constant-answer baseline"] = [round(last["constant_baseline"], 2)]
    return rows, last["num_tasks"], last["num_clusters"]


def _get_figures(estimate: Mapping[str, float]) -> Figures:
    return [round(estimate[name], 2) for name in ("mean", "low", "high")]


def format_cell(figures: Sequence[float], *, show_sign: bool) -> str:
    """Return a cell of the README's table: 0.70 [0.65, 0.75]."""
    texts = [f"{value:{'+' if show_sign else ''}.2f}" for value in figures]
    return texts[0] if len(texts) == 1 else f"{texts[0]} [{', '.join(texts[1:])}]"


def format_table(rows: Mapping[str, Sequence[Figures]]) -> str:
    """Return the README's table."""
    num_seeds = len(next(iter(rows.values())))
    lines = ["| | " + " | ".join(f"seed {seed}" for seed in range(num_seeds)) + " |", "|" + "---|" * (num_seeds + 1)]
    for name, cells in rows.items():
        is_difference = "gain" in name or "−" in name
        texts = [format_cell(figures, show_sign=is_difference) for figures in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main(source: str, runs: Sequence[Path]) -> None:
    """Write the file and print the table."""
    old: dict[str, Any] = json.loads(RESULTS.read_text())
    figures, tasks, clips = zip(*map(collect_figures, runs), strict=True)
    rows = {name: [own[name] for own in figures] for name in figures[0]}
    new = {"source": source, "seeds": list(range(len(runs))), "tasks": tasks[0], "clips": clips[0], "rows": rows}
    RESULTS.write_text(json.dumps({**old, **new}, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.write(format_table(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], [Path(argument) for argument in sys.argv[2:]])
