"""Optimisers and schedules: AdamW, or Muon for the matrices of the layers with AdamW for the rest."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from saccade.config import Optim


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
    """Updates the parameters of a model by its settings; state goes to and comes from checkpoints."""

    def __init__(self, model: nn.Module, settings: Optim, steps: int) -> None:
        self._settings, self._steps, self.done = settings, steps, 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices, rest = _split(model.named_parameters(), settings.name == "muon")
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
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

    def step(self) -> float:
        """Clip, update, clear the gradients; returns the gradient's norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm))
        lr = rate(self._settings, self.done, self._steps)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)
        self.done += 1
        return norm

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        return {"done": self.done, "parts": [part.state_dict() for part in self._parts]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.done = state["done"]
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def _split(
    named: Iterable[tuple[str, nn.Parameter]], muon: bool
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside layers and blocks for Muon; embeddings, norms, biases and the rest for AdamW."""
    matrices, rest = [], []
    for name, parameter in named:
        if parameter.requires_grad:
            inside = muon and parameter.ndim == 2 and (".layers." in name or ".blocks." in name)
            (matrices if inside else rest).append(parameter)
    return matrices, rest
