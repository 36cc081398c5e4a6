"""What following the load is for both algorithms: choose a shape, time the step, keep the books."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from draftloop.drafters.load.calibration import Reliability
from draftloop.drafters.load.chooser import Chooser, Gains, Load
from draftloop.drafters.load.cost_model import CostModel
from draftloop.drafters.load.gains import Levels
from draftloop.drafters.load.shapes import Shape
from draftloop.sglang.hooks import serving_version
from draftloop.sglang.load.report import LoadReport
from draftloop.sglang.load.settings import LoadSettings, Pinned


@dataclass(slots=True)
class Timed:
    """A step whose end is the start of the next one."""

    requests: tuple[str, ...]
    shape: Shape
    context: float
    begin: float


class Follower:
    """One lives in each scheduler process; `start` is called once its models are loaded."""

    _chooser: Chooser
    _report: LoadReport

    def __init__(self, settings: LoadSettings, gains: Gains, curves: Sequence[Reliability] = ()) -> None:
        self._settings = settings
        self._gains = gains
        self._curves = curves
        self._pinned = Pinned(settings.folder)
        self._load = Load(1, 1.0, None)
        self._is_pinned = False
        self._timed: Timed | None = None
        self._version = ""

    def start(self, target: Any, draft: Any) -> None:
        """target, draft: SGLang's model runners. Their matrix products are timed now."""
        from draftloop.sglang.load.timing import start_up

        cost = CostModel(start_up(target, draft))
        self._chooser = Chooser(self._settings.shapes, cost, self._gains, self._settings.margin)
        self._report = LoadReport(self._settings.folder, cost, self._curves)

    def interrupted(self) -> None:
        """Something else runs now: the step before it has no end to be timed by."""
        self._timed = None

    def choose(self, batch: Any, first: NDArray[Any] | None) -> Shape:
        """The shape of the decoding step that begins. first: [B, k] confidences of the first level, if there are."""
        begin = time.perf_counter()
        requests = tuple(req.rid for req in batch.reqs)
        self._load = Load(len(requests), float(batch.seq_lens.float().mean()), first)
        self._end_timing(requests, begin)
        if (version := serving_version()) != self._version:
            self._version = version
            self._chooser.forget()
        pinned = self._pinned.next()
        self._is_pinned = pinned is not None
        shape = pinned or self._chooser.choose(self._load)
        self._timed = Timed(requests, shape, self._load.context, begin)
        return shape

    def prune(self, drafted: Shape, levels: Levels) -> Shape:
        return drafted if self._is_pinned else self._chooser.prune(drafted, levels, self._load)

    def ran(self, shape: Shape, comparable: bool = True) -> None:
        """The step ran `shape` (pruned since it was chosen). comparable: it did nothing that others do not."""
        self._report.count(self._load.batch, shape)
        if self._timed is not None:
            self._timed.shape = shape
        if not comparable:
            self._timed = None

    def _end_timing(self, requests: tuple[str, ...], now: float) -> None:
        """The last step ends where this one begins, if nothing came between: same requests, no prefill."""
        last = self._timed
        if last is not None and last.requests == requests:
            cost, seconds = self._chooser.cost, now - last.begin
            self._report.timed(cost.seconds(last.shape, len(requests), last.context), seconds)
            cost.observe(last.shape, len(requests), last.context, seconds)
