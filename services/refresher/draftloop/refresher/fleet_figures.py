"""What a fleet's metrics show of each worker: its counters, as rates over a window."""

from __future__ import annotations

import time
from collections.abc import Mapping

from draftloop.fleet.counters import StepTally, WorkerSample
from draftloop.fleet.plan import WorkerView
from draftloop.refresher.metrics import WorkerFigures

WINDOW_S = 15.0


class FleetFigures:
    """Compares the workers' counters with those of the last window. `due` says when the next one is full."""

    def __init__(self) -> None:
        self._last: dict[str, WorkerSample] = {}
        self._since = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._since >= WINDOW_S

    def close_window(
        self, views: Mapping[str, WorkerView], samples: Mapping[str, WorkerSample]
    ) -> tuple[float, list[WorkerFigures]]:
        """Tokens of the window, and each worker's figures in it."""
        seconds = max(time.monotonic() - self._since, 1e-3)
        figures, total = [], 0.0
        for name, view in sorted(views.items()):
            sample = samples.get(name, WorkerSample())
            before = self._last.get(name, WorkerSample())
            if before.url != sample.url:
                before = WorkerSample()  # another server: it counts from zero
            tokens = sample.decode.tokens - before.decode.tokens
            total += tokens
            lengths = accept_lengths(sample, before)
            figures.append(WorkerFigures(name, view.version or "", view.phase == "ready", tokens / seconds, lengths))
        self._last = dict(samples)
        self._since = time.monotonic()
        return total, figures


def accept_lengths(sample: WorkerSample, before: WorkerSample) -> dict[str, float]:
    """Domain -> accepted length of the steps since `before`, whichever drafter drew them."""
    tallies: dict[str, StepTally] = {}
    for key, tally in sample.steps.items():
        fresh = tally - before.steps.get(key, StepTally())
        tallies[key[1]] = tallies.get(key[1], StepTally()) + fresh
    return {domain: tally.mean for domain, tally in tallies.items() if tally.steps}
