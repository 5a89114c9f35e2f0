"""Evaluate tasks on the rollout path of training, durably and resumably.

    tasks ── plan ────> what the file lacks ──> collect ──> append_group(group) ──> append lines ──> read the file back
                              ▲                                                          │
                              └──────────── a rerun resumes here <──── interrupted ──────┘

Every finished group of samples is appended to a JSONL file at once. A rerun with the same file runs only the missing or
failed samples and returns the same results as an uninterrupted run, because a sample's seed depends only on the run's
seed, the task and the sample's index. A repeated sample is a new line; the newest line of a sample counts. The lines of
a task that has changed, such as its ground truth or the content of its video, are marked void and run again.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saccade.config.schema import MAX_EPISODES_IN_PROGRESS, EvaluationConfig
from saccade.data.option_shuffle import shuffle_options
from saccade.errors import ConfigError, MediaError
from saccade.evaluation.records import Record, SampleKey, format_fingerprint, read_records, void_changed_records
from saccade.evaluation.shards import MANIFEST_SUFFIX, ShardManifest
from saccade.evaluation.subset import FULL_SET, WEIGHTS_SUFFIX, Subset, assign_frame_budgets
from saccade.media import hashing
from saccade.media.relocation import map_media_paths
from saccade.media.subtitles import list_media_files
from saccade.metrics.episode_metrics import get_accuracy, has_failed, is_undecided
from saccade.protocols import Context, Environment, EnvironmentFactory, ScoreFn, SelectEnvironment
from saccade.rollouts.collect import RolloutExecutor, collect
from saccade.types import Group, SamplingParams, ScoredEpisode, Task, UngradedEpisode
from saccade.utils.files import convert_file_errors, create_folder
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import append_jsonl, relativize_path, write_json
from saccade.utils.text import join_examples

_logger = logging.getLogger("saccade")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationProgress:
    """The progress of an evaluation."""

    done: int  # finished samples
    total: int  # all samples
    accuracy: float | None  # of the finished ones with a score; None before the first
    failed: int = 0  # finished ones that failed and count as wrong

    @property
    def accuracy_text(self) -> str:
        """Return the accuracy as text, "" if unknown."""
        accuracy = "" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"
        return ", ".join(filter(None, (accuracy, f"{self.failed} failed" if self.failed else "")))


class ProgressCounter:
    """Count finished samples and their accuracy, in constant time per sample."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples, self._done, self._scored, self._graded, self._failed = num_samples, 0, 0, 0, 0
        self._accuracy = 0.0  # sum over the scored samples

    def add(self, outcome: ScoredEpisode | UngradedEpisode) -> None:
        """Count a finished sample; one without a score, or without a judge's verdict yet, is in no accuracy."""
        self._done += 1
        if isinstance(outcome, UngradedEpisode) or is_undecided(outcome):
            return
        is_failed = has_failed(outcome.episode)
        self._scored += 1
        self._failed += is_failed
        self._graded += not is_failed and outcome.score.correct is not None
        self._accuracy += get_accuracy(outcome)

    def report(self) -> EvaluationProgress:
        """Return the progress; its accuracy is None until a sample that did not fail was graded."""
        accuracy = self._accuracy / self._scored if self._graded else None
        return EvaluationProgress(done=self._done, total=self._num_samples, accuracy=accuracy, failed=self._failed)


EvalItem = tuple[Task, tuple[SampleKey, ...]]  # a task's samples that run together, as the keys of their records


async def evaluate(
    tasks: Sequence[Task],
    *,
    environments: SelectEnvironment,
    context: Context,
    score_fn: ScoreFn,
    settings: EvaluationConfig,
    results_path: Path,
    root: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    benchmark: str = "",
    checkpoint: str | None = None,
    subset: Subset = FULL_SET,
    max_concurrency: int = MAX_EPISODES_IN_PROGRESS,
    on_progress: Callable[[EvaluationProgress], None] | None = None,
    executor: RolloutExecutor | None = None,
) -> list[ScoredEpisode]:
    """Return `settings.num_samples` scored episodes per task, in the order of tasks and samples.

    `subset` selects the tasks, with `settings.num_tasks` as its limit; for a shard its manifest is written next to
    `results_path`. `context.seed` is the evaluation's seed; `settings` replace the temperature and the frame budget of
    `context` and can disable the environment's tools. `identity` holds what else the results depend on, such as the
    weights, by name; the lines record the `benchmark`'s name and the `checkpoint` (see Record). `on_progress` is called
    at the start and after every finished group; `executor` decides where episodes run. A failed episode is among the
    results, with its error and an accuracy of 0; one that could not be graded is left out (`read_ungraded_episodes`). A
    rerun repeats both.
    Media paths below `root` are stored relative to the results file, so that both may be moved.

    Raises RunError if the file holds results of another identity, seed or settings.
    """
    sampling = replace(context.sampling, temperature=settings.temperature)
    subset = replace(subset, limit=settings.num_tasks)
    fingerprint, items, finished = _plan(
        tasks, replace(sampling, seed=context.seed), settings, results_path, identity or {}, subset
    )
    missing = [(task, keys) for task, keys in items if not finished.keys() >= {*keys}]
    done = [finished[key] for _, keys in items for key in keys if key in finished]
    num_samples = sum(len(keys) for _, keys in items)

    counter = ProgressCounter(num_samples)
    for outcome in done:
        counter.add(outcome)

    def report_progress() -> None:
        if on_progress is not None:
            on_progress(counter.report())

    def append_group(index: int, group: Group) -> None:
        # Graded and ungraded episodes in the order in which they were started.
        graded, ungraded = iter(group.scored_episodes), {outcome.group_index: outcome for outcome in group.ungraded}
        with convert_file_errors(results_path):
            for i, key in enumerate(missing[index][1]):
                outcome: ScoredEpisode | UngradedEpisode = ungraded[i] if i in ungraded else next(graded)
                if key in finished:  # an interrupted run had written a part of this group
                    continue
                relocated = map_media_paths(outcome, lambda file: relativize_path(results_path.parent, file, root))
                record = Record(
                    task=key[0],
                    frame_budget=key[1],
                    sample_index=key[2],
                    fingerprint=fingerprint,
                    outcome=relocated,
                    benchmark=benchmark,
                    use_tools=settings.use_tools,
                    checkpoint=checkpoint,
                )
                append_jsonl(results_path, record)
                counter.add(outcome)
        report_progress()

    _prepare_results(results_path, tasks, items, settings, subset=subset, fingerprint=fingerprint)
    report_progress()
    budgets = {task.id: keys[0][1] for task, keys in items}
    await collect(
        [task for task, _ in missing],
        environments if settings.use_tools else disable_tools(environments),
        replace(context, sampling=sampling),
        group_size=1 if settings.shuffle_options else settings.num_samples,
        score_fn=score_fn,
        frame_budgets=[budgets[task.id] for task, _ in missing],
        max_concurrency=max_concurrency,
        on_group_done=append_group,
        executor=executor,
    )
    if not missing:
        return _list_scored(items, finished)
    # Read everything back, so that a rerun and a first run return identical values.
    outcomes = {record.key: record.outcome for record in read_records(results_path, fingerprint)}
    return _list_scored(items, outcomes)


def find_finished(
    tasks: Sequence[Task],
    *,
    sampling: SamplingParams,
    settings: EvaluationConfig,
    results_path: Path,
    identity: Mapping[str, Any],
    subset: Subset = FULL_SET,
) -> list[ScoredEpisode] | None:
    """Return what `evaluate` would without running an episode; None if one is missing, failed or has no score.

    `sampling` has the evaluation's seed. Raises RunError as `evaluate` does.
    """
    subset = replace(subset, limit=settings.num_tasks)
    sampling = replace(sampling, temperature=settings.temperature)
    fingerprint, items, finished = _plan(tasks, sampling, settings, results_path, identity, subset)
    if not all(key in finished for _, keys in items for key in keys):
        return None
    _prepare_results(results_path, tasks, items, settings, subset=subset, fingerprint=fingerprint)
    return _list_scored(items, finished)


def _plan(
    tasks: Sequence[Task],
    sampling: SamplingParams,
    settings: EvaluationConfig,
    results_path: Path,
    identity: Mapping[str, Any],
    subset: Subset,
) -> tuple[str, list[EvalItem], dict[SampleKey, ScoredEpisode | UngradedEpisode]]:
    """Return the fingerprint, the samples to run, and the outcomes that the results file holds of any samples."""
    fingerprint = _compute_fingerprint(settings, sampling, identity)
    items = _plan_items(tasks, settings, subset, sampling.seed)
    read_records(results_path, fingerprint)  # raises before a line is marked
    void = void_changed_records(results_path, {task.id: keys[0][0] for task, keys in items}, fingerprint)
    if void:
        names = list(dict.fromkeys(record.outcome.episode.task.id for record in void))
        _logger.warning(
            "%s: %d results of %d tasks (%s) are void, since question, ground truth or media have changed; they stay "
            "in the file, count no more, and are run again",
            results_path,
            len(void),
            len(names),
            join_examples(names),
        )
    records = read_records(results_path, fingerprint)
    return fingerprint, items, {record.key: record.outcome for record in records if not record.should_retry}


def _list_scored(
    items: Sequence[EvalItem], outcomes: Mapping[SampleKey, ScoredEpisode | UngradedEpisode]
) -> list[ScoredEpisode]:
    return [scored for _, keys in items for key in keys if isinstance(scored := outcomes[key], ScoredEpisode)]


def _plan_items(tasks: Sequence[Task], settings: EvaluationConfig, subset: Subset, seed: int) -> list[EvalItem]:
    """Return the samples to run, in the order of tasks and samples."""
    # Assigned over all tasks, so that a limit doesn't change any task's budget.
    budgets = assign_frame_budgets(tasks, settings.frame_budgets)
    items: list[EvalItem] = []
    for task in subset.select(tasks):
        digest = compute_digest(task.digest, [_hash_file(path) for path in list_media_files(task)])
        keys = tuple((digest, budgets[task.id], i) for i in range(settings.num_samples))
        # Samples with different option orders have different prompts, so each is its own group.
        if settings.shuffle_options:
            variants = [shuffle_options(task, seed=seed, sample_index=i) for i in range(settings.num_samples)]
            items += [(variant, (key,)) for variant, key in zip(variants, keys, strict=True)]
        else:
            items.append((task, keys))
    return items


def _prepare_results(
    path: Path,
    tasks: Sequence[Task],
    items: Sequence[EvalItem],
    settings: EvaluationConfig,
    *,
    subset: Subset,
    fingerprint: str,
) -> None:
    """Create the results folder, and write the weights of a limit and the manifest of a shard into it."""
    with convert_file_errors(path):
        create_folder(path.parent)
        if weights := subset.compute_weights(tasks):
            weights.write_unless_covered(path)
        else:
            path.with_suffix(WEIGHTS_SUFFIX).unlink(missing_ok=True)
    if subset.shard is None:
        return
    all_tasks = subset.apply_limit(tasks)
    offsets = {task.id: index * settings.num_samples for index, task in enumerate(all_tasks)}
    # The digest excludes media content: a machine may lack the media of other shards.
    manifest = ShardManifest(
        shard=subset.shard,
        tasks_digest=compute_digest([task.digest for task in all_tasks], settings.num_samples),
        fingerprint=fingerprint,
        samples=tuple((offsets[task.id] + key[2], key) for task, keys in items for key in keys),
    )
    # Before the first sample: an interrupted shard must not look like a complete evaluation.
    write_json(path.with_suffix(MANIFEST_SUFFIX), manifest)


def _compute_fingerprint(settings: EvaluationConfig, sampling: SamplingParams, identity: Mapping[str, Any]) -> str:
    """Return the fingerprint of everything besides the task that one sample depends on."""
    # A larger limit or more samples extend the same file; a judge grades answers that exist already.
    evaluation_settings = settings.model_dump(exclude={"num_tasks", "num_samples", "judge", "use_tools", "benchmarks"})
    if not settings.shuffle_options:
        del evaluation_settings["shuffle_options"]
    sampling_settings = {key: value for key, value in asdict(sampling).items() if key != "seed"}
    parts = {"seed": sampling.seed, "settings": (evaluation_settings, sampling_settings), "tools": settings.use_tools}
    parts |= identity
    return format_fingerprint(parts)


def _hash_file(path: str) -> str:
    """Return the digest of a file; "" if it can't be read, which is reported when the file is used."""
    try:
        return hashing.compute_file_digest(path)
    except MediaError:
        return ""


def has_tools(make_environment: Callable[..., Any]) -> bool:
    """Return whether an environment has a setting `tools`, which can be emptied."""
    return "tools" in inspect.signature(make_environment).parameters


def disable_tools(environments: SelectEnvironment) -> SelectEnvironment:
    """Return the environments without tools, the control; ConfigError for a task's without a setting `tools`."""

    def select_without_tools(task: Task) -> EnvironmentFactory:
        make_environment: Callable[..., Environment] = environments(task)
        if not has_tools(make_environment):
            raise ConfigError(
                "evaluation.use_tools=false needs an environment with a setting `tools`, such as tool_calling",
                key="evaluation.use_tools",
                value=False,
            )
        return functools.partial(make_environment, tools={})

    return select_without_tools
