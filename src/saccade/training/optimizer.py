"""Optimizers and learning-rate schedules: AdamW, also with 8-bit moments, or Muon for the layers' matrices.

With Muon the other parameters are AdamW's.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from saccade.config.schema import OptimizerConfig
from saccade.errors import ConfigError, RunError, convert_errors
from saccade.models import checkpoint_io
from saccade.training.optimizer_package import check_optimizer
from saccade.utils.files import require_regular

STATE_FILE = "optimizer.pt"  # of a checkpoint
STATE_FOLDER = "sharded"  # in its place if several processes train: their parts of weights and optimizer
_MAX_SMALL_VALUES = 2**18  # of a parameter: on a CPU several threads take longer than one to update it


def compute_learning_rate(settings: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a step (from 0): linear warmup, then constant, or cosine or linear decay.

    >>> settings = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", decay_start=0.5)
    >>> [round(compute_learning_rate(settings, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    start = settings.decay_start * num_steps
    progress = max(0.0, (step - start) / max(num_steps - start, 1))
    if settings.schedule == "cosine":
        decay = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay = 1.0 - progress if settings.schedule == "linear" else 1.0
    return settings.lr * warmup * decay


@contextlib.contextmanager
def limit_threads(num_threads: int) -> Iterator[None]:
    """Let torch use so many threads per operation inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """A copy of an optimizer's state."""

    state: Mapping[str, Any]

    def save(self, folder: Path) -> None:
        """Write what `Optimizer.save` would have written when the copy was made."""
        torch.save(self.state, folder / STATE_FILE)


class Optimizer:
    """Updates the trainable parameters of a model; its state is saved in checkpoints.

    A parameter that isn't float32 is updated through a float32 master copy: an RL step is far smaller than bfloat16's
    resolution and would be lost. With `cpu_offload` those of all parameters are on the CPU, with the optimizer's state,
    but for sharded ones, which FSDP2 offloads.
    """

    def __init__(
        self, model: nn.Module, settings: OptimizerConfig, num_steps: int, *, cpu_offload: bool = False
    ) -> None:
        self._settings, self._num_steps = settings, num_steps
        self.num_updates = 0  # of this process
        self.current_step = 0  # from 1
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._trainable = trainable
        updated: dict[str, Tensor] = dict(trainable)
        for name, weight in trainable.items():
            if cpu_offload and not isinstance(weight, DTensor):
                updated[name] = checkpoint_io.copy_to_cpu(weight).float()
            elif weight.dtype != torch.float32:
                updated[name] = weight.detach().float()
        self._updated_parameters = updated
        self._are_small = all(value.is_cpu and value.numel() <= _MAX_SMALL_VALUES for value in updated.values())
        self._master_copies = [(trainable[name], copy) for name, copy in updated.items() if copy is not trainable[name]]
        # Muon is for matrices inside layers and blocks; AdamW for embeddings, norms, biases and the rest.
        matrices, rest = list[Tensor](), list[Tensor]()
        for name, parameter in updated.items():
            is_layer_matrix = parameter.ndim == 2 and (".layers." in name or ".blocks." in name)
            (matrices if settings.name == "muon" and is_layer_matrix else rest).append(parameter)
        self.optimizers: list[torch.optim.Optimizer] = []
        if rest:  # empty with LoRA, whose adapters are matrices inside layers
            check_optimizer(settings, cpu_offload=cpu_offload)
            # Without `fused`, all gradients are copied on a GPU, and a CPU takes several passes.
            fused = cpu_offload or all(parameter.is_cuda for parameter in rest)
            self.optimizers.append(_build_adamw(rest, settings, fused=fused))
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=settings.lr,
                momentum=0.95,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self.optimizers.append(muon)
        self.start_step(0)

    def start_step(self, step: int) -> None:
        """Set the learning rate of step `step` (from 0), which holds for all its updates."""
        self.current_step = step + 1
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = compute_learning_rate(self._settings, step, self._num_steps)
                group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate  # torchao has tensors

    def step(self) -> float:
        """Clip, update, clear gradients; return their norm before clipping.

        Raises RunError if a gradient isn't finite, on all ranks and before any weight changes; or if an updated weight
        isn't: then the weights are lost.
        """
        for parameter, copy in self._master_copies:
            copy.grad = None if parameter.grad is None else parameter.grad.to(copy)
            parameter.grad = None
        updated = self._updated_parameters
        gradients = {name: value.grad for name, value in updated.items() if value.grad is not None}
        local_norm = nn.utils.get_total_norm(gradients.values())
        norm = float(checkpoint_io.gather_tensor(local_norm))  # of the parts of all ranks
        if not math.isfinite(norm):
            name = _agree_on_first(gradients, checkpoint_io.find_nonfinite(gradients))
            reason = f"the gradient of {name} holds NaN or an infinity" if name else f"the gradient norm is {norm}"
            raise self._build_error(f"{reason}, so no weight was changed")
        nn.utils.clip_grads_with_norm_(updated.values(), self._settings.max_grad_norm, local_norm)
        self.num_updates += 1  # before, since an interrupted one may have changed weights
        with limit_threads(1) if self._are_small else contextlib.nullcontext():
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            # Only the model's weights are rounded; the master copies keep full precision.
            for parameter, copy in self._master_copies:
                parameter.copy_(copy)
        if name := _agree_on_first(self._trainable, checkpoint_io.find_nonfinite(self._trainable)):
            raise self._build_error(f"the update has made {name} NaN or infinite; the last checkpoint is kept")
        return norm

    def _build_error(self, problem: str) -> RunError:
        return RunError(
            f"step {self.current_step}: {problem}; start again with a lower learning rate than "
            f"optim.lr={self._settings.lr}",
            key="optim.lr",
            value=self._settings.lr,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' states and the master copies."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"optimizers": states, "master_copies": [copy for _, copy in self._master_copies]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state returned by `state_dict`."""
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for (_, copy), saved_copy in zip(self._master_copies, state["master_copies"], strict=True):
            copy.copy_(saved_copy)

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder."""
        torch.save(self.state_dict(), folder / STATE_FILE)

    def take_snapshot(self) -> "OptimizerSnapshot":
        """Return a copy of the state in the CPU's memory, to be written while the optimizer is used."""
        return OptimizerSnapshot(tree_map_only(Tensor, checkpoint_io.copy_to_cpu, self.state_dict()))

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote. Raises RunError if several processes wrote the checkpoint."""
        if (folder / STATE_FOLDER).is_dir():
            raise RunError(
                f"{folder} was written by a training in several processes; resume it with torchrun, or with --nproc",
                key=str(folder),
            )
        require_regular(folder / STATE_FILE)
        self.load_state_dict(torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True))


def _build_adamw(parameters: Sequence[Tensor], settings: OptimizerConfig, *, fused: bool) -> torch.optim.Optimizer:
    values: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.name == "adamw_8bit":
        problem = "the package torchao can't be imported"
        with convert_errors(ConfigError, problem, key="optim.name", value=settings.name):
            from saccade.training.adamw_8bit import AdamW8bit  # torchao takes seconds to import

        return AdamW8bit(parameters, **values)
    return torch.optim.AdamW(parameters, **values, fused=fused)


def _agree_on_first(tensors: Mapping[str, Tensor], name: str | None) -> str | None:
    """Return the first name, in the order of the tensors, that any rank has; a collective operation."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return name
    names: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(names, name)
    return next((known for known in tensors if known in names), None)
