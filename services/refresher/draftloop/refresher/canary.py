"""The canary's figures: new drafter against old, on the same router's traffic over the same period.

accepted length   from the tap's verify steps, which name the drafter that drafted: exact by version, compared domain
                  by domain, so that a router which gives the canary other traffic does not decide
tokens/s          of one stream, from SGLang's own decode counters (/v1/loads), by the version served meanwhile

A drop must be shown, not just seen: the accepted length's allowance is widened by two standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftloop.core.config import RolloutConfig
from draftloop.fleet.counters import DecodeCounters, StepTally, WorkerSample
from draftloop.refresher.rollout import Verdict

STANDARD_ERRORS = 2.0


@dataclass
class VersionFigures:
    """Sums over all workers while they served one version."""

    steps: dict[str, StepTally] = field(default_factory=dict)
    decode: DecodeCounters = field(default_factory=DecodeCounters)

    @property
    def total_steps(self) -> int:
        return sum(tally.steps for tally in self.steps.values())


class Evidence:
    """Collects samples of all workers; figures since the last `restart`."""

    def __init__(self) -> None:
        self._last: dict[str, WorkerSample] = {}
        self._versions: dict[str, VersionFigures] = {}

    def of(self, version: str) -> VersionFigures:
        return self._versions.setdefault(version, VersionFigures())

    def restart(self, keep: str | None = None) -> None:
        """Forget all figures but version `keep`'s: a fleet of one worker has only its own past to compare with."""
        self._versions = {name: figures for name, figures in self._versions.items() if name == keep}

    def add(self, worker: str, sample: WorkerSample) -> None:
        """Counters are totals since the server's start: what counts is their growth since the last sample."""
        last, self._last[worker] = self._last.get(worker), sample
        if last is None or last.url != sample.url:
            return
        for (version, domain), tally in sample.steps.items():
            grown = tally - last.steps.get((version, domain), StepTally())
            held = self.of(version).steps
            held[domain] = held.get(domain, StepTally()) + grown
        if sample.version is not None and sample.version == last.version:
            self.of(sample.version).decode += sample.decode - last.decode


def judge(new: VersionFigures, old: VersionFigures, config: RolloutConfig) -> Verdict:
    """Whether the new drafter may stay. Speed is judged where both sides have decoded."""
    if min(new.total_steps, old.total_steps) < config.min_steps:
        return Verdict(
            "wait", f"{new.total_steps} and {old.total_steps} verify steps of the {config.min_steps} that it takes"
        )
    compared = compare_lengths(new.steps, old.steps)
    if compared is None:
        return Verdict("wait", "the two drafters have not yet seen traffic of the same domain")
    before, after, error = compared
    figures = f"accepted length {before:.2f} -> {after:.2f}"
    if after + STANDARD_ERRORS * error < before * (1.0 - config.max_accept_drop):
        return Verdict("bad", f"{figures}: more than the {config.max_accept_drop:.0%} that it may lose")
    slow, fast = new.decode.tokens_per_stream_s, old.decode.tokens_per_stream_s
    if slow is None or fast is None:
        return Verdict("good", f"{figures} over {new.total_steps} verify steps")
    figures += f", a stream's tokens/s {fast:.1f} -> {slow:.1f}"
    if slow < fast * (1.0 - config.max_speed_drop):
        return Verdict("bad", f"{figures}: more than the {config.max_speed_drop:.0%} that it may lose")
    return Verdict("good", f"{figures} over {new.total_steps} verify steps")


def compare_lengths(new: Mapping[str, StepTally], old: Mapping[str, StepTally]) -> tuple[float, float, float] | None:
    """(old mean, new mean, standard error of their difference), each domain weighted by its scarcer side's steps.

    None while no domain has steps on both sides.
    """
    weights = {domain: min(new[domain].steps, old[domain].steps) for domain in new.keys() & old.keys()}
    total = sum(weights.values())
    if total == 0:
        return None
    before = after = variance = 0.0
    for domain, weight in weights.items():
        share = weight / total
        if share == 0.0:
            continue
        before += share * old[domain].mean
        after += share * new[domain].mean
        variance += share**2 * (old[domain].variance / old[domain].steps + new[domain].variance / new[domain].steps)
    return before, after, math.sqrt(variance)
