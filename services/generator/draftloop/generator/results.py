"""What requests told us: one result each, and running totals by domain."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

_RECENT = 2048


@dataclass(frozen=True)
class RequestResult:
    """One finished or failed request.

    latency_s, gaps_s: seconds; gaps are between streamed pieces (empty when not streaming).
    spec_verify_ct: the target's verification steps, None when the server does not speculate or does not tell.
    error: one line, None when it went well.
    """

    domain: str
    prompt_id: str
    request_id: str
    latency_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spec_verify_ct: int | None = None
    gaps_s: tuple[float, ...] = ()
    error: str | None = None


@dataclass
class DomainTotals:
    """Sums over one domain's good requests. spec_*: over those that told their verification steps."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spec_tokens: int = 0
    spec_verify_ct: int = 0

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per verification step, the bonus token included."""
        return self.spec_tokens / self.spec_verify_ct if self.spec_verify_ct else None


@dataclass
class TrafficStats:
    """Totals of a driver. latencies_s and gaps_s hold the newest 2048 values, in seconds."""

    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    last_error: str | None = None
    domains: dict[str, DomainTotals] = field(default_factory=dict)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def completion_tokens(self) -> int:
        return sum(totals.completion_tokens for totals in self.domains.values())

    @property
    def prompt_tokens(self) -> int:
        return sum(totals.prompt_tokens for totals in self.domains.values())

    @property
    def median_latency_s(self) -> float | None:
        return statistics.median(self.latencies_s) if self.latencies_s else None

    def add(self, result: RequestResult) -> None:
        if result.error is not None:
            self.failed += 1
            self.last_error = result.error
            return
        self.ok += 1
        self.latencies_s.append(result.latency_s)
        self.gaps_s.extend(result.gaps_s)
        totals = self.domains.setdefault(result.domain, DomainTotals())
        totals.requests += 1
        totals.prompt_tokens += result.prompt_tokens
        totals.completion_tokens += result.completion_tokens
        if result.spec_verify_ct:
            totals.spec_tokens += result.completion_tokens
            totals.spec_verify_ct += result.spec_verify_ct
