"""Evaluate a checkpoint with and without tools, with intervals.

`python examples/evaluate_checkpoint.py RUN [CHECKPOINT]` evaluates a checkpoint (default: the run's newest) on the
run's test tasks. Questions about one video are not independent: the intervals resample videos.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import saccade


def compute_interval(values: Sequence[float], clusters: Sequence[str], *, resamples: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the mean, from a bootstrap over clusters."""
    by_cluster = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        by_cluster[cluster].append(value)
    sums = np.array([[sum(group), len(group)] for group in by_cluster.values()])
    drawn = np.random.default_rng(0).integers(len(sums), size=(resamples, len(sums)))
    totals = sums[drawn].sum(axis=1)
    low, high = np.quantile(totals[:, 0] / totals[:, 1], [0.025, 0.975])
    return float(low), float(high)


def main(run: Path, checkpoint: Path | None = None) -> dict[str, float]:
    """Evaluate with and without tools; return both accuracies."""
    recipe = saccade.Run.open(run).recipe
    accuracies = {}
    for name, use_tools in (("with_tools", True), ("without_tools", False)):
        settings = recipe.evaluation.model_copy(update={"use_tools": use_tools})
        scored = saccade.evaluate(
            run, recipe=recipe.model_copy(update={"evaluation": settings}), model=checkpoint, name=name
        )
        values = [each.score.correct for each in scored]
        videos = [each.episode.task.media[0].path for each in scored]
        low, high = compute_interval(values, videos)
        accuracies[name] = float(np.mean(values))
        print(
            f"{name}: {accuracies[name]:.2f} [{low:.2f}, {high:.2f}], {len(values)} questions, {len({*videos})} videos"
        )
    return accuracies


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(Path, sys.argv[2:]))
