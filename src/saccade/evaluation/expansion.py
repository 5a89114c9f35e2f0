"""A limited evaluation as a sample of the whole: for how many tasks each of those that were asked stands.

A limit takes equally many tasks of every row of a table, whatever their sizes. So that something can be said of the
whole, a task counts as often as there are tasks of its stratum for each that was asked (the weights of a stratified
sample; Cochran 1977, Sampling Techniques, section 5.2). Where none of a stratum was asked, the others of the row that
it is in stand for it. The file `<results>.expansion.json` keeps this beside the results.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from saccade.data.record import typed
from saccade.errors import DataError
from saccade.runlog import write_text

EXPANSION = ".expansion.json"

Place = tuple[tuple[str, ...], ...]  # the rows of each table that a unit belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """Of `whole` tasks some were asked; `weights` says, by id, for how many of the whole each of these stands. `unseen`
    is the share of the whole in strata of which none was asked.

    >>> Expansion(whole=6, weights={"w-1": 4.0, "w-2": 2.0}, unseen=0.0).weights["w-1"]
    4.0
    """

    whole: int
    weights: Mapping[str, float]
    unseen: float

    def covers(self, tasks: set[str]) -> bool:
        """Whether every one of these tasks, by id, is among those that were asked."""
        return tasks <= self.weights.keys()

    def keep(self, results: Path) -> None:
        """Write it beside the results, unless what is there tells of all these tasks and more, as those do."""
        known = read_expansion(results) if results.exists() else None
        if known is None or len(known.weights) <= len(self.weights) or not known.covers({*self.weights}):
            self.write(results)

    def write(self, results: Path) -> None:
        """Write it beside the results."""
        write_text(results.with_suffix(EXPANSION), json.dumps(asdict(self), indent=1) + "\n")


def read_expansion(results: Path) -> Expansion | None:
    """That of the results, where they are of a limited evaluation. Raises DataError where it can't be read."""
    path = results.with_suffix(EXPANSION)
    if not path.exists():
        return None
    mend = "delete it, and evaluate again with the same limit"
    try:
        return typed(json.loads(path.read_bytes()), Expansion, str(path))
    except DataError as error:
        raise DataError(f"{error}; {mend}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}; {mend}") from error


def weigh(places: Mapping[str, Place], asked: set[str]) -> tuple[dict[str, float], set[str]]:
    """For how many units each one that was asked stands, and the units of strata in which none was.

    `places` holds all units with their rows in each table, the first table first.

    >>> weigh({"a": (("x",),), "b": (("x",),), "c": (("y",),)}, {"a", "c"})
    ({'a': 2.0, 'c': 1.0}, set())
    """
    unseen: set[str] = set()
    return dict(_shared(places, [*places], asked, float(len(places)), unseen)), unseen


def _shared(
    places: Mapping[str, Place], units: Sequence[str], asked: set[str], count: float, unseen: set[str], depth: int = 0
) -> Iterator[tuple[str, float]]:
    """What is to be stood for, `count` units, among those of `units` that were asked."""
    chosen = [unit for unit in units if unit in asked]
    if depth == len(places[units[0]]):
        yield from ((unit, count / len(chosen)) for unit in chosen)
        return
    rows: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for unit in units:
        rows[places[unit][depth]].append(unit)
    seen = [members for members in rows.values() if not asked.isdisjoint(members)]
    unseen.update(unit for members in rows.values() if asked.isdisjoint(members) for unit in members)
    total = sum(map(len, seen))
    for members in seen:
        yield from _shared(places, members, asked, count * len(members) / total, unseen, depth + 1)
