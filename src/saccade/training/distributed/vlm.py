"""What rank 0's training loop sees of a sharded model: a model and an optimizer whose methods are commands."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, distributed

from saccade.config.schema import ModelConfig, OptimizerConfig
from saccade.errors import RunError
from saccade.ledger import Ledger
from saccade.models.vlm import LoadAllPixels, LoadPixels, ModelSnapshot, VisionLanguageModel
from saccade.training.background import CheckCancelled
from saccade.training.distributed.controller import Controller
from saccade.training.distributed.micro_steps import count_micro_steps, iterate_micro_steps
from saccade.training.optimizer import STATE_FOLDER, Optimizer
from saccade.training.packing import MicroBatch

FULL_MEMORY_KEY = "micro_batch_size"  # of the error of a rank in whose memory a micro-batch doesn't fit


class ShardedVisionLanguageModel(VisionLanguageModel):
    """A model whose weights are sharded among the ranks.

    Only the methods below may read the weights; an engine that samples in this process needs a copy of its own.
    """

    def __init__(self, controller: Controller, settings: ModelConfig) -> None:
        self.controller = controller
        controller.call_on_rank_zero("read_model", settings)
        own: VisionLanguageModel = controller.call("load_model", settings)
        self.__dict__.update({**vars(own), "settings": settings})

    @property
    def num_parallel_micro_batches(self) -> int:
        """Return how many micro-batches are processed in parallel: one per rank."""
        return distributed.get_world_size()

    def accumulate_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_fn: Any,
        *,
        load_all_pixels: LoadAllPixels,
        temperature: float,
        entropy_coef: float,
        check_cancelled: CheckCancelled,
    ) -> list[Any]:
        """Add up the micro-batches' gradients; return their results, in order."""
        micro_steps = self._iterate_micro_steps(micro_batches, load_all_pixels, check_cancelled)
        has_images = any(micro_batch.images for micro_batch in micro_batches)
        with self._remember_full_memory():
            results = self.controller.call(
                "accumulate_gradients", loss_fn, temperature, entropy_coef, has_images, **micro_steps
            )
        return [result for _, result in results]

    def compute_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        load_all_pixels: LoadAllPixels,
        temperature: float,
        check_cancelled: CheckCancelled,
    ) -> list[np.ndarray]:
        """Return the logprobs [N] of each micro-batch's trained tokens, without a gradient."""
        micro_steps = self._iterate_micro_steps(micro_batches, load_all_pixels, check_cancelled)
        with self._remember_full_memory():
            results = self.controller.call("compute_logprobs", temperature, **micro_steps)
        return [logp_N for _, logp_N in results]

    @contextlib.contextmanager
    def _remember_full_memory(self) -> Iterator[None]:
        """Lower the bound of tokens if a rank's micro-batch doesn't fit in memory; the error is raised on."""
        try:
            yield
        except RunError as error:
            if error.key == FULL_MEMORY_KEY and isinstance(error.value, int):
                self.max_micro_batch_tokens = error.value - 1
            raise

    def _iterate_micro_steps(
        self, micro_batches: Sequence[MicroBatch], load_all_pixels: LoadAllPixels, check_cancelled: CheckCancelled
    ) -> dict[str, Any]:
        num_ranks = distributed.get_world_size()
        micro_steps = iterate_micro_steps(micro_batches, num_ranks, load_all_pixels, check_cancelled)
        return {"micro_steps": micro_steps, "num_micro_steps": count_micro_steps(micro_batches, num_ranks)}

    def create_reference(self, folder: str | None, reference_device: str) -> "ShardedReference":
        """Create the reference policy from a folder's weights, or from the current ones (None)."""
        if folder is not None:
            self.controller.call_on_rank_zero("read_reference", folder)
        self.controller.call("create_reference", folder, reference_device)
        return ShardedReference(self.controller)

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the whole tensors by their names in the model, on the CPU."""
        state: Mapping[str, Tensor] = self.controller.call("gather_state")
        return state

    def copy_layers_to_cpu(self) -> tuple[Mapping[str, Tensor], ...]:
        """Return a copy of each layer's whole tensors, by their names in a checkpoint; adapters are merged."""
        layers: tuple[Mapping[str, Tensor], ...] = self.controller.call("vlm.copy_layers_to_cpu")
        return layers

    def take_snapshot(self) -> ModelSnapshot:
        """Return a copy of the whole model on the CPU, to be written while this one is trained."""
        snapshot: ModelSnapshot = self.controller.call("vlm.take_snapshot")
        return snapshot

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder; adapters are merged into its weights."""
        self.controller.call("vlm.save", folder)

    def export_adapters(self, folder: Path) -> None:
        """Write the adapters alone into a folder, in peft's format."""
        self.controller.call("vlm.export_adapters", folder)

    def compute_token_logprobs(self, ledger: Ledger, tokens: Sequence[int], load_pixels: LoadPixels) -> list[float]:
        """Return the logprob of each token after the ledger, at temperature 1, by one forward pass."""
        pixels = {image.key: load_pixels(image) for image in ledger.images()}
        logprobs: list[float] = self.controller.call("compute_token_logprobs", ledger, tuple(tokens), pixels)
        return logprobs


def create_optimizer(
    vlm: VisionLanguageModel, settings: OptimizerConfig, num_steps: int
) -> "Optimizer | ShardedOptimizer":
    """Create the optimizer of a model's trainable weights, on all ranks if they are sharded."""
    if isinstance(vlm, ShardedVisionLanguageModel):
        vlm.controller.call("create_optimizer", settings, num_steps)
        return ShardedOptimizer(vlm.controller)
    return Optimizer(vlm.model, settings, num_steps, cpu_offload=vlm.settings.cpu_offload)


class ShardedReference:
    """The reference policy of all ranks; the interface of `Reference`."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @contextlib.contextmanager
    def swap_in(self) -> Iterator[None]:
        """Use the reference's weights inside the block."""
        self._controller.call("swap_reference")
        try:
            yield
        finally:
            self._controller.call("swap_reference")


class ShardedOptimizer:
    """The optimizers of all ranks; the interface of `Optimizer`."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.num_updates = 0  # of this process
        self.current_step = 0  # from 1

    def start_step(self, step: int) -> None:
        """Set the learning rate of step `step` (from 0), which holds for all its updates."""
        self.current_step = step + 1
        self._controller.call("start_step", step)

    def step(self) -> float:
        """Clip, update, clear gradients; return their norm before clipping. Raises RunError like `Optimizer.step`."""
        self.num_updates += 1  # before, since an interrupted one may have changed weights
        result, self.num_updates = self._controller.call("update_weights")
        if isinstance(result, RunError):
            raise result
        norm: float = result
        return norm

    def save(self, folder: Path) -> None:
        """Write the sharded weights and states below a checkpoint's folder. Raises the error of a rank, as OSError."""
        if error := self._controller.call("save_state", folder):
            raise error

    def take_snapshot(self) -> "ShardedOptimizerSnapshot":
        """Copy the sharded weights and states to the CPU, to be written while the training continues."""
        self._controller.call("copy_state")
        return ShardedOptimizerSnapshot(self._controller)

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, on this number of ranks or on another. Raises RunError without it."""
        if not (folder / STATE_FOLDER).is_dir():
            raise RunError(
                f"{folder} was written by a training in one process, and this one has "
                f"{distributed.get_world_size()}; resume it without torchrun and without --nproc",
                key=str(folder),
            )
        self._controller.call("restore_state", folder)


class ShardedOptimizerSnapshot:
    """The copies that all ranks hold since `ShardedOptimizer.take_snapshot`."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def save(self, folder: Path) -> None:
        """Write them below a checkpoint's folder, beside the commands of the training. Raises as above, or RunError."""
        writing: Future[Exception | None] = self._controller.call("start_writing", folder)
        try:
            error = writing.result()
        except RuntimeError as failure:  # of the connection to another rank
            error = self._controller.explain(failure)
        if error is not None:
            raise error
