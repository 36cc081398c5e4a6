"""What the scheduler says about its speculation: for the gate, and for the run's events and report."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from draftloop.drafters.load.calibration import Reliability
from draftloop.drafters.load.cost_model import CostModel
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.load.shapes import Shape
from draftloop.sglang.load.settings import REPORT_FILE, LoadSettings, write_whole

EVERY_S = 2.0
# Of the steps of late, what is left from one report to the next: half of them are from the last minute.
KEPT = 0.977


class LoadReport:
    """Counts steps, and writes a JSON file every EVERY_S seconds:

    reliability: a level's [confidence, accepted, drafts] points.  calibration_error: a level's.  steps: {batch:
    {shape: steps}}.  step_ms: {batch: {shape: predicted}} of what was run.  cost_error: mean relative error of the
    step times predicted.  start_up_s: what timing the models took.  served: `ServedCosts.dump`.
    """

    def __init__(
        self, settings: LoadSettings, cost: CostModel, curves: Sequence[Reliability], start_up_s: float
    ) -> None:
        self._settings = settings
        self._path = settings.folder / REPORT_FILE
        self._cost = cost
        self._curves = curves
        self._start_up_s = start_up_s
        self._steps: Counter[tuple[int, Shape]] = Counter()
        self._late: dict[tuple[int, Shape], float] = {}
        self._errors = [0.0, 0.0]
        self._written = time.monotonic()

    def count(self, batch: int, shape: Shape) -> None:
        self._steps[batch, shape] += 1
        self._late[batch, shape] = self._late.get((batch, shape), 0.0) + 1.0
        if time.monotonic() - self._written > EVERY_S:
            self.write()

    def timed(self, predicted: float, seconds: float) -> None:
        self._errors[0] += abs(predicted / seconds - 1.0)
        self._errors[1] += 1.0

    def write(self) -> None:
        self._written = time.monotonic()
        write_whole(self._path, json.dumps(self._data()))
        self._late = {key: KEPT * weight for key, weight in self._late.items()}

    def _served(self) -> ServedCosts:
        batches: dict[int, float] = {}
        for (batch, _), weight in self._late.items():
            batches[batch] = batches.get(batch, 0.0) + weight
        resting = sum(weight for (_, shape), weight in self._late.items() if not shape.drafts)
        shape, follow = self._settings.shapes[-1], self._settings.follow
        return ServedCosts(shape, follow, batches, resting / sum(self._late.values()), self._cost)

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
            "start_up_s": round(self._start_up_s, 3),
            "served": self._served().dump(),
        }
