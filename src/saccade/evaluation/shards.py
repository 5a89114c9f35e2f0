"""Split an evaluation into shards, equal parts that several machines run, and merge their results.

evaluations/shards/<name>/2-of-4.jsonl        the results of the second shard, in the format of any results file
evaluations/shards/<name>/2-of-4.shard.json   its manifest: which samples it holds, of which evaluation
evaluations/<name>.jsonl                      all of them, merged: the results that one machine would have written
"""

import filecmp
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import DataError, RunError
from saccade.evaluation.judge_results import VERDICTS_SUFFIX, read_verdicts
from saccade.evaluation.records import Record, SampleKey, find_fingerprint_differences, read_newest_records
from saccade.evaluation.subset import WEIGHTS_SUFFIX, Shard, read_stratified_weights
from saccade.media.relocation import map_media_paths
from saccade.utils.files import convert_file_errors
from saccade.utils.jsonl import read_json, relativize_path, write_jsonl

MANIFEST_SUFFIX = ".shard.json"
SHARDS_DIR = Path("evaluations", "shards")
_MAX_NAME_BYTES = 128  # file systems allow 255, with suffixes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """Describe a shard: `tasks_digest` is a digest of the tasks of all shards, `fingerprint` identifies everything else
    the results depend on, `samples` are their positions among the samples of all shards, and their keys.
    """

    shard: Shard
    tasks_digest: str
    fingerprint: str
    samples: tuple[tuple[int, SampleKey], ...]


def check_name(name: str) -> None:
    """Raise DataError for a name of an evaluation that can't be a file's."""
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name.encode()) > _MAX_NAME_BYTES:
        message = (
            f"an evaluation can't be called {name[:40]!r}; give it a name of letters, digits, '_', '-' and '.', of at "
            f"most {_MAX_NAME_BYTES} bytes"
        )
        raise DataError(message, key="name", value=name)


def get_results_path(folder: Path, name: str, shard: Shard | None) -> Path:
    """Return the results file of an evaluation, or of one of its shards, in the run `folder`.

    Raises DataError for a name that can't be a file's.
    """
    check_name(name)
    if shard is None:
        return folder / "evaluations" / f"{name}.jsonl"
    return folder / SHARDS_DIR / name / f"{shard.index}-of-{shard.num_shards}.jsonl"


def get_shard_file(manifest: Path, suffix: str) -> Path:
    """Return a file next to a shard's manifest, such as its results (".jsonl")."""
    return manifest.with_name(manifest.name.removesuffix(MANIFEST_SUFFIX) + suffix)


def list_shard_manifests(folder: Path, name: str) -> Sequence[Path]:
    """Return the shard manifests of an evaluation in a run. Raises DataError for a name that can't be a file's."""
    check_name(name)
    return sorted((folder / SHARDS_DIR / name).glob(f"*{MANIFEST_SUFFIX}"))


def merge_shards(folder: Path, name: str, other_runs: Sequence[Path] = ()) -> Path:
    """Merge the shards of the evaluation `name` in the run `folder` and its copies, and return the path of the results.

    The records are in the order of a single machine, and judge verdicts are merged too. A shard that exists twice with
    the same content is used once. Raises RunError for shards that are missing, unfinished, duplicated with other
    results, or of other weights, settings or tasks, and if the run has other results under this name.
    """
    runs = dict.fromkeys(run.resolve() for run in (folder, *other_runs))
    manifests = {
        path: read_json(path, ShardManifest, hint="run the shard's command again")
        for run in runs
        for path in list_shard_manifests(run, name)
    }
    if not manifests:
        manifest_paths = (path for run in runs for path in (run / SHARDS_DIR).glob(f"*/*{MANIFEST_SUFFIX}"))
        others = sorted({path.parent.name for path in manifest_paths})
        also = (
            f", but some of {', '.join(map(repr, others))} (--name, or --benchmarks for a benchmark's)"
            if others
            else ""
        )
        raise RunError(
            f"{', '.join(map(str, (folder, *other_runs)))} holds no shard of {name!r}{also}; "
            "evaluate with --shard 1/n to n/n first, on any machines",
            key="shards",
            value=name,
        )
    shard_verdicts = [verdict for path in manifests for verdict in read_verdicts(get_shard_file(path, ".jsonl"))]
    manifests = _drop_duplicates(manifests)
    _check_shards(manifests, name)
    target = get_results_path(folder, name, None)
    indexed = [item for path, manifest in manifests.items() for item in _read_shard_records(path, manifest)]
    # Copies of a run have the same layout, so a relative path resolves as if the shard were in this copy.
    source, evaluations = (folder / SHARDS_DIR / name).resolve(), target.parent.resolve()

    def relocate(file: str) -> str:
        return relativize_path(evaluations, os.path.normpath(source / file), folder.resolve())

    records = [map_media_paths(record, relocate) for _, record in sorted(indexed, key=lambda item: item[0])]
    # The existing file may be newer: failed episodes that were repeated after an earlier merge.
    existing = {record.key: record for record in read_newest_records(target)}
    if target.exists() and existing != {record.key: record for record in records}:
        raise RunError(f"{target} holds other results; delete or move it and merge again", key=str(target))
    # Verdicts with a value, and later ones, take precedence: the last verdict per answer is kept.
    verdicts = sorted([*shard_verdicts, *read_verdicts(target)], key=lambda verdict: verdict.value is not None)
    weights = [weights for path in manifests if (weights := read_stratified_weights(get_shard_file(path, ".jsonl")))]
    with convert_file_errors(target):
        write_jsonl(target, records)
        if weights:  # identical in every shard
            weights[0].write(target)
        else:
            target.with_suffix(WEIGHTS_SUFFIX).unlink(missing_ok=True)
        if verdicts:
            latest = {(verdict.task_id, verdict.answer): verdict for verdict in verdicts}
            write_jsonl(target.with_suffix(VERDICTS_SUFFIX), latest.values())
    return target


def _drop_duplicates(manifests: Mapping[Path, ShardManifest]) -> dict[Path, ShardManifest]:
    """Drop shards whose manifest and results are byte-identical to an earlier one."""
    unique: dict[Path, ShardManifest] = {}
    for path, manifest in manifests.items():
        results = get_shard_file(path, ".jsonl")
        twins = (get_shard_file(other, ".jsonl") for other in unique if unique[other] == manifest)
        if not any(results.exists() and twin.exists() and filecmp.cmp(results, twin, shallow=False) for twin in twins):
            unique[path] = manifest
    return unique


def _check_shards(manifests: Mapping[Path, ShardManifest], name: str) -> None:
    """Raise RunError unless these are all shards of one evaluation, each exactly once."""
    (first_path, first), *rest = manifests.items()
    num_shards = first.shard.num_shards
    for path, manifest in rest:
        if manifest.shard.num_shards != num_shards:
            raise RunError(
                f"{first_path} is shard {first.shard} and {path} is shard {manifest.shard}; "
                "delete the shards of the wrong split",
                key=str(path),
                value=str(manifest.shard),
            )
        changed = tuple(find_fingerprint_differences(first.fingerprint, manifest.fingerprint))
        if changed or manifest.tasks_digest != first.tasks_digest:
            problem = f"was evaluated with other {' and '.join(changed)}"
            problem = problem if changed else "belongs to other tasks, another limit or another num_samples"
            raise RunError(
                f"{path} {problem} than {first_path}; evaluate one of them again",
                key=str(path),
                value=changed or "tasks",
            )
    indices = [manifest.shard.index for manifest in manifests.values()]
    duplicate = next((path for path, manifest in manifests.items() if indices.count(manifest.shard.index) > 1), None)
    if duplicate is not None:
        raise RunError(
            f"the shard {manifests[duplicate].shard} of {name!r} exists twice with different results, once as "
            f"{duplicate}; leave one out",
            key=str(duplicate),
            value=str(manifests[duplicate].shard),
        )
    missing = tuple(f"{index}/{num_shards}" for index in range(1, num_shards + 1) if index not in indices)
    if missing:
        raise RunError(
            f"{name!r} lacks the shards {', '.join(missing)}; evaluate them, or give the runs that hold them",
            key="shards",
            value=missing,
        )


def _read_shard_records(path: Path, manifest: ShardManifest) -> list[tuple[int, Record]]:
    """Return a shard's records, each with its position in the full evaluation."""
    results = get_shard_file(path, ".jsonl")
    records = {
        record.key: record for record in read_newest_records(results) if record.fingerprint == manifest.fingerprint
    }
    num_missing = sum(key not in records for _, key in manifest.samples)
    if num_missing:
        raise RunError(
            f"{results} is unfinished, {num_missing} of its {len(manifest.samples)} episodes are missing; "
            "run the same command again to resume it",
            key=str(results),
            value=num_missing,
        )
    return [(position, records[key]) for position, key in manifest.samples]
