"""Evaluate a checkpoint with and without tools, with intervals.

`python examples/evaluate_checkpoint.py RUN [CHECKPOINT]` evaluates a checkpoint (default: the run's newest) on the
run's test tasks. Questions about one video are not independent: the intervals are over videos.
"""

import sys
from pathlib import Path

import saccade


def main(run: Path, checkpoint: Path | None = None) -> dict[str, float]:
    """Evaluate with and without tools; return both accuracies."""
    recipe = saccade.Run.open(run).recipe
    accuracies = {}
    for name, use_tools in (("with_tools", True), ("without_tools", False)):
        settings = recipe.evaluation.model_copy(update={"use_tools": use_tools})
        scored = saccade.evaluate(
            run, recipe=recipe.model_copy(update={"evaluation": settings}), model=checkpoint, name=name
        )
        tasks = [outcome.episode.task for outcome in scored]
        estimate = saccade.estimate_clustered_mean(
            [outcome.score.correct for outcome in scored],
            [task.id for task in tasks],
            clusters={task.id: task.media[0].path for task in tasks},
        )
        accuracies[name] = estimate.mean
        interval = f"[{estimate.low:.2f}, {estimate.high:.2f}]"
        print(f"{name}: {estimate.mean:.2f} {interval}, {estimate.n} questions, {estimate.num_clusters} videos")
    return accuracies


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(Path, sys.argv[2:]))
