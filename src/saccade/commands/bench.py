"""`saccade eval RUN --bench videomme,mlvu --data FOLDER`: published benchmarks, one after the other."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from saccade import plugins
from saccade.commands._terminal import out, progress, show
from saccade.config import load_recipe
from saccade.data.hub import HUB, MAIN, MARK, Hub
from saccade.errors import ConfigError
from saccade.runlog import Run
from saccade.view.live import say

# Names for the settings of a file that holds two benchmarks; VideoMME with subtitles waits for an agent to show them.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hrbench_4k": ("hrbench", {"size": "4k"}),
    "hrbench_8k": ("hrbench", {"size": "8k"}),
    "mathvision_mini": ("mathvision", {"mini": True}),
}


def run_benchmarks(
    folder: Path,
    settings: Sequence[str],
    names: Sequence[str],
    *,
    data: Path,
    model: Path | None,
    extractor: str,
    subset: bool,
    hub: str = HUB,
) -> None:
    """Evaluate a run on each benchmark, whose copy lies in `data` under its name, and show what is reported.

    Where `data` is `hub:main`, or another revision, what is missing is fetched from the `hub` first.
    Raises ConfigError for an unknown benchmark or extractor before anything is run.
    """
    from saccade import stages
    from saccade.evaluation.benchmarks._benchmark import Extractor

    if extractor not in get_args(Extractor):
        raise ConfigError(f"--extractor must be official or tolerant, not {extractor!r}")
    found = [VARIANTS.get(name.strip(), (name.strip(), {})) for name in names]
    benchmarks = [(name, plugins.bind("evaluation.benchmarks", name, given)()) for name, given in found]
    loaded = load_recipe(str(Run.open(folder).path / "recipe.yaml"), settings)
    # a split that is missing is told before hours go into another benchmark
    limit = loaded.evaluation.limit
    places = [_place(data, each, name, hub, limit=limit, subset=subset) for name, each in benchmarks]
    for (_, benchmark), place in zip(benchmarks, places, strict=True):
        with progress(f"eval {benchmark.name}") as advance:
            report = stages.examine(
                folder,
                loaded,
                benchmark,
                data=place,
                subset=subset,
                extractor="tolerant" if extractor == "tolerant" else "official",
                weights=model,
                on_done=functools.partial(_tell, advance),
            )
        show(_grids(report))
        if report.errors:
            first = f"{report.errors} of {report.n} answers are errors and count as wrong; the first: {report.reason}"
            say(out, first, style="dim")


def _place(data: Path, benchmark: Any, name: str, hub: str, *, limit: int, subset: bool) -> Path:
    """Where a benchmark's copy is; one of the hub is completed with what the chosen tasks show. Raises DataError."""
    from saccade.evaluation.benchmarks._benchmark import missing_media
    from saccade.evaluation.benchmarks._rows import Copy
    from saccade.evaluation.run import choose

    if not str(data).startswith(MARK):
        place = data / (benchmark.name if (data / benchmark.name).exists() else name)
        Copy(root=place).files(*benchmark.patterns)
        return place
    there = Hub(endpoint=hub)
    folder = there.copy(benchmark.hub, benchmark.patterns, revision=str(data).removeprefix(MARK) or MAIN)
    there.add(folder, missing_media(choose(benchmark.tasks(folder, subset=subset), limit)).values())
    return folder


def _tell(advance: Callable[[int, str, int | None], None], done: int, every: int) -> None:
    advance(done, "", every)


def _grids(report: Any) -> list[Any]:
    """What a report says, as tables: its metrics, what went wrong, its strata."""
    from saccade.evaluation.report import Grid

    counts = {"questions": report.n, "errors": report.errors, "unparsed": report.unparsed}
    rows = [(name, f"{value:.2f}") for name, value in report.metrics.items()]
    if report.undecided:
        counts["without a verdict" if report.judge else "for a judge to decide"] = report.undecided
        rows.append((f"{report.headline}, at most", f"{report.at_most[report.headline]:.2f}"))
    if report.judge:
        rows.append(("judge", report.judge))
    rows += [(name, str(count)) for name, count in counts.items()]
    whole = Grid(title=f"{report.benchmark} ({report.extractor})", header=("", ""), rows=tuple(rows))
    tables = [
        Grid(
            title=name,
            header=("", "n", "mean"),
            rows=tuple((row, str(cell.n), f"{cell.value:.2f}") for row, cell in cells.items()),
        )
        for name, cells in report.strata.items()
    ]
    return [whole, *tables]
