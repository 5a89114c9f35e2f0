"""The runs that the viewer shows, and what its pages need of them as plain JSON.

Results are kept until the files that they were computed from change.
"""

import contextlib
import functools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saccade.algorithms.group_advantages import GroupAdvantages, compute_group_advantages
from saccade.config.load import load_recipe
from saccade.errors import DataError, RunError, SaccadeError, convert_errors
from saccade.evaluation.judge_results import VERDICTS_SUFFIX, list_results_files
from saccade.metrics.statistics import compute_seed_interval
from saccade.reporting.episode_view import DecodeFn
from saccade.reporting.run_summary import (
    RECIPE_FILE,
    RunSummary,
    find_recipe_differences,
    find_runs,
    flatten,
    read_run_recipe,
    summarize_run,
)
from saccade.reporting.viewer.episodes import Describer, StoredEpisode, describe_tokens, read_episode
from saccade.reporting.viewer.index import EpisodeIndex
from saccade.reporting.viewer.results import compute_pair, compute_results, describe_section, describe_table
from saccade.training.episode_log import (
    RolloutRecord,
    list_rollout_files,
    read_rollouts,
    read_step_token_values,
)
from saccade.training.token_log import StoredValues
from saccade.training.training_samples import build_samples
from saccade.types import Group, ScoredEpisode
from saccade.utils.hashing import compute_digest
from saccade.utils.text import pluralize

MAX_POINTS = 1000  # of a curve; the means of longer ones
SEED_KEYS = ("seed", "model.path", "data.", "extends")  # in which runs of one recipe may differ
MAX_FLIPPED = 500  # rows of a comparison
MAX_KEPT_RESULTS = 64  # metrics and tables
MAX_KEPT_STEPS = 2  # a step's groups, whole episodes
MAX_KEPT_SUMMARIES = 10_000  # of runs


NO_TOKEN_VALUES = (  # of an episode that was not kept, and of one that was
    "Entropy and logprob differences are computed when a step trains on an episode; no step trained on this one.",
    "Entropy and logprob differences are not on disk: no step has trained on this episode, or an earlier version did.",
)


class UnknownItemError(DataError):
    """A page requested a run, an episode or a file that doesn't exist."""


class RecentResults:
    """The `maxsize` results that were used last, each until the stamp of its files changes. Threads may share it.

    A result that two threads need at the same time is computed once.
    """

    def __init__(self, maxsize: int) -> None:
        self._maxsize, self._lock = maxsize, threading.Lock()
        self._results: OrderedDict[Hashable, tuple[Any, Future[Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, key: Hashable, stamp: Any, compute: Callable[[], Any]) -> Any:
        """Return a result, computed if it isn't kept or its stamp has changed."""
        own: Future[Any] = Future()
        with self._lock:
            known = self._results.get(key)
            if known is None or known[0] != stamp:
                self._results[key] = known = (stamp, own)
            self._results.move_to_end(key)
            while len(self._results) > self._maxsize:
                self._results.popitem(last=False)
        if known[1] is not own:
            return known[1].result()
        try:
            own.set_result(compute())
        except BaseException as error:
            with self._lock:  # the next request tries again
                if self._results.get(key) is known:
                    del self._results[key]
            own.set_exception(error)
            raise
        return own.result()


@dataclass(slots=True)
class ViewedRun:
    """A run that the viewer shows."""

    name: str
    folder: Path
    index: EpisodeIndex
    problem: str = ""  # why the index can't be updated


class Library:
    """The runs at and below some paths. `load_decoder(folder)` returns a run's token decoder, or None without one;
    `is_running(folder)` whether a process trains the run. `compute(function, *arguments)` calls a function that may
    take minutes, in another process or, by default, here.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        load_decoder: Callable[[Path], DecodeFn | None] = lambda folder: None,
        is_running: Callable[[Path], bool] = lambda folder: False,
        compute: Callable[..., Any] = lambda function, *arguments: function(*arguments),
    ) -> None:
        self._paths, self._is_running, self._compute = paths, is_running, compute
        self._load_decoder = functools.lru_cache(maxsize=8)(load_decoder)
        self._runs: dict[Path, ViewedRun] = {}
        self._results, self._steps = RecentResults(MAX_KEPT_RESULTS), RecentResults(MAX_KEPT_STEPS)
        self._summaries = RecentResults(MAX_KEPT_SUMMARIES)
        self._decoder_lock, self._scan_lock = threading.Lock(), threading.Lock()
        self._read_cached = functools.lru_cache(maxsize=8)(lambda location, modified_ns: read_episode(location))

    # ---- runs ------------------------------------------------------------------------------------------------------

    def scan(self) -> list[ViewedRun]:
        """Find new runs; return all of them in order of their names."""
        found = find_runs(self._paths)
        with self._scan_lock:  # the watcher and requests scan, too
            for folder, name in found:
                key = folder.resolve()
                if key not in self._runs:
                    used = {run.name for run in self._runs.values()}
                    own = next(n for n in (name, f"{key.parent.name}/{name}", str(key)) if n not in used)
                    self._runs[key] = ViewedRun(own, folder, EpisodeIndex(folder))
            for key in [key for key, run in self._runs.items() if not (run.folder / RECIPE_FILE).is_file()]:
                del self._runs[key]
            return sorted(self._runs.values(), key=lambda run: run.name)

    def get(self, name: str) -> ViewedRun:
        """Return a run by its name. Raises UnknownItemError."""
        for run in list(self._runs.values()):
            if run.name == name:
                return run
        raise UnknownItemError(f"there is no run {name!r}", key="run", value=name)

    def refresh(self) -> None:
        """Bring the indexes of all runs up to date. Raises RunError for one that can't be, when the others are."""
        first_error: SaccadeError | None = None
        for run in self.scan():
            run.problem = ""
            try:
                with convert_errors(RunError, f"the index of {run.folder} can't be updated", key=str(run.folder)):
                    run.index.refresh()
            except SaccadeError as error:
                run.problem = str(error)
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def list_runs(self) -> list[dict[str, Any]]:
        """Return what the list of runs shows, the newest run first."""
        rows = [self._describe_run(run) for run in self.scan()]
        return sorted(rows, key=lambda row: -row["modified"])

    def _describe_run(self, run: ViewedRun) -> dict[str, Any]:
        # An open page requests the list every 3 seconds; reading the recipes and metrics of many runs takes seconds.
        is_running = self._is_running(run.folder)
        names = (RECIPE_FILE, "metrics.jsonl", "invocations.json", "finished_stages")
        stamp = [is_running, *_stamp_files(run.folder / name for name in names), *self._stamp_evaluations(run)]
        summary: RunSummary = self._summaries.keep(
            run.folder, stamp, lambda: summarize_run(run.folder, lambda folder: is_running)
        )
        problems = "; ".join(f"{file}: {text}" for file, text in run.index.problems.items())
        return {
            **asdict(summary),
            "name": run.name,
            "path": str(run.folder),
            "problem": summary.problem or run.problem or problems,
            "episodes": run.index.count(),
            "indexing": run.index.num_files_left,
        }

    # ---- curves ----------------------------------------------------------------------------------------------------

    def build_curves(self, names: Sequence[str], stage: str, *, has_bands: bool = False) -> dict[str, Any]:
        """Return the panels of a stage's metrics, with the curves of each run.

        With `has_bands`, runs whose recipes differ in nothing but seed and paths are one curve: the mean over seeds,
        with its interval where at least two have the step.
        """
        from saccade.reporting.plots import PANELS, extract_bands, extract_series, find_alarm_steps

        runs = {name: self._read_metrics(self.get(name)) for name in names}
        stages = [stage for stage in STAGE_ORDER if any(stage in metrics for metrics in runs.values())]
        rows = {name: metrics.get(stage, []) for name, metrics in runs.items()}
        families = self._group_by_recipe(names) if has_bands else {name: [name] for name in names}
        panels = []
        for panel in PANELS:
            curves = []
            for family, members in families.items():
                series = {name: extract_series(panel, rows[name]) for name in members}
                labels = dict.fromkeys(label for own in series.values() for label in own)
                for label in labels:
                    own = [series[name][label] for name in members if label in series[name]]
                    curve = {"run": family, "label": label}
                    if len(members) > 1:
                        curves.append({**curve, **_average_seeds(own)})
                        continue
                    xs, ys = own[0]
                    band = extract_bands(panel, rows[members[0]]).get(label)
                    points: dict[str, Any] = {"x": xs, "y": ys}
                    if band is not None and len(band[0]) == len(xs):
                        points |= {"low": band[1], "high": band[2]}
                    curves.append({**curve, **_thin(points)})
            if curves:
                panels.append(
                    {
                        "title": panel.title,
                        "unit": panel.unit,
                        "is_log": panel.is_log,
                        "maximum": panel.axis_max,
                        "curves": curves,
                    }
                )
        alarms = sorted({step for own in rows.values() for step in find_alarm_steps(own)})
        return {"stages": stages, "stage": stage, "panels": panels, "alarms": alarms, "families": families}

    def _read_metrics(self, run: ViewedRun) -> dict[str, list[dict[str, Any]]]:
        from saccade.reporting.run_report import read_metrics

        stamp = list(_stamp_files([run.folder / "metrics.jsonl"]))
        return self._results.keep(("metrics", run.folder), stamp, lambda: read_metrics(run.folder))

    def _group_by_recipe(self, names: Sequence[str]) -> dict[str, list[str]]:
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            try:
                leaves = flatten(read_run_recipe(self.get(name).folder))
                own = {key: str(value) for key, value in leaves.items() if not key.startswith(SEED_KEYS)}
            except SaccadeError:  # a damaged recipe equals no other
                own = {"run": name}
            groups[compute_digest(own)].append(name)
        return {
            members[0] if len(members) == 1 else f"{members[0]} and {pluralize(len(members) - 1, 'more seed')}": members
            for members in groups.values()
        }

    # ---- tables of runs --------------------------------------------------------------------------------------------

    def build_tables(self, name: str) -> dict[str, Any]:
        """Return the tables of a run: training, results with intervals, tool calls; and why some can't be shown."""
        from saccade.reporting.run_report import build_call_tables, build_training_tables, collect_metadata

        run, problems = self.get(name), list[str]()

        def attempt(title: str, compute: Callable[[], Any]) -> Any:
            """Return a part, or nothing of a damaged one, so that the others are shown."""
            try:
                with convert_errors(RunError, f"the {title} of {run.folder} can't be read"):
                    return compute()
            except SaccadeError as error:
                problems.append(str(error))
                return {}

        stages = attempt("metrics", lambda: self._read_metrics(run))
        training = attempt("training", lambda: build_training_tables(run.folder, stages))
        stamp = self._stamp_evaluations(run)
        kept = attempt(
            "evaluations",
            lambda: self._results.keep(
                ("results", run.folder), stamp, lambda: self._compute(compute_results, run.folder)
            ),
        )
        results, damaged = kept or ([], [])
        calls = attempt("tool calls", lambda: build_call_tables(stages.get("rl", ())))
        metadata = attempt("metadata", lambda: collect_metadata(run.folder))
        return {
            "problems": list(dict.fromkeys([*problems, *damaged])),
            "metadata": {key: str(value) for key, value in metadata.items()},
            "sections": [*map(describe_section, training), *results, *map(describe_section, calls)],
        }

    def _stamp_evaluations(self, run: ViewedRun) -> Any:
        return list(_stamp_files(sorted((run.folder / "evaluations").glob("*.json*"))))

    def find_differences(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the recipe keys in which runs differ."""
        differences = find_recipe_differences({name: self.get(name).folder for name in names})
        return [{"key": key, "values": values} for key, values in differences]

    def build_benchmarks(self, name: str) -> dict[str, Any]:
        """Return the tables of a run's benchmarks: scores beside published ones, costs, strata, failures first."""
        from saccade.evaluation.benchmark_result import read_benchmark_results
        from saccade.reporting import benchmark_report as report

        run = self.get(name)
        try:
            benchmark_results = self._results.keep(
                ("benchmark_results", run.folder),
                self._stamp_evaluations(run),
                lambda: read_benchmark_results(run.folder),
            )
        except DataError as error:
            if error.key == str(run.folder):
                return {"notes": [], "overview": [], "evaluations": []}
            raise
        references = {
            result.benchmark: report.get_reference_scores(result.benchmark) for result in benchmark_results.values()
        }
        scores, costs, *published = report.build_overview_tables(benchmark_results, references)
        overview = [scores, costs, *(replace(table, is_folded=True) for table in published)]
        return {
            "notes": [report.READING_GUIDE, *([report.COMPARABILITY_WARNING] if any(references.values()) else [])],
            "overview": [describe_table(table) for table in overview],
            "evaluations": [
                {
                    "name": evaluation,
                    "tables": [
                        *map(describe_table, report.build_evaluation_tables(evaluation, result, references)),
                        describe_table(report.build_example_table(result)),
                    ],
                }
                for evaluation, result in benchmark_results.items()
            ],
        }

    def list_facets(self, name: str) -> dict[str, list[tuple[str, int]]]:
        """Return the values of each facet of a run's episodes, with their numbers of episodes."""
        run = self.get(name)
        return self._results.keep(("facets", run.folder), run.index.get_stamp(), run.index.list_facets)

    # ---- episodes --------------------------------------------------------------------------------------------------

    def read(self, name: str, ref: str) -> tuple[StoredEpisode, dict[str, Any]]:
        """Return an episode and its row. Raises UnknownItemError."""
        found = self.get(name).index.find(ref)
        if found is None:
            raise UnknownItemError(f"the run {name} has no episode {ref!r}", key="ref", value=ref)
        location, row = found
        try:
            stamp = (location, location.path.stat().st_mtime_ns)  # a page requests its frames one by one
            return self._read_cached(*stamp), row
        except FileNotFoundError:
            message = (
                f"the episode {ref} was deleted with its file; `episodes.max_gib` limits the disk space of episodes"
            )
            raise UnknownItemError(message, key="ref", value=ref) from None

    def describe_episode(self, name: str, ref: str) -> dict[str, Any]:
        """Return the description of an episode, its row, and the weights of the rewards."""
        from saccade.reporting.run_report import read_reward_weights

        stored, row = self.read(name, ref)
        run = self.get(name)
        try:
            weights = self._results.keep(
                ("weights", run.folder), None, lambda: read_reward_weights(run.folder / RECIPE_FILE)
            )
        except SaccadeError:  # of a plugin that is gone
            weights = {}
        return {"row": row, "weights": weights, **Describer(stored).describe()}

    def describe_tokens(self, name: str, ref: str) -> dict[str, Any]:
        """Return an episode token by token; without the run's tokenizer, why there are none."""
        stored, row = self.read(name, ref)
        run = self.get(name)
        with self._decoder_lock:  # one thread loads it
            decode = self._load_decoder(run.folder)
        if decode is None:
            return {"error": "the run's tokenizer is missing: its model was moved or deleted", "conversations": []}
        advantages: dict[int, tuple[float, ...]] = {}
        trained: Mapping[str, StoredValues] = {}
        notes = []
        if row["outcome"] == "kept":
            try:
                advantages = self._find_token_advantages(run, row, decode)
            except (SaccadeError, ValueError, OSError) as error:
                notes.append(f"Advantages can't be computed: {error}.")
            try:
                trained = read_step_token_values(run.folder, row["stage"], row["step"])
            except (SaccadeError, OSError) as error:
                notes.append(f"{error}.")
        conversations = describe_tokens(stored.episode, decode, advantages, trained)
        if all(
            piece["logprob_diff"] is None
            for item in conversations
            for part in item["segments"]
            for piece in part["pieces"]
        ):
            notes.append(NO_TOKEN_VALUES[row["outcome"] == "kept"])
        return {"error": "", "note": " ".join(notes), "conversations": conversations}

    def _find_token_advantages(
        self, run: ViewedRun, row: Mapping[str, Any], decode: DecodeFn
    ) -> dict[int, tuple[float, ...]]:
        """Return the advantages of an episode's trained conversations, by their number in `Episode.walk`."""
        positions, groups, advantages = self._load_step(run, row["stage"], row["step"])
        number, member = positions[row["grp"], row["idx"]]
        group = groups[number]
        credit = load_recipe(str(run.folder / RECIPE_FILE)).rl.advantage.sub_agent_advantage
        masks = [[index == member for index in range(len(group.scored_episodes))]]
        samples = build_samples([group], [advantages[number]], credit, decode=decode, masks=masks)
        parts = group.scored_episodes[member].episode.walk()
        numbers = {id(part.ledger): index for index, part in enumerate(parts)}
        return {numbers[id(sample.ledger)]: sample.advantages for sample in samples}

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _load_step(
        self, run: ViewedRun, stage: str, step: int
    ) -> tuple[dict[tuple[int, int], tuple[int, int]], list[Group], list[GroupAdvantages]]:
        """Return the kept episodes' positions (group, member), the kept groups, and their advantages."""
        files = {(own_stage, own_step): path for path, own_stage, own_step in list_rollout_files(run.folder)}
        if (stage, step) not in files:
            raise UnknownItemError(f"the run {run.name} has no episodes of step {step} of {stage!r}", key="step")
        stamp = files[stage, step].stat().st_mtime_ns

        def compute() -> Any:
            kept: defaultdict[int, list[RolloutRecord]] = defaultdict(list)
            baselines = {}
            for record in read_rollouts(run.folder, stage, step):
                if record.score is not None and record.outcome == "kept":
                    kept[record.group].append(record)
                elif record.score is not None and record.outcome == "greedy_baseline":
                    baselines[record.group] = ScoredEpisode(episode=record.episode, score=record.score)
            positions: dict[tuple[int, int], tuple[int, int]] = {}
            groups: list[Group] = []
            for number, (group, records) in enumerate(kept.items()):
                members = tuple(ScoredEpisode(episode=r.episode, score=r.score) for r in records if r.score)
                positions |= {(group, r.index): (number, member) for member, r in enumerate(records)}
                groups.append(
                    Group(task=records[0].episode.task, scored_episodes=members, greedy_baseline=baselines.get(group))
                )
            settings = load_recipe(str(run.folder / RECIPE_FILE)).rl.advantage
            return positions, groups, compute_group_advantages(groups, settings)

        return self._steps.keep(("step", run.folder, stage, step), stamp, compute)

    def compute_advantages(self, name: str, stage: str, step: int) -> dict[str, float]:
        """Return the advantage of a token in all credited spans, by the ref of each kept episode of a step."""
        positions, _, advantages = self._load_step(self.get(name), stage, step)
        totals = [own.total_G for own in advantages]
        return {
            f"{stage}/{step}/{group}/{index}": float(totals[number][member])
            for (group, index), (number, member) in positions.items()
        }

    # ---- comparisons -----------------------------------------------------------------------------------------------

    def compare(self, first: tuple[str, str, int], second: tuple[str, str, int]) -> dict[str, Any]:
        """Compare two lists of episodes (run, stage or evaluation, step): whose verdict or answer changed, right to
        wrong first.
        """
        before, after = (
            _index_by_task(self.get(name).index.list_outcomes(stage, step)) for name, stage, step in (first, second)
        )
        shared = [task for task in before if task in after]
        pairs = [_pair_task(before[task], after[task]) for task in shared]
        kinds = ("right → wrong", "wrong → right", "answer changed")
        flipped = sorted((pair for pair in pairs if pair["kind"] in kinds), key=lambda pair: kinds.index(pair["kind"]))
        return {
            "shared": len(shared),
            "only_first": len(before) - len(shared),
            "only_second": len(after) - len(shared),
            "counts": {kind: sum(pair["kind"] == kind for pair in pairs) for kind in (*kinds, "same")},
            "pairs": flipped[:MAX_FLIPPED],
        }

    def compare_evaluations(self, *sides: tuple[str, str, int]) -> list[Any]:
        """Return the table of the paired difference of two evaluations, with its interval; [] for anything else."""
        files = [{path.stem: path for path in list_results_files(self.get(name).folder)} for name, _, _ in sides]
        paths = [own[stage] for own, (_, stage, _) in zip(files, sides, strict=True) if stage in own]
        if len(paths) < 2:
            return []
        stamp = list(_stamp_files(file for path in paths for file in (path, path.with_suffix(VERDICTS_SUFFIX))))
        try:
            return self._results.keep(("pair", *paths), stamp, lambda: self._compute(compute_pair, *paths))
        except DataError as error:  # the tasks differ
            return [
                {"title": "No paired comparison", "header": [""], "rows": [[str(error)]], "bars": [], "folded": False}
            ]


def _stamp_files(paths: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    """Yield name, time and size of each file that exists."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            yield path.name, status.st_mtime_ns, status.st_size


STAGE_ORDER = ("sft", "sft_validation", "rl", "rl_validation")


def _index_by_task(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return one row per task and sample; of a step, per task its first episode."""
    indexed: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        sample = f"{row['idx']}" if row["kind"] == "evaluation" else row["mode"]
        indexed.setdefault(f"{row['task']}\n{sample}\n{row['frame_budget']}", row)
    return indexed


def _pair_task(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    was_right, is_right = ((row["correct"] or 0.0) >= 0.5 for row in (before, after))
    if was_right != is_right:
        kind = "right → wrong" if was_right else "wrong → right"
    else:
        kind = "answer changed" if before["answer"] != after["answer"] else "same"
    return {"kind": kind, "before": before, "after": after}


def _average_seeds(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    """Return the mean over seeds at each step, with Student's t interval where at least two seeds have it."""
    values: defaultdict[float, list[float]] = defaultdict(list)
    for xs, ys in curves:
        for x, y in zip(xs, ys, strict=True):
            values[x].append(y)
    steps = sorted(values)
    means = [sum(values[step]) / len(values[step]) for step in steps]
    intervals = [compute_seed_interval(values[step]) or (mean, mean) for step, mean in zip(steps, means, strict=True)]
    lows, highs = ([interval[side] for interval in intervals] for side in (0, 1))
    return _thin({"x": steps, "y": means, "low": lows, "high": highs})


def _thin(points: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return curves of at most MAX_POINTS points: means of equally many neighbors."""
    count = len(points["x"])
    size = -(-count // MAX_POINTS)
    if size <= 1:
        return {name: list(values) for name, values in points.items()}
    starts = range(0, count, size)
    return {
        name: [sum(values[i : i + size]) / len(values[i : i + size]) for i in starts] for name, values in points.items()
    }
