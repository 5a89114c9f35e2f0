"""Shard a policy over processes with FSDP2: one unit per language layer, the rest in the root unit.

The vision tower, its projector, embeddings, norm and head are in the root unit, so a rank without images runs the same
collective operations as the others. A frozen vision tower isn't sharded.

    rank 0: weights on the CPU ─┐ one unit at a time, in float32
    others: no weights (meta)   ├─broadcast──> whole unit on the device ──shard───> this rank's part
"""

from collections.abc import Collection

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from saccade.models.vlm import VisionLanguageModel


def shard_vlm(vlm: VisionLanguageModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard rank 0's weights over the ranks of a mesh, in place, and move them to `device`.

    Rank 0's model is on the CPU; those of the others are on the meta device, so they never hold a whole model.
    The sharded weights are float32, as the optimizer needs them; they are gathered in the type of the activations. On a
    mesh of two dimensions they are sharded within the second and replicated over the first (HSDP). Gradients are summed
    over the ranks, not averaged. With `cpu_offload` this rank's part of weights and gradients is on the CPU; a unit is
    copied to the device when it is gathered.
    """
    policy, dtype = vlm.policy, vlm.policy.compute_dtype
    tower = policy.model.model.visual
    is_tower_trained = any(parameter.requires_grad for parameter in tower.parameters())
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    is_on_gpu = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=is_on_gpu) if vlm.settings.cpu_offload else OffloadPolicy()
    for layer in policy.model.model.language_model.layers:
        _receive_weights(layer, device)
        fully_shard(layer, mesh=mesh, mp_policy=mixed_precision, offload_policy=offload)
    _receive_weights(policy, device, replicated=() if is_tower_trained else set(tower.parameters()))
    replicated = set() if is_tower_trained else set(tower.parameters())
    # Gathered again in the backward pass: a forward pass without one must not leave weights that become outdated.
    fully_shard(
        policy,
        mesh=mesh,
        mp_policy=mixed_precision,
        offload_policy=offload,
        reshard_after_forward=True,
        ignored_params=replicated,
    )
    for module in policy.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_gradient_divide_factor(1.0)
        if mesh.device_type == "cpu":  # gloo has no PREMUL_SUM
            module.set_force_sum_reduction_for_comms(True)
    policy.has_gradients_without_images = is_tower_trained
    vlm.device = device


def _receive_weights(unit: nn.Module, device: torch.device, replicated: Collection[nn.Parameter] = ()) -> None:
    """Replace the weights and buffers of a unit by rank 0's on a device, weights in float32 but for `replicated` ones.

    Tied weights stay tied; those of inner units are sharded already.
    """
    received: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(weight, DTensor):
                continue
            if weight not in received:
                value = _broadcast(weight.detach(), device)
                received[weight] = nn.Parameter(value if weight in replicated else value.float(), weight.requires_grad)
            setattr(module, name, received[weight])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _broadcast(buffer, device))


def _broadcast(tensor: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's tensor on the device; those of the others have its shape and type."""
    copy = torch.empty_like(tensor, device=device)
    if distributed.get_rank() == 0:
        copy.copy_(tensor)
    distributed.broadcast(copy, src=0)
    return copy
