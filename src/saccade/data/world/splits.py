"""What worlds of either medium share: no two files show the same, and a split with tasks is complete."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from saccade.config import World
from saccade.data.record import write_jsonl
from saccade.data.rows import write_tasks
from saccade.data.world.folder import SPLITS, write_json
from saccade.errors import ConfigError
from saccade.types import Demo, Task, seed_of

ATTEMPTS = 200  # to draw what no other file shows

T = TypeVar("T")


def draw_splits(
    world: World,
    draw: Callable[[random.Random], T],
    *,
    signature: Callable[[T], str],
    name: str,
    seed: int,
    mend: str,
) -> dict[str, list[T]]:
    """What every file of every split shows; no two have one signature.

    `name` is what the seeds are drawn for. Raises ConfigError with `mend` where nothing new is found any more.
    """
    sizes = {"train": world.train, "validation": world.validation, "test": world.test}
    # Across splits too: a clip of the test may not have been seen in training.
    known: set[str] = set()

    def fresh(rng: random.Random) -> T:
        for _ in range(ATTEMPTS):
            found = draw(rng)
            key = signature(found)
            if key not in known:
                known.add(key)
                return found
        raise ConfigError(mend)

    drawn = {}
    for split in reversed(SPLITS):  # so that a larger training split leaves the test as it is
        drawn[split] = [fresh(random.Random(seed_of(name, seed, split, index))) for index in range(sizes[split])]
    return drawn


def write_split(
    folder: Path, labels: str, entries: Mapping[str, Any], tasks: Sequence[Task], traces: Sequence[Demo]
) -> None:
    """The rows of a split: `labels` is the file of what its files show."""
    # Rows are cheap and follow from the seed: they are written anew on every call.
    write_json(folder / labels, entries)
    if traces:
        write_jsonl(folder / "traces.jsonl", traces)
    write_tasks(folder / "tasks.jsonl", tasks)  # last: a split with tasks is complete
