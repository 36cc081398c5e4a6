"""Tree attention by torch's scaled_dot_product_attention: the reference, and what the CPU platform runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from draftloop.attention.interface import TreeAttention, TreeBatch
from draftloop.attention.paging import slots_of, visible_mask


class TorchTreeAttention(TreeAttention):
    """Gathers each request's keys and values, folds grouped heads into rows, and calls SDPA once for the batch."""

    def __init__(self, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
        self.group = num_heads // num_kv_heads
        self.dtype = dtype
        self._nodes = 0
        self._slots: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def plan(self, batch: TreeBatch) -> None:
        self._nodes = batch.num_nodes
        self._slots = slots_of(batch)
        mask = needed_mask(batch, self._slots.shape[1])
        self._bias = None if mask is None else self._folded_bias(mask)

    def _folded_bias(self, mask: torch.Tensor) -> torch.Tensor:
        """[B, 1, N*group, L] additive mask. Rows of one node's query heads are neighbours after folding.

        Additive once here, as SDPA would turn a boolean mask into it anew in every layer.
        """
        bias = torch.zeros(mask.shape, device=mask.device, dtype=self.dtype).masked_fill_(~mask, float("-inf"))
        return bias.repeat_interleave(self.group, 1)[:, None]

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
        if self._slots is None:
            raise RuntimeError("TorchTreeAttention.run called before plan")
        num_requests, longest = self._slots.shape
        slots = self._slots.reshape(-1)
        heads, size = q.shape[1], q.shape[2]
        kv_heads = k_cache.shape[1]
        # [S, hk, d] -> [B, hk, L, d]; index_select copies whole rows, plain indexing element by element.
        k = k_cache.index_select(0, slots).view(num_requests, longest, kv_heads, size).transpose(1, 2)
        v = v_cache.index_select(0, slots).view(num_requests, longest, kv_heads, size).transpose(1, 2)
        rows = self._nodes * self.group
        folded = q.view(num_requests, self._nodes, kv_heads, self.group, size).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            folded.reshape(num_requests, kv_heads, rows, size), k, v, attn_mask=self._bias, scale=scale
        )
        out = out.view(num_requests, kv_heads, self._nodes, self.group, size).transpose(1, 2)
        return out.reshape(-1, heads, size)


def needed_mask(batch: TreeBatch, length: int) -> torch.Tensor | None:
    """[B, N, length], or None in plain decoding of equally long requests, where every node sees every column."""
    if batch.num_nodes == 1:
        mask = torch.arange(length, device=batch.kv_lens.device) < batch.kv_lens[:, None]
        return None if bool(mask.all()) else mask[:, None]
    return visible_mask(batch, length)


def causal_extend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request's prefill: its last T of len(slots) positions attend causally.

    q: [T, h, d]; slots: [L] int64, the request's slots in order, T new ones last. Returns [T, h, d].
    """
    new, total = q.shape[0], slots.shape[0]
    group = q.shape[1] // k_cache.shape[1]
    k = k_cache[slots].transpose(0, 1).repeat_interleave(group, 0)[None]
    v = v_cache[slots].transpose(0, 1).repeat_interleave(group, 0)[None]
    mask = None
    if new != total:
        column = torch.arange(total, device=q.device)
        mask = column <= (total - new + torch.arange(new, device=q.device))[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)
