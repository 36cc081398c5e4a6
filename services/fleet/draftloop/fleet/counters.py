"""What one worker has counted since its server started: verify steps by drafter and domain, decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from draftloop.capture.collector import CollectorCounts
from draftloop.core.records import CaptureRecord


@dataclass(frozen=True, slots=True)
class StepTally:
    """Verify steps. tokens: emitted by them, the bonus token included; squares: sum of each step's tokens squared."""

    steps: int = 0
    tokens: int = 0
    squares: int = 0

    def __add__(self, other: StepTally) -> StepTally:
        return StepTally(self.steps + other.steps, self.tokens + other.tokens, self.squares + other.squares)

    def __sub__(self, other: StepTally) -> StepTally:
        return StepTally(self.steps - other.steps, self.tokens - other.tokens, self.squares - other.squares)

    @property
    def mean(self) -> float:
        """Accepted length. Of at least one step."""
        return self.tokens / self.steps

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.steps - self.mean**2)


@dataclass(frozen=True, slots=True)
class DecodeCounters:
    """Sums over SGLang's decode steps. tokens: emitted.  stream_us: step time times requests in the batch."""

    tokens: float = 0.0
    stream_us: float = 0.0

    def __add__(self, other: DecodeCounters) -> DecodeCounters:
        return DecodeCounters(self.tokens + other.tokens, self.stream_us + other.stream_us)

    def __sub__(self, other: DecodeCounters) -> DecodeCounters:
        return DecodeCounters(self.tokens - other.tokens, self.stream_us - other.stream_us)

    @property
    def tokens_per_stream_s(self) -> float | None:
        """Tokens/s that one request sees; None before a decode step was timed."""
        return 1e6 * self.tokens / self.stream_us if self.stream_us > 0 else None


@dataclass(frozen=True)
class WorkerSample:
    """A worker's answer to the controller. version: as its server says.  steps: by (drafter version, domain)."""

    url: str | None = None
    version: str | None = None
    running: int = 0
    captured: CollectorCounts = field(default_factory=CollectorCounts)
    steps: Mapping[tuple[str, str], StepTally] = field(default_factory=dict)
    decode: DecodeCounters = field(default_factory=DecodeCounters)
    problem: str | None = None


def tally_steps(tallies: dict[tuple[str, str], StepTally], records: Iterable[CaptureRecord]) -> None:
    """Add the records' verify steps to `tallies`, but those in which the drafter rested."""
    for record in records:
        for step in record.verify_steps:
            if not len(step.draft_tokens):
                continue
            key, tokens = (step.drafter_version, record.domain), step.accepted + 1
            tallies[key] = tallies.get(key, StepTally()) + StepTally(1, tokens, tokens * tokens)
