"""What the loop makes of the traffic and of its candidates: drift, the training budget, whether speculation pays.

No clock, no process: observations and verdicts in, events out. The loop emits them and does what they say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from draftloop.capture.observation import Observation
from draftloop.core.config import Config
from draftloop.core.events import EventKind
from draftloop.refresher.budget import SpeculationPolicy, TrainingBudget
from draftloop.refresher.drift import DriftMonitor
from draftloop.refresher.gate import Decision


@dataclass(frozen=True)
class Said:
    """An event, still without its time."""

    kind: EventKind
    data: dict[str, Any]


class Watch:
    """serving: the version in service.  speculation: a measured cost model; without one nothing is said about speed.

    speculating: whether speculation is predicted to pay.  rebuild_wanted: the draft vocabulary should follow the
    traffic; `vocabulary_rebuilt` clears it.
    """

    def __init__(self, config: Config, serving: str, speculation: SpeculationPolicy | None = None) -> None:
        self._config = config
        self._budget = TrainingBudget(config.drift.patience, config.gate.min_gain)
        self._monitor = DriftMonitor(config.drift, serving)
        self._speculation = speculation
        self.speculating = True
        self.rebuild_wanted = False

    @property
    def training(self) -> bool:
        """Whether to spend on training now."""
        return self._budget.spending

    def traffic(self, observations: Iterable[Observation]) -> list[Said]:
        """Take what newly captured records say."""
        said: list[Said] = []
        for drift in [drift for seen in observations for drift in self._monitor.add(seen)]:
            data = {"signal": drift.signal, "action": drift.action, "before": drift.before, "now": drift.now}
            said.append(Said("drift", data))
            if self._budget.drift():
                said.append(Said("training_resumed", {"reason": f"drift in {drift.signal}"}))
            if drift.action == "rebuild_vocabulary" and self._config.drift.rebuild_vocabulary:
                self.rebuild_wanted = True
        return said + self._weigh_speculation()

    def _weigh_speculation(self) -> list[Said]:
        """Speculation begins to lose against plain decoding, or to win again."""
        length = self._monitor.accept_length
        if self._speculation is None or length is None:
            return []
        wanted = self._speculation.wanted(self.speculating, length)
        if wanted == self.speculating:
            return []
        self.speculating = wanted
        action = "speculation_on" if wanted else "speculation_off"
        speed = {"before": self._speculation.plain_tokens_per_s, "now": self._speculation.tokens_per_s(length)}
        return [Said("drift", {"signal": "speculation", "action": action, **speed})]

    def candidate(self, decision: Decision) -> list[Said]:
        """Take the gate's verdict: training pauses when candidate after candidate gains nothing."""
        if decision.gain is None or not self._budget.candidate(decision.gain.gain):
            return []
        patience, least = self._config.drift.patience, self._config.gate.min_gain
        return [Said("training_paused", {"reason": f"{patience} candidates in a row gained less than {least:g}"})]

    def predicted_tokens_per_s(self, accept_length: float) -> float | None:
        """At the policy's batch; None without a cost model."""
        return None if self._speculation is None else self._speculation.tokens_per_s(accept_length)

    def new_drafter(self, version: str) -> None:
        """`version` serves now."""
        self._monitor.new_drafter(version)

    def vocabulary_rebuilt(self) -> None:
        """The drafter in training has another draft vocabulary now."""
        self.rebuild_wanted = False
        self._monitor.new_vocabulary()
