"""Divide a policy among processes with FSDP2: one unit per language layer, the rest in the root unit.

The vision tower, its projector, embeddings, norm and head are in the root unit, so a rank without images runs the same
collective operations as the others. A frozen vision tower isn't divided.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from saccade.models.backbone import Backbone


def shard_backbone(backbone: Backbone, mesh: DeviceMesh) -> None:
    """Divide the weights of a backbone among the ranks of a mesh, in place; every rank holds the same weights before.

    The divided weights are float32, as the optimizer needs them; they are gathered in the type of the activations. On a
    mesh of two dimensions they are divided within the second and replicated over the first (HSDP). Gradients are summed
    over the ranks, not averaged.
    """
    policy, dtype = backbone.policy, backbone.policy.compute_dtype
    visual = list(policy.model.model.visual.parameters())
    is_tower_trained = any(parameter.requires_grad for parameter in visual)
    undivided = set() if is_tower_trained else set(visual)
    for parameter in policy.parameters():
        if parameter not in undivided:
            parameter.data = parameter.data.float()
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for layer in policy.model.model.language_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed_precision)
    # Gathered again in the backward pass: a forward pass without one must not leave weights that become outdated.
    fully_shard(policy, mesh=mesh, mp_policy=mixed_precision, reshard_after_forward=True, ignored_params=undivided)
    for module in _find_units(policy):
        module.set_gradient_divide_factor(1.0)
        if mesh.device_type == "cpu":  # gloo has no PREMUL_SUM
            module.set_force_sum_reduction_for_comms(True)
    policy.has_gradients_without_images = is_tower_trained


def _find_units(policy: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in policy.modules() if isinstance(module, FSDPModule))
