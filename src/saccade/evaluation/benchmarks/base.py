"""Define benchmarks: their rows and questions, two rules that grade answers, and the metric each is known by.

`strict` is exactly the published rule. `lenient` ignores case, formatting and phrases such as "the answer is", and
accepts an option's text for its letter. Both receive only the final answer (`extract_final_answer`), because no
published rule handles reasoning, calls or tags.
Denominators are fixed: failures, missing answers and answers that can't be parsed score 0 and are counted.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Literal

from saccade.data.source_row import OPTION_LETTERS
from saccade.errors import DataError
from saccade.evaluation.benchmarks.answer_extraction import extract_final_answer
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow, iterate_rows
from saccade.media.subtitles import find_subtitles, list_media_files
from saccade.metrics.episode_metrics import has_failed
from saccade.metrics.statistics import get_media_key
from saccade.protocols import ScoreFn
from saccade.rewards.answer_types.reader import read_letter
from saccade.rewards.compose import score_each
from saccade.rewards.text_normalization import format_question
from saccade.types import Episode, Reply, Score, ScoredEpisode, Task
from saccade.utils.text import pluralize

Scoring = Literal["strict", "lenient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What a benchmark's rule gives an answer."""

    extracted: str | None  # what the rule extracted from the answer; None: nothing
    value: float | None  # in [0, 1]; None if only a judge can decide


UNPARSED = Grade(extracted=None, value=0.0)
UNDECIDED = Grade(extracted=None, value=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold a model's untouched response to a task, or the error that prevented one."""

    text: str
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedAnswer:
    """A task with its graded answer."""

    task: Task  # the question
    answer: Answer  # the model's untouched response, or the error that prevented one
    grade: Grade  # what the rule gives it
    sample_index: int = 0  # numbers several answers to one task
    weight: float = 1.0  # how many tasks of the full set the answer represents

    @property
    def value(self) -> float:
        """Return the value; 0 while undecided."""
        return self.grade.value or 0.0

    @property
    def is_undecided(self) -> bool:
        """Return whether only a judge can decide the value."""
        return self.grade.value is None

    @property
    def is_unparsed(self) -> bool:
        """Return whether there is a response from which the rule extracted nothing."""
        return self.answer.error is None and self.grade.extracted is None


GradeFn = Callable[[str, Task], Grade]  # a final answer and its task to a grade
StratumFn = Callable[[Task], str | Sequence[str] | None]  # a task to its labels in a table; None: it is in none
MetricsFn = Callable[[Sequence[GradedAnswer]], dict[str, float]]  # all answers to metrics in percent


def grade_choice(letter: str | None, task: Task, without_letter: Grade = UNPARSED) -> Grade:
    """Grade a letter; `without_letter` is the grade of None."""
    return without_letter if letter is None else Grade(extracted=letter, value=float(letter == task.ground_truth))


def grade_choice_lenient(text: str, task: Task, without_letter: Grade = UNPARSED) -> Grade:
    """Grade a multiple-choice answer leniently; see `reader.read_letter`."""
    letter = read_letter(text, OPTION_LETTERS[: len(task.options)], task.options, in_prose=True)
    return grade_choice(letter, task, without_letter)


def format_ground_truth(task: Task) -> str:
    """Return the ground truth for a judge; of options, the letter and the text."""
    truth = str(task.ground_truth)
    return f"{truth}. {task.options[OPTION_LETTERS.index(truth)]}" if task.options else truth


@dataclass(frozen=True, slots=True, kw_only=True)
class StratumScore:
    """Record a row of a table: the number of tasks, and the mean of their values in percent."""

    n: int
    value: float


def get_stratum_labels(stratum_fn: StratumFn, task: Task) -> tuple[str, ...]:
    """Return the labels of a task in one table."""
    labels = stratum_fn(task)
    return () if labels is None else (labels,) if isinstance(labels, str) else tuple(labels)


def group_by_extra(name: str) -> Callable[[Task], str]:
    """Return a stratum, or a cluster key, that reads a field of a task's `extras`."""
    return lambda task: str(task.extras[name])


def group_by_extras(*names: str) -> dict[str, StratumFn]:
    """Return a stratum per field of a task's `extras`, by the field's name."""
    return {name: group_by_extra(name) for name in names}


def group_by_label(results: Sequence[GradedAnswer], stratum_fn: StratumFn) -> dict[str, list[GradedAnswer]]:
    """Return the results per label, ordered by label; those of a task with several labels are in each."""
    rows: defaultdict[str, list[GradedAnswer]] = defaultdict(list)
    for result in results:
        for label in get_stratum_labels(stratum_fn, result.task):
            rows[label].append(result)
    return dict(sorted(rows.items()))


def tabulate(results: Sequence[GradedAnswer], stratum_fn: StratumFn) -> dict[str, StratumScore]:
    """Return the mean per label, ordered by label; a task with several labels counts in each."""
    return {
        label: StratumScore(n=len({result.task.id for result in row}), value=100 * compute_weighted_mean(row))
        for label, row in group_by_label(results, stratum_fn).items()
    }


def compute_accuracy(results: Sequence[GradedAnswer]) -> dict[str, float]:
    """Return the mean over all tasks, in percent."""
    return {"accuracy": 100 * compute_weighted_mean(results)}


def compute_weighted_mean(
    results: Sequence[GradedAnswer], get_value: Callable[[GradedAnswer], float] = lambda result: result.value
) -> float:
    """Return the mean of the results' values, or of `get_value`, weighted by `weight`."""
    return fsum(result.weight * get_value(result) for result in results) / fsum(result.weight for result in results)


def compute_macro_average(results: Sequence[GradedAnswer], stratum_fn: StratumFn) -> float:
    """Return the unweighted mean, in percent, of a table's rows."""
    return fmean(row.value for row in tabulate(results, stratum_fn).values())


def build_accuracy_metrics(is_answered: Callable[[GradedAnswer], bool]) -> MetricsFn:
    """Return a metrics function: the mean over all tasks and, as in some official scripts, over answered ones."""

    def compute_metrics(results: Sequence[GradedAnswer]) -> dict[str, float]:
        answered = [result for result in results if is_answered(result)]
        rate = 100 * compute_weighted_mean(answered) if answered else 0.0
        return {**compute_accuracy(results), "accuracy_of_answered": rate}

    return compute_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePrompt:
    """Configure the judge for answers that no rule decides.

    With an `extraction_prompt` the judge first extracts the answer, and the rule grades the extracted answer; the judge
    compares only what remains undecided.
    """

    instructions: str = ""  # of the comparison; empty = the judge's own
    # the question as the judge reads it
    question: Callable[[Task], str] = lambda task: format_question(task.question, task.options)
    ground_truth: Callable[[Task], str] = format_ground_truth  # as the judge reads it
    extraction_prompt: Callable[[Task], str] | None = None  # instructions of the extraction; None: no extraction
    max_words: int = 0  # extract from this many last words of the answer; 0 = all
    extract_always: bool = False  # extract also what the rule could decide, unless the extraction prompt is ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark: its rows, the rules that grade answers, and its metrics."""

    name: str  # of letters, digits, `_`, `-` and `.`: reports and result files have it
    repo_id: str  # the dataset's name on the Hugging Face hub
    file_patterns: tuple[str, ...]  # the files of its split there, preferred ones first
    num_tasks: int  # of a complete copy
    parse_row: Callable[[BenchmarkRow], Iterable[Task]]  # a row to its tasks
    grade_strict: GradeFn  # exactly the published rule
    grade_lenient: GradeFn = grade_choice_lenient  # ignores case, formatting and phrases
    primary_metric: str = "accuracy"  # the metric that it is known by
    compute_metrics: MetricsFn = compute_accuracy  # percentages, each answer by its weight (`compute_weighted_mean`)
    # the tables of scores by a property of the tasks, such as duration, by name: each function returns the label of a
    # task, several labels, or None for a task that is not in the table. `--num-tasks` spreads tasks evenly over the
    # labels, in the order of the tables
    strata: Mapping[str, StratumFn] = field(default_factory=dict)
    stratum_sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # published numbers of tasks, by label
    # tasks with the same key are dependent, as those about one video are: intervals are over clusters
    cluster_key: Callable[[Task], str] = get_media_key
    # tasks with the same key, such as the variants of a question, are selected together: `compute_metrics` needs all
    joint_key: Callable[[Task], str] = lambda task: task.id
    fixed_order_reason: str = ""  # why options must keep their published order; empty = they may be shuffled
    archives: tuple[str, ...] = ()  # archives to unpack although no row refers to their files: subtitles
    num_subtitled_videos: int | None = None  # videos with subtitles in a complete copy
    judge_prompt: JudgePrompt | None = None  # None if rules decide every answer

    def iterate_tasks(self, root: Path) -> Iterator[Task]:
        """Yield the tasks of a local copy one at a time; only each row by itself is checked."""
        for row in iterate_rows(root, self.file_patterns):
            yield from self.parse_row(row)

    def load_tasks(self, root: Path, *, allow_incomplete: bool = False) -> list[Task]:
        """Return the tasks of a local copy, a folder or one file of rows; media may be missing (`find_missing_media`).

        Raises DataError for a missing split, a bad row, a repeated id and, unless `allow_incomplete`, a wrong count.
        """
        tasks = list(self.iterate_tasks(root))
        repeated = next((task_id for task_id, count in Counter(task.id for task in tasks).items() if count > 1), None)
        if repeated is not None:
            problem = f"{root}: {self.name} contains the id {repeated} twice; download the dataset again"
            raise DataError(problem, key="id", value=repeated)
        if not tasks:
            raise DataError(f"{root}: {self.name} contains no question; download the dataset again", key=str(root))
        if allow_incomplete:
            return tasks
        # Scores on an incomplete copy are not comparable with published ones.
        hint = "complete the copy, or accept it with --allow-incomplete"
        if len(tasks) != self.num_tasks:
            problem = f"{root}: {self.name} has {self.num_tasks} questions, this copy has {len(tasks)}; {hint}"
            raise DataError(problem, key=str(root), value=len(tasks))
        for stratum, sizes in self.stratum_sizes.items():
            counts = Counter(label for task in tasks for label in get_stratum_labels(self.strata[stratum], task))
            for label in sorted({*sizes, *counts}):
                if (expected := sizes.get(label, 0)) != counts[label]:
                    problem = f"{root}: {self.name} has {expected} questions of {stratum} {label!r}, this copy has"
                    raise DataError(f"{problem} {counts[label]}; {hint}", key=stratum, value=label)
        return tasks

    def get_grade_fn(self, scoring: Scoring) -> GradeFn:
        """Return the rule of a scoring mode."""
        return self.grade_strict if scoring == "strict" else self.grade_lenient


def find_missing_media(tasks: Iterable[Task]) -> dict[str, list[str]]:
    """Return by task id the missing media files, subtitles included, of each task that lacks some."""
    missing = {task.id: [path for path in list_media_files(task) if not os.path.isfile(path)] for task in tasks}
    return {task_id: paths for task_id, paths in missing.items() if paths}


def check_subtitles(benchmark: Benchmark, tasks: Iterable[Task], selected: Iterable[Task], root: Path) -> None:
    """Raise DataError if `selected` tasks lack subtitles, or if other than the published number of videos have some."""
    hint = "unpack the dataset's subtitle archive there (with --allow-incomplete such questions run without, or fail)"
    missing = [path for path in map(find_subtitles, selected) if path and not Path(path).is_file()]
    if missing:
        problem = f"{benchmark.name} lacks the subtitles of {pluralize(len(missing), 'question')}, first {missing[0]}"
        raise DataError(f"{root}: {problem}; {hint}", key=missing[0], value=len(missing))
    num_videos = len({benchmark.cluster_key(task) for task in tasks if find_subtitles(task)})
    if benchmark.num_subtitled_videos not in (None, num_videos):
        problem = f"has subtitles of {benchmark.num_subtitled_videos} videos, this copy of {num_videos}"
        raise DataError(f"{root}: {benchmark.name} {problem}; {hint}", key=str(root), value=num_videos)


def grade(
    benchmark: Benchmark, tasks: Sequence[Task], answers: Mapping[str, Answer], *, scoring: Scoring = "strict"
) -> list[GradedAnswer]:
    """Return every task with its grade, in order; a missing or blank answer is an error and not graded."""
    grade_fn = benchmark.get_grade_fn(scoring)
    return [grade_answer(task, answers.get(task.id), grade_fn) for task in tasks]


def grade_answer(task: Task, answer: Answer | None, grade_fn: GradeFn) -> GradedAnswer:
    """Grade one task; see `grade`."""
    answer = answer or Answer(text="", error="there is no answer")
    if answer.error is None and not answer.text.strip():
        answer = replace(answer, error="the answer is blank")
    if answer.error is not None:
        return GradedAnswer(task=task, answer=answer, grade=UNPARSED)
    final = extract_final_answer(answer.text)
    # A response of reasoning alone has nothing to grade, neither for a rule nor for a judge.
    return GradedAnswer(task=task, answer=answer, grade=grade_fn(final, task) if final else UNPARSED)


def extract_answer(episode: Episode) -> Answer:
    """Return the text of the main agent's last turn; an error if the episode failed or the text is blank.

    An answer that is not in a tag, as in other systems' prompt formats, replaces the text.
    """
    if has_failed(episode):
        return Answer(text="", error=episode.error or f"the episode ended as {episode.status}")
    # Only the last turn: text before a call is not an answer.
    reply = episode.turns[-1].reply if episode.turns else Reply(text="")
    text = reply.text if reply.answer is None or "<answer>" in reply.text else reply.answer
    return Answer(text=text) if text.strip() else Answer(text="", error="the answer is blank")


def build_score_fn(benchmark: Benchmark, scoring: Scoring) -> ScoreFn:
    """Return a function that scores an episode by the benchmark's rule; an answer that needs a judge counts 0."""

    def score_episode(episode: Episode) -> Score:
        result = grade_answer(episode.task, extract_answer(episode), benchmark.get_grade_fn(scoring))
        return Score(value=result.value, parts={"undecided": float(result.is_undecided)}, correct=result.value)

    return score_each(score_episode)


def grade_episodes(
    benchmark: Benchmark, scored: Sequence[ScoredEpisode], scoring: Scoring = "strict"
) -> list[GradedAnswer]:
    """Return the graded answers of scored episodes, in order; several of one task are its samples."""
    grade_fn, num_samples = benchmark.get_grade_fn(scoring), Counter[str]()
    results = []
    for outcome in scored:
        task = outcome.episode.task
        result = grade_answer(task, extract_answer(outcome.episode), grade_fn)
        results.append(replace(result, sample_index=num_samples[task.id]))
        num_samples[task.id] += 1
    return results
