"""The reference policy: the weights that RL began with, to which a penalty holds the policy (KL).

Trained parameters alone are kept (of a model with adapters that is the adapters; its frozen weights are the same). To
ask the reference, they change places with the present ones for as long as a forward pass takes (from the CPU, where
they may wait, they come to the device for that long), so that the device never holds a second model.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from saccade.errors import ModelError, RunError
from saccade.model.backbone import Backbone

Weights = Mapping[str, Tensor]


class Reference:
    """The first weights of a backbone's trainable parameters; `keep` says where they wait."""

    def __init__(self, backbone: Backbone, first: Weights, keep: Literal["device", "cpu"]) -> None:
        place = torch.device("cpu") if keep == "cpu" else backbone.device
        self._pairs = [(value, first[name].detach().to(place, copy=True)) for name, value in trained(backbone).items()]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the backbone is the reference. Nothing may be sampled from it then."""
        present = [parameter.data for parameter, _ in self._pairs]
        try:
            for parameter, first in self._pairs:
                parameter.data = first.to(parameter.device)  # the tensor itself where it is there already
            yield
        finally:
            for (parameter, _), own in zip(self._pairs, present, strict=True):
                parameter.data = own


def trained(backbone: Backbone) -> dict[str, nn.Parameter]:
    """The trainable parameters of a backbone by name, each once."""
    return {name: value for name, value in backbone.model.named_parameters() if value.requires_grad}


def first_weights(backbone: Backbone, start: str) -> Weights:
    """The weights in the folder `start`, read like the backbone's own. Raises RunError where they are gone."""
    try:
        return trained(Backbone(backbone.settings.model_copy(update={"path": start, "device": "cpu"})))
    except ModelError as error:
        raise RunError(
            f"rl.kl needs the weights {start} that RL began with, and they can't be read: {error}"
        ) from error
