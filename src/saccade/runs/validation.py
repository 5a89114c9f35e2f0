"""Validation during a training: the same held-out tasks every time, on the rollout path of training.

    data.validation ── no overlap with the training's tasks ──> select ──> per mode: collect ──> a row of metrics

Tasks, frame budgets and seeds depend on the recipe alone, so validations of one run are paired.
"""

import difflib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.config.schema import CheckpointConfig, Recipe
from saccade.data.dataset import load_recipe_data
from saccade.errors import ConfigError, DataError, MediaError
from saccade.evaluation.subset import assign_frame_budgets
from saccade.media.hashing import compute_file_digest
from saccade.metrics.episode_metrics import estimate_at_k, get_accuracy, group_by_task, summarize
from saccade.rollouts.collect import collect
from saccade.rollouts.components import RolloutComponents
from saccade.training.episode_log import RolloutRecord
from saccade.training.rollout_batch import OnRollouts
from saccade.types import Group, Task
from saccade.utils.hashing import compute_digest, derive_seed

STAGE_SUFFIX = "_validation"  # of the stage's name in the log, the loggers and the episodes
NUM_EXAMPLES = 3  # tasks and files named in an error


def load_validation_file(folder: Path, recipe: Recipe) -> list[Task]:
    """Return every task of a run's validation file; [] if the run makes no validation.

    Raises DataError if there is no file, or if it holds no task.
    """
    settings, path = recipe.validation, recipe.data.validation
    if not settings.every:
        return []
    if not path:
        raise DataError(
            f"validation.every={settings.every} needs tasks: set data.validation to a file of tasks, or "
            "validation.every=0",
            key="data.validation",
            value=path,
        )
    tasks = list(load_recipe_data(folder, recipe, "data.validation", path, Task))
    if not tasks:
        raise DataError(f"data.validation={path} holds no tasks", key="data.validation", value=path)
    return tasks


def load_validation_tasks(folder: Path, recipe: Recipe, training_tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of a run's validations; [] if it makes none.

    Raises what `load_validation_file` raises, and DataError if a task or a media file is in the training, too.
    """
    tasks = load_validation_file(folder, recipe)
    if not tasks:
        return []
    # A list: a mixture concatenates its datasets at every access.
    require_disjoint(tasks, training_tasks[:], recipe.data.validation)
    return select_tasks(tasks, recipe.validation.num_tasks, recipe.seed)


def select_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """Return `count` tasks (0: all), which depend on the seed and the set of tasks, not on their order in the file."""
    order = sorted(tasks, key=lambda task: compute_digest(seed, "validation", task.digest))
    return order[: count or None]


def require_disjoint(tasks: Sequence[Task], training_tasks: Sequence[Task], path: str) -> None:
    """Raise DataError if a validation task, or the content of one of its media files, is in the training too."""
    trained = {_compute_task_digest(task) for task in training_tasks}
    shared_tasks = [task.id for task in tasks if _compute_task_digest(task) in trained]
    shared_files = find_shared_files(tasks, training_tasks)
    if shared_tasks or shared_files:
        examples = ", ".join((shared_tasks or shared_files)[:NUM_EXAMPLES])
        raise DataError(
            f"data.validation={path} overlaps the training: {len(shared_tasks)} of its {len(tasks)} tasks and "
            f"{len(shared_files)} of its {len(_list_files(tasks))} media files are in both ({examples}); remove them "
            "from one of the two",
            key="data.validation",
            value=path,
        )


def find_shared_files(tasks: Sequence[Task], training_tasks: Sequence[Task]) -> list[str]:
    """Return the media files of `tasks` whose content is also that of a training file; unreadable files are left out.

    Only training files of an equal size are read.
    """
    sizes: dict[str, int] = {}
    for file in [*_list_files(tasks), *_list_files(training_tasks)]:
        if os.path.isfile(file):
            sizes[file] = os.path.getsize(file)
    files = [file for file in _list_files(tasks) if file in sizes]
    candidate_sizes = {sizes[file] for file in files}
    candidates = [file for file in _list_files(training_tasks) if sizes.get(file) in candidate_sizes]
    trained = {digest for file in candidates if (digest := _compute_digest(file))}
    return [file for file in files if _compute_digest(file) in trained]


def _compute_task_digest(task: Task) -> str:
    """Return a task's digest; without media, of its question and answers alone, since no file would show a copy."""
    if task.media:
        return task.digest
    return compute_digest("text", task.question, task.options, task.answer_type, task.ground_truth)


def _list_files(tasks: Sequence[Task]) -> list[str]:
    return list(dict.fromkeys(media.path for task in tasks for media in task.media))


def _compute_digest(file: str) -> str | None:
    try:
        return compute_file_digest(file)
    except MediaError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Validates the weights that an engine has, on fixed tasks; `stage` is the stage of the training."""

    components: RolloutComponents
    tasks: Sequence[Task]
    stage: str
    on_rollouts: OnRollouts

    async def run(self, step: int) -> dict[str, float]:
        """Return the metrics of the weights after `step` steps; `on_rollouts` receives every episode."""
        start, metrics, records = time.perf_counter(), dict[str, float](), list[RolloutRecord]()
        for mode in self.components.recipe.validation.modes:
            groups = await self._collect(mode)
            metrics |= {f"{mode}/{name}": value for name, value in compute_validation_metrics(groups).items()}
            records += self._build_records(mode, step, groups)
        await self.on_rollouts(f"{self.stage}{STAGE_SUFFIX}", step, records)
        return {"step": step, **metrics, "seconds": time.perf_counter() - start}

    async def _collect(self, mode: str) -> list[Group]:
        recipe = self.components.recipe
        settings, is_greedy = recipe.validation, mode == "greedy"
        temperature = recipe.sampling.temperature if settings.temperature is None else settings.temperature
        budgets = assign_frame_budgets(self.tasks, settings.frame_budgets)
        return await collect(
            self.tasks,
            self.components.environments,
            self.components.build_context(
                seed=derive_seed(recipe.seed, "validation", mode), temperature=0.0 if is_greedy else temperature
            ),
            group_size=1 if is_greedy else settings.num_samples,
            score_fn=self.components.score_fn,
            frame_budgets=[budgets[task.id] for task in self.tasks],
            max_concurrency=settings.max_concurrency,
            executor=self.components.executor,
        )

    def _build_records(self, mode: str, step: int, groups: Sequence[Group]) -> list[RolloutRecord]:
        def build(number: int, index: int, group: Group) -> RolloutRecord:
            ungraded = {outcome.group_index: outcome for outcome in group.ungraded}
            scored = None if index in ungraded else graded.pop(0)
            return RolloutRecord(
                stage=f"{self.stage}{STAGE_SUFFIX}",
                step=step,
                group=number,
                index=index,
                outcome="validation",
                reason=ungraded[index].reason if scored is None else "",
                mode=mode,
                episode=ungraded[index].episode if scored is None else scored.episode,
                score=None if scored is None else scored.score,
            )

        records = []
        for number, group in enumerate(groups):
            graded = list(group.scored_episodes)
            records += [build(number, i, group) for i in range(len(graded) + len(group.ungraded))]
        return records


def require_checkpoint_metric(retention: CheckpointConfig, stage: str, metrics: Mapping[str, float]) -> None:
    """Raise ConfigError if the retention compares checkpoints by a metric that a validation doesn't have."""
    modes = [name.removesuffix("/episodes") for name in metrics if name.endswith("/episodes")]
    is_complete = all(f"{mode}/accuracy" in metrics for mode in modes)  # else no reward could grade an episode
    if retention.best and is_complete and retention.metric not in metrics:
        close = difflib.get_close_matches(retention.metric, metrics, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(metrics)}"
        raise ConfigError(
            f"{stage}.checkpoints.metric={retention.metric} isn't a metric of the validation; {hint}",
            key=f"{stage}.checkpoints.metric",
            value=retention.metric,
        )


def compute_validation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of a validation in one mode: accuracy with its 95 % interval, behavior, failures."""
    scored = [outcome for group in groups for outcome in group.scored_episodes]
    num_ungraded = sum(len(group.ungraded) for group in groups)
    metrics: dict[str, float] = {"episodes": len(scored), "frac_ungraded": num_ungraded / (len(scored) + num_ungraded)}
    if not scored:  # no reward could grade one: there is no accuracy
        return metrics
    summary = summarize(scored, ungraded=num_ungraded)
    estimates = {"accuracy": summary.accuracy, "format_compliance": summary.format_compliance}
    for name, estimate in estimates.items():
        metrics |= {name: estimate.mean, f"{name}/low": estimate.low, f"{name}/high": estimate.high}
    budgets = summary.slices["frame_budget"]
    metrics |= {f"accuracy/{row.name}": row.accuracy.mean for row in budgets}
    behavior: Mapping[str, float] = {
        name: getattr(summary, name)
        for name in ("calls", "frac_with_tool_call", "turns", "sampled_tokens", "visual_tokens")
    }
    return {
        **metrics,
        **estimate_at_k([[*map(get_accuracy, samples)] for samples in group_by_task(scored).values()]),
        "reward": sum(outcome.score.total for outcome in scored) / len(scored),
        **behavior,
        "frac_errors": summary.errors / len(scored),
        "frac_unanswered": summary.unanswered / len(scored),
        "tasks": summary.num_tasks,
        "clusters": summary.num_clusters,
    }
