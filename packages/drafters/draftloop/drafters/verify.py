"""Verification of a draft tree that leaves the target's distribution untouched.

The tree is a deterministic function of the past, so each drafted token is a point mass. Sampled verification
tries the children of a node in turn: the child's token x is accepted with probability p(x); else p(x) is set
to zero and p renormalised for the next sibling. When no child is accepted the next token is drawn from what is
left of p. Every emitted token then has the target's law, whatever the tree.

Where the siblings were SAMPLED from the drafter's q (each on its own, so one token may come twice) the rule is that
of the EAGLE-1 paper (appendix): accept x with min(1, p(x)/q(x)); else p becomes the normalised (p - q)+ for the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftloop.drafters.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """nodes: accepted tree nodes from the root down, the root (0) first.  tokens: what is emitted: the accepted
    drafts and one token more from the target; len(tokens) == len(nodes)."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


class Chance(Protocol):
    """Where verification takes its randomness from; a test enumerates it, a server draws it."""

    def accept(self, probability: float) -> bool: ...

    def draw(self, probs: Tensor) -> int: ...


class RandomChance:
    """Chance drawn from a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def accept(self, probability: float) -> bool:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability

    def draw(self, probs: Tensor) -> int:
        return int(torch.multinomial(probs, 1, generator=self._generator))


def verify_greedy(tree: DraftTree, target_tokens: Tensor) -> Verdict:
    """Follow the target's arg-max down the tree. target_tokens: [N] int64, the target's choice after each node."""
    nodes: list[int] = [0]
    tokens: list[int] = []
    while True:
        wanted = int(target_tokens[nodes[-1]])
        tokens.append(wanted)
        matching = [int(child) for child in tree.children(nodes[-1]) if int(tree.tokens[child]) == wanted]
        if not matching:
            return Verdict(tuple(nodes), tuple(tokens))
        nodes.append(matching[0])


def verify_sampled(tree: DraftTree, target_probs: Tensor, chance: Chance) -> Verdict:
    """Lossless sampled verification. target_probs: [N, V], the target's distribution after each node."""
    nodes: list[int] = [0]
    tokens: list[int] = []
    while True:
        accepted, rest = _try_children(tree, nodes[-1], target_probs[nodes[-1]], chance)
        if accepted is None:
            return Verdict(tuple(nodes), (*tokens, chance.draw(rest)))
        nodes.append(accepted)
        tokens.append(int(tree.tokens[accepted]))


def verify_sampled_siblings(tree: DraftTree, target_probs: Tensor, draft_probs: Tensor, chance: Chance) -> Verdict:
    """The multi-round rule for a tree whose children were drawn from q independently.

    target_probs, draft_probs: [N, V], p and q after each node.
    """
    nodes: list[int] = [0]
    tokens: list[int] = []
    while True:
        rest, q = _normalised(target_probs[nodes[-1]]), _normalised(draft_probs[nodes[-1]])
        for child in tree.children(nodes[-1]).tolist():
            token = int(tree.tokens[child])
            share = float(rest[token] / q[token])
            if share >= 1.0 or chance.accept(share):
                nodes.append(child)
                tokens.append(token)
                break
            # Refused, so p(x) < q(x) somewhere and p > q elsewhere: something is left.
            rest = _normalised((rest - q).clamp(min=0.0))
        else:
            return Verdict(tuple(nodes), (*tokens, chance.draw(rest)))


def _normalised(probs: Tensor) -> Tensor:
    return probs.double() / probs.double().sum()


def _try_children(tree: DraftTree, node: int, probs: Tensor, chance: Chance) -> tuple[int | None, Tensor]:
    """The accepted child, or None with the distribution [V] that is left."""
    rest = probs.double().clone()
    rest /= rest.sum()
    for child in tree.children(node).tolist():
        token = int(tree.tokens[child])
        # Mass 1 on one token leaves nothing to renormalise, so it must never be refused.
        if rest[token] >= 1.0 or chance.accept(float(rest[token])):
            return child, rest
        rest[token] = 0.0
        rest /= rest.sum()
    return None, rest
