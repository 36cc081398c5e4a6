"""Attention of tree nodes written out with loops, and batches to try it on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from draftloop.attention.interface import TreeBatch


def attend(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float) -> torch.Tensor:
    """One head's attention. query: [d]; keys, values: what it may see, [d] each."""
    scores = [math.exp(scale * float(query.double() @ key.double())) for key in keys]
    total = sum(scores)
    weighted = [score / total * value.double() for score, value in zip(scores, values, strict=True)]
    return torch.stack(weighted).sum(0).float()


def random_parents(rng: np.random.Generator, nodes: int) -> torch.Tensor:
    """[N] parents of a random tree, the root first."""
    return torch.tensor([-1, *(int(rng.integers(0, node)) for node in range(1, nodes))])


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """[N, N] bool: walk from each node to its root."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        above = node
        while above >= 0:
            mask[node, above] = True
            above = int(parents[above])
    return mask


@dataclass(frozen=True)
class Case:
    """A batch, its query [B*N, h, d] and caches [S, hk, d]."""

    batch: TreeBatch
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float = 0.4

    def visible(self, request: int, node: int) -> list[int]:
        """The slots that a node may see, by the definition of `TreeBatch`."""
        batch, size = self.batch, self.batch.page_size
        prefix = int(batch.kv_lens[request]) - batch.num_nodes
        seen = list(range(prefix))
        for other in range(batch.num_nodes):
            if other <= node if batch.tree_mask is None else bool(batch.tree_mask[request, node, other]):
                seen.append(prefix + other)
        pages = batch.kv_indices[request].tolist()
        return [pages[position // size] * size + position % size for position in seen]

    def expected(self) -> torch.Tensor:
        """[B*N, h, d] by loops."""
        group = self.query.shape[1] // self.keys.shape[1]
        out = torch.empty_like(self.query)
        for row in range(len(self.query)):
            slots = self.visible(row // self.batch.num_nodes, row % self.batch.num_nodes)
            for head in range(self.query.shape[1]):
                keys = [self.keys[slot, head // group] for slot in slots]
                values = [self.values[slot, head // group] for slot in slots]
                out[row, head] = attend(self.query[row, head], keys, values, self.scale)
        return out


def random_case(
    seed: int, prefixes: list[int], nodes: int, kv_heads: int, group: int, page_size: int, *, chain: bool, padding: int
) -> Case:
    """Requests may share pages of a common prefix; padding points at page 0, which is somebody's."""
    rng = np.random.default_rng(seed)
    longest = -(-(max(prefixes) + nodes) // page_size)
    total = 2 * (longest + padding)
    pages = torch.from_numpy(np.stack([rng.permutation(total)[: longest + padding] for _ in prefixes]))
    lengths = torch.tensor(prefixes) + nodes
    for row, length in enumerate(lengths.tolist()):
        pages[row, -(-length // page_size) :] = 0
    masks = torch.stack([ancestors(random_parents(rng, nodes)) for _ in prefixes])
    query, keys, values = (
        torch.from_numpy(rng.standard_normal(shape)).float()
        for shape in (
            (len(prefixes) * nodes, kv_heads * group, 5),
            (total * page_size, kv_heads, 5),
            (total * page_size, kv_heads, 5),
        )
    )
    return Case(TreeBatch(pages, lengths, nodes, None if chain else masks, page_size), query, keys, values)
