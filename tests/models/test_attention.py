"""Attention of packed rows without a mask, compared with the dense mask: outputs, gradients, and sizes of tensors."""

import itertools

import numpy as np
import pytest
import torch
from attention_cases import attend_densely, build_mask
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.config.schema import ModelConfig
from saccade.errors import ModelError
from saccade.models import attention
from saccade.models.attention import AttentionSpan, PackedTrees, VarlenIndex, attend_packed, find_attention_spans
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel

KERNELS = ("branchwise", "by_span", "varlen")
# Lengths of the prefix and of the branches of each tree of a row.
ROWS = st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=5), min_size=1, max_size=3)


def lay_out(rows):
    """Return `tree_BT` and `branch_BT` of rows of trees; their last token is padding."""
    T = max(sum(map(sum, row)) for row in rows) + 1
    tree_BT, branch_BT = np.full((len(rows), T), -1), np.zeros((len(rows), T), dtype=np.int64)
    for b, row in enumerate(rows):
        labels = [(t, n) for t, lengths in enumerate(row) for n, length in enumerate(lengths) for _ in range(length)]
        for index, label in enumerate(labels):
            tree_BT[b, index], branch_BT[b, index] = label
    return tree_BT, branch_BT


def attend_each(query_N, key_S, value_S, query_bounds, key_bounds, max_q, max_k, *, scale, window_size, enable_gqa):
    """Do what `varlen_attn` does on a GPU by its documentation; it has no kernel for a CPU."""
    assert window_size == (-1, 0)
    outputs = []
    for (q, q_end), (k, k_end) in zip(
        *map(itertools.pairwise, (query_bounds.tolist(), key_bounds.tolist())), strict=True
    ):
        assert q_end - q <= max_q
        assert k_end - k <= max_k
        mask = torch.ones(q_end - q, k_end - k, dtype=torch.bool).tril(k_end - k - (q_end - q))
        parts = (tensor.transpose(0, 1)[None] for tensor in (query_N[q:q_end], key_S[k:k_end], value_S[k:k_end]))
        out = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def attend(kernel, query, key, value, spans, scale, monkeypatch):
    if kernel == "by_span":
        return attention.attend_by_span(query, key, value, PackedTrees(spans), scale)
    index = VarlenIndex.build(spans, query.shape[2], query.device) if kernel == "varlen" else None
    monkeypatch.setattr(attention.varlen, "varlen_attn", attend_each)
    return attend_packed(query, key, value, PackedTrees(spans, index), scale)


def draw_tensors(B, T, *, heads, dtype, generator):
    """Draw queries, keys and values as the layers make them: heads are the second last dimension in memory."""
    shapes = [(B, T, count, 8) for count in (heads, 2, 2)]
    tensors = [torch.randn(shape, dtype=dtype, generator=generator).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(rows=st.lists(ROWS, min_size=1, max_size=3).filter(lambda rows: any(sum(map(sum, row)) for row in rows)),
       heads=st.sampled_from([2, 6]))  # fmt: skip
def test_outputs_and_gradients_equal_the_dense_mask(kernel, rows, heads):
    tree_BT, branch_BT = lay_out(rows)
    generator = torch.Generator().manual_seed(0)
    tensors = draw_tensors(*tree_BT.shape, heads=heads, dtype=torch.float64, generator=generator)
    grad = torch.randn(*tree_BT.shape, heads, 8, dtype=torch.float64, generator=generator)
    grad *= torch.from_numpy(tree_BT >= 0)[..., None, None]
    expected = attend_densely(*tensors, build_mask(tree_BT, branch_BT), 0.3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        out = attend(kernel, *tensors, find_attention_spans(tree_BT, branch_BT), 0.3, monkeypatch)
    assert (out - expected).abs().max() <= 1e-12
    gradients = torch.autograd.grad(out, tensors, grad)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, tensors, grad), strict=True):
        assert (ours - theirs.nan_to_num()).abs().max() <= 1e-12


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_is_as_close_to_the_exact_result_as_the_dense_mask(kernel, monkeypatch):
    tree_BT, branch_BT = lay_out([[[40, 20, 30, 20], [0, 50]], [[90, 31, 17]]])
    exact = draw_tensors(*tree_BT.shape, heads=4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    halves = [tensor.detach().to(torch.bfloat16) for tensor in exact]
    mask = build_mask(tree_BT, branch_BT)
    expected = attend_densely(*exact, mask, 0.3)
    out = attend(kernel, *halves, find_attention_spans(tree_BT, branch_BT), 0.3, monkeypatch)
    assert out.dtype == torch.bfloat16
    error, dense_error = ((part - expected).abs().max() for part in (out, attend_densely(*halves, mask, 0.3)))
    assert error <= 2 * dense_error


class LargestTensor(TorchDispatchMode):
    """Records the most numbers of a tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage().nbytes() // max(value.element_size(), 1)
                self.size = max(self.size, min(value.numel(), storage))
        return result


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def vlm(request, tmp_path_factory) -> VisionLanguageModel:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny_model(str(folder), family=request.param, seed=2)
    return VisionLanguageModel(ModelConfig(path=str(folder), num_threads=1))


@pytest.mark.slow
@pytest.mark.parametrize("row", [[[1000, 250, 250]], [[0, 1], *([[150, 50]] * 8)]], ids=["tree", "SFT row"])
def test_no_tensor_has_as_many_numbers_as_pairs_of_tokens(vlm, row):
    tree_BT, branch_BT = lay_out([row])
    T = tree_BT.shape[1]
    ids, positions = torch.zeros(1, T, dtype=torch.long), torch.arange(T).expand(3, 1, T)
    trees = vlm.pack_spans(find_attention_spans(tree_BT, branch_BT), T)
    with LargestTensor() as largest:
        vlm.policy.compute_hidden_states(ids, positions, trees).sum().backward()
    vlm.model.zero_grad(set_to_none=True)
    assert T * 384 <= largest.size < T * T / 2  # the MLP's is the largest


def test_varlen_is_refused_where_it_has_no_kernel(vlm):
    changes = {"attention": "varlen"}
    with raises(ModelError, key="model.attention", value="varlen"):
        VisionLanguageModel(vlm.settings.model_copy(update=changes))


def test_a_span_counts_its_pairs():
    assert [AttentionSpan(0, 5, 8, 0, 5).num_pairs, AttentionSpan(0, 5, 8).num_pairs] == [21, 6]
