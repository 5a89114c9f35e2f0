"""The dense reference of packed attention: a mask with a row and a column for each token of a row."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def build_mask(tree_BT, branch_BT):
    """Return the tree attention mask by its definition, bool [B, query T, key T]; padding sees nothing."""
    tree_BT, branch_BT = torch.as_tensor(tree_BT), torch.as_tensor(branch_BT)
    same_tree = (tree_BT[:, :, None] == tree_BT[:, None, :]) & (tree_BT >= 0)[:, :, None]
    visible = (branch_BT[:, None, :] == 0) | (branch_BT[:, :, None] == branch_BT[:, None, :])
    return (same_tree & visible).tril()


def attend_densely(query, key, value, mask_BTT, scale):
    """Return the attention [B, T, H, D] of queries [B, H, T, D] with a mask."""
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask_BTT[:, None], scale=scale, enable_gqa=True)
    return out.transpose(1, 2).nan_to_num()  # a softmax over nothing
