"""Attention of packed rows on a GPU, as training computes it, beside a dense mask and beside one padded row per reply.

    python benchmarks/gpu_attention.py

The shape is that of Qwen3-VL-8B's layers (32 heads of queries, 8 of keys, 128 wide) in bfloat16; a group of 8 replies
of 512 tokens shares a prompt. Each side is forward and backward of one layer's attention. Errors are the largest
differences of output and gradients from float64 with a dense mask, relative to the largest value, at a small size.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from _common import describe_machine, parser, show
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.models.attention import PackedTrees, VarlenIndex, attend_by_span, attend_varlen, find_attention_spans

HEADS, KV_HEADS, SIZE = 32, 8, 128
Side = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(tokens: int, rows: int, options: argparse.Namespace) -> list[Tensor]:
    """Draw queries, keys, values [B, heads, T, D]."""
    return [
        torch.randn(rows, tokens, heads, SIZE, device=options.device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def build_labels(prefix: int, group: int, reply: int) -> tuple[np.ndarray, np.ndarray]:
    """Label the tokens of one row with one tree."""
    branch = np.concatenate([np.zeros(prefix, dtype=np.int64), np.repeat(np.arange(1, group + 1), reply)])
    return np.zeros_like(branch)[None], branch[None]


def build_mask(branch_T: np.ndarray, device: str) -> Tensor:
    """Return which keys a query sees, [T, T]."""
    branch = torch.from_numpy(branch_T).to(device)
    return ((branch[:, None] == branch) | (branch == 0)).tril()


def attend_with_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute attention with a dense mask -> [B, T, H, D]."""
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention of rows that are one conversation each -> [B, T, H, D]."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def build_sides(prefix: int, options: argparse.Namespace) -> dict[str, Side]:
    """Return the ways to compute a packed row."""
    tree_BT, branch_BT = build_labels(prefix, options.group, options.reply)
    spans = find_attention_spans(tree_BT, branch_BT)
    index = VarlenIndex.build(spans, branch_BT.shape[1], torch.device(options.device))
    scale = SIZE**-0.5
    return {
        "branchwise": functools.partial(attend_by_span, trees=PackedTrees(spans), scale=scale),
        "varlen": functools.partial(attend_varlen, index=index, scale=scale),
        "dense mask": functools.partial(attend_with_mask, mask=build_mask(branch_BT[0], options.device)),
    }


def differentiate(side: Side, tensors: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients."""
    out = side(*tensors)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def measure(side: Side, tensors: Sequence[Tensor], rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of forward and backward, and the peak of the memory that they add in MiB."""
    grad = torch.randn_like(side(*tensors))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        differentiate(side, tensors, grad)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:]), (torch.cuda.max_memory_allocated() - before) / 2**20


def find_error(side: Side, tensors: Sequence[Tensor], expected: Iterable[Tensor], grad: Tensor) -> float:
    """Return the largest relative difference from float64."""
    pairs = zip(differentiate(side, tensors, grad), expected, strict=True)
    return max(((got - exact).abs().max() / exact.abs().max()).item() for got, exact in pairs)


def compare(prefix: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure each side at one length of the prompt; return a row per side."""
    packed = draw(prefix + options.group * options.reply, 1, options)
    padded = draw(prefix + options.reply, options.group, options)
    inputs = {**dict.fromkeys(build_sides(prefix, options), packed), "padded rows": padded}
    sides = {**build_sides(prefix, options), "padded rows": attend_causally}
    rows: list[dict[str, object]] = []
    for name, side in sides.items():
        try:
            milliseconds, mebibytes = measure(side, inputs[name], options.rounds)
        except torch.OutOfMemoryError:
            milliseconds = mebibytes = float("nan")
        rows.append({"prompt": prefix, "side": name, "ms": milliseconds, "peak MiB": mebibytes})
    return rows


def check(options: argparse.Namespace) -> list[dict[str, object]]:
    """Return the error of each side at a small size."""
    prefix, small = 200, argparse.Namespace(**{**vars(options), "group": 3, "reply": 70})
    tensors = draw(prefix + 3 * 70, 1, small)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    sides = build_sides(prefix, small)
    grad = torch.randn_like(sides["dense mask"](*tensors))
    expected = differentiate(sides["dense mask"], exact, grad.double())
    return [{"side": name, "largest error": find_error(side, tensors, expected, grad)} for name, side in sides.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, then measure each length."""
    options = parser(__doc__, rounds=10)
    options.add_argument("--device", default="cuda")
    options.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens")
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--reply", type=int, default=512)
    chosen = options.parse_args(arguments)
    torch.manual_seed(0)
    show("Errors relative to float64", check(chosen), describe_machine(chosen.device), None)
    rows = [row for prefix in chosen.prompts for row in compare(prefix, chosen)]
    show("Attention of one layer, forward and backward", rows, describe_machine(chosen.device), chosen.out)


if __name__ == "__main__":
    main()
