"""Attention of packed rows without a mask: a branch attends to its tree's whole prefix and causally to itself.

    queries       prefix's keys   own keys
    prefix                        causal call
    branch 1, 2   one call        causal call each, merged with the former

No tensor has a row's length twice in its shape; on a CPU no prefix is copied for its branches. Calls are merged as
FlashAttention merges blocks of keys (arXiv 2205.14135, algorithm 1): each returns the logarithm of its softmax's
denominator; in the backward pass each call receives the merged result and the merged denominator.

Axis letters: B rows, T tokens of a row, H query heads, K key-value heads, D head size, L tokens of a span, N tokens
of all spans, S their keys, prefixes included.
"""

import importlib
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from saccade.errors import ModelError

try:
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    _varlen_parameters = set(inspect.signature(varlen.varlen_attn).parameters)
except ImportError:  # an older torch
    varlen, _varlen_parameters = None, set()
# torch 2.11 has no such parameter, and groups heads of queries unasked.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in _varlen_parameters else {}
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Bounds = tuple[int, int, int]  # row, start and stop of tokens
Call = tuple[Bounds, Bounds, bool]  # queries, keys, and whether the attention is causal


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Tokens [start, stop) of a row, which attend causally to each other and to all of [prefix_start, prefix_stop)."""

    row: int
    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0

    @property
    def length(self) -> int:
        """Return how many tokens it has."""
        return self.stop - self.start

    @property
    def prefix_length(self) -> int:
        """Return how many tokens its prefix has."""
        return self.prefix_stop - self.prefix_start

    @property
    def num_pairs(self) -> int:
        """Return how many pairs of a query and a visible key it has."""
        return self.length * (self.length + 1) // 2 + self.length * self.prefix_length


def find_attention_spans(tree_BT: np.ndarray, branch_BT: np.ndarray) -> tuple[AttentionSpan, ...]:
    """Return the spans of packed rows, in order; padding (tree −1) is in none.

    The prefix of a tree (branch 0) is a span, and so is each branch; the prefix and an only branch are one.

    >>> spans = find_attention_spans(np.array([[0, 0, 0, 0, 0, -1]]), np.array([[0, 0, 1, 2, 2, 0]]))
    >>> [(span.start, span.stop, span.prefix_stop) for span in spans]
    [(0, 2, 0), (2, 3, 2), (3, 5, 2)]
    """
    spans: list[AttentionSpan] = []
    for row, (tree_T, branch_T) in enumerate(zip(tree_BT, branch_BT, strict=True)):
        changes = np.flatnonzero((np.diff(tree_T) != 0) | (np.diff(branch_T) != 0)) + 1
        bounds = itertools.pairwise((0, *changes.tolist(), len(tree_T)))
        for tree, runs in itertools.groupby(bounds, key=lambda bound: int(tree_T[bound[0]])):
            (start, stop), *branches = runs
            if tree < 0:
                continue
            if branch_T[start]:  # the tree has no prefix
                spans += [AttentionSpan(row, *bound) for bound in ((start, stop), *branches)]
            elif len(branches) == 1:
                spans.append(AttentionSpan(row, start, branches[0][1]))
            else:
                spans.append(AttentionSpan(row, start, stop))
                spans += [AttentionSpan(row, *bound, start, stop) for bound in branches]
    return tuple(spans)


@dataclass(frozen=True)
class PackedTrees:
    """The spans of packed rows; with `varlen_index` their attention is computed by `attend_varlen`."""

    spans: Sequence[AttentionSpan]
    varlen_index: "VarlenIndex | None" = None

    @cached_property
    def calls(self) -> Sequence[Call]:
        """Return the causal call of each span, then one call per tree from all its branches to its prefix."""
        calls: list[Call] = [(own, own, True) for s in self.spans for own in [(s.row, s.start, s.stop)]]
        for prefix, branches in itertools.groupby(self.spans, key=_get_prefix):
            if prefix[2]:
                first, *_, last = [bound for branch in branches for bound in (branch.start, branch.stop)]  # contiguous
                calls.append(((prefix[0], first, last), prefix, False))
        return calls


@dataclass(frozen=True, slots=True)
class VarlenIndex:
    """Where `attend_varlen` finds the spans' tokens in rows of one length, one row after the other."""

    queries_N: Tensor
    keys_S: Tensor  # of each span: its prefix, then its own
    query_bounds: Tensor  # of the spans in `queries_N`, int32 [spans + 1]
    key_bounds: Tensor  # of the spans in `keys_S`
    max_queries: int  # of a span
    max_keys: int

    @staticmethod
    def build(spans: Sequence[AttentionSpan], num_tokens: int, device: torch.device) -> "VarlenIndex":
        """Build the index for rows of `num_tokens` tokens."""

        def index(row: int, start: int, stop: int) -> np.ndarray:
            return row * num_tokens + np.arange(start, stop)

        queries = [index(s.row, s.start, s.stop) for s in spans]
        keys = [np.concatenate([index(*_get_prefix(s)), own]) for s, own in zip(spans, queries, strict=True)]
        lengths = [[len(part) for part in parts] for parts in (queries, keys)]
        bounds = [np.cumsum([0, *counts], dtype=np.int32) for counts in lengths]
        arrays = (np.concatenate(queries), np.concatenate(keys), *bounds)
        queries_N, keys_S, query_bounds, key_bounds = (torch.from_numpy(array).to(device) for array in arrays)
        max_queries, max_keys = map(max, lengths)
        return VarlenIndex(queries_N, keys_S, query_bounds, key_bounds, max_queries, max_keys)


def _get_prefix(span: AttentionSpan) -> Bounds:
    return span.row, span.prefix_start, span.prefix_stop


def attend_packed(query: Tensor, key: Tensor, value: Tensor, trees: PackedTrees, scale: float) -> Tensor:
    """Compute the attention of packed rows: queries [B, H, T, D], keys and values [B, K, T, D] -> [B, T, H, D].

    The result of padding is zero.
    """
    if trees.varlen_index:
        return attend_varlen(query, key, value, trees.varlen_index, scale)
    if query.device.type == "cpu":
        function: Any = _BranchwiseAttention
        out_BTHD: Tensor = function.apply(query, key, value, trees, scale)
        return out_BTHD
    return attend_by_span(query, key, value, trees, scale)


class _BranchwiseAttention(torch.autograd.Function):
    """Run the calls of packed trees with the CPU's kernel, which has the interface of FlashAttention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, trees: PackedTrees, scale: float) -> Tensor:
        B, H, T, D = query.shape
        out_BTHD = query.new_zeros(B, T, H, D)
        lse = query.new_zeros(B, H, T, dtype=torch.promote_types(query.dtype, torch.float32))
        of_queries = _fold(key.shape[1], query, out_BTHD.transpose(1, 2), lse)
        of_keys = _expand(H // key.shape[1], key, value)
        for queries, keys, is_causal in trees.calls:
            part_query, part_out, part_lse = _take(of_queries, queries)
            new_out, new_lse = _flash(part_query, *_take(of_keys, keys), 0.0, is_causal, scale=scale)
            if is_causal:  # the first call of these queries
                part_out.copy_(new_out)
                part_lse.copy_(new_lse)
            else:
                share = torch.sigmoid(new_lse - part_lse)  # exp(new_lse) / (exp(new_lse) + exp(part_lse))
                part_out.lerp_(new_out, share[..., None].to(query.dtype))
                part_lse.copy_(torch.logaddexp(part_lse, new_lse))
        ctx.save_for_backward(query, key, value, out_BTHD, lse)
        ctx.trees, ctx.scale = trees, scale
        return out_BTHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out_BTHD, lse = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        K, groups = key.shape[1], query.shape[1] // key.shape[1]
        of_queries = _fold(K, gradients[0].transpose(1, 2), query, out_BTHD.transpose(1, 2), lse, grad_query)
        of_keys, totals = _expand(groups, key, value), _expand(1, grad_key, grad_value)
        for queries, keys, is_causal in ctx.trees.calls:
            part_grad, part_query, part_out, part_lse, total_query = _take(of_queries, queries)
            new_query, *new = _flash_backward(
                part_grad, part_query, *_take(of_keys, keys), part_out, part_lse, 0.0, is_causal, scale=ctx.scale
            )
            total_query += new_query
            for total, part in zip(_take(totals, keys), new, strict=True):
                total += part.sum(0, keepdim=True)
        return grad_query, grad_key, grad_value, None, None


def _fold(num_kv_heads: int, *tensors: Tensor) -> list[Sequence[Tensor]]:
    """View the rows of [B, H, T, …] as [H / K, K, T, …]: the kernel takes as many heads of queries as of keys."""
    shapes = [(len(tensor), num_kv_heads, -1, *tensor.shape[2:]) for tensor in tensors]
    return [tensor.view(shape).transpose(1, 2).unbind() for tensor, shape in zip(tensors, shapes, strict=True)]


def _expand(size: int, *tensors: Tensor) -> list[Sequence[Tensor]]:
    """View the rows of [B, K, T, D] as [size, K, T, D]."""
    return [tensor[:, None].expand(-1, size, *tensor.shape[1:]).unbind() for tensor in tensors]


def _take(tensors: Sequence[Sequence[Tensor]], bounds: Bounds) -> list[Tensor]:
    """Return the tokens of a span of each tensor."""
    row, start, stop = bounds
    return [rows[row].narrow(2, start, stop - start) for rows in tensors]


def attend_by_span(query: Tensor, key: Tensor, value: Tensor, trees: PackedTrees, scale: float) -> Tensor:
    """Compute what `attend_packed` does with torch's public attention.

    Branches of one tree and of equal length are one call, and so are other spans of equal length.
    """
    B, H, T, D = query.shape
    # The kernels that support fewer heads of keys than of queries have no lower-right causal attention.
    key, value = (tensor.repeat_interleave(H // tensor.shape[1], dim=1) for tensor in (key, value))

    def get_kind(span: AttentionSpan) -> tuple[int, ...]:
        return (span.length, *(_get_prefix(span) if span.prefix_length else ()))

    parts: list[tuple[AttentionSpan, Tensor]] = []  # [L, H, D]
    for (length, *prefix), group in itertools.groupby(sorted(trees.spans, key=get_kind), key=get_kind):
        spans = list(group)
        queries, keys, values = (
            torch.stack([tensor[s.row, :, s.start : s.stop] for s in spans]) for tensor in (query, key, value)
        )
        if prefix:
            row, start, stop = prefix
            keys, values = (
                torch.cat([tensor[row, :, start:stop].expand(len(spans), -1, -1, -1), own], dim=2)
                for tensor, own in ((key, keys), (value, values))
            )
        bias: Any = causal_lower_right(length, keys.shape[2])
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
        parts += zip(spans, out.transpose(1, 2), strict=True)
    rows: list[list[Tensor]] = [[] for _ in range(B)]
    ends = [0] * B
    for span, part in sorted(parts, key=lambda pair: (pair[0].row, pair[0].start)):
        rows[span.row] += [query.new_zeros(span.start - ends[span.row], H, D), part]
        ends[span.row] = span.stop
    return torch.stack([torch.cat([*row, query.new_zeros(T - end, H, D)]) for row, end in zip(rows, ends, strict=True)])


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, index: VarlenIndex, scale: float) -> Tensor:
    """Compute what `attend_packed` does with one call of FlashAttention; see `require_varlen`."""
    B, H, T, D = query.shape
    query_N, key_S, value_S = (
        tensor.transpose(1, 2).flatten(0, 1).index_select(0, taken)
        for tensor, taken in ((query, index.queries_N), (key, index.keys_S), (value, index.keys_S))
    )
    out_N = varlen.varlen_attn(
        *(query_N, key_S, value_S, index.query_bounds, index.key_bounds, index.max_queries, index.max_keys),
        scale=scale,
        window_size=(-1, 0),  # causal: the last query of a span sees its last key
        **_GROUPED,
    )
    out: Tensor = query.new_zeros(B * T, H, D).index_copy(0, index.queries_N, out_N).view(B, T, H, D)
    return out


def require_varlen(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError unless `attend_varlen` can be used with weights of this type on a device."""
    problem = ""
    if device.type != "cuda":
        problem = f"it needs a CUDA device instead of {device}"
    elif dtype != torch.bfloat16:
        problem = f"it needs model.dtype=bfloat16 instead of {str(dtype).removeprefix('torch.')}"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        problem = f"it needs compute capability 8.0 or newer, which {device} hasn't"
    elif "window_size" not in _varlen_parameters:
        problem = f"it needs torch 2.11 or newer instead of {torch.__version__}"
    if problem:
        raise ModelError(
            f"model.attention=varlen can't be used: {problem}; set model.attention=branchwise",
            key="model.attention",
            value="varlen",
        )
