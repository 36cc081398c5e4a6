"""Drafting with a drafter at decoding time, one sequence: what it remembers, and the tree it draws.

The decoder tells a proposer every row the target has computed, with the token that follows it; then the proposer
draws a tree below the last of those tokens.

    rows known      f[0] .. f[t]          tokens known    x[1] .. x[t+1]         the tree's root is x[t+1]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.drafters.dflash import Context, DflashDrafter
from draftloop.drafters.eagle1 import Eagle1Drafter
from draftloop.drafters.recurrent import OwnKeys, Prefix, RecurrentDrafter
from draftloop.drafters.target import FrozenTarget
from draftloop.drafters.tree import DraftTree, Propose, chain, draft_tree

# A way to draw a tree from a proposal: (propose, root token) -> tree. See `tree`.
DrawTree = Callable[[Propose, int], DraftTree]


def dynamic(depth: int, topk: int, total: int) -> DrawTree:
    """EAGLE-2's tree; topk = 1 and total = depth + 1 is a chain."""
    return lambda propose, root: draft_tree(propose, root, depth, topk, total)


class Proposer(Protocol):
    def observe(self, fused: Tensor, last_hidden: Tensor, tokens: Tensor) -> None:
        """n more rows of the target, [n, K*H] and [n, H], and the token after each, [n] int64."""
        ...

    def draft(self, root: int) -> DraftTree:
        """A tree below `root`, the last token observed."""
        ...


class EagleProposer:
    """EAGLE-1, EAGLE-2 and EAGLE-3: which one is the drafter's and the tree's business."""

    def __init__(self, drafter: RecurrentDrafter, target: FrozenTarget, draw: DrawTree) -> None:
        self._drafter, self._target, self._draw = drafter, target, draw
        self._ids = drafter.draft_ids()
        self._reads_last_hidden = isinstance(drafter, Eagle1Drafter)
        self._prefix: Prefix | None = None
        self._tokens = torch.empty(0, dtype=torch.int64)
        # Path below the root -> the feature there, [1, 1, H], and the keys of the path.
        self._nodes: dict[tuple[int, ...], tuple[Tensor, OwnKeys]] = {}

    def observe(self, fused: Tensor, last_hidden: Tensor, tokens: Tensor) -> None:
        drafter, start = self._drafter, len(self._tokens)
        self._tokens = torch.cat((self._tokens, tokens))
        # The token row t reads is x[t+1], which is tokens[t]; one earlier in the ablation.
        reads = self._tokens[start:] if drafter.token_lag == 0 else F.pad(self._tokens, (1, 0))[start:-1]
        states = (last_hidden if self._reads_last_hidden else fused)[None]
        new = drafter.prefix(states, F.embedding(reads, self._target.embedding)[None], start)
        old = self._prefix
        if old is not None:
            new = replace(
                new,
                key=torch.cat((old.key, new.key), 2),
                value=torch.cat((old.value, new.value), 2),
                starts=torch.cat((old.starts, new.starts), 1),
            )
        self._prefix = new
        last = torch.tensor([[len(self._tokens) - 1]])
        feature = drafter.attend(new.residual[:, -1:], new.query[:, :, -1:], last, new, OwnKeys())
        self._nodes = {(): (feature, OwnKeys())}

    def draft(self, root: int) -> DraftTree:
        return self._draw(self._propose, root)

    def _propose(self, paths: Tensor) -> Tensor:
        """[F, d] paths below the root -> [F, V] log-probabilities; each node is one step of the drafter."""
        depth, drafter = paths.shape[1], self._drafter
        keys = [tuple(path) for path in paths.tolist()]
        if depth > 0:
            self._step(keys, paths, depth)
        features = torch.cat([self._nodes[key][0] for key in keys], dim=1)[0]
        log_probs = drafter.guess_logits(features, self._target).log_softmax(-1)
        everything = log_probs.new_full((len(keys), self._target.embedding.shape[0]), -torch.inf)
        return everything.index_copy_(1, self._ids, log_probs)

    def _step(self, keys: list[tuple[int, ...]], paths: Tensor, depth: int) -> None:
        assert self._prefix is not None, "observe comes before draft"
        drafter, last = self._drafter, len(self._tokens) - 1
        parents = [self._nodes[key[:-1]] for key in keys]
        feature = torch.cat([parent for parent, _ in parents], dim=1)
        own = OwnKeys(
            tuple(torch.cat(step, dim=2) for step in zip(*(keys.keys for _, keys in parents), strict=True)),
            tuple(torch.cat(step, dim=2) for step in zip(*(keys.values for _, keys in parents), strict=True)),
        )
        known = torch.cat((self._tokens[-1:].expand(len(keys), 1), paths), dim=1)
        embedded = F.embedding(known[:, depth + drafter.token_lag], self._target.embedding)[None]
        seen = torch.full((1, len(keys)), last)
        feature, own = drafter.advance(feature, drafter.project_tokens(embedded), seen + depth, seen, self._prefix, own)
        for column, key in enumerate(keys):
            part = slice(column, column + 1)
            mine = OwnKeys(tuple(k[:, :, part] for k in own.keys), tuple(v[:, :, part] for v in own.values))
            self._nodes[key] = (feature[:, part], mine)


class DflashProposer:
    """One denoising pass a block; the arg-max of each slot makes a chain."""

    def __init__(self, drafter: DflashDrafter, target: FrozenTarget) -> None:
        self._drafter, self._target = drafter, target
        self._context: Context | None = None
        self._rows = 0

    def observe(self, fused: Tensor, last_hidden: Tensor, tokens: Tensor) -> None:
        new = self._drafter.context(fused[None], start=self._rows)
        self._context = new if self._context is None else self._context.extend(new)
        self._rows += len(fused)

    def draft(self, root: int) -> DraftTree:
        assert self._context is not None, "observe comes before draft"
        embedding, mask = self._target.embedding, self._drafter.config.mask_token_id
        block = self._drafter(
            self._context,
            embedding[root].view(1, 1, -1),
            embedding[mask],
            torch.tensor([[self._rows]]),
            torch.zeros(1, 1).long(),
        )
        best = self._drafter.guess_logits(block[0, 0, 1:], self._target).log_softmax(-1).max(-1)
        return chain(best.indices, best.values, root)
