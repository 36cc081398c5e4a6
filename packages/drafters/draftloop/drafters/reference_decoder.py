"""Speculative decoding in plain torch, over any causal language model of `transformers`: batch 1, to be read.

It is the second opinion on SGLang's output, and serves what SGLang has no place for (EAGLE-1's static tree, the
papers' ablations). Each turn: draw a tree, run the target over all its nodes at once under a mask of ancestors,
walk down the accepted path, and keep only that path in the target's cache.

    cache x[0] .. x[t]    tree: root x[t+1], drafts a, b below it, c below a
    mask row of c:  all of the cache, root, a, c             position of c: t + 1 + 2
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.drafters.proposers import Proposer
from draftloop.drafters.verify import Chance, verify_greedy, verify_sampled


@dataclass(frozen=True)
class Rows:
    """What the target says of n tokens. fused: [n, K*H].  last_hidden: [n, H].  logits: [n, V]."""

    fused: Tensor
    last_hidden: Tensor
    logits: Tensor


class CachedTarget:
    """A causal language model with its cache for one sequence. layer_ids: outputs of layer i, side by side."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._model, self._layer_ids, self._cache = model, tuple(layer_ids), DynamicCache()
        self.length = 0

    def forward(self, tokens: Tensor, depths: Tensor, mask: Tensor) -> Rows:
        """Run n tokens after the cache. tokens, depths: [n]; a token stands at `length` + depth.  mask: [n, n]."""
        size, dtype = len(tokens), self._model.dtype
        allowed = torch.cat((torch.ones(size, self.length, dtype=torch.bool), mask), dim=1)
        bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
        out = self._model(
            tokens[None],
            position_ids=(self.length + depths)[None],
            attention_mask=bias[None, None],
            past_key_values=self._cache,
            output_hidden_states=True,
            use_cache=True,
        )
        # hidden_states[0] is the embedding, the last is after the final norm.
        states = [out.hidden_states[layer + 1][0] for layer in self._layer_ids]
        last = out.hidden_states[-1][0]
        return Rows(torch.cat(states, dim=-1) if states else last[:, :0], last, out.logits[0])

    def prefill(self, tokens: Tensor) -> Rows:
        """Run n tokens, one after the other, and keep them."""
        order = torch.arange(len(tokens))
        rows = self.forward(tokens, order, order[:, None] >= order)
        self.keep(range(len(tokens)))
        return rows

    def keep(self, nodes: Sequence[int]) -> None:
        """Of the rows of the last forward pass, keep these, in order."""
        rows = torch.cat((torch.arange(self.length), self.length + torch.tensor(list(nodes))))
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
        self.length += len(nodes)


@dataclass(frozen=True)
class Decoded:
    """tokens: what was generated.  accepted: drafts accepted in each turn.  offered: depth of each turn's tree.
    seconds: wall clock of drafting and of everything, the prefill aside."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    offered: tuple[int, ...]
    draft_seconds: float
    seconds: float

    @property
    def accept_length(self) -> float:
        """Tokens a turn: 1 without any accepted draft."""
        return 1.0 + sum(self.accepted) / max(len(self.accepted), 1)

    def acceptance(self, position: int) -> tuple[int, int]:
        """(accepted, tried) of the draft at this depth, 1 the first: turns whose earlier drafts were accepted."""
        tried = [a for a, o in zip(self.accepted, self.offered, strict=True) if a >= position - 1 and o >= position]
        return sum(a >= position for a in tried), len(tried)


@torch.no_grad()
def decode(
    target: CachedTarget,
    proposer: Proposer,
    prompt: Sequence[int],
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    chance: Chance | None = None,
    temperature: float = 1.0,
) -> Decoded:
    """Generate. chance: None decodes greedily; else it samples at `temperature`, with the target's exact law."""
    rows = target.prefill(torch.tensor(prompt))
    if chance is None:
        tokens = [int(rows.logits[-1].argmax())]
    else:
        tokens = [chance.draw((rows.logits[-1].double() / temperature).softmax(-1))]
    proposer.observe(rows.fused, rows.last_hidden, torch.tensor([*prompt[1:], tokens[0]]))
    accepted, offered = [], []
    drafting, begin = 0.0, time.perf_counter()
    while len(tokens) < max_new_tokens and not set(end_ids) & set(tokens):
        before = time.perf_counter()
        tree = proposer.draft(tokens[-1])
        drafting += time.perf_counter() - before
        rows = target.forward(tree.tokens, tree.depths, tree.ancestor_mask())
        if chance is None:
            verdict = verify_greedy(tree, rows.logits.argmax(-1))
        else:
            verdict = verify_sampled(tree, (rows.logits.double() / temperature).softmax(-1), chance)
        path = torch.tensor(verdict.nodes)
        target.keep(verdict.nodes)
        before = time.perf_counter()
        proposer.observe(rows.fused[path], rows.last_hidden[path], torch.tensor(verdict.tokens))
        drafting += time.perf_counter() - before
        tokens.extend(verdict.tokens)
        accepted.append(len(verdict.nodes) - 1)
        offered.append(int(tree.depths.max()))
    return Decoded(
        _cut(tokens, max_new_tokens, end_ids), tuple(accepted), tuple(offered), drafting, time.perf_counter() - begin
    )


@torch.no_grad()
def decode_plainly(
    target: CachedTarget, prompt: Sequence[int], max_new_tokens: int, end_ids: Sequence[int] = ()
) -> tuple[int, ...]:
    """Greedy decoding without a drafter, one token a pass."""
    tokens: list[int] = []
    feed = list(prompt)
    while len(tokens) < max_new_tokens and not set(end_ids) & set(tokens):
        tokens.append(int(target.prefill(torch.tensor(feed)).logits[-1].argmax()))
        feed = tokens[-1:]
    return tuple(tokens)


def _cut(tokens: list[int], most: int, end_ids: Sequence[int]) -> tuple[int, ...]:
    """At most `most` tokens, the first end token the last of them."""
    ends = [place + 1 for place, token in enumerate(tokens) if token in end_ids]
    return tuple(tokens[: min([most, *ends])])
