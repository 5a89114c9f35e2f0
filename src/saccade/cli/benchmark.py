"""`saccade eval RUN --bench videomme,mlvu --data FOLDER`: published benchmarks, one after the other."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from saccade import plugins
from saccade.commands._terminal import out, show
from saccade.config import Recipe
from saccade.data.archives import Told, archives, by_hand, complete, foreign_in, packed_in, unpack
from saccade.data.hub import HUB, MAIN, MARK, Hub, below, check_installed
from saccade.errors import ConfigError, DataError, boundary
from saccade.view.live import Advance, lines, say

if TYPE_CHECKING:
    from saccade.doctor import Finding
    from saccade.evaluation.run import Tally
    from saccade.types import Task

# Names for the settings of a file that holds two benchmarks.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "videomme_subtitles": ("videomme", {"subtitles": True}),
    "longvideobench_subtitles": ("longvideobench", {"subtitles": True}),
    "hrbench_4k": ("hrbench", {"size": "4k"}),
    "hrbench_8k": ("hrbench", {"size": "8k"}),
    "mathvision_mini": ("mathvision", {"mini": True}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies of benchmarks: the folder that holds them by name, or the hub that does, and how they are read."""

    data: Path  # or hub:main, or another revision: what is missing is fetched first
    subset: bool
    extractor: str
    hub: str = HUB


def run_benchmarks(
    folder: Path, recipe: Recipe, names: Sequence[str], *, copies: Copies, called: str, model: Path | None, shard: Any
) -> None:
    """Evaluate a run on each benchmark, whose copy lies in `copies.data` under its name, and show what is reported.

    What is `called` "tools off" is kept beside the evaluations of other names, as "videomme, tools off". Raises
    ConfigError for an unknown benchmark or extractor, and for options that can't be shuffled, before anything is run.
    """
    from saccade import exams
    from saccade.evaluation.scoreboard import grids_of, write_scores

    extractor, benchmarks = _rule(copies.extractor), _bound(names)
    for _, benchmark in benchmarks:
        exams.check_order(recipe, benchmark)
    # A split that is missing is told before hours go into another benchmark.
    places = [_place(copies, each, name, exams.portion_of(recipe, each, shard)) for name, each in benchmarks]
    for (_, benchmark), place in zip(benchmarks, places, strict=True):
        name = title(benchmark.name, called)
        with lines(out) as begin:
            report = exams.examine(
                folder,
                recipe,
                benchmark,
                data=place,
                name=name,
                subset=copies.subset,
                extractor=extractor,
                weights=model,
                shard=shard,
                on_done=_teller(begin, f"eval {name}"),
                on_judged=_teller(begin, f"judge {name}"),
            )
        show(grids_of(name, report, {}))
        # After each, so that what was evaluated before a kill is reported; of shards when they are joined.
        page = None if shard else write_scores(folder)
    if page is not None:
        say(out, f"The report: {page}")


def examine_benchmarks(recipe: Recipe, names: Sequence[str], copies: Copies) -> "Iterator[Finding]":
    """Whether each benchmark could be evaluated: its copy, its media, what its rule and its judge want."""
    from saccade.checkup import looked

    for name in names:
        yield looked(f"benchmark {name}", functools.partial(_examined, recipe, name, copies))


def _examined(recipe: Recipe, name: str, copies: Copies) -> str:
    from saccade import exams
    from saccade.checkup import open_some
    from saccade.evaluation.benchmarks._benchmark import check_subtitles, missing_media
    from saccade.evaluation.benchmarks._judging import Referee

    ((_, benchmark),) = _bound([name])
    exams.check_order(recipe, benchmark)
    Referee.of(benchmark, recipe.evaluation.judge)
    if str(copies.data).startswith(MARK):
        check_installed()
        return f"{benchmark.hub} is fetched from the hub when it is evaluated"
    place = _local(copies, benchmark, name)
    everything = benchmark.tasks(place, subset=copies.subset)
    tasks = exams.portion_of(recipe, benchmark, None).of(everything)
    lacking = [path for paths in missing_media(tasks).values() for path in paths]
    packed = packed_in(place)
    if lacking and packed:
        return f"{place}: {len(tasks):,} questions; of {len(packed)} archives there, what is wanted will be unpacked"
    if not copies.subset and not packed:
        check_subtitles(benchmark, everything, tasks, place)
    if lacking:
        mend = "put them or the data set's archives there"
        raise DataError(f"{place}: {benchmark.name} lacks {len(lacking)} files, first {lacking[0]}; {mend}")
    _, opened = open_some(tasks)
    return f"{place}: {len(tasks):,} questions, their files are there, {opened} of them were opened"


def merge_benchmarks(
    folder: Path, names: Sequence[str], *, called: str, extractor: str, others: Sequence[Path]
) -> None:
    """Join the shards of a run's evaluations on benchmarks, and show and write what is reported; see `exams.joined`."""
    from saccade import exams
    from saccade.evaluation.scoreboard import grids_of, write_scores

    rule, benchmarks = _rule(extractor), _bound(names)
    for _, benchmark in benchmarks:
        name = title(benchmark.name, called)
        card = exams.joined(folder, benchmark, name=name, extractor=rule, others=others)
        show(grids_of(name, card, {}))
    say(out, f"The report: {write_scores(folder)}")


def _rule(extractor: str) -> Any:
    from saccade.evaluation.benchmarks._benchmark import Extractor

    if extractor not in get_args(Extractor):
        raise ConfigError(f"--extractor must be official or tolerant, not {extractor!r}")
    return extractor


def _bound(names: Sequence[str]) -> list[tuple[str, Any]]:
    """The benchmarks of these names, each with the name of its plugin."""
    known = sorted({*plugins.names("evaluation.benchmarks"), *VARIANTS})
    wanted = [name.strip() for name in names]
    for name in wanted:
        if name not in known and not name.endswith(".py"):
            raise ConfigError(f"there is no benchmark {name!r}; {plugins.nearest(name, known)}")
    found = [VARIANTS.get(name, (name, {})) for name in wanted]
    return [(name, plugins.bind("evaluation.benchmarks", name, given)()) for name, given in found]


def unit_of_results(path: Path) -> Callable[["Task"], str]:
    """What tasks of a results file go together: those that its benchmark says, else those about the same files."""
    from saccade.evaluation.intervals import same_media

    name = path.stem.partition(", ")[0]
    if name not in {*plugins.names("evaluation.benchmarks"), *VARIANTS}:
        return same_media
    own: Callable[[Task], str] = _bound([name])[0][1].unit

    def unit(task: "Task") -> str:
        with boundary(DataError, f"{path} is called after the benchmark {name}, but holds other tasks; rename it"):
            return own(task)

    return unit


def title(benchmark: str, called: str) -> str:
    """What an evaluation on a benchmark is called.

    >>> title("videomme", ""), title("videomme", "tools off")
    ('videomme', 'videomme, tools off')
    """
    return f"{benchmark}, {called}" if called else benchmark


def _teller(begin: Callable[..., Advance], label: str) -> "Callable[[Tally], None]":
    """Who is told how far something is, on a line that begins with the first word of it."""
    begun = functools.cache(functools.partial(begin, label))
    return lambda tally: begun()(tally.done, tally.remark, tally.total)


def _place(copies: Copies, benchmark: Any, name: str, portion: Any) -> Path:
    """Where a benchmark's copy is, completed with what the chosen tasks show: out of archives that lie there, and of a
    copy of the hub from there. Raises DataError.
    """
    from saccade.evaluation.benchmarks._benchmark import missing_media

    data = str(copies.data)
    with lines(out) as begin:
        told = _unpacking(begin, benchmark.name)
        if data.startswith(MARK):
            there = Hub(endpoint=copies.hub)
            folder = there.copy(benchmark.hub, benchmark.patterns, revision=data.removeprefix(MARK) or MAIN)
            there.unpack(folder, benchmark.packed, told=told)
            add = functools.partial(there.add, folder, told=told)
        else:
            folder = _local(copies, benchmark, name)
            packed, foreign = packed_in(folder), foreign_in(folder)
            if not packed and not foreign:  # what is missing will count as errors, one by one
                return folder
            for archive in archives(set(packed).intersection(benchmark.packed)):
                unpack(folder, archive, folder, told=told)
            add = functools.partial(_add, folder, packed, told)
        tasks = benchmark.tasks(folder, subset=copies.subset)
        lacking = [path for paths in missing_media(portion.of(tasks)).values() for path in paths]
        if lacking:
            add(lacking, named={media.path for task in tasks for media in task.media})
            if not copies.subset:
                _refuse_foreign(folder, benchmark.name, lacking)
    return folder


def _refuse_foreign(folder: Path, name: str, paths: Iterable[str]) -> None:
    """Raises DataError where files still lack, and an archive lies there that only other programs unpack."""
    left = [path for path in paths if not Path(path).is_file()]
    told = by_hand(str(folder / each) for each in foreign_in(folder)) if left else ""
    if told:
        raise DataError(f"{name} lacks {len(left)} files, first {left[0]}, and {told}")


def _local(copies: Copies, benchmark: Any, name: str) -> Path:
    """The folder of a benchmark's copy on this machine. Raises DataError where its tables are not there."""
    from saccade.evaluation.benchmarks._rows import Copy

    folder = copies.data / (benchmark.name if (copies.data / benchmark.name).exists() else name)
    Copy(root=folder).files(*benchmark.patterns)
    return folder


def _add(folder: Path, packed: Sequence[str], told: Told, paths: Sequence[str], *, named: Iterable[str]) -> None:
    """Unpack what a local copy lacks; what isn't there either counts as errors, one by one."""
    complete(folder, below(folder, paths), named=below(folder, named), packed=archives(packed), told=told)


def _unpacking(begin: Callable[[str], Advance], name: str) -> Told:
    """Tells of files as they are unpacked, in a line that begins with the first."""
    shown: list[Advance] = []

    def told(done: int, archive: str) -> None:
        if not shown:
            shown.append(begin(f"unpack {name}"))
        shown[0](done, f"files of {archive}")

    return told
