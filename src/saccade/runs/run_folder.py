"""The run folder: everything a run leaves behind, written so that a killed run can be read and resumed.

recipe.yaml      the resolved recipe, every default written out
versions.json    one entry per start: seed, versions, platform, commit, what jails code, what the recipe changed since
metrics.jsonl    one line per step, appended and flushed
done/*.json      one mark per finished stage
"""

import contextlib
import errno
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.config import Recipe, dump, load_recipe
from saccade.errors import RunError

# What may change when a run goes on: who watches it, how far it goes, what it keeps and how it is evaluated, how it
# shares the machine, and how hard it looks for groups. All else would make two experiments of one: which groups are
# learned from (filters, ranks), and, by `rl.max_staleness` and `rl.select.overlaunch`, how late they may be and whether
# the slow ones among them are left out.
MAY_CHANGE = (
    "track",
    "engine",
    "evaluation",
    "model.threads",
    "model.activation_checkpointing",
    *(f"{stage}.{key}" for stage in ("sft", "rl") for key in ("steps", "save_every", "rows_per_pass")),
    "rl.max_waiting_tokens",
    *(f"rl.select.{key}" for key in ("oversample", "max_rounds", "on_short", "spare")),
)
GO_ON = "then go on with --resume, or with the same command where there is none"
MENDS = {
    errno.ENOSPC: f"free some space, {GO_ON}",
    errno.EDQUOT: f"free some space, {GO_ON}",
    errno.EFBIG: f"allow larger files (ulimit -f), {GO_ON}",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder",
    errno.ENOTDIR: "a part of the path is a file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder and its recipe. Every method raises RunError with one sentence where the folder can't be used."""

    path: Path
    recipe: Recipe

    @classmethod
    def create(
        cls,
        path: str | Path,
        recipe: Recipe,
        *,
        resume: bool = False,
        may_change: Collection[str] = MAY_CHANGE,
        facts: Mapping[str, str] | None = None,
    ) -> "Run":
        """Start a run, or go on with one; an existing run needs `resume` and the recipe that it was started with.

        Only what lies at or below the keys `may_change` may differ; versions.json then says what did, and the `facts`
        of this start.
        """
        run = cls(path=Path(path), recipe=recipe)
        exists = (run.path / "recipe.yaml").exists()
        if exists and not resume:
            raise RunError(f"the run {path} already exists; go on with --resume, or choose another folder with --out")
        changed = {}
        if resume:
            changed = run.changed(may_change)
            run._drop_torn_line()
        with writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        starts = run.read_json("versions.json") if exists else []
        note = {"changed": changed} if changed else {}
        run.write_json("versions.json", [*starts, {"seed": recipe.seed, **versions(), **(facts or {}), **note}])
        if changed or not exists:  # last, since this file is what makes the folder a run
            run.write_text("recipe.yaml", dump(recipe))
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """An existing run, with the recipe in its folder."""
        if not (Path(path) / "recipe.yaml").is_file():
            raise RunError(f"there is no run at {path}: it has no recipe.yaml")
        return cls(path=Path(path), recipe=load_recipe(str(Path(path) / "recipe.yaml")))

    def changed(self, may_change: Collection[str] = MAY_CHANGE) -> dict[str, tuple[Any, Any]]:
        """What the recipe has otherwise than the one in the folder, before and now; RunError for what may not."""
        return _changed(Run.open(self.path).recipe, self.recipe, str(self.path), may_change)

    # ---- what steps leave ------------------------------------------------------------------------------------------

    def log(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; numbers that aren't finite are written as null."""
        line = json.dumps(_finite({"stage": stage, "step": step, **values}), ensure_ascii=False) + "\n"
        path = self.path / "metrics.jsonl"
        # One unbuffered write per line: a kill can tear the last line but never mix two.
        with writing(path), path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """The lines of a stage by step; of a step that was done again after a resume the last line counts.

        A torn last line, left by a kill, is ignored.
        """
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        try:
            records = [json.loads(line) for line in lines]
        except ValueError as error:
            raise RunError(f"{path} holds a line that isn't JSON: {error}") from error
        steps = {record["step"]: record for record in records if record["stage"] == stage}
        return [steps[step] for step in sorted(steps)]

    def _drop_torn_line(self) -> None:
        path = self.path / "metrics.jsonl"
        whole = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        if path.exists() and whole < path.stat().st_size:
            with writing(path):
                os.truncate(path, whole)

    # ---- files and marks -------------------------------------------------------------------------------------------

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of the run atomically: after a kill there is the old file or the new one, never a half."""
        return write_text(self.path / name, text)

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file of the run atomically."""
        return self.write_text(name, json.dumps(_finite(value), indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """The value of a JSON file of the run."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / name} can't be read: {error}") from error

    def mark_done(self, stage: str, facts: Mapping[str, Any] | None = None) -> None:
        """Remember that a stage is finished, with facts for whoever comes later."""
        self.write_json(f"done/{stage}.json", dict(facts or {}))

    def mark_begun(self, stage: str) -> None:
        """Forget that a stage was finished: it goes on, and may be stopped halfway."""
        with writing(self.path):
            (self.path / "done" / f"{stage}.json").unlink(missing_ok=True)

    def is_done(self, stage: str) -> bool:
        """Whether a stage is finished."""
        return (self.path / "done" / f"{stage}.json").is_file()


def write_text(path: Path, text: str) -> Path:
    """Write a file atomically, its folder included; RunError where that fails."""
    # Beside the target, since a rename is atomic only within one file system.
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure of the file system into one sentence about `path`, with the mend where it is known."""
    try:
        yield
    except OSError as error:
        mend = MENDS.get(error.errno or 0)
        tail = f"; {mend}" if mend else ""
        raise RunError(f"{path} can't be written: {(error.strerror or str(error)).lower()}{tail}") from error


def versions() -> dict[str, str | None]:
    """What a run depends on: Python, the packages that compute, the platform, the commit of a source tree."""
    packages = ("saccade", "torch", "transformers", "numpy", "av")
    found = {name: version_of(name) for name in packages}
    return {"python": platform.python_version(), **found, "platform": platform.platform(), "commit": _commit()}


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it; None where it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of Saccade's own source tree (with -dirty where it was changed), None where it isn't one."""
    folder, name = Path(__file__).parent, Path(__file__).name
    try:
        # An installed copy may lie inside somebody else's repository, whose commit would say nothing.
        tracked = subprocess.run(["git", "ls-files", "--error-unmatch", name], cwd=folder, capture_output=True)
        if tracked.returncode:
            return None
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, cwd=folder, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def _changed(old: Recipe, new: Recipe, path: str, may: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, each with the value before and now. Raises RunError for one that may not."""
    found = {}
    for key, before, now in _differences(old.model_dump(mode="json"), new.model_dump(mode="json"), ""):
        if not any(f"{key}.".startswith(f"{free}.") for free in may):
            raise RunError(
                f"the run {path} was started with {key}={before}, not {now}; resume with the same recipe, or choose "
                "another folder with --out"
            )
        found[key] = (before, now)
    return found


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
