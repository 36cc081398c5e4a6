"""What following the load is for both algorithms: choose a shape, run it, learn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from draftloop.drafters.load.calibration import Reliability
from draftloop.drafters.load.chooser import Chooser, Gains, Load
from draftloop.drafters.load.gains import Levels
from draftloop.drafters.load.shapes import Shape
from draftloop.sglang.hooks import serving_version
from draftloop.sglang.load.meter import StepMeter
from draftloop.sglang.load.settings import LoadSettings, Pinned


class Follower:
    """One lives in each scheduler process; `start` is called once its models are loaded."""

    _chooser: Chooser

    def __init__(self, settings: LoadSettings, gains: Gains, curves: Sequence[Reliability] = ()) -> None:
        self._settings = settings
        self._gains = gains
        self._meter = StepMeter(settings, curves)
        self._pinned = Pinned(settings.folder)
        self._load = Load(1, 1.0, None)
        self._is_pinned = False
        self._version = ""

    def start(self, target: Any, draft: Any) -> None:
        """target, draft: SGLang's model runners."""
        self._meter.start(target, draft)
        self._chooser = Chooser(self._settings.shapes, self._meter.cost, self._gains, self._settings.margin)

    def interrupted(self) -> None:
        """Something else than decoding runs now."""
        self._meter.interrupted()

    def choose(self, batch: Any, first: NDArray[Any] | None) -> Shape:
        """The shape of the decoding step that begins. first: [B, k] confidences of the first level, if there are."""
        requests, context = self._meter.begin(batch)
        self._load = Load(requests, context, first)
        if (version := serving_version()) != self._version:
            self._version = version
            self._chooser.forget()
        pinned = self._pinned.next()
        self._is_pinned = pinned is not None
        return pinned or self._chooser.choose(self._load)

    def prune(self, drafted: Shape, levels: Levels) -> Shape:
        return drafted if self._is_pinned else self._chooser.prune(drafted, levels, self._load)

    def ran(self, shape: Shape, comparable: bool = True) -> None:
        """The step ran `shape` (pruned since it was chosen). comparable: it did nothing that others do not."""
        self._meter.ran(shape, comparable)
