"""The one interface of tree attention: plan once a forward, run once a layer.

Symbols: B requests, N query tokens a request (tree nodes; 1 in plain decoding), L longest visible length,
S slots of the KV cache, g page size, h query heads, hk key/value heads, d head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """A batch of draft trees behind ragged prefixes.

        request b:   prefix p0 p1 p2 | nodes n0 n1 n2 n3      N = 4, kv_lens[b] = 7
        kv_indices:  pages of p0 ... n3, then padding         g = 1: a page is a slot
        tree_mask:   [B, N, N], True where node i may see node j (its ancestors and itself)

    Every node sees the whole prefix. Trees of different shapes share a batch: `trees.lay_out` pads the smaller ones
    with nodes that see only themselves. kv_indices: [B, P] int, column j holds positions g*j .. g*j + g - 1 of a
    request, in the slots g*page .. g*page + g - 1; padding must be valid pages (0 will do).
    kv_lens: [B] int, nodes included. tree_mask None: a chain, node i sees nodes 0..i.
    """

    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    num_nodes: int
    tree_mask: torch.Tensor | None = None
    page_size: int = 1


class TreeAttention(ABC):
    """Attention of tree nodes over a paged KV cache that already holds the nodes' own keys and values."""

    @abstractmethod
    def plan(self, batch: TreeBatch) -> None:
        """Prepare what every layer of one forward shares. May allocate and may wait for the device."""

    @abstractmethod
    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """q: [B*N, h, d]; k_cache, v_cache: [S, hk, d] with h a multiple of hk. Returns [B*N, h, d].

        A backend made for CUDA graphs returns a buffer of its own, valid until its next run.
        """
