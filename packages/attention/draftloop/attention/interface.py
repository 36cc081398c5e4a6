"""The one interface of tree attention: plan once a forward, run once a layer.

Symbols: B requests, N query tokens a request (tree nodes; 1 in plain decoding), L longest visible length,
S slots of the KV cache, h query heads, hk key/value heads, d head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """A batch of draft trees behind ragged prefixes.

        request b:   prefix p0 p1 p2 | nodes n0 n1 n2 n3      N = 4, kv_lens[b] = 7
        kv_indices:  slots of p0 ... n3, then padding up to L
        tree_mask:   [B, N, N], True where node i may see node j (its ancestors and itself)

    Every node sees the whole prefix. kv_indices: [B, L] int64, padding must be valid slots (0 will do).
    kv_lens: [B] int64, nodes included. tree_mask None: a chain, node i sees nodes 0..i.
    """

    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    num_nodes: int
    tree_mask: torch.Tensor | None = None


class TreeAttention(ABC):
    """Attention of tree nodes over a paged KV cache that already holds the nodes' own keys and values."""

    @abstractmethod
    def plan(self, batch: TreeBatch) -> None:
        """Prepare what every layer of one forward shares."""

    @abstractmethod
    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """q: [B*N, h, d]; k_cache, v_cache: [S, hk, d] with h a multiple of hk. Returns [B*N, h, d]."""
