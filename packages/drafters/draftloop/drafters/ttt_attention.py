"""Attention of training-time test: one softmax over the prefix and the drafter's own earlier steps.

At step j the query of position t sees the true prefix and, of each self-generated step, only its own
position. In one picture, for t = 2 and j = 2 (. = not seen):

    step 0 keys   K0[0] K0[1] K0[2]   .          causal: an ordinary attention
    step 1 keys     .     .   K1[2]   .          diagonal: an elementwise dot product
    step 2 keys     .     .   K2[2]   .          diagonal

No mask of size [T, T*(j+1)] exists: the prefix part is one matrix product, each diagonal is one row-wise dot.
A later step of position t never looks at the later steps of another position, so any subset of the positions
can be unrolled alone. Sequences are padded on the right, so the causal prefix never reaches a padded key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [positions, head_dim], fp32 (Llama's half-split layout)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * theta**-exponent
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, S, D] by cos, sin [B or 1, S, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1).to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.unsqueeze(1).to(x.dtype)


def ttt_attention(
    query: Tensor,
    positions: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend from step j = len(own), for S chosen positions of each sequence.

    query: [B, heads, S, D].  positions: [B, S] int64, where each query stands.  prefix: step 0's key and value
    of all positions, [B, kv_heads, T, D] each.  own: key and value of steps 1..j at the chosen positions,
    [B, kv_heads, S, D] each.  Returns [B, heads, S, D].
    """
    batch, heads, chosen, dim = query.shape
    kv_heads, length = prefix[0].shape[1:3]
    group = heads // kv_heads
    query = (query * dim**-0.5).view(batch, kv_heads, group, chosen, dim)
    # The heads that share a key are rows of one matrix product.
    rows = query.reshape(batch, kv_heads, group * chosen, dim)
    scores = (rows @ prefix[0].transpose(-1, -2)).view(batch, kv_heads, group, chosen, length)
    future = torch.arange(length, device=query.device) > positions[:, None, None, :, None]
    scores = scores.masked_fill(future, -torch.inf)
    diagonals = [(query * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat((scores, *diagonals), dim=-1).softmax(-1)
    prefix_weights = weights[..., :length].reshape(batch, kv_heads, group * chosen, length)
    out = (prefix_weights @ prefix[1]).view(batch, kv_heads, group, chosen, dim)
    for column, (_, value) in enumerate(own, start=length):
        out = out + weights[..., column : column + 1] * value.unsqueeze(2)
    return out.reshape(batch, heads, chosen, dim)
