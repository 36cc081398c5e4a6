"""The run's running figures: totals, and rates over a recent window of the traffic."""

from __future__ import annotations

from collections import deque
from typing import Any

from draftloop.generator.results import TrafficStats
from draftloop.refresher.loop import LoopState

WINDOW_S = 30.0


class ProgressMeter:
    """Turns snapshots of the traffic's totals into a `progress` event's data (`draftloop.cli.run_events`)."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, TrafficStats]] = deque()

    def reading(self, t_s: float, phase: str, traffic: TrafficStats, loop: LoopState) -> dict[str, Any]:
        """Data for the moment `t_s`; rates are since the oldest snapshot within WINDOW_S."""
        self._snapshots.append((t_s, traffic))
        while len(self._snapshots) > 2 and self._snapshots[1][0] < t_s - WINDOW_S:
            self._snapshots.popleft()
        began, old = self._snapshots[0]
        seconds = t_s - began
        tokens = traffic.completion_tokens - old.completion_tokens
        by_domain = {domain: recent_accept_length(old, traffic, domain) for domain in sorted(traffic.domains)}
        return {
            "t_s": t_s,
            "phase": phase,
            "requests": traffic.ok,
            "failed": traffic.failed,
            "tokens": traffic.completion_tokens,
            "tokens_per_s": tokens / seconds if seconds > 0 else None,
            "accept_length": recent_accept_length(old, traffic, None),
            "accept_by_domain": {domain: value for domain, value in by_domain.items() if value is not None},
            "tokens_captured": loop.captured.tokens,
            "records_dropped": loop.captured.records_dropped,
            "train_steps": loop.train_steps,
            "loss": loop.loss,
            "version": loop.serving,
        }


def recent_accept_length(old: TrafficStats, new: TrafficStats, domain: str | None) -> float | None:
    """Tokens per verification of what finished between two snapshots, of one domain or of all (None)."""
    domains = new.domains if domain is None else [domain]
    tokens = steps = 0
    for name in domains:
        before, after = old.domains.get(name), new.domains[name]
        tokens += after.spec_tokens - (before.spec_tokens if before else 0)
        steps += after.spec_verify_ct - (before.spec_verify_ct if before else 0)
    return tokens / steps if steps else None
