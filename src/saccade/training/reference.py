"""The reference policy of the KL penalty: the weights that RL started from.

Only trainable parameters are stored (with LoRA these are the adapters; the frozen weights are shared). For a forward
pass of the reference they are swapped with the current ones (and copied from the CPU to the device, if they are stored
there), so the device never holds a second model.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from saccade.errors import ModelError, RunError
from saccade.models.vlm import VisionLanguageModel

Weights = Mapping[str, Tensor]


class Reference:
    """The initial weights of a model's trainable parameters, stored on `reference_device`."""

    def __init__(
        self, vlm: VisionLanguageModel, initial_weights: Weights, reference_device: Literal["device", "cpu"]
    ) -> None:
        device = torch.device("cpu") if reference_device == "cpu" else vlm.device
        self._parameter_pairs = [
            (parameter, initial_weights[name].detach().to(device, copy=True))
            for name, parameter in get_trainable_parameters(vlm).items()
        ]

    @contextlib.contextmanager
    def swap_in(self) -> Iterator[None]:
        """Use the reference's weights in the trained model inside the block; no engine may sample from it meanwhile."""
        current = [parameter.data for parameter, _ in self._parameter_pairs]
        try:
            for parameter, initial in self._parameter_pairs:
                parameter.data = initial.to(parameter.device)  # no copy if it is on that device
            yield
        finally:
            for (parameter, _), data in zip(self._parameter_pairs, current, strict=True):
                parameter.data = data


def get_trainable_parameters(vlm: VisionLanguageModel) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model by name, each once."""
    return {name: parameter for name, parameter in vlm.model.named_parameters() if parameter.requires_grad}


def load_initial_weights(vlm: VisionLanguageModel, folder: str) -> Weights:
    """Load the weights of a folder, with the trained model's settings. Raises RunError if they can't be read."""
    return get_trainable_parameters(load_initial_vlm(vlm, folder, device="cpu"))


def load_initial_vlm(vlm: VisionLanguageModel, folder: str, device: str = "") -> VisionLanguageModel:
    """Load a folder with the model's settings, on its device or `device`. Raises RunError if it can't be read."""
    changes = {"path": folder, "device": device or vlm.settings.device}
    try:
        return VisionLanguageModel(vlm.settings.model_copy(update=changes))
    except ModelError as error:
        raise RunError(
            f"rl.kl needs the weights that RL started from, and {folder} can't be read: {error}. Restore that folder",
            key=folder,
        ) from error
