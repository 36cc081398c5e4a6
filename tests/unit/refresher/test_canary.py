"""The canary's figures against sums written out by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from draftloop.core.config import RolloutConfig
from draftloop.fleet.counters import DecodeCounters, StepTally, WorkerSample
from draftloop.refresher.canary import Evidence, VersionFigures, compare_lengths, judge

CONFIG = RolloutConfig(min_steps=100, max_accept_drop=0.05, max_speed_drop=0.2)


def tally(lengths: list[int]) -> StepTally:
    return StepTally(len(lengths), sum(lengths), sum(length**2 for length in lengths))


def drawn(mean: float, count: int, seed: int) -> list[int]:
    """Accepted lengths of 1 or 3 with about this mean."""
    rng = random.Random(seed)
    return [3 if rng.random() < (mean - 1) / 2 else 1 for _ in range(count)]


def figures(speed: float | None = None, **domains: list[int]) -> VersionFigures:
    decode = DecodeCounters() if speed is None else DecodeCounters(tokens=speed, stream_us=1e6)
    return VersionFigures({name: tally(lengths) for name, lengths in domains.items()}, decode)


def test_a_tally_is_the_samples_mean_and_variance() -> None:
    lengths = drawn(1.7, 500, 1)
    assert tally(lengths).mean == pytest.approx(statistics.fmean(lengths))
    assert tally(lengths).variance == pytest.approx(statistics.pvariance(lengths))


@pytest.mark.parametrize(
    ("new", "old", "outcome"),
    [
        (figures(chat=drawn(1.7, 400, 1)), figures(chat=drawn(1.7, 900, 2)), "good"),
        (figures(chat=drawn(1.1, 400, 1)), figures(chat=drawn(1.7, 900, 2)), "bad"),
        (figures(chat=drawn(1.1, 40, 1)), figures(chat=drawn(1.7, 900, 2)), "wait"),
        (figures(chat=drawn(1.1, 400, 1)), figures(chat=drawn(1.7, 9, 2)), "wait"),
        (figures(chat=drawn(1.1, 400, 1)), figures(code=drawn(1.7, 900, 2)), "wait"),
        # Slower, but as well accepted.
        (figures(70.0, chat=drawn(1.7, 400, 1)), figures(100.0, chat=drawn(1.7, 400, 2)), "bad"),
        (figures(90.0, chat=drawn(1.7, 400, 1)), figures(100.0, chat=drawn(1.7, 400, 2)), "good"),
        (figures(None, chat=drawn(1.7, 400, 1)), figures(100.0, chat=drawn(1.7, 400, 2)), "good"),
    ],
)
def test_verdicts(new: VersionFigures, old: VersionFigures, outcome: str) -> None:
    verdict = judge(new, old, CONFIG)
    assert verdict.outcome == outcome
    assert "\n" not in verdict.reason


def test_another_mix_of_domains_is_not_a_drop() -> None:
    """The canary gets the hard domain's traffic. Its plain mean falls; domain by domain nothing changed."""
    easy, hard = drawn(2.6, 4000, 1), drawn(1.2, 4000, 2)
    new, old = figures(easy=easy[:200], hard=hard[:1800]), figures(easy=easy[200:], hard=hard[1800:])
    plain = [sum(t.tokens for t in f.steps.values()) / f.total_steps for f in (new, old)]
    assert plain[0] < 0.8 * plain[1]
    assert judge(new, old, CONFIG).outcome == "good"


def test_the_standard_error_is_that_of_the_weighted_difference() -> None:
    new = {"a": tally([1, 3, 3, 1]), "b": tally([1, 1, 3])}
    old = {"a": tally([1, 1]), "b": tally([3, 1, 1, 1, 3])}
    compared = compare_lengths(new, old)
    assert compared is not None
    before, after, error = compared
    assert before == pytest.approx(0.4 * 1.0 + 0.6 * 1.8)
    assert after == pytest.approx(0.4 * 2.0 + 0.6 * 5 / 3)
    variance = 0.16 * (1.0 / 4 + 0.0) + 0.36 * ((8 / 9) / 3 + 0.96 / 5)
    assert error == pytest.approx(math.sqrt(variance))


def sample(url: str, version: str, steps: int, tokens: float) -> WorkerSample:
    counted = {(version, "chat"): StepTally(steps, 2 * steps, 4 * steps)}
    return WorkerSample(url, version, steps=counted, decode=DecodeCounters(tokens, 10 * tokens))


def test_evidence_is_growth_by_version() -> None:
    evidence = Evidence()
    evidence.add("w0", sample("http://a", "v0", 10, 100.0))
    assert evidence.of("v0").total_steps == 0
    evidence.add("w0", sample("http://a", "v0", 25, 130.0))
    assert (evidence.of("v0").total_steps, evidence.of("v0").decode.tokens) == (15, 30.0)
    # The interval of a swap speaks for neither.
    evidence.add("w0", sample("http://a", "v1", 4, 150.0))
    assert evidence.of("v1").decode.tokens == 0.0
    assert evidence.of("v1").total_steps == 4
    # A new server counts from zero.
    evidence.add("w0", sample("http://b", "v1", 1, 5.0))
    evidence.add("w0", sample("http://b", "v1", 3, 9.0))
    assert (evidence.of("v1").total_steps, evidence.of("v1").decode.tokens) == (6, 4.0)
    evidence.restart(keep="v1")
    assert (evidence.of("v0").total_steps, evidence.of("v1").total_steps) == (0, 6)
