"""Tree attention in two parts merged by their log-sum-exps, in plain torch: what `flashinfer_backend` does on a GPU.

    out = softmax over [prefix | own tree]                    one softmax, computed as two
        = (e^a * prefix_out + e^b * tree_out) / (e^a + e^b)   a, b: the parts' log-sum-exps

The prefix part needs no mask but its length, so the tree's mask costs N x N and not N x context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.attention.interface import TreeAttention, TreeBatch
from draftloop.attention.paging import node_slots, slots_of, tree_mask


class TorchCascadeAttention(TreeAttention):
    """Both parts in fp32, whatever the caches' dtype."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def plan(self, batch: TreeBatch) -> None:
        slots = slots_of(batch)
        column = torch.arange(slots.shape[1], device=slots.device)
        prefix = (column < (batch.kv_lens - batch.num_nodes)[:, None])[:, None]
        self._parts = [(slots, prefix.expand(-1, batch.num_nodes, -1)), (node_slots(batch), tree_mask(batch))]

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        if not self._parts:
            raise RuntimeError("TorchCascadeAttention.run called before plan")
        states = [_attend(q.float() * scale, k_cache, v_cache, *part) for part in self._parts]
        return merge_states(*states[0], *states[1]).to(q.dtype)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """out_a, out_b: [rows, h, d].  lse_a, lse_b: [rows, h], -inf for a part that saw nothing; not both."""
    share = torch.softmax(torch.stack((lse_a, lse_b)), dim=0)[..., None]
    return share[0] * out_a + share[1] * out_b


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """q: [B*N, h, d], scaled.  slots: [B, L].  mask: [B, N, L].  Returns out [B*N, h, d] and lse [B*N, h].

    A row that sees nothing gets zeros and -inf.
    """
    requests, nodes, _ = mask.shape
    kv_heads, size = k_cache.shape[1:]
    grouped = q.view(requests, nodes, kv_heads, -1, size)
    scores = torch.einsum("bnkgd,blkd->bnkgl", grouped, k_cache[slots].float())
    scores = scores.masked_fill(~mask[:, :, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp()
    out = torch.einsum("bnkgl,blkd->bnkgd", weights, v_cache[slots].float())
    return out.reshape(requests * nodes, -1, size), lse.reshape(requests * nodes, -1)
