"""Draft trees as pure functions on tensors: EAGLE-2's dynamic one, EAGLE-1's static one, and their ablations.

The value of a node is the product of the confidences on its path. The tree grows by depth: the k best nodes of
a depth propose k children each, and of all candidates the N-1 best become the tree. A child is never worth
more than its parent, so the best N-1 are closed under ancestors, provided that a tie (a confidence of exactly
1, or of 0) goes to the shallower and then to the earlier node.

    depth 1    a .6   b .3             N = 4: root, a, c, b
    depth 2    c .5   d .05  e .2      mask row of c: root, a, c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


class Propose(Protocol):
    def __call__(self, paths: Tensor) -> Tensor:
        """paths: [F, d] int64, the drafted tokens from below the root to each frontier node (d = 0: the root).

        Returns [F, V] log-probabilities of the next token.
        """
        ...


@dataclass(frozen=True)
class DraftTree:
    """N nodes, parents before children; node 0 is the root, the last known token.

    tokens: [N] int64.  parents: [N] int64, -1 for the root.  depths: [N] int64, added to the root's position.
    log_values: [N] fp32, 0 for the root.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_values: Tensor

    def ancestor_mask(self) -> Tensor:
        """[N, N] bool: row i sees node j when j is i or one of its ancestors."""
        mask = torch.eye(len(self.tokens), dtype=torch.bool)
        for node in range(1, len(self.tokens)):
            mask[node] |= mask[int(self.parents[node])]
        return mask

    def children(self, node: int) -> Tensor:
        """The node's children in tree order, [C] int64."""
        return (self.parents == node).nonzero().flatten()


@dataclass(frozen=True)
class Candidates:
    """Every node a growing tree proposed, depth by depth: C of them, indexed from 0.

    tokens, parents, depths: [C] int64; a parent of -1 is the root.  log_values: [C] fp32.
    expanded: [C] bool, the k best of each level.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_values: Tensor
    expanded: Tensor


def best_first(log_values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values; equal values keep their order. log_values: [C]."""
    return torch.argsort(log_values, descending=True, stable=True)[:count]


def grow(propose: Propose, depth: int, topk: int, by: Literal["value", "confidence"] = "value") -> Candidates:
    """Collect the candidates of `depth` levels, expanding the `topk` best nodes of each level.

    by: what "best" means; "confidence" is the ablation of the EAGLE-2 paper (table 4): the node's own alone.
    """
    paths = torch.empty(1, 0, dtype=torch.int64)
    frontier, frontier_values = torch.tensor([-1]), torch.zeros(1)
    tokens, parents, depths, values, expanded = [], [], [], [], []
    total = 0
    for level in range(1, depth + 1):
        # A log-softmax may round above 0; a child must never look better than its parent.
        best = propose(paths).float().clamp(max=0.0).topk(topk, dim=-1)
        level_values = (frontier_values[:, None] + best.values).flatten()
        level_tokens = best.indices.flatten()
        tokens.append(level_tokens)
        parents.append(frontier.repeat_interleave(topk))
        depths.append(torch.full_like(level_tokens, level))
        values.append(level_values)
        chosen = best_first(level_values if by == "value" else best.values.flatten(), topk)
        expanded.append(torch.zeros(len(level_tokens), dtype=torch.bool).index_fill_(0, chosen, True))
        paths = torch.cat((paths[chosen // topk], level_tokens[chosen, None]), dim=1)
        frontier, frontier_values = chosen + total, level_values[chosen]
        total += len(level_tokens)
    return Candidates(*(torch.cat(x) for x in (tokens, parents, depths, values, expanded)))


def rerank(candidates: Candidates, root_token: int, total: int) -> DraftTree:
    """Keep the root and the `total` - 1 best candidates, in candidate order (parents before children)."""
    # Candidates lie shallow first, so the stable order is the tie rule.
    return _select(candidates, best_first(candidates.log_values, total - 1).sort().values, root_token)


def without_rerank(candidates: Candidates, root_token: int, total: int) -> DraftTree:
    """The ablation of the EAGLE-2 paper (table 4): the expanded nodes as they come, shallow first."""
    return _select(candidates, candidates.expanded.nonzero().flatten()[: total - 1], root_token)


def _select(candidates: Candidates, kept: Tensor, root_token: int) -> DraftTree:
    """The tree of the root and the candidates `kept` [M], increasing and closed under ancestors."""
    # Place of each candidate in the tree; the extra last entry is the root, reached by the parent -1.
    place = torch.full((len(candidates.tokens) + 1,), -1, dtype=torch.int64)
    place[kept] = torch.arange(1, len(kept) + 1)
    place[-1] = 0
    return DraftTree(
        tokens=torch.cat((torch.tensor([root_token]), candidates.tokens[kept])),
        parents=torch.cat((torch.tensor([-1]), place[candidates.parents[kept]])),
        depths=torch.cat((torch.tensor([0]), candidates.depths[kept])),
        log_values=torch.cat((torch.zeros(1), candidates.log_values[kept])),
    )


def draft_tree(propose: Propose, root_token: int, depth: int, topk: int, total: int) -> DraftTree:
    """Grow and rerank: a tree of `total` nodes, the root included (fewer when there are fewer candidates)."""
    return rerank(grow(propose, depth, topk), root_token, total)


# EAGLE-1's tree for a batch of one (the public code's mc_sim_7b_63): a path is the rank of the child at each depth.
EAGLE1_TREE: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


def static_tree(propose: Propose, root_token: int, paths: Sequence[tuple[int, ...]]) -> DraftTree:
    """A tree whose form never changes. paths: as `EAGLE1_TREE`, closed under ancestors, shallow first.

    (0,) (1,) (0, 0)      the root's two best tokens, and the best token after the first of them
    """
    place: dict[tuple[int, ...], int] = {(): 0}
    said: dict[tuple[int, ...], list[int]] = {(): []}
    tokens, parents, values = [root_token], [-1], [0.0]
    for depth in range(1, max(map(len, paths)) + 1):
        level = [path for path in paths if len(path) == depth]
        inner = sorted({path[:-1] for path in level})
        width = 1 + max(path[-1] for path in level)
        best = propose(torch.tensor([said[path] for path in inner], dtype=torch.int64)).float().topk(width, dim=-1)
        for path in level:
            row, rank = inner.index(path[:-1]), path[-1]
            token, parent = int(best.indices[row, rank]), place[path[:-1]]
            place[path], said[path] = len(tokens), [*said[path[:-1]], token]
            values.append(values[parent] + min(float(best.values[row, rank]), 0.0))
            tokens.append(token)
            parents.append(parent)
    depths = [0, *(len(path) for path in sorted(paths, key=len))]
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), torch.tensor(values))


def chain(tokens: Tensor, log_probs: Tensor, root_token: int) -> DraftTree:
    """One drafted path below the root. tokens: [n] int64.  log_probs: [n]."""
    order = torch.arange(len(tokens) + 1)
    values = torch.cat((torch.zeros(1), log_probs.float().cumsum(0)))
    return DraftTree(torch.cat((torch.tensor([root_token]), tokens)), order - 1, order, values)
