"""Speculation shapes: how deep and wide to draft, and how many nodes to verify."""

from __future__ import annotations

from dataclasses import dataclass

BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """depth: levels below the root.  width: children drafted of a node, and nodes grown a level.  nodes: tokens
    verified of a request, the root included.  Depth 0 is plain decoding: one token, and the drafter rests."""

    depth: int
    width: int
    nodes: int

    @property
    def drafts(self) -> bool:
        return self.depth > 0

    def __str__(self) -> str:
        return f"{self.depth}x{self.width}/{self.nodes}" if self.drafts else "plain"


PLAIN = Shape(0, 1, 1)


def candidates(depth: int, width: int) -> int:
    """Nodes that growing `depth` levels of `width` beams draws, the root not counted."""
    return width + (depth - 1) * width * width


def tree_shapes(depth: int, width: int, nodes: int) -> tuple[Shape, ...]:
    """Plain decoding and every tree within a server's largest one, node budgets in coarse steps.

    A budget below depth + 1 could not hold the deepest path, which a shallower tree would draft for less.
    """
    widths = sorted({width, min(2, width)})
    shapes = [PLAIN]
    for d in range(1, depth + 1):
        for w in widths:
            largest = min(nodes, 1 + candidates(d, w))
            budgets = {b for b in BUDGETS if d + 1 <= b <= largest} | {largest}
            shapes += [Shape(d, w, n) for n in sorted(budgets) if n > d]
    return tuple(shapes)


def block_shapes(block: int) -> tuple[Shape, ...]:
    """DFlash: chains of every block length up to the drafter's own, in coarse steps; length 1 is plain decoding."""
    lengths = {b for b in BUDGETS if b < block} | {block}
    return (PLAIN, *(Shape(1, 1, n) for n in sorted(lengths)))
