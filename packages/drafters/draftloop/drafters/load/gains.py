"""How many drafts of each shape the target will accept, from calibrated confidences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftloop.drafters.load.calibration import Reliability
from draftloop.drafters.load.shapes import Shape

# Weight that the last step's drafts keep in the next one's average.
MEMORY = 0.98
# Until trees were seen: half of the accepted drafts' children are accepted too, and so many steps this counts for.
PRIOR_CHILD = 0.5
PRIOR_STEPS = 2.0

Levels = Sequence[NDArray[np.floating]]


def accepted_by_budget(levels: Levels, width: int, budgets: Iterable[int]) -> list[NDArray[np.float64]]:
    """[B] expected accepted drafts for each budget of nodes (the root included).

    levels: [B, parents, children] acceptance of each drawn node, level by level; of a narrower tree the first
    `width` parents and children. A node's acceptance counts once for every node on its path, and only one child of a
    node is accepted, so the accepted length is the plain sum over the nodes kept; the best ones are kept.
    """
    flat = [level[:, :width, :width].reshape(len(level), -1) for level in levels]
    ordered = -np.sort(-np.concatenate(flat, axis=1), axis=1)
    total = np.cumsum(ordered, axis=1)
    return [total[:, min(budget - 1, total.shape[1]) - 1] for budget in budgets]


class TreeGains:
    """Expected accepted drafts of each shape.

    Before drafting only the first level's confidences are known, so a shape's gain is their calibrated sum times a
    ratio: what the whole shape brought in the trees drawn so far, over what their first level promised (its best
    children, as many as the narrowest shape has, so that all trees promise alike). Every tree teaches the ratios of
    all shapes it holds. Deeper levels are calibrated apart: they continue guessed features.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = tuple(shape for shape in shapes if shape.drafts)
        depth = max((shape.depth for shape in self.shapes), default=1)
        self.reliability = [Reliability() for _ in range(depth)]
        self._narrowest = min((shape.width for shape in self.shapes), default=1)
        self._first = 1.0
        self._gained = {shape: PRIOR_STEPS * _prior_ratio(shape) for shape in self.shapes}
        self._promised = dict.fromkeys(self.shapes, PRIOR_STEPS)
        self._groups: dict[tuple[int, int], list[Shape]] = {}
        for shape in self.shapes:
            self._groups.setdefault((shape.depth, shape.width), []).append(shape)

    def first_level(self, confidence: NDArray[np.floating]) -> NDArray[np.float64]:
        """[B] what the first level promises by its confidences [B, k]: the chance that one of the best is accepted."""
        best = self.reliability[0].calibrated(confidence[:, : self._narrowest])
        return np.minimum(best.sum(axis=1), 1.0)

    def calibrated(self, levels: Levels) -> list[NDArray[np.float64]]:
        """Acceptance of each drawn node, from its path confidence."""
        return [curve.calibrated(level) for curve, level in zip(self.reliability, levels, strict=False)]

    def see(self, levels: Levels, width: int) -> None:
        """One step's drawn trees, as calibrated acceptance [B, parents, children] a level."""
        first = float(np.minimum(levels[0][:, 0, : self._narrowest].sum(axis=1), 1.0).mean())
        self._first = MEMORY * self._first + (1.0 - MEMORY) * first
        for (depth, narrow), shapes in self._groups.items():
            if depth > len(levels) or narrow > width:
                continue
            gains = accepted_by_budget(levels[:depth], narrow, [shape.nodes for shape in shapes])
            for shape, gain in zip(shapes, gains, strict=True):
                self._gained[shape] = MEMORY * self._gained[shape] + float(gain.mean())
                self._promised[shape] = MEMORY * self._promised[shape] + first

    def observe(self, level: int, confidence: NDArray[np.floating], accepted: NDArray[np.bool_]) -> None:
        """The verdicts on verified drafts `level` levels below the root (1 is the first)."""
        self.reliability[level - 1].observe(confidence, accepted)

    def expected(self, shapes: Sequence[Shape], first: NDArray[np.floating] | None) -> list[float]:
        """Mean tokens a request gains in a step of each shape, the target's own included. first: [B, k] confidences
        of the first level, None when the drafter has not run: then the average of late."""
        start = self._first if first is None else float(self.first_level(first).mean())
        return [
            1.0 + start * self._gained[shape] / max(self._promised[shape], 1e-9) if shape.drafts else 1.0
            for shape in shapes
        ]


def _prior_ratio(shape: Shape) -> float:
    depths = sum(PRIOR_CHILD**level for level in range(shape.depth))
    return float(depths * (1.0 - PRIOR_CHILD ** (shape.nodes - 1)))


class BlockGains:
    """Expected accepted drafts of a block, from the verdicts on each of its slots.

    SGLang takes the arg-max of DFlash's logits and drops them, so there are no confidences: a slot's acceptance, given
    that the slots before it were accepted, is counted instead, old verdicts fading.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        slots = max(shape.nodes for shape in shapes) - 1
        self._tried = np.full(slots, PRIOR_STEPS)
        self._accepted = PRIOR_CHILD * self._tried

    def observe(self, slots: int, accepted: NDArray[np.integer]) -> None:
        """slots: drafts verified of each request.  accepted: [B] how many of them were."""
        place = np.arange(slots)
        tried = (accepted[:, None] >= place).sum(axis=0)
        hits = (accepted[:, None] > place).sum(axis=0)
        self._tried[:slots] = MEMORY * self._tried[:slots] + tried
        self._accepted[:slots] = MEMORY * self._accepted[:slots] + hits

    def expected(self, shapes: Sequence[Shape], first: NDArray[np.floating] | None) -> list[float]:
        """Mean tokens a request gains in a step of each shape; `first` is of no use here."""
        reached = np.concatenate(([1.0], np.cumprod(self._accepted / self._tried))).cumsum()
        return [float(reached[shape.nodes - 1]) for shape in shapes]
