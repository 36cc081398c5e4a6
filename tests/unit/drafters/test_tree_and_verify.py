"""Draft trees stay trees under exact ties, and sampled verification has exactly the target's law."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.drafters.tree import EAGLE1_TREE, DraftTree, draft_tree, grow, rerank, static_tree, without_rerank
from draftloop.drafters.verify import (
    RandomChance,
    Verdict,
    verify_greedy,
    verify_sampled,
    verify_sampled_siblings,
)

VOCAB = 4


def _proposer(rows: list[list[float]]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A proposal that depends on the path through a table, so that ties are common."""
    table = torch.tensor(rows)

    def propose(paths: torch.Tensor) -> torch.Tensor:
        return table[(paths.sum(1) + paths.shape[1]) % len(rows)]

    return propose


def _tree(tokens: list[int], parents: list[int]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(*(torch.tensor(x) for x in (tokens, parents, depths)), torch.zeros(len(tokens)))


# Exact ties: certain tokens (0), impossible ones (-inf), equal ones, and one that rounded above 0.
confidences = st.sampled_from([0.0, 1e-7, -0.5, -0.5, -1.0, -math.inf])
weights = st.lists(st.integers(0, 3), min_size=VOCAB, max_size=VOCAB).filter(any)
tables = st.lists(st.lists(confidences, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(tables, st.integers(1, 4), st.integers(1, 3), st.integers(1, 14))
def test_trees_are_connected_and_masks_hold_only_ancestors(
    rows: list[list[float]], depth: int, topk: int, total: int
) -> None:
    tree = draft_tree(_proposer(rows), root_token=9, depth=depth, topk=topk, total=total)
    size = len(tree.tokens)
    assert size == min(total, 1 + topk + (depth - 1) * topk * topk)
    assert (int(tree.tokens[0]), int(tree.parents[0]), int(tree.depths[0])) == (9, -1, 0)
    mask = tree.ancestor_mask()
    for node in range(1, size):
        parent = int(tree.parents[node])
        assert 0 <= parent < node
        assert int(tree.depths[node]) == int(tree.depths[parent]) + 1
        assert tree.log_values[node] <= tree.log_values[parent]
        ancestors = {node}
        while node != 0:
            node = int(tree.parents[node])
            ancestors.add(node)
        assert set(mask[max(ancestors)].nonzero().flatten().tolist()) == ancestors
    siblings = {(int(p), int(t)) for p, t in zip(tree.parents, tree.tokens, strict=True)}
    assert len(siblings) == size


@settings(deadline=None, max_examples=60)
@given(tables, st.integers(1, 3), st.integers(2, 3), st.integers(2, 10))
def test_rerank_keeps_the_best_values(rows: list[list[float]], depth: int, topk: int, total: int) -> None:
    candidates = grow(_proposer(rows), depth, topk)
    tree = rerank(candidates, 0, total)
    best = candidates.log_values.sort(descending=True).values[: total - 1]
    assert torch.equal(tree.log_values[1:].sort(descending=True).values, best)


def test_a_drawn_example() -> None:
    p = {(): [0.6, 0.3, 0.06, 0.04], (0,): [0.1, 0.5, 0.3, 0.1], (1,): [0.2, 0.1, 0.6, 0.1]}
    tree = draft_tree(lambda paths: torch.tensor([p[tuple(row)] for row in paths.tolist()]).log(), 7, 2, 2, 4)
    assert tree.tokens.tolist() == [7, 0, 1, 1]
    assert tree.parents.tolist() == [-1, 0, 0, 1]
    assert tree.ancestor_mask().int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


@settings(deadline=None, max_examples=60)
@given(tables, st.integers(1, 3), st.integers(1, 3), st.integers(1, 10), st.booleans())
def test_the_ablations_trees_are_connected(
    rows: list[list[float]], depth: int, topk: int, total: int, rerank_too: bool
) -> None:
    candidates = grow(_proposer(rows), depth, topk, by="confidence" if rerank_too else "value")
    tree = (rerank if rerank_too else without_rerank)(candidates, 9, total)
    assert len(tree.tokens) == 1 + min(total - 1, len(candidates.tokens) if rerank_too else depth * topk)
    for node in range(1, len(tree.tokens)):
        assert 0 <= int(tree.parents[node]) < node
        assert int(tree.depths[node]) == int(tree.depths[int(tree.parents[node])]) + 1


def test_confidence_expansion_may_leave_the_best_path() -> None:
    p = {(): [0.6, 0.4, 0.0, 0.0], (0,): [0.3, 0.25, 0.25, 0.2], (1,): [0.4, 0.3, 0.2, 0.1]}
    propose = lambda paths: torch.tensor([p[tuple(row)] for row in paths.tolist()]).log()  # noqa: E731
    by_value, by_confidence = (grow(propose, 2, 2, by=by) for by in ("value", "confidence"))
    # Values .18 .15 below token 0 and .16 .12 below token 1; confidences .3 .25 and .4 .3.
    assert by_value.expanded.tolist() == [True, True, True, False, True, False]
    assert by_confidence.expanded.tolist() == [True, True, True, False, True, False]
    p[(0,)] = [0.29, 0.28, 0.23, 0.2]
    by_value, by_confidence = (grow(propose, 2, 2, by=by) for by in ("value", "confidence"))
    assert by_value.expanded.tolist() == [True, True, True, True, False, False]
    assert by_confidence.expanded.tolist() == [True, True, False, False, True, True]


def test_the_static_tree_has_its_form_and_the_best_tokens() -> None:
    table = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    tree = static_tree(lambda paths: table.expand(len(paths), 4), 9, EAGLE1_TREE)
    assert len(tree.tokens) == 1 + len(EAGLE1_TREE)
    best = [1, 3, 2, 0]
    for node, path in enumerate(EAGLE1_TREE, start=1):
        said, at = [], node
        while at:
            said.append(int(tree.tokens[at]))
            at = int(tree.parents[at])
        assert said[::-1] == [best[rank] for rank in path]
        assert int(tree.depths[node]) == len(path)
        assert float(tree.log_values[node]) == pytest.approx(sum(float(table[0, t]) for t in said), abs=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), weights, weights)
def test_sampled_siblings_have_exactly_the_targets_law(width: int, p: list[int], q: list[int]) -> None:
    """Over every draw of the siblings and every path of chance, the first emitted token has the law p."""
    target, draft = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (p, q))
    law = [0.0] * VOCAB
    for drawn in itertools.product(range(VOCAB), repeat=width):
        drawn_with = math.prod(float(draft[token]) for token in drawn)
        if drawn_with == 0.0:
            continue
        tree = _tree([9, *drawn], [-1] + [0] * width)
        probs = torch.stack([target] * (width + 1)), torch.stack([draft] * (width + 1))
        outcomes = _enumerate(lambda chance, t=tree, x=probs: verify_sampled_siblings(t, *x, chance))  # type: ignore[misc]
        for tokens, weight in outcomes.items():
            law[tokens[0]] += drawn_with * weight
    assert law == pytest.approx(target.tolist(), abs=1e-9)


def test_greedy_follows_the_target() -> None:
    tree = _tree([9, 1, 2, 3, 0], [-1, 0, 0, 2, 3])
    assert verify_greedy(tree, torch.tensor([2, 0, 3, 1, 1])) == Verdict((0, 2, 3), (2, 3, 1))
    assert verify_greedy(tree, torch.tensor([0, 0, 0, 0, 0])) == Verdict((0,), (0,))
    assert verify_greedy(tree, torch.tensor([2, 0, 3, 0, 3])) == Verdict((0, 2, 3, 4), (2, 3, 0, 3))


class EveryChance:
    """Replays a list of decisions, then takes the first branch; `weight` is the exact chance of this path."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.widths, self.weight = script, [], [], 1.0  # type: ignore[var-annotated]

    def _decide(self, probabilities: list[float]) -> int:
        place = len(self.taken)
        choice = self.script[place] if place < len(self.script) else 0
        self.taken.append(choice)
        self.widths.append(len(probabilities))
        self.weight *= probabilities[choice]
        return choice

    def accept(self, probability: float) -> bool:
        return self._decide([probability, 1.0 - probability]) == 0

    def draw(self, probs: torch.Tensor) -> int:
        return self._decide(probs.tolist())


def _law(tree: DraftTree, probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    return _enumerate(lambda chance: verify_sampled(tree, probs, chance))


def _enumerate(verify: Callable[[EveryChance], Verdict]) -> dict[tuple[int, ...], float]:
    """Emitted tokens -> exact probability, over every path of decisions."""
    law: dict[tuple[int, ...], float] = {}
    script: list[int] | None = []
    while script is not None:
        chance = EveryChance(script)
        verdict = verify(chance)
        assert len(verdict.tokens) == len(verdict.nodes)
        law[verdict.tokens] = law.get(verdict.tokens, 0.0) + chance.weight
        script = chance.taken
        while script and script[-1] + 1 == chance.widths[len(script) - 1]:
            script = script[:-1]
        script = [*script[:-1], script[-1] + 1] if script else None
    return law


shapes = st.sampled_from([
    ([9], [-1]),
    ([9, 1], [-1, 0]),
    ([9, 1, 2, 3], [-1, 0, 0, 0]),
    ([9, 0, 1, 2, 3], [-1, 0, 0, 0, 0]),
    ([9, 1, 2, 0, 3, 2], [-1, 0, 0, 1, 1, 3]),
    ([9, 1, 1, 1], [-1, 0, 1, 2]),
])  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(shapes, st.lists(weights, min_size=6, max_size=6))
def test_sampled_verification_has_exactly_the_targets_law(
    shape: tuple[list[int], list[int]], rows: list[list[int]]
) -> None:
    tree = _tree(*shape)
    exact = [[Fraction(w, sum(row)) for w in row] for row in rows]
    probs = torch.tensor([[float(p) for p in row] for row in exact], dtype=torch.float64)[: len(tree.tokens)]
    law = _law(tree, probs)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)

    def expect(node: int, emitted: tuple[int, ...], weight: float) -> None:
        """Walk the target alone: it emits p at each node, and stops where the tree has no such child."""
        children = {int(tree.tokens[c]): c for c in tree.children(node).tolist()}
        for token in range(VOCAB):
            chance = weight * float(exact[node][token])
            if token in children:
                expect(children[token], (*emitted, token), chance)
            else:
                assert law.pop((*emitted, token), 0.0) == pytest.approx(chance, abs=1e-12)

    expect(0, (), 1.0)
    assert all(weight == pytest.approx(0.0, abs=1e-12) for weight in law.values())


def test_random_chance_is_reproducible() -> None:
    tree = _tree([9, 1, 2, 3], [-1, 0, 0, 1])
    probs = torch.full((4, VOCAB), 0.25)
    runs = [
        [verify_sampled(tree, probs, chance) for _ in range(20)]
        for chance in (RandomChance(torch.Generator().manual_seed(3)), RandomChance(torch.Generator().manual_seed(3)))
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3
