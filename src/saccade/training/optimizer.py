"""Optimisers and schedules: AdamW, or Muon for the matrices of the layers with AdamW for the rest."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.config import Optim
from saccade.errors import RunError


def rate(settings: Optim, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: linear warm-up, then constant, cosine or linear decay.

    >>> [round(rate(Optim(lr=1.0, warmup=2, schedule="linear", decay_from=0.5), s, 8), 2) for s in range(8)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    begin = settings.decay_from * steps
    gone = max(0.0, (step - begin) / max(steps - begin, 1))
    if settings.schedule == "cosine":
        decay = 0.5 * (1 + math.cos(math.pi * gone))
    else:
        decay = 1.0 - gone if settings.schedule == "linear" else 1.0
    return settings.lr * warm * decay


class Optimizer:
    """Updates the trainable parameters of a model by its settings; state goes to and comes from checkpoints.

    A parameter that isn't float32 is updated through a float32 copy: a step of RL is far smaller than what bfloat16
    can tell apart, and would be lost.
    """

    def __init__(self, model: nn.Module, settings: Optim, steps: int) -> None:
        self._settings, self._steps = settings, steps
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        updated = {name: _exact(parameter) for name, parameter in named.items()}
        self._updated = list(updated.values())
        self._copies = [(named[name], copy) for name, copy in updated.items() if copy is not named[name]]
        matrices, rest = _split(updated.items(), settings.name == "muon")
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                rest,
                lr=settings.lr,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                fused=all(parameter.is_cuda for parameter in rest),  # the other ways copy all gradients first
            )
        ]
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=settings.lr,
                momentum=0.95,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self._parts.append(muon)
        self.begin(0)

    def begin(self, number: int) -> None:
        """Step `number` (from 0) begins: its learning rate holds for all of its updates, be they none or several."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate(self._settings, number, self._steps)

    def step(self) -> float:
        """Clip, update, clear the gradients; returns the gradient's norm before clipping.

        Raises RunError, the weights being as they were, for a gradient that is not finite.
        """
        for parameter, copy in self._copies:
            copy.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = float(nn.utils.clip_grad_norm_(self._updated, self._settings.clip_norm))
        if not math.isfinite(norm):
            raise RunError(f"the gradient became {norm}, so nothing more can be learned; start again with a lower lr")
        for part in self._parts:
            part.step()
            part.zero_grad(set_to_none=True)
        with torch.no_grad():
            # Rounded for the model alone; the copy keeps what rounding loses.
            for parameter, copy in self._copies:
                parameter.copy_(copy)
        return norm

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, but for the number of its step."""
        parts = [part.state_dict() for part in self._parts]
        return {"parts": parts, "copies": [copy for _, copy in self._copies]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        for (_, copy), exact in zip(self._copies, state["copies"], strict=True):
            copy.copy_(exact)


def _exact(parameter: nn.Parameter) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float()


def _split(named: Iterable[tuple[str, Tensor]], muon: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices inside layers and blocks for Muon; embeddings, norms, biases and the rest for AdamW."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in named:
        inside = muon and parameter.ndim == 2 and (".layers." in name or ".blocks." in name)
        (matrices if inside else rest).append(parameter)
    return matrices, rest
