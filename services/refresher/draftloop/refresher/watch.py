"""What the loop makes of the traffic and of its candidates: drift, the training budget, whether speculation pays.

No clock, no process: observations and verdicts in, events out. The loop emits them and does what they say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from draftloop.capture.observation import Observation
from draftloop.core.config import Config
from draftloop.core.events import EventKind
from draftloop.drafters.load.served import ServedCosts
from draftloop.refresher.budget import SpeculationPolicy, TrainingBudget
from draftloop.refresher.drift import DriftMonitor
from draftloop.refresher.gate import Decision

# What an operator can do where servers that keep their one shape would be faster without it.
ADVICE = "set speculation.follow_load=true (servers on a CPU), or a smaller server.num_steps and num_draft_tokens"
FOLLOWED = "nothing to do: the servers follow their load"


@dataclass(frozen=True)
class Said:
    """An event, still without its time."""

    kind: EventKind
    data: dict[str, Any]


class Watch:
    """serving: the version in service. Until `measured` is told what steps cost, nothing is said about speed.

    speculating: whether speculation is predicted to pay.  rebuild_wanted: the draft vocabulary should follow the
    traffic; `vocabulary_rebuilt` clears it.
    """

    def __init__(self, config: Config, serving: str) -> None:
        self._config = config
        self._budget = TrainingBudget(config.drift.patience, config.gate.min_gain)
        self._monitor = DriftMonitor(config.drift, serving)
        self._speculation: SpeculationPolicy | None = None
        self.speculating = True
        self.rebuild_wanted = False

    @property
    def training(self) -> bool:
        """Whether to spend on training now."""
        return self._budget.spending

    def measured(self, servers: Sequence[ServedCosts]) -> None:
        """Take what the servers say their steps cost, the newest of each."""
        if servers:
            self._speculation = SpeculationPolicy(servers)

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
        length, policy = self._monitor.accept_length, self._speculation
        if policy is None or length is None:
            return []
        wanted = policy.wanted(self.speculating, length)
        if wanted == self.speculating:
            return []
        self.speculating = wanted
        data: dict[str, Any] = {
            "signal": "speculation",
            "action": "speculation_on" if wanted else "speculation_off",
            "before": policy.plain_tokens_per_s,
            "now": policy.tokens_per_s(length),
        }
        if not wanted:
            data["advice"] = FOLLOWED if policy.follows else ADVICE
        return [Said("drift", data)]

    def candidate(self, decision: Decision) -> list[Said]:
        """Take the gate's verdict: training pauses when candidate after candidate gains nothing."""
        if decision.gain is None or not self._budget.candidate(decision.gain.gain):
            return []
        patience, least = self._config.drift.patience, self._config.gate.min_gain
        return [Said("training_paused", {"reason": f"{patience} candidates in a row gained less than {least:g}"})]

    def predicted_tokens_per_s(self, accept_length: float) -> float | None:
        """Of all servers at the batches they run; None before they measured their steps."""
        return None if self._speculation is None else self._speculation.tokens_per_s(accept_length)

    def new_drafter(self, version: str) -> None:
        """`version` serves now."""
        self._monitor.new_drafter(version)

    def vocabulary_rebuilt(self) -> None:
        """The drafter in training has another draft vocabulary now."""
        self.rebuild_wanted = False
        self._monitor.new_vocabulary()
