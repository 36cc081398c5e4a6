"""What the live view and the report read from a run's events: the contract, typed.

Every `t_s` is seconds since the run started. Unknown fields are ignored and figures that do not exist yet are
null, so that an older reader can show a newer run.

    kind         data
    phase        t_s, phase                                            the run entered a phase
    progress     t_s, phase, requests, failed, tokens, tokens_per_s, accept_length (recent window),
                 accept_by_domain {domain: value}, tokens_captured, records_dropped, train_steps, loss, version
                                                                       every 2 s or so
    train_step   t_s, step, loss, step_accuracy [per draft step], tokens                  sampled
    candidate    t_s, version, gate_before, gate_after, gain_bounds [low, high] or [], by_domain {domain: share gained},
                 records, tokens_per_s_before, tokens_per_s_after (predicted)      the gate looked at a candidate
    promoted, refused                                                  the same, and reason
    swap         t_s, version, stall_ms, checksum_ok, copy_ms          the candidate is in service
    trainer_started      t_s, steps (done before), reason               whether it goes on from a saved state
    drift        t_s, signal, action, before, now                      see `draftloop.refresher.drift`; of the signal
                 "speculation": predicted tokens/s plain and speculating, and advice    see `draftloop.refresher.watch`
    vocabulary_rebuilt   t_s, replaced, coverage_before, coverage_after
    training_paused, training_resumed   t_s, reason
    speculation  t_s, reliability [per draft level: [confidence, accepted, drafts] points], calibration_error
                 [per draft level], steps {batch: {shape: steps}}      how a server followed its load
    measured     t_s, what ("plain" | "day0" | "mid" | "final"), accept_length, by_domain, tokens_per_s

Gate values are expected accepted lengths on held-out recent records: before = serving drafter, after =
candidate. Other kinds (server_started, error, ...) are shown by the live view as they come and not charted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftloop.core.events import Event


class _Data(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    t_s: float


class PhaseData(_Data):
    """The run entered `phase`."""

    phase: str


class ProgressData(_Data):
    """A regular snapshot. Counters are totals of the run; tokens_per_s and accept_length are of a recent window."""

    phase: str = ""
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    accept_length: float | None = None
    accept_by_domain: dict[str, float | None] = Field(default_factory=dict)
    tokens_captured: int = 0
    records_dropped: int = 0
    train_steps: int = 0
    loss: float | None = None
    version: str = ""


class TrainStepData(_Data):
    """One optimiser step. step_accuracy[i]: top-1 accuracy of draft step i. tokens: in this step's batch."""

    step: int
    loss: float | None
    step_accuracy: list[float | None] = Field(default_factory=list)
    tokens: int = 0


class GateData(_Data):
    """A gate decision about `version` (kinds candidate, promoted and refused)."""

    version: str
    gate_before: float | None = None
    gate_after: float | None = None
    reason: str = ""


class SwapData(_Data):
    """A drafter put in service. stall_ms: serving stood still; copy_ms: weights copied meanwhile."""

    version: str
    stall_ms: float | None = None
    checksum_ok: bool | None = None
    copy_ms: float | None = None


class DriftData(_Data):
    """A drift alarm. before, now: the signal's level before it and at it."""

    signal: str
    action: str = ""
    before: float | None = None
    now: float | None = None


class MeasuredData(_Data):
    """A measurement on the held-out prompts."""

    what: Literal["plain", "day0", "mid", "final"]
    accept_length: float | None = None
    by_domain: dict[str, float | None] = Field(default_factory=dict)
    tokens_per_s: float | None = None


class SpeculationData(_Data):
    """How a server that follows its load speculated, and how well its drafter's confidences were calibrated."""

    reliability: list[list[tuple[float, float, float]]] = Field(default_factory=list)
    calibration_error: list[float] = Field(default_factory=list)
    steps: dict[str, dict[str, int]] = Field(default_factory=dict)


@dataclass
class RunEvents:
    """A run's events by kind, each list in the order they happened.

    unreadable: events of a kind above whose fields did not fit; the rest is shown without them.
    """

    phases: list[PhaseData] = field(default_factory=list)
    progress: list[ProgressData] = field(default_factory=list)
    train_steps: list[TrainStepData] = field(default_factory=list)
    promoted: list[GateData] = field(default_factory=list)
    refused: list[GateData] = field(default_factory=list)
    swaps: list[SwapData] = field(default_factory=list)
    drifts: list[DriftData] = field(default_factory=list)
    measured: list[MeasuredData] = field(default_factory=list)
    speculation: list[SpeculationData] = field(default_factory=list)
    unreadable: int = 0

    @property
    def end_s(self) -> float:
        """The last moment any event speaks of, in seconds; 0.0 when there is none."""
        groups: list[Iterable[_Data]] = [
            self.phases,
            self.progress,
            self.train_steps,
            self.promoted,
            self.refused,
            self.swaps,
            self.drifts,
            self.measured,
            self.speculation,
        ]
        return max((item.t_s for group in groups for item in group), default=0.0)


def parse_events(events: Iterable[Event]) -> RunEvents:
    """Sort events into their typed lists. Never raises for a bad event: it is counted."""
    run = RunEvents()
    for event in events:
        try:
            _add(run, event)
        except ValidationError:
            run.unreadable += 1
    return run


def _add(run: RunEvents, event: Event) -> None:
    match event.kind:
        case "phase":
            run.phases.append(PhaseData.model_validate(event.data))
        case "progress":
            run.progress.append(ProgressData.model_validate(event.data))
        case "train_step":
            run.train_steps.append(TrainStepData.model_validate(event.data))
        case "promoted":
            run.promoted.append(GateData.model_validate(event.data))
        case "refused":
            run.refused.append(GateData.model_validate(event.data))
        case "swap":
            run.swaps.append(SwapData.model_validate(event.data))
        case "drift":
            run.drifts.append(DriftData.model_validate(event.data))
        case "measured":
            run.measured.append(MeasuredData.model_validate(event.data))
        case "speculation":
            run.speculation.append(SpeculationData.model_validate(event.data))
        case _:
            pass
