"""The forward pass of one new token per row: a text model's own weights in fewer, larger operations.

    x ── norm ── q k v in one product ── norm, rotate ── KV cache ── attention ── o, + x
      ── norm ── gate and up in one product ── silu ── down, + x                 (once per layer)

On a CPU, rows with one prompt read its keys and values once, for the queries of all of them.

Modules of transformers spend most of a small step between operations: a layer has seven products and about forty calls.
Results are those of the modules up to rounding. Models of other architectures are sampled by calling their modules.

Axis letters: B rows, S cached positions, H key-value heads, D hidden size, d head size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from saccade.engines._local.kv_cache import KVCache, RowRun

# Their layers have the fields that `_Layer` reads. FSDP renames the class of a sharded layer, which calls its modules.
_LAYER_TYPES = frozenset({"Qwen3VLTextDecoderLayer", "Qwen2_5_VLDecoderLayer"})
_MAX_COPIED_BYTES = 2**28  # of weights that are copied to be next to each other; larger models have large products


class Decoder:
    """Computes the last hidden state of one new token per row.

    It copies weights at its first pass; call `drop_weights` before they change.
    """

    def __init__(self, language_model: Any) -> None:
        self._model = language_model
        parameters = [parameter for layer in language_model.layers for parameter in layer.parameters()]
        can_copy = sum(parameter.nbytes for parameter in parameters) <= _MAX_COPIED_BYTES
        self._layers = [_Layer(layer, can_copy=can_copy) for layer in language_model.layers]
        self._norm = _Norm([language_model.norm])
        self._has_weights = False
        self._rotation = torch.empty(2, 0, 1, 1)

    @staticmethod
    def supports(language_model: Any) -> bool:
        """Return whether the text model's layers are of a known architecture, with plain rotary positions."""
        types = {type(layer).__name__ for layer in language_model.layers}
        is_sliding = any("sliding" in str(layer.self_attn.layer_type) for layer in language_model.layers)
        return types <= _LAYER_TYPES and not is_sliding and language_model.rotary_emb.rope_type == "default"

    def drop_weights(self) -> None:
        """Free the copies of the weights."""
        if self._has_weights:
            for layer in self._layers:
                layer.drop_weights()
            self._norm.weight, self._has_weights = None, False

    def forward(self, ids_B: Tensor, positions_B: Tensor, cache: KVCache) -> Tensor:
        """Return the last hidden states [B, D] of tokens that have one position on all three axes.

        `cache` is prepared for one token per row, and is extended.
        """
        if not self._has_weights:
            for layer in self._layers:
                layer.load_weights()
            self._norm.load_weights()
            self._has_weights = True
        x_BD = self._model.embed_tokens(ids_B)
        cos, sin = self._get_rotation(int(cache.key_length), positions_B, x_BD)
        mask = cache.build_additive_mask(x_BD.dtype)
        for index, layer in enumerate(self._layers):
            x_BD = layer.forward(index, x_BD, cos, sin, mask, cache)
        return self._norm.apply(x_BD)

    def _get_rotation(self, num_positions: int, positions_B: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, 1, d] of the positions; sines of the first half are negative.

        No position exceeds the number of cached tokens: an image's positions advance by at most its tokens.
        """
        if num_positions > self._rotation.shape[1]:
            positions = torch.arange(num_positions + num_positions // 2, device=positions_B.device)
            cos, sin = self._model.rotary_emb(like, positions.expand(3, 1, -1))
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            self._rotation = torch.stack((cos[0], signed[0]))[:, :, None]
        cos_B1d, sin_B1d = self._rotation[:, positions_B]
        return cos_B1d, sin_B1d


class _Layer:
    def __init__(self, layer: Any, *, can_copy: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        self._num_kv_heads = attention.config.num_key_value_heads
        self._num_heads = attention.config.num_attention_heads
        self._activate = mlp.act_fn
        self._input_norm, self._mlp_norm = _Norm([layer.input_layernorm]), _Norm([layer.post_attention_layernorm])
        self._head_norm: _Norm | None = None
        if hasattr(attention, "q_norm"):
            self._head_norm = _Norm([attention.q_norm] * self._num_heads + [attention.k_norm] * self._num_kv_heads)
        self._qkv = _Product([attention.q_proj, attention.k_proj, attention.v_proj], can_copy=can_copy)
        self._output = _Product([attention.o_proj], can_copy=can_copy)
        self._gate_up = _Product([mlp.gate_proj, mlp.up_proj], can_copy=can_copy)
        self._down = _Product([mlp.down_proj], can_copy=can_copy)

    def load_weights(self) -> None:
        for part in self._list_parts():
            part.load_weights()

    def drop_weights(self) -> None:
        for part in self._list_parts():
            part.weight = None

    def _list_parts(self) -> "list[_Product | _Norm]":
        parts: list[_Product | _Norm]
        parts = [self._input_norm, self._qkv, self._output, self._mlp_norm, self._gate_up, self._down]
        return parts if self._head_norm is None else [*parts, self._head_norm]

    def forward(
        self, index: int, x_BD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        num_rows, num_heads, num_kv_heads, dim = len(x_BD), self._num_heads, self._num_kv_heads, self._head_dim
        qkv = self._qkv.apply(self._input_norm.apply(x_BD)).view(num_rows, -1, dim)
        qk, value = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        if self._head_norm is not None:
            qk = self._head_norm.apply(qk)
        qk = (qk * cos).add_(qk.roll(dim // 2, dims=-1).mul_(sin))
        keys, values = cache.write(index, qk[:, num_heads:, None], value[:, :, None])
        query = qk[:, :num_heads].reshape(num_rows, num_kv_heads, -1, dim)
        attended = _attend(query, keys, values, mask, self._scaling, cache.runs)
        x_BD = self._output.add_to(x_BD, attended.reshape(num_rows, -1))
        gate, up = self._gate_up.apply(self._mlp_norm.apply(x_BD)).chunk(2, dim=-1)
        return self._down.add_to(x_BD, self._activate(gate).mul_(up))


class _Norm:
    """One RMSNorm, or one per head, computed as x / hypot(|x|, √(D ε)) * √D weight on a CPU in float32.

    There torch's has no kernel of its own, but seven operations; elsewhere it is that of transformers.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules, self._epsilon = modules, modules[0].variance_epsilon
        self._is_per_head = len(modules) > 1
        self._floor: Tensor | None = None
        self.weight: Tensor | None = None

    def load_weights(self) -> None:
        weights = [module.weight for module in self._modules]
        self.weight = torch.stack(weights) if self._is_per_head else weights[0]
        self._floor = None
        if _has_cpu_kernels(self.weight):
            dim = self.weight.shape[-1]
            self._floor = self.weight.new_tensor(dim * self._epsilon).sqrt()
            self.weight = self.weight * dim**0.5

    def apply(self, x: Tensor) -> Tensor:
        assert self.weight is not None  # loaded before a pass
        if self._floor is not None:
            return x.div(vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)).mul_(self.weight)
        if self._is_per_head:
            return rms_norm(x, x.shape[-1:], None, self._epsilon).mul_(self.weight)
        return rms_norm(x, x.shape[-1:], self.weight, self._epsilon)


class _Product:
    """The outputs of linear modules of one input, concatenated: one product, if their weights are copied."""

    def __init__(self, modules: Sequence[nn.Module], *, can_copy: bool) -> None:
        self._modules = modules
        # A module with adapters is another type, and computes its own output.
        self._is_copied = can_copy and all(type(module) is nn.Linear for module in modules)
        self.weight: Tensor | None = None
        self._bias: Tensor | None = None

    def load_weights(self) -> None:
        if self._is_copied:
            linears: list[Any] = list(self._modules)
            # Transposed in memory: products of a few rows then take half the time on a CPU.
            self.weight = torch.cat([module.weight for module in linears]).t().contiguous()
            self._bias = None if linears[0].bias is None else torch.cat([module.bias for module in linears])

    def apply(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return x.mm(self.weight) if self._bias is None else torch.addmm(self._bias, x, self.weight)
        return torch.cat([module(x) for module in self._modules], dim=-1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.weight is not None and self._bias is None:
            return torch.addmm(residual, x, self.weight)
        return residual + self.apply(x)


def _has_cpu_kernels(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, runs: Sequence[RowRun]
) -> Tensor:
    """Attend to cached positions: query [B, H, queries, d], keys and values [B, H, S, d], mask [B, 1, 1, S]."""
    if not _has_cpu_kernels(query):
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    query = query * scaling
    parts = []
    for run in runs:
        rows = slice(run.start, run.stop)
        of_rows = query[rows], keys[rows], values[rows], None if mask is None else mask[rows]
        parts.append(_attend_shared(*of_rows, run.shared_length) if run.shared_length else _attend_separate(*of_rows))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend_separate(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    # A few queries per row are tiny products, for which torch's kernels take three times as long as numpy's.
    scores = torch.from_numpy(np.matmul(query.numpy(), keys.numpy().swapaxes(-1, -2)))
    if mask is not None:
        scores.add_(mask)
    return torch.from_numpy(np.matmul(scores.softmax(dim=-1).numpy(), values.numpy()))


def _attend_shared(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, shared: int) -> Tensor:
    """Read the first `shared` positions, which are the same in all rows, once: from the first row, for all queries."""
    num_rows, num_kv_heads, num_queries, dim = query.shape
    folded = query.transpose(0, 1).reshape(num_kv_heads, -1, dim)
    scores = query.new_empty(num_kv_heads, num_rows, num_queries, keys.shape[2])
    torch.bmm(folded, keys[0, :, :shared].transpose(1, 2), out=scores.flatten(1, 2)[..., :shared])
    tail = scores.transpose(0, 1)[..., shared:]
    np.matmul(query.numpy(), keys[:, :, shared:].numpy().swapaxes(-1, -2), out=tail.numpy())
    if mask is not None:
        tail.add_(mask[..., shared:])
    weights = scores.softmax(dim=-1)
    out = torch.bmm(weights.flatten(1, 2)[..., :shared], values[0, :, :shared])
    tail_weights = weights.transpose(0, 1)[..., shared:]
    attended = torch.from_numpy(np.matmul(tail_weights.numpy(), values[:, :, shared:].numpy()))
    return attended.add_(out.view(num_kv_heads, num_rows, num_queries, dim).transpose(0, 1))
