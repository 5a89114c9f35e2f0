"""What every rank does: it holds its part of the weights and of the optimizer.

The commands are its methods and those of its model, such as `vlm.save`, whose results are whole on rank 0. All ranks
call a method at the same time with the same arguments (see `controller`). Results are rank 0's.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from saccade.config.schema import ModelConfig, OptimizerConfig
from saccade.errors import RunError
from saccade.ledger import ImageRef, Ledger
from saccade.models import checkpoint_io
from saccade.models.vlm import VisionLanguageModel
from saccade.training.distributed.micro_steps import LoadedMicroBatch
from saccade.training.distributed.sharding import shard_vlm
from saccade.training.distributed.vlm import FULL_MEMORY_KEY
from saccade.training.optimizer import STATE_FOLDER, Optimizer
from saccade.training.reference import get_trainable_parameters, load_initial_vlm
from saccade.training.train_step import (
    LossFn,
    MemoryExceededError,
    MicroBatchResult,
    accumulate_gradients,
    detect_full_memory,
    forward,
)


class TrainingWorker:
    """A rank's model and optimizer."""

    def __init__(self, mesh: DeviceMesh, timeout: timedelta) -> None:
        self._mesh = mesh
        # Its operations run beside those of the training.
        self._writer_group = distributed.new_group(backend="gloo", timeout=timeout)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="saccade-checkpoint")
        self._writing: Future[Exception | None] | None = None
        self._snapshot: dict[str, Any] = {}  # a copy of this rank's part of a checkpoint
        is_cuda = mesh.device_type == "cuda"
        self._device = torch.device(f"cuda:{torch.cuda.current_device()}" if is_cuda else mesh.device_type)
        self._whole_model: VisionLanguageModel | None = None  # on rank 0, between reading a model and sharding it
        self.vlm: VisionLanguageModel
        self.optimizer: Optimizer
        self._reference: list[tuple[Tensor, Tensor]] = []  # this rank's part of each weight, and the other policy's

    def read_model(self, settings: ModelConfig) -> None:
        """Read a model into rank 0's memory, for the next command that shards it. Raises ModelError."""
        self._whole_model = VisionLanguageModel(settings.model_copy(update={"device": "cpu"}))

    def read_reference(self, folder: str) -> None:
        """Read a folder with the model's settings, like `read_model`. Raises RunError."""
        self._whole_model = load_initial_vlm(self.vlm, folder, "cpu")

    def _shard_model(self, settings: ModelConfig) -> VisionLanguageModel:
        """Shard the model that rank 0 has read; the other ranks build it without weights."""
        vlm = self._whole_model or VisionLanguageModel(settings.model_copy(update={"device": "meta"}))
        self._whole_model = None
        shard_vlm(vlm, self._mesh, self._device)
        return vlm

    def free(self) -> None:
        """Free this rank's part of the weights and of the optimizer."""
        for name in ("vlm", "optimizer"):
            vars(self).pop(name, None)
        self._reference = []
        self._snapshot = {}

    def load_model(self, settings: ModelConfig) -> VisionLanguageModel:
        """Shard the model that rank 0 has read; an earlier stage's model and optimizer are freed before."""
        self.free()
        torch.set_num_threads(max(1, settings.num_threads // self._mesh.shape[-1]))
        self.vlm = self._shard_model(settings)
        return self.vlm

    def create_optimizer(self, settings: OptimizerConfig, num_steps: int) -> None:
        """Create the optimizer of this rank's part of the weights."""
        self.optimizer = Optimizer(self.vlm.model, settings, num_steps, cpu_offload=self.vlm.settings.cpu_offload)

    def start_step(self, step: int) -> None:
        """Set the learning rate of a step."""
        self.optimizer.start_step(step)
        self.vlm.frozen_features.clear()

    def accumulate_gradients(
        self,
        loaded_batches: Iterable[LoadedMicroBatch],
        loss_fn: LossFn,
        temperature: float,
        entropy_coef: float,
        has_images: bool,
    ) -> list[tuple[int, MicroBatchResult]]:
        """Add up the gradients of the micro-batches of all ranks; `has_images`: any of them has images.

        Return the results with the micro-batches' indices.
        """
        self.vlm.model.zero_grad(set_to_none=True)  # of an aborted command
        self.vlm.model.train()
        results = []
        for loaded in loaded_batches:
            if loaded.index is None:
                logp_N, _ = forward(
                    self.vlm, loaded.micro_batch, load_pixels=loaded.load_pixels, temperature=temperature
                )
                torch.autograd.backward(logp_N.sum())
            else:
                with _explain_full_memory():
                    [result] = accumulate_gradients(
                        self.vlm,
                        [loaded.micro_batch],
                        loss_fn,
                        load_all_pixels=loaded.load_all_pixels,
                        temperature=temperature,
                        entropy_coef=entropy_coef,
                    )
                stats = {name: value.cpu() for name, value in result.stats.items()}
                results.append((loaded.index, result._replace(stats=stats)))
        self.vlm.model.eval()
        if not has_images:  # one process has no gradient there, which the optimizer distinguishes from zero
            for parameter in self.vlm.model.model.visual.parameters():
                parameter.grad = None
        return self._gather(results)

    @torch.no_grad()
    def compute_logprobs(
        self, loaded_batches: Iterable[LoadedMicroBatch], temperature: float
    ) -> list[tuple[int, np.ndarray]]:
        """Return the logprobs of the trained tokens of each micro-batch, with its index."""
        results = []
        for loaded in loaded_batches:
            with _explain_full_memory(), detect_full_memory(loaded.micro_batch):
                logp_N, _ = forward(
                    self.vlm, loaded.micro_batch, load_pixels=loaded.load_pixels, temperature=temperature
                )
            if loaded.index is not None:
                results.append((loaded.index, logp_N.cpu().numpy()))
        return self._gather(results)

    @torch.no_grad()
    def compute_token_logprobs(self, ledger: Ledger, tokens: tuple[int, ...], pixels: Mapping[str, Any]) -> list[float]:
        """Return the logprob of each token after the ledger."""

        def load_pixels(image: ImageRef) -> Any:
            return pixels[image.key]

        return self.vlm.compute_token_logprobs(ledger, tokens, load_pixels)

    def create_reference(self, folder: str | None, reference_device: str) -> None:
        """Create the reference policy from a folder's weights, or from the current ones (None)."""
        initial = self.vlm
        if folder is not None:
            initial = self._shard_model(initial.settings.model_copy(update={"path": folder}))
        device = torch.device("cpu") if reference_device == "cpu" else self._device
        weights = _get_trainable_parts(initial)
        self._reference = [
            (part, weights[name].detach().to(device, copy=True))
            for name, part in _get_trainable_parts(self.vlm).items()
        ]

    @torch.no_grad()
    def swap_reference(self) -> None:
        """Exchange the current weights and the reference's; the next call restores both."""
        for part, other in self._reference:
            current = part.clone()
            part.copy_(other)  # in place: FSDP2 gathers from this memory
            other.copy_(current)

    def update_weights(self) -> tuple[float | RunError, int]:
        """Take one optimizer step; return the norm of the gradient over all ranks, and the updates so far.

        An error of the optimizer, which all ranks have, is returned: the ranks stay ready to write a checkpoint.
        """
        try:
            result: float | RunError = self.optimizer.step()
        except RunError as error:
            result = error
        return result, self.optimizer.num_updates

    def gather_state(self) -> dict[str, Tensor]:
        """Return the whole weights by their names in the model, on rank 0's CPU."""
        state = {}
        for name, value in self.vlm.model.state_dict().items():
            full = checkpoint_io.gather_tensor(value)
            if checkpoint_io.is_rank_zero():
                state[name] = full.to("cpu", self.vlm.policy.compute_dtype)
        return state

    def save_state(self, folder: Path) -> Exception | None:
        """Write the sharded weights and the optimizer's state below a checkpoint's folder.

        An error of any rank, which all ranks have, is returned: they stay ready.
        """
        return _write_state(self._get_state(), folder, None)

    def _get_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.vlm.model, self.optimizer.optimizers)
        return {"model": model, "optimizer": optimizer}

    def copy_state(self) -> None:
        """Copy this rank's part of the weights and of the optimizer's state to the CPU, for `start_writing`."""
        if self._writing is not None:  # rank 0's has ended
            self._writing.result()
        self._snapshot = tree_map_only(Tensor, checkpoint_io.copy_to_cpu, self._get_state())

    def start_writing(self, folder: Path) -> "Future[Exception | None]":
        """Write the copy in a thread; the result is that of `save_state`, once all ranks have written."""
        snapshot, self._snapshot = self._snapshot, {}
        self._writing = self._writer.submit(_write_state, snapshot, folder, self._writer_group)
        return self._writing

    def restore_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, on this number of ranks or on another."""
        state = self._get_state()
        try:
            load(state, checkpoint_id=folder / STATE_FOLDER)
        except CheckpointException as error:  # not an Exception
            [failure, _] = next(iter(error.failures.values()))
            raise RunError(
                f"{distributed.get_world_size()} processes can't read the parts in {folder} ({failure}); with "
                "optim.name=adamw_8bit, use as many as wrote them: blocks of 8-bit moments can't be divided",
                key=str(folder),
            ) from None
        set_state_dict(
            self.vlm.model,
            self.optimizer.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _gather(self, results: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        gathered: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
        distributed.gather_object(results, gathered, dst=0)
        return sorted((result for part in gathered or [] for result in part), key=lambda pair: pair[0])


def _write_state(state: dict[str, Any], folder: Path, group: Any) -> Exception | None:
    """Write this rank's part of a checkpoint; a collective operation of a group. Return the error of any rank.

    If a rank has an OSError, it is returned: `save_checkpoint` knows what to advise.
    """
    try:
        save(state, checkpoint_id=folder / STATE_FOLDER, process_group=group)
    except CheckpointException as error:  # not an Exception
        failures = [failure for failure, _ in error.failures.values()]
        os_error = next((failure for failure in failures if isinstance(failure, OSError)), None)
        return os_error or RuntimeError("; ".join(dict.fromkeys(map(str, failures))))
    return None


def _get_trainable_parts(vlm: VisionLanguageModel) -> dict[str, Tensor]:
    """Return this rank's part of each trainable weight by name."""
    parameters: dict[str, Any] = get_trainable_parameters(vlm)
    return {name: parameter.to_local() for name, parameter in parameters.items()}


@contextlib.contextmanager
def _explain_full_memory() -> Iterator[None]:
    """Raise RunError if a micro-batch doesn't fit: the other ranks are inside of its collective operations.

    `launch_processes` starts the processes again, which then split such micro-batches.
    """
    try:
        yield
    except MemoryExceededError as error:
        raise RunError(
            f"rank {distributed.get_rank()}: {error}, and the resumed training splits those as large; lower "
            "rl.micro_batch_size or sft.micro_batch_size to avoid the restart",
            key=FULL_MEMORY_KEY,
            value=error.num_tokens,
        ) from None
