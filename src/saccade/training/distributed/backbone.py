"""What rank 0's training loop sees of a divided model: a backbone and an optimizer whose methods are orders."""

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
from saccade.models.backbone import Backbone, LoadAllPixels, LoadPixels, StagedModel
from saccade.training.background import CheckCancelled
from saccade.training.distributed.conductor import Conductor
from saccade.training.distributed.dealing import count_waves, deal_waves
from saccade.training.optimizer import STATE_FOLDER, Optimizer
from saccade.training.packing import Batch


class DividedBackbone(Backbone):
    """A backbone whose weights are divided among the ranks.

    Only the methods below may read the weights; an engine in this process needs a copy of its own.
    """

    def __init__(self, conductor: Conductor, settings: ModelConfig) -> None:
        self.conductor = conductor
        conductor.prepare("read_model", settings)
        own: Backbone = conductor.call("load_model", settings)
        self.__dict__.update({**vars(own), "settings": settings})

    @property
    def num_parallel_micro_batches(self) -> int:
        """Return how many micro-batches are processed in parallel: one per rank."""
        return distributed.get_world_size()

    def create_optimizer(self, settings: OptimizerConfig, num_steps: int) -> "DividedOptimizer":
        """Create the optimizer of all ranks."""
        self.conductor.call("create_optimizer", settings, num_steps)
        return DividedOptimizer(self.conductor)

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        loss_fn: Any,
        *,
        load_all_pixels: LoadAllPixels,
        temperature: float,
        check_cancelled: CheckCancelled,
    ) -> list[Any]:
        """Add up the micro-batches' gradients; return their results, in order."""
        waves = self._deal(batches, load_all_pixels, check_cancelled)
        has_images = any(batch.images for batch in batches)
        results = self.conductor.call("accumulate_gradients", loss_fn, temperature, has_images, **waves)
        return [result for _, result in results]

    def compute_logprobs(
        self,
        batches: Sequence[Batch],
        *,
        load_all_pixels: LoadAllPixels,
        temperature: float,
        check_cancelled: CheckCancelled,
    ) -> list[np.ndarray]:
        """Return the logprobs [N] of each micro-batch's trained tokens, without a gradient."""
        waves = self._deal(batches, load_all_pixels, check_cancelled)
        return [logp_N for _, logp_N in self.conductor.call("compute_logprobs", temperature, **waves)]

    def _deal(
        self, batches: Sequence[Batch], load_all_pixels: LoadAllPixels, check_cancelled: CheckCancelled
    ) -> dict[str, Any]:
        num_ranks = distributed.get_world_size()
        waves = deal_waves(batches, num_ranks, load_all_pixels, check_cancelled)
        return {"waves": waves, "num_waves": count_waves(batches, num_ranks)}

    def create_reference(self, folder: str | None, reference_device: str) -> "DividedReference":
        """Create the reference policy from a folder's weights, or from the current ones (None)."""
        if folder is not None:
            self.conductor.prepare("read_reference", folder)
        self.conductor.call("create_reference", folder, reference_device)
        return DividedReference(self.conductor)

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the whole tensors by their names in the model, on the CPU."""
        state: Mapping[str, Tensor] = self.conductor.call("gather_state")
        return state

    def copy_layers_to_cpu(self) -> tuple[Mapping[str, Tensor], ...]:
        """Return a copy of each layer's whole tensors, by their names in a checkpoint; adapters are merged."""
        layers: tuple[Mapping[str, Tensor], ...] = self.conductor.call("copy_layers_to_cpu")
        return layers

    def stage(self) -> StagedModel:
        """Return a copy of the whole model on the CPU, to be written while this one is trained."""
        staged: StagedModel = self.conductor.call("stage_model")
        return staged

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder; adapters are merged into its weights."""
        self.conductor.call("save_model", folder)

    def export_adapters(self, folder: Path) -> None:
        """Write the adapters alone into a folder, in peft's format."""
        self.conductor.call("export_adapters", folder)

    def compute_token_logprobs(self, ledger: Ledger, tokens: Sequence[int], load_pixels: LoadPixels) -> list[float]:
        """Return the logprob of each token after the ledger, at temperature 1, by one forward pass."""
        pixels = {image.key: load_pixels(image) for image in ledger.images()}
        logprobs: list[float] = self.conductor.call("compute_token_logprobs", ledger, tuple(tokens), pixels)
        return logprobs


def create_optimizer(backbone: Backbone, settings: OptimizerConfig, num_steps: int) -> "Optimizer | DividedOptimizer":
    """Create the optimizer of a backbone's trainable weights, on all ranks if they are divided."""
    if isinstance(backbone, DividedBackbone):
        return backbone.create_optimizer(settings, num_steps)
    return Optimizer(backbone.model, settings, num_steps)


class DividedReference:
    """The reference policy of all ranks; the interface of `Reference`."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    @contextlib.contextmanager
    def swap_in(self) -> Iterator[None]:
        """Use the reference's weights inside the block."""
        self._conductor.call("swap_reference")
        try:
            yield
        finally:
            self._conductor.call("swap_reference")


class DividedOptimizer:
    """The optimizers of all ranks; the interface of `Optimizer`."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self.num_updates = 0  # of this process
        self.current_step = 0  # from 1

    def start_step(self, step: int) -> None:
        """Set the learning rate of step `step` (from 0), which holds for all its updates."""
        self.current_step = step + 1
        self._conductor.call("start_step", step)

    def step(self) -> float:
        """Clip, update, clear gradients; return their norm before clipping. Raises RunError like `Optimizer.step`."""
        self.num_updates += 1  # before, since an interrupted one may have changed weights
        result, self.num_updates = self._conductor.call("update_weights")
        if isinstance(result, RunError):
            raise result
        norm: float = result
        return norm

    def save(self, folder: Path) -> None:
        """Write the divided weights and states below a checkpoint's folder. Raises RunError."""
        if error := self._conductor.call("save_state", folder):
            raise error

    def stage(self) -> "StagedDividedOptimizer":
        """Copy the divided weights and states to the CPU, to be written while the training continues."""
        self._conductor.call("stage_state")
        return StagedDividedOptimizer(self._conductor)

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, on this number of ranks or on another. Raises RunError without it."""
        if not (folder / STATE_FOLDER).is_dir():
            raise RunError(
                f"{folder} was written by a training in one process, and this one has "
                f"{distributed.get_world_size()}; resume it without torchrun and without --nproc",
                key=str(folder),
            )
        self._conductor.call("restore_state", folder)


class StagedDividedOptimizer:
    """The copies that all ranks hold since `DividedOptimizer.stage`."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def save(self, folder: Path) -> None:
        """Write them below a checkpoint's folder, beside the orders of the training. Raises RunError."""
        writing: Future[RunError | None] = self._conductor.call("start_writing", folder)
        try:
            error = writing.result()
        except RuntimeError as failure:  # of the connection to another rank
            error = self._conductor.explain(failure)
        if error is not None:
            raise error
