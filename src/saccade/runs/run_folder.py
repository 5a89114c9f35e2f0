"""The run folder: what a run writes to disk, in a form that survives a kill and can be read and resumed.

recipe.yaml         the resolved recipe with every default
invocations.json    one entry per invocation: seed, versions, platform, commit, sandbox isolation, digests of
                    plugin files, changed recipe keys
plugins/            copies of the plugin files that the recipe names, by the start of their digest
metrics.jsonl       one line per step, appended and synced; cut back to the checkpoint when a run is resumed
finished_stages/*.json  one file per finished stage

Other modules write the rest: checkpoints, episodes, evaluations, reports. docs/index.md lists every file.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.config.load import check_run_recipe, dump_recipe, load_recipe, read_yaml
from saccade.config.paths import list_plugin_files, relativize_paths, resolve_paths
from saccade.config.schema import Recipe
from saccade.errors import DataError, RunError, convert_errors
from saccade.metrics.metric_log import read_metric_rows
from saccade.utils.files import (
    convert_file_errors,
    create_folder,
    read_bytes,
    read_text,
    resolve_path,
    write_atomically,
    write_text,
)
from saccade.utils.jsonl import append_jsonl, read_json, write_jsonl
from saccade.utils.versions import collect_versions

# Keys that may differ when a run is resumed: logging, length, checkpoints, evaluation, alarms, use of the machine, and
# how many groups are sampled. Every other key changes what is trained: the filters and ranks choose what is
# trained on; `rl.max_staleness` and `rl.selection.over_provision` choose how stale groups may be and whether slow ones
# are dropped. Other tasks or settings of the validation would give scores that can't be compared with earlier ones.
PLUGINS_FOLDER = "plugins"
RESUMABLE_KEYS = (
    "loggers",
    "engine",
    "rollouts",
    "evaluation",
    *(f"validation.{key}" for key in ("every", "max_concurrency")),
    "episodes",
    "alarms",
    "model.num_threads",
    "model.activation_checkpointing",
    "model.collective_timeout",
    *(
        f"{stage}.{key}"
        for stage in ("sft", "rl")
        for key in ("steps", "save_every", "checkpoints", "micro_batch_size")
    ),
    *(f"rl.{key}" for key in ("max_groups_in_progress", "max_queued_tokens")),
    *(
        f"rl.selection.{key}"
        for key in ("oversample", "round_size", "max_sampling_rounds", "on_underfilled", "surplus")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder and its recipe. Every method raises RunError if the folder can't be used."""

    path: Path  # of the folder
    recipe: Recipe  # with every default

    @classmethod
    def create(
        cls,
        path: str | Path,
        recipe: Recipe,
        *,
        resume: bool = False,
        resumable_keys: Collection[str] = RESUMABLE_KEYS,
        metadata: Mapping[str, str] | None = None,
    ) -> "Run":
        """Create a run, or resume an existing one with `resume` and the same recipe.

        Only values at or below `resumable_keys` may differ from the recipe in the folder; invocations.json records the
        differences and the `metadata` of this invocation.
        """
        run = cls(path=Path(path), recipe=recipe)
        exists = (run.path / "recipe.yaml").exists()
        if exists and not resume:
            raise RunError(
                f"the run {path} already exists; resume it with --resume, or choose another folder with --out",
                key=str(path),
            )
        changed = run.diff_recipe(resumable_keys) if resume else {}
        with convert_file_errors(run.path):
            create_folder(run.path)
        invocations = run.read_invocations()
        invocation: dict[str, Any] = {"seed": recipe.seed, **collect_versions(), **(metadata or {})}
        invocation |= {"plugins": plugins} if (plugins := run._copy_plugins()) else {}
        if changed:
            invocation["changed"] = changed
        run.write_json("invocations.json", [*invocations, invocation])
        if changed or not exists:  # last, since this file is what makes the folder a run
            write_text(run.path / "recipe.yaml", dump_recipe(recipe, run.path))
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open an existing run with the recipe in its folder."""
        if not (Path(path) / "recipe.yaml").is_file():
            raise RunError(f"there is no run at {path}: it has no recipe.yaml", key=str(path))
        recipe = load_recipe(str(Path(path) / "recipe.yaml"))
        check_run_recipe(Path(path) / "recipe.yaml", recipe.model_fields_set)
        return cls(path=Path(path), recipe=recipe)

    def diff_recipe(self, resumable_keys: Collection[str] = RESUMABLE_KEYS) -> dict[str, tuple[Any, Any]]:
        """Return (before, now) of each changed key. Raises RunError for a key outside `resumable_keys`.

        Also raises RunError for a plugin file whose content differs from the one that the run was started with.
        """
        differences = {}
        before, now = (
            relativize_paths(resolve_paths(recipe.model_dump(mode="json"), resolve_path(self.path)), self.path)
            for recipe in (Run.open(self.path).recipe, self.recipe)
        )
        for key, old, new in _iterate_differences(before, now, ""):
            if not any(f"{key}.".startswith(f"{resumable}.") for resumable in resumable_keys):
                raise RunError(
                    f"the run {self.path} was started with {key}={old}, not {new}; resume it with the same recipe, or "
                    "choose another folder with --out",
                    key=key,
                    value=new,
                )
            differences[key] = (old, new)
        recorded = self._read_plugin_digests()
        for path, digest in self._digest_plugins().items():
            if recorded.get(path, digest) != digest:
                raise RunError(
                    f"{path} has changed since the run {self.path} was started; restore it from "
                    f"{self._get_plugin_copy(path, recorded[path])}, or choose another folder with --out",
                    key=path,
                    value=digest,
                )
        return differences

    def _digest_plugins(self) -> dict[str, str]:
        """Return the digest of each plugin file of the recipe, and of those that its YAML files name."""
        digests = {}
        waiting = list(list_plugin_files(self.recipe.model_dump(mode="json")))
        while waiting:
            file = waiting.pop()
            if not file.is_file() or str(file) in digests:  # loading the plugin reports a missing one
                continue
            with convert_file_errors(file):
                digests[str(file)] = hashlib.sha256(read_bytes(file)).hexdigest()
            if file.suffix != ".py":
                waiting += [file.parent / path for path in list_plugin_files(read_yaml(file, "plugin's file"))]
        return digests

    def check_plugin_files(self) -> None:
        """Raise RunError, with the run's copy, for a plugin file that was there when the run was started and isn't."""
        recorded = self._read_plugin_digests()
        for file in list_plugin_files(self.recipe.model_dump(mode="json")):
            if str(file) in recorded and not file.is_file():
                copy = self._get_plugin_copy(str(file), recorded[str(file)])
                raise RunError(f"there is no plugin file {file}; restore it from {copy}", key=str(file))

    def _get_plugin_copy(self, path: str, digest: str) -> Path:
        return self.path / PLUGINS_FOLDER / digest[:12] / Path(path).name

    def _copy_plugins(self) -> dict[str, str]:
        """Copy the plugin files into the run's folder, as a record of what was run; return their digests by path."""
        digests = self._digest_plugins()
        for path, digest in digests.items():
            copy = self._get_plugin_copy(path, digest)
            with convert_file_errors(copy):
                create_folder(copy.parent)
                with write_atomically(copy) as partial:
                    shutil.copyfile(path, partial)
        return digests

    def _read_plugin_digests(self) -> dict[str, str]:
        """Return the digests of the plugin files at the first invocation that used each of them."""
        recorded: dict[str, str] = {}
        for invocation in self.read_invocations():
            recorded = {**invocation.get("plugins", {}), **recorded}
        return recorded

    def log(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; numbers that aren't finite are written as null."""
        path = self.path / "metrics.jsonl"
        with convert_file_errors(path):
            append_jsonl(path, _replace_non_finite({"stage": stage, "step": step, **values}))

    def read_metrics(self, stage: str) -> list[dict[str, Any]]:
        """Return a stage's lines by step: a step's last line counts, and a line that a kill truncated is ignored."""
        steps = {row["step"]: row for row in self._read_metric_rows() if row["stage"] == stage}
        return [steps[step] for step in sorted(steps)]

    def _read_metric_rows(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        try:
            return read_metric_rows(path)
        except DataError as error:
            raise RunError(str(error), key=str(path)) from error

    def cut_metrics(self, stages: Collection[str], last_step: int) -> None:
        """Remove the lines of `stages` after a step from metrics.jsonl, since a resumed run makes these steps again.

        Of several lines of one step, such as an earlier version's two processes wrote, the last one stays.
        """
        path = self.path / "metrics.jsonl"
        rows = self._read_metric_rows()
        last_lines = {(row["stage"], row["step"]): number for number, row in enumerate(rows)}
        kept = [
            row
            for number, row in enumerate(rows)
            if row["stage"] not in stages
            or (row["step"] <= last_step and number == last_lines[row["stage"], row["step"]])
        ]
        if len(kept) < len(rows):
            with convert_file_errors(path):
                write_jsonl(path, kept)

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file of the run atomically: after a kill it holds the old value or the new one, never a part."""
        return write_text(self.path / name, json.dumps(_replace_non_finite(value), indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Return the value of a JSON file of the run."""
        path = self.path / name
        with convert_errors(RunError, f"{path} can't be read", key=str(path)):
            return json.loads(read_text(path))

    def read_invocations(self) -> list[dict[str, Any]]:
        """Return the entries of invocations.json; [] without the file, which a run can be resumed without."""
        path = self.path / "invocations.json"
        if not path.exists():
            return []
        try:
            return read_json(
                path, list[dict[str, Any]], hint="delete it to resume without the record of earlier invocations"
            )
        except DataError as error:
            raise RunError(str(error), key=str(path)) from error

    def mark_done(self, stage: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Record that a stage is finished, with metadata for later stages."""
        self.write_json(f"finished_stages/{stage}.json", dict(metadata or {}))

    def mark_begun(self, stage: str) -> None:
        """Remove the record that a stage is finished, since it continues and may be interrupted."""
        path = self.path / "finished_stages" / f"{stage}.json"
        with convert_file_errors(path):
            path.unlink(missing_ok=True)

    def is_done(self, stage: str) -> bool:
        """Return whether a stage is finished."""
        return (self.path / "finished_stages" / f"{stage}.json").is_file()


def _iterate_differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _iterate_differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
