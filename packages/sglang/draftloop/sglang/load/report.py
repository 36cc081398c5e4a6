"""What the scheduler says about its speculation, for the run's events and report."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftloop.drafters.load.calibration import Reliability
from draftloop.drafters.load.cost_model import CostModel
from draftloop.drafters.load.shapes import Shape
from draftloop.sglang.load.settings import REPORT_FILE, write_whole

EVERY_S = 2.0


class LoadReport:
    """Counts steps, and writes a JSON file every EVERY_S seconds:

    reliability: a level's [confidence, accepted, drafts] points.  calibration_error: a level's.  steps: {batch:
    {shape: steps}}.  step_ms: {batch: {shape: predicted}} of what was run.  cost_error: mean relative error of the
    step times predicted.
    """

    def __init__(self, folder: Path, cost: CostModel, curves: Sequence[Reliability]) -> None:
        self._path = folder / REPORT_FILE
        self._cost = cost
        self._curves = curves
        self._steps: Counter[tuple[int, Shape]] = Counter()
        self._errors = [0.0, 0.0]
        self._written = time.monotonic()

    def count(self, batch: int, shape: Shape) -> None:
        self._steps[batch, shape] += 1
        if time.monotonic() - self._written > EVERY_S:
            self.write()

    def timed(self, predicted: float, seconds: float) -> None:
        self._errors[0] += abs(predicted / seconds - 1.0)
        self._errors[1] += 1.0

    def write(self) -> None:
        self._written = time.monotonic()
        write_whole(self._path, json.dumps(self._data()))

    def _data(self) -> dict[str, Any]:
        steps: dict[int, dict[str, int]] = {}
        costs: dict[int, dict[str, float]] = {}
        cost = self._cost
        for (batch, shape), count in sorted(self._steps.items()):
            steps.setdefault(batch, {})[str(shape)] = count
            costs.setdefault(batch, {})[str(shape)] = round(1e3 * cost.seconds(shape, batch, cost.usual_context), 2)
        return {
            "reliability": [[[round(x, 4) for x in point] for point in curve.points()] for curve in self._curves],
            "calibration_error": [round(curve.error(), 4) for curve in self._curves],
            "steps": steps,
            "step_ms": costs,
            "cost_error": round(self._errors[0] / self._errors[1], 4) if self._errors[1] else None,
        }
