"""Write the checkpoints of a stage while its training continues, and one more if the training stops.

    training   step 20 │ copy │ step 21 ... step 22 ... │ `check`: raises if the write has failed
    thread             └──────> write, checksums, fsync, rename ──> delete what `retention` drops

At most one write is in progress: the next copy waits for it, and so does every end of the training but a second Ctrl-C.
A checkpoint appears when it is complete (see `checkpoint`). A write that fails stops the training at the next step.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.config.schema import CheckpointConfig
from saccade.errors import SaccadeError
from saccade.training import checkpoint
from saccade.training.background import Abandoned, RankLostError, run_in_thread, wait_for_thread
from saccade.utils.async_utils import run_in_daemon_thread

if TYPE_CHECKING:
    from saccade.models.vlm import VisionLanguageModel
    from saccade.training.distributed.vlm import ShardedOptimizer
    from saccade.training.optimizer import Optimizer

_DESCRIPTION = "the checkpoint"
_logger = logging.getLogger("saccade")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """What a checkpoint of `step` holds besides weights and optimizer: immutable, since a thread writes it later."""

    step: int
    trainer_state: Mapping[str, Any]
    write_extra_files: Callable[[Path], None] = lambda part_folder: None


@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Writes the checkpoints of a stage below `folder`; `get_scores` returns the validated steps' metric."""

    folder: Path
    vlm: "VisionLanguageModel"
    optimizer: "Optimizer | ShardedOptimizer"
    retention: CheckpointConfig
    get_scores: Callable[[str], Mapping[int, float]]
    has_failed: bool = False
    _write: "asyncio.Future[None] | None" = field(default=None, init=False)

    async def save(self, finished: FinishedStep) -> None:
        """Copy weights and optimizer, and write them in a thread after this returns; wait for the last write before.

        Without `checkpoints.background`, returns when the checkpoint is on the disk, without a copy. Raises RunError
        for the last write, if it has failed.
        """
        await self.finish()
        if not self.retention.background:
            await self.save_now(finished)
            return
        snapshot = await run_in_thread(
            lambda _: (self.vlm.take_snapshot(), self.optimizer.take_snapshot()), _DESCRIPTION
        )
        scores = self._copy_scores()
        self._write = run_in_daemon_thread(lambda: self._save(finished, *snapshot, scores), "saccade-checkpoint")

    async def save_now(self, finished: FinishedStep) -> None:
        """Write a checkpoint without a copy; return when it is on the disk. Raises RunError."""
        await self.finish()
        scores = self._copy_scores()
        await run_in_thread(lambda _: self._save(finished, self.vlm, self.optimizer, scores), _DESCRIPTION)

    def _copy_scores(self) -> Mapping[int, float]:
        return dict(self.get_scores(self.retention.metric))

    def _save(
        self,
        finished: FinishedStep,
        vlm: checkpoint.Savable,
        optimizer: checkpoint.Savable,
        scores: Mapping[int, float],
    ) -> None:
        try:
            checkpoint.save_checkpoint(
                self.folder,
                step=finished.step,
                vlm=vlm,
                optimizer=optimizer,
                trainer_state=finished.trainer_state,
                write_extra_files=finished.write_extra_files,
                retention=self.retention,
                scores=scores,
            )
        except BaseException:
            self.has_failed = True
            raise

    def check(self) -> None:
        """Raise the error of the last write if it has failed by now."""
        if self._write is not None and self._write.done():
            write, self._write = self._write, None
            write.result()

    async def finish(self) -> None:
        """Return when no write is in progress. Raises RunError if the last one has failed."""
        if self._write is not None:
            try:
                await wait_for_thread(self._write, _DESCRIPTION)
            finally:
                if self._write.done():  # else a second Ctrl-C stops the run at once
                    self._write = None

    async def prune(self) -> None:
        """Delete what `retention` drops, and link the best checkpoint, after the last write. Raises RunError."""
        await self.finish()
        checkpoint.prune_checkpoints(self.folder, self.retention, self.get_scores(self.retention.metric))

    async def close(self) -> None:
        """Wait for the write in progress, whose error is logged: another one stops the training."""
        try:
            await self.finish()
        except RankLostError:
            pass  # which stops the training, too
        except SaccadeError as error:
            _logger.warning("%s", error)


@contextlib.asynccontextmanager
async def save_on_stop(
    writer: CheckpointWriter, find_unsaved: Callable[[], FinishedStep | None]
) -> AsyncIterator[None]:
    """Write a checkpoint if Ctrl-C or a SaccadeError stops the block, e.g. because the engine's servers are down.

    `find_unsaved` returns the step whose weights these are; None if an update has begun to change them. Nothing is
    written if that step is on the disk, or if a checkpoint could not be written before. The error of this checkpoint is
    logged, but raised in place of Ctrl-C.
    """
    try:
        yield
    except (Abandoned, RankLostError):
        raise
    except (SaccadeError, asyncio.CancelledError) as cause:
        try:
            await writer.finish()
            unsaved = None if writer.has_failed else find_unsaved()
            last = checkpoint.find_newest_checkpoint(writer.folder)
            if unsaved is not None and unsaved.step > (last.step if last else 0):
                await writer.save_now(unsaved)
        except SaccadeError as error:
            if not isinstance(cause, SaccadeError):  # Ctrl-C
                raise
            _logger.warning("The last steps are lost: %s", error)
        raise
