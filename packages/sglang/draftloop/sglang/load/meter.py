"""Times each decoding step: it ends where the next one begins, if nothing came between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftloop.drafters.load.calibration import Reliability
from draftloop.drafters.load.cost_model import CostModel
from draftloop.drafters.load.shapes import Shape
from draftloop.sglang.load.report import LoadReport
from draftloop.sglang.load.settings import LoadSettings


@dataclass(slots=True)
class Timed:
    """A step that has begun. shape: None when it is not to be learnt from."""

    requests: tuple[str, ...]
    context: float
    begin: float
    shape: Shape | None = None


class StepMeter:
    """Teaches the cost model and keeps the report. `start` is called once the server's models are loaded.

    curves: of a drafter whose confidences are calibrated, for the report.
    """

    cost: CostModel
    _report: LoadReport

    def __init__(self, settings: LoadSettings, curves: Sequence[Reliability] = ()) -> None:
        self._settings = settings
        self._curves = curves
        self._timed: Timed | None = None

    def start(self, target: Any, draft: Any) -> None:
        """target, draft: SGLang's model runners. Their matrix products are timed now."""
        from draftloop.sglang.load.timing import start_up

        self._settings.folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        self.cost = CostModel(start_up(target, draft))
        self._report = LoadReport(self._settings, self.cost, self._curves, time.perf_counter() - begin)

    def interrupted(self) -> None:
        """Something else runs now: the step before it has no end to be timed by."""
        self._timed = None

    def begin(self, batch: Any) -> tuple[int, float]:
        """A decoding step begins. Returns its requests and their mean context, as the host knows it: asking the device
        would wait for it."""
        now = time.perf_counter()
        requests = tuple(req.rid for req in batch.reqs)
        context = sum(req.seqlen for req in batch.reqs) / len(requests)
        last, self._timed = self._timed, Timed(requests, context, now)
        if last is not None and last.shape is not None and last.requests == requests:
            seconds = now - last.begin
            self._report.timed(self.cost.seconds(last.shape, len(requests), last.context), seconds)
            self.cost.observe(last.shape, len(requests), last.context, seconds)
        return len(requests), context

    def ran(self, shape: Shape, comparable: bool = True) -> None:
        """The step that began runs `shape`. comparable: it does nothing that others do not."""
        if self._timed is not None:
            self._report.count(len(self._timed.requests), shape)
            self._timed.shape = shape if comparable else None
