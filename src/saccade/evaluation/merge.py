"""Shards of an evaluation joined into the results that one machine would have written."""

import filecmp
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from saccade.data.record import relocated, seen_from, write_jsonl
from saccade.errors import RunError
from saccade.evaluation.expansion import EXPANSION, read_expansion
from saccade.evaluation.run import Record, differences, newest_records
from saccade.evaluation.shards import Cut, evaluations_in_shards, of_shard, shard_path, shards_of
from saccade.evaluation.verdicts import VERDICTS, read_verdicts
from saccade.runlog import writing


def merge(folder: Path, name: str, others: Sequence[Path] = ()) -> Path:
    """Join the shards of the evaluation `name` that lie in the run `folder` and in copies of it, in the order in which
    one machine would have been asked, and what judges said of them; the path of the results.

    A shard that is there twice, and holds the same both times, is taken once. Raises RunError for shards that are
    missing, unfinished, there twice with other results, or of other weights, settings or tasks, and where the run holds
    other results of this name.
    """
    places = dict.fromkeys(place.resolve() for place in (folder, *others))
    cuts = {path: Cut.read(path) for place in places for path in shards_of(place, name)}
    if not cuts:
        there = sorted({evaluation for place in places for evaluation in evaluations_in_shards(place)})
        also = f", but some of {', '.join(map(repr, there))} (--name, or --bench for a benchmark's)" if there else ""
        mend = "evaluate with --shard 1/n to n/n first, on any machines"
        raise RunError(f"{', '.join(map(str, (folder, *others)))} holds no shard of {name!r}{also}; {mend}")
    said = [each for path in cuts for each in read_verdicts(of_shard(path, ".jsonl"))]
    cuts = _once(cuts)
    _check(cuts, name)
    target = shard_path(folder, name, None)
    found = [record for path, cut in cuts.items() for record in _placed(path, cut)]
    records = [_moved(record, folder, name) for _, record in sorted(found, key=lambda each: each[0])]
    # What is there may be newer: attempts that broke and were made again after an earlier merge.
    if target.exists() and not _same(newest_records(target), records):
        raise RunError(f"{target} holds other results; delete it, or move it away, and merge again")
    # What was said of a merged file later stays, but for an answer on which nothing was.
    known = sorted([*said, *read_verdicts(target)], key=lambda each: each.value is not None)
    limited = [each for path in cuts if (each := read_expansion(of_shard(path, ".jsonl")))]
    with writing(target):
        write_jsonl(target, records)
        if limited:  # every shard tells of all of them
            limited[0].write(target)
        else:
            target.with_suffix(EXPANSION).unlink(missing_ok=True)
        if known:
            write_jsonl(target.with_suffix(VERDICTS), {(each.task, each.answer): each for each in known}.values())
    return target


def _once(cuts: Mapping[Path, Cut]) -> dict[Path, Cut]:
    """The cuts without copies, to the letter, of one before."""
    kept: dict[Path, Cut] = {}
    for path, cut in cuts.items():
        files = [(of_shard(path, ".jsonl"), of_shard(other, ".jsonl")) for other in kept if kept[other] == cut]
        if not any(all(map(Path.exists, pair)) and filecmp.cmp(*pair, shallow=False) for pair in files):
            kept[path] = cut
    return kept


def _check(cuts: Mapping[Path, Cut], name: str) -> None:
    """See that these are all the parts of one whole, each once."""
    (first, one), *rest = cuts.items()
    for path, cut in rest:
        if cut.shard.of != one.shard.of:
            raise RunError(f"{first} is shard {one.shard} and {path} shard {cut.shard}: delete those of the wrong cut")
        changed = differences(one.under, cut.under)
        if changed:
            raise RunError(
                f"{path} was made with other {' and '.join(changed)} than {first}; evaluate one of them anew"
            )
        if cut.whole != one.whole:
            why = "is a part of other tasks, of another limit or of other repeats"
            raise RunError(f"{path} {why} than {first}; evaluate one of them anew")
    indices = [cut.shard.index for cut in cuts.values()]
    twice = next((path for path, cut in cuts.items() if indices.count(cut.shard.index) > 1), None)
    if twice is not None:
        raise RunError(
            f"the shard {cuts[twice].shard} of {name!r} is there twice, with other results, as {twice}; leave one out"
        )
    missing = [f"{index}/{one.shard.of}" for index in range(1, one.shard.of + 1) if index not in indices]
    if missing:
        raise RunError(f"of {name!r} these shards are missing: {', '.join(missing)}; evaluate them, or name their runs")


def _placed(path: Path, cut: Cut) -> list[tuple[int, Record]]:
    """A shard's records, each with its place in the whole."""
    results = of_shard(path, ".jsonl")
    found = {record.key: record for record in newest_records(results) if record.under == cut.under}
    lacking = sum(key not in found for key in cut.keys)
    if lacking:
        many = f"{lacking} of its {len(cut.keys)} attempts"
        raise RunError(f"{results} isn't finished, {many} are missing; run the same command again to go on with it")
    return [(place, found[key]) for place, key in zip(cut.places, cut.keys, strict=True)]


def _moved(record: Record, folder: Path, name: str) -> Record:
    """A shard's record as the merged file has it, whichever copy of the run it was written in."""
    # Copies of a run have the same files at the same places below themselves, so a path is read as if it lay here.
    place, target = (folder / "evaluations" / "shards" / name).resolve(), (folder / "evaluations").resolve()
    return relocated(record, lambda file: seen_from(target, os.path.normpath(place / file), folder.resolve()))


def _same(there: Sequence[Record], records: Sequence[Record]) -> bool:
    return {record.key: record for record in there} == {record.key: record for record in records}
