"""Checkpoints of a stage: the model as a Hugging Face folder, the optimizer, and the state of the trainer.

    save_checkpoint ──> .step-000020.part ──checksums, fsync──> rename ──> link `best` ──> delete what `retention` drops
                               └─ deleted on failure                                           └─ rename, then remove

A checkpoint is written to a temporary folder, synced to the disk and then renamed, so it is never partial, also after a
power cut; one that is deleted is renamed first, so a crash leaves no partial one either. A resumed run loads the
newest, and refuses it unless every file has the content that was written.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from saccade.config.schema import CheckpointConfig, RlConfig, SftConfig
from saccade.errors import ModelError, RunError, convert_errors
from saccade.models.checkpoint_files import check_weights, verify_checksums, write_checksums
from saccade.utils.files import convert_file_errors, describe_retry, read_text, sync_path, sync_tree

if TYPE_CHECKING:  # reports list checkpoints without torch
    from saccade.training.distributed.vlm import ShardedOptimizer
    from saccade.training.optimizer import Optimizer

STATE_FILE = "trainer_state.json"
KEEP_FILE = "keep"  # a checkpoint that contains this file is never deleted
BEST_LINK = "best"
LAST_STEP = "last"


class Savable(Protocol):
    """A model, an optimizer, or a copy of one."""

    def save(self, folder: Path) -> None:
        """Write its files into a checkpoint's folder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk; `step` is the number of finished steps."""

    step: int
    folder: Path

    def restore(self, optimizer: "Optimizer | ShardedOptimizer") -> dict[str, Any]:
        """Load the optimizer's state and return the trainer's. Raises RunError, also if a file has changed."""
        with convert_read_errors(self.folder):
            verify_checksums(self.folder)
            optimizer.restore(self.folder)
            return self._read_state()

    def require_step(self) -> None:
        """Raise RunError if the folder was renamed to another step; weights without a readable state pass."""
        try:
            state = self._read_state()
        except (OSError, ValueError):  # `restore` refuses them
            return
        if state.get("step", self.step) != self.step:  # earlier versions wrote none
            raise RunError(
                f"the checkpoint {self.folder} is that of step {state['step']}; give its folder that name again",
                key=str(self.folder),
                value=state["step"],
            )

    def _read_state(self) -> dict[str, Any]:
        state = json.loads(read_text(self.folder / STATE_FILE))
        if not isinstance(state, dict):
            raise ValueError(f"{STATE_FILE} must hold an object")
        return state


@contextlib.contextmanager
def convert_read_errors(folder: Path) -> Iterator[None]:
    """Convert any exception inside the block into a RunError that names the checkpoint's folder."""
    message = f"the checkpoint {folder} can't be read; delete it to resume from the previous one"
    with convert_errors(RunError, message, key=str(folder)):
        try:
            yield
        except ModelError as error:
            raise RunError(f"{message}: {error}", key=str(folder)) from error


def should_save(step: int, settings: SftConfig | RlConfig, *, is_validated: bool = False) -> bool:
    """Return whether a stage saves a checkpoint after `step` finished steps."""
    retention = settings.checkpoints
    return (
        step % settings.save_every == 0
        or step in (settings.steps, *retention.keep_steps)
        or (retention.keep_every > 0 and step % retention.keep_every == 0)
        or (retention.best > 0 and is_validated)
    )


def count_kept_checkpoints(settings: SftConfig | RlConfig) -> int:
    """Return how many checkpoints of a finished stage its settings keep, at most."""
    retention = settings.checkpoints
    regular = settings.steps // retention.keep_every if retention.keep_every else 0
    return retention.last + retention.best + regular + len(retention.keep_steps)


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    vlm: Savable,
    optimizer: Savable,
    trainer_state: Mapping[str, Any],
    write_extra_files: Callable[[Path], None] = lambda part_folder: None,
    retention: CheckpointConfig = CheckpointConfig(),  # noqa: B008 (frozen)
    scores: Mapping[int, float] | None = None,
) -> Checkpoint:
    """Write checkpoint `step`, with `write_extra_files`, and delete those that `retention` drops. Raises RunError.

    `vlm` and `optimizer` may be copies (see `checkpoint_writer`).

    `scores` maps validated steps to the metric by which `retention` finds the best ones.
    """
    target = folder / f"step-{step:06d}"
    part_folder = folder / f".step-{step:06d}.part"
    message = f"the checkpoint {target} can't be written; free some space, {describe_retry(target)}"
    with convert_errors(RunError, message, key=str(target)), convert_file_errors(target):
        _delete_leftovers(folder)
        try:
            part_folder.mkdir(parents=True)
            vlm.save(part_folder)
            optimizer.save(part_folder)
            (part_folder / STATE_FILE).write_text(json.dumps({"step": step, **trainer_state}))
            write_extra_files(part_folder)
            check_weights(part_folder)  # not shorter than its header
            write_checksums(part_folder)
            if (target / KEEP_FILE).exists():
                (part_folder / KEEP_FILE).touch()
            sync_tree(part_folder)
            if target.exists():
                os.replace(target, _get_trash(target))
            os.replace(part_folder, target)
        except Exception:
            shutil.rmtree(part_folder, ignore_errors=True)  # it would keep the disk full
            raise
        for parent in (folder, folder.parent):  # the parent: the folder may be new
            sync_path(parent)
        prune_checkpoints(folder, retention, scores or {})
    return Checkpoint(step=step, folder=target)


def prune_checkpoints(folder: Path, retention: CheckpointConfig, scores: Mapping[int, float]) -> None:
    """Link the best checkpoint of a stage, and delete those that `retention` drops. Raises RunError."""
    _delete_leftovers(folder)
    checkpoints = {saved.step: saved for saved in list_checkpoints(folder)}
    kept = select_kept_steps(checkpoints, retention, scores)
    with convert_errors(RunError, f"the checkpoints in {folder} can't be deleted or linked", key=str(folder)):
        if retention.best and (best := rank_steps(checkpoints, retention, scores)):
            _link_best(folder, checkpoints[best[0]].folder)
        for step, saved in checkpoints.items():
            if step not in kept and not (saved.folder / KEEP_FILE).exists():
                _delete_folder(saved.folder)


def rank_steps(steps: Collection[int], retention: CheckpointConfig, scores: Mapping[int, float]) -> list[int]:
    """Return the validated ones of the steps, the best first; of equal scores, the earlier step.

    >>> rank_steps([1, 2, 3, 4], CheckpointConfig(best=1), {1: 0.5, 2: 0.75, 4: 0.75})
    [2, 4, 1]
    """
    sign = -1.0 if retention.mode == "max" else 1.0
    validated = [step for step in steps if step in scores and math.isfinite(scores[step])]
    return sorted(validated, key=lambda step: (sign * scores[step], step))


def select_kept_steps(steps: Collection[int], retention: CheckpointConfig, scores: Mapping[int, float]) -> set[int]:
    """Return the steps whose checkpoints `retention` keeps.

    >>> retention = CheckpointConfig(last=1, best=1, keep_every=4, keep_steps=(5,))
    >>> sorted(select_kept_steps(range(1, 11), retention, {2: 0.5, 3: 0.75}))
    [3, 4, 5, 8, 10]
    """
    regular = {step for step in steps if retention.keep_every and step % retention.keep_every == 0}
    best = rank_steps(steps, retention, scores)[: retention.best]
    return {
        *sorted(steps)[-retention.last :],
        *best,
        *regular,
        *(step for step in steps if step in retention.keep_steps),
    }


def protect_checkpoint(folder: Path) -> None:
    """Keep a checkpoint forever, since a training starts from it; a folder without a trainer's state stays as it is."""
    if (folder / STATE_FILE).exists():
        with contextlib.suppress(OSError):  # a folder that can't be written can't be pruned either
            (folder / KEEP_FILE).touch()


def _link_best(folder: Path, target: Path) -> None:
    """Point the link at a checkpoint, atomically; a folder of the user's with the link's name stays as it is."""
    link, new_link = folder / BEST_LINK, folder / f".{BEST_LINK}.part"
    if link.is_symlink() or not link.exists():
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(target.name)
        os.replace(new_link, link)
        sync_path(folder)  # before the checkpoint that it pointed at is deleted


def _delete_leftovers(folder: Path) -> None:
    """Delete what a kill left of a checkpoint that was being written or deleted."""
    for leftover in (*folder.glob(".step-*.part"), *folder.glob(".step-*.deleted")):
        shutil.rmtree(leftover, ignore_errors=True)


def _delete_folder(folder: Path) -> None:
    """Delete a checkpoint; if that is interrupted, the rest no longer looks like one."""
    if folder.exists():
        trash = _get_trash(folder)
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(folder, trash)
        sync_path(folder.parent)  # or a power cut could undo the renaming, but not the deletion
        shutil.rmtree(trash)


def _get_trash(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.deleted")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints below `folder`, oldest first."""
    suffixes = ((path.name.removeprefix("step-"), path) for path in folder.glob("step-*"))
    # The user may keep other folders here, such as a copy of a checkpoint.
    checkpoints = [Checkpoint(step=int(suffix), folder=path) for suffix, path in suffixes if suffix.isdecimal()]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def find_checkpoint(folder: Path, step: str) -> Checkpoint:
    """Return the checkpoint of a step, of the "last" step or of the "best" one. Raises RunError if there is none."""
    checkpoints = {saved.step: saved for saved in list_checkpoints(folder)}
    wanted = max(checkpoints, default=-1)
    if step == BEST_LINK:
        name = (folder / BEST_LINK).resolve().name.removeprefix("step-")
        wanted = int(name) if name.isdecimal() else -1
    elif step != LAST_STEP:
        wanted = int(step) if step.isascii() and step.isdecimal() else -1
    if wanted in checkpoints:
        checkpoints[wanted].require_step()
        return checkpoints[wanted]
    existing = f"it has those of the steps {', '.join(map(str, checkpoints))}" if checkpoints else "it has none"
    hint = f"; {BEST_LINK} needs validations and checkpoints.best above 0" if step == BEST_LINK else ""
    raise RunError(f"{folder} has no checkpoint of step {step!r}: {existing}{hint}", key="--step", value=step)


def find_newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint to resume from, if there is one. Raises RunError if it was renamed."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return None
    checkpoints[-1].require_step()
    return checkpoints[-1]
