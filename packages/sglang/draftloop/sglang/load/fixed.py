"""A server that keeps its one shape: its steps are timed, and nothing else is done."""

from __future__ import annotations

from typing import Any

from draftloop.sglang.hooks import DFLASH_WORKER, EAGLE_SERVER, Hook
from draftloop.sglang.load.meter import StepMeter
from draftloop.sglang.load.settings import LoadSettings

# Two steps in a row of so many, one to be timed and one that ends it: a single shape is learnt soon, and learning
# takes the host 0.1 ms.
SAMPLED_EVERY = 8


class FixedShape:
    """One lives in each scheduler process; its methods are hooks. The Python around a graph's replay is enough."""

    def __init__(self, settings: LoadSettings) -> None:
        self._dflash = settings.algorithm == "DFLASH"
        self._shape = settings.shapes[-1]
        self._meter = StepMeter(settings)
        self._steps = 0

    def hooks(self) -> tuple[Hook, ...]:
        worker = DFLASH_WORKER if self._dflash else EAGLE_SERVER
        return (
            Hook(f"{worker}.init_cuda_graphs", ("self",), "AFTER", self.start),
            Hook(f"{worker}.forward_batch_generation", ("self", "batch"), "BEFORE", self.step),
        )

    def start(self, _result: None, worker: Any) -> None:
        draft = worker.draft_model_runner if self._dflash else worker.draft_worker.draft_runner
        self._meter.start(worker.target_worker.model_runner, draft)

    def step(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._steps += batch.forward_mode.is_decode()
        if batch.forward_mode.is_decode() and self._steps % SAMPLED_EVERY < 2:
            self._meter.begin(batch)
            self._meter.ran(self._shape)
        else:
            self._meter.interrupted()
