"""The two training masks written out, and attention under a mask in three implementations that must agree.

The drafters themselves materialise no mask (`prefix_attention`); these forms are the yardstick, and the FlexAttention
one is what a GPU kernel would be generated from. A mask is a rule on indices:

    training-time test    queries of step j, rows t      keys: step 0, step 1, .. step j, T rows each
    DFlash                block b of anchor a, slot n    keys: the context, T rows, then all blocks, N rows each
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from draftloop.drafters.prefix_attention import share_heads

Form = Literal["eager", "sdpa", "flex"]
# (query index, key index) -> may the query see the key; works on index tensors of any shape.
Rule = Callable[[Tensor, Tensor], Tensor]


def ttt_rule(length: int) -> Rule:
    """Row t sees step 0's rows up to t, and of every later step its own row only."""

    def rule(query: Tensor, key: Tensor) -> Tensor:
        row = key % length
        return ((key < length) & (row <= query)) | ((key >= length) & (row == query))

    return rule


def block_rule(anchors: Tensor, block_size: int, length: int) -> Rule:
    """A slot sees the context before its block's anchor, and its own block. anchors: [A] int64."""

    def rule(query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        own = (key >= length) & ((key - length) // block_size == block)
        return own | ((key < length) & (key < anchors[block]))

    return rule


def masked_attention(query: Tensor, key: Tensor, value: Tensor, rule: Rule, form: Form) -> Tensor:
    """query: [B, heads, S, D].  key, value: [B, kv_heads, L, D].  Returns [B, heads, S, D]."""
    key, value = share_heads(key, query.shape[1]), share_heads(value, query.shape[1])
    size, total = query.shape[2], key.shape[2]
    if form == "flex":
        mask = create_block_mask(lambda b, h, q, k: rule(q, k), None, None, size, total, device=query.device.type)
        out = flex_attention(query, key, value, block_mask=mask)
        assert isinstance(out, Tensor)
        return out
    device = query.device
    allowed = rule(torch.arange(size, device=device)[:, None], torch.arange(total, device=device)[None])
    if form == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value
