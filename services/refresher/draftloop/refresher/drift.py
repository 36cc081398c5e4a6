"""Drift: has the traffic left what the drafter was trained on?

Three signals, each with the action that answers it:

    accept_length       live accepted length fell                          train (again)
    out_of_vocabulary   more generated tokens lie outside the draft        rebuild the vocabulary map, train
                        vocabulary, where the loss cannot see them
    domain_mix          the domains' shares of the requests changed        train (again)

The first two are watched by a self-starting CUSUM (Hawkins, "Self-Starting CUSUM Charts for Location and Scale", The
Statistician 36, 1987): every value is compared with the mean and deviation of those before it, and the t value is
turned into the normal one of the same probability, so that no reference period is needed and, for values that are
independent and normal, the false-alarm rate is known from the second value on. Values are means over a window
of many steps or tokens, which are near enough to normal. The mix is watched by a chi-square test of each new window
of requests against a reference window.

All rates are set by one number, `false_alarm_every`: how many windows without drift lie between two false alarms of a
detector, on average.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from scipy.special import chdtrc, ndtri, stdtr

from draftloop.capture.observation import Observation
from draftloop.core.config import DriftConfig

Signal = Literal["accept_length", "out_of_vocabulary", "domain_mix"]
Action = Literal["train", "rebuild_vocabulary"]

# In deviations: the CUSUM is fastest for shifts of twice this.
SLACK = 0.5
# A change of the mix smaller than this share of the requests is of no interest, however certain.
LEAST_MIX_CHANGE = 0.1
# The chi-square law holds where a cell is expected to hold this many; rarer domains are counted together.
LEAST_EXPECTED = 5.0
_REST = ""
# Windows of a new drafter that are compared with its predecessor's.
PROBATION = 16
# Of the smoothed accepted length: it averages over some five windows.
NEWEST_WINDOW_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Drift:
    """An alarm. before, now: the signal's level before and in the newest window (of the mix: the share of requests
    that changed domain, so before is 0)."""

    signal: Signal
    action: Action
    before: float
    now: float


class Cusum:
    """Self-starting, one-sided: alarms when the mean has moved in `direction` (+1 or -1) for good.

    least_deviation: deviations are taken to be at least this, so that a constant signal's first wobble is none.
    """

    def __init__(self, direction: Literal[1, -1], false_alarm_every: float, least_deviation: float) -> None:
        self._direction = direction
        self._threshold = cusum_threshold(false_alarm_every)
        self._least_variance = least_deviation**2
        self.reset()

    def reset(self) -> None:
        """Forget everything, also the reference."""
        self._count, self.mean, self._squares, self._sum = 0, 0.0, 0.0, 0.0

    def restart(self) -> None:
        """Forget what has summed up, but not the reference."""
        self._sum = 0.0

    def add(self, value: float, *, learn: bool = True) -> bool:
        """Take the next value; True for an alarm. The caller resets.

        learn: let the value join the reference that later ones are compared with.
        """
        n = self._count
        if n >= 2:
            deviation = math.sqrt(max(self._squares / (n - 1), self._least_variance))
            t = math.sqrt(n / (n + 1)) * (value - self.mean) / deviation
            # The probability below -|t| keeps its digits where that below |t| rounds to one.
            normal = -float(ndtri(stdtr(n - 1, -abs(t)))) * math.copysign(1.0, t)
            self._sum = max(0.0, self._sum + self._direction * min(max(normal, -8.0), 8.0) - SLACK)
        if learn:
            self._learn(value)
        return self._sum > self._threshold

    def _learn(self, value: float) -> None:
        self._count += 1
        change = value - self.mean
        self.mean += change / self._count
        self._squares += change * (value - self.mean)


def cusum_threshold(false_alarm_every: float) -> float:
    """h so that a CUSUM with slack k of standard normal values runs this long on average before a false alarm.

    Siegmund's approximation (Sequential Analysis, 1985): (exp(2kb) - 2kb - 1) / (2k^2) with b = h + 1.166.
    """

    def run_length(h: float) -> float:
        b = h + 1.166
        return (math.exp(2 * SLACK * b) - 2 * SLACK * b - 1) / (2 * SLACK**2)

    low, high = 0.0, 60.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if run_length(middle) < false_alarm_every else (low, middle)
    return high


class MixDetector:
    """Compares each `window` requests with the first ones; after an alarm the new window is the reference.

    Two-sample chi-square test at level 1 / false_alarm_every a window, and a total variation of LEAST_MIX_CHANGE.
    """

    def __init__(self, window: int, false_alarm_every: float) -> None:
        self._window = window
        self._level = 1.0 / false_alarm_every
        self._reference: Counter[str] | None = None
        self._current: Counter[str] = Counter()

    def add(self, domain: str) -> float | None:
        """Take a request's domain; the share of requests that changed domain for an alarm, else None."""
        self._current[domain] += 1
        if self._current.total() < self._window:
            return None
        full, self._current = self._current, Counter()
        if self._reference is None:
            self._reference = full
            return None
        changed = total_variation(self._reference, full)
        if changed < LEAST_MIX_CHANGE or mix_p_value(self._reference, full) > self._level:
            return None
        self._reference = full
        return changed


def total_variation(a: Counter[str], b: Counter[str]) -> float:
    """Half the summed differences of the domains' shares: the share of requests that changed domain."""
    return 0.5 * sum(abs(a[name] / a.total() - b[name] / b.total()) for name in a.keys() | b.keys())


def mix_p_value(a: Counter[str], b: Counter[str]) -> float:
    """How likely two windows of one mix differ at least so much: chi-square, rare domains counted together."""
    both = a + b
    share = min(a.total(), b.total()) / both.total()
    rare = {name for name, count in both.items() if count * share < LEAST_EXPECTED}
    cells: dict[str, list[int]] = {}
    for name in both:
        cell = cells.setdefault(_REST if name in rare else name, [0, 0])
        cell[0] += a[name]
        cell[1] += b[name]
    if len(cells) < 2:
        return 1.0
    statistic = 0.0
    for counts in cells.values():
        for count, total in zip(counts, (a.total(), b.total()), strict=True):
            expected = sum(counts) * total / both.total()
            statistic += (count - expected) ** 2 / expected
    return float(chdtrc(len(cells) - 1, statistic))


class _Ratio:
    """Sums of two counts; gives their ratio each time the lower one has reached `least`."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._upper = self._lower = 0

    def add(self, upper: int, lower: int) -> float | None:
        self._upper += upper
        self._lower += lower
        if self._lower < self._least:
            return None
        value = self._upper / self._lower
        self._upper = self._lower = 0
        return value

    def reset(self) -> None:
        self._upper = self._lower = 0


class DriftMonitor:
    """All detectors over one stream of observations. `new_drafter` starts the drafter's own signals afresh.

    accept_length: of the serving drafter in live traffic, recent windows smoothed; None before its first window.
    """

    def __init__(self, config: DriftConfig, serving: str) -> None:
        every = config.false_alarm_every
        self._serving = serving
        self._accept, self._lengths = Cusum(-1, every, least_deviation=0.02), _Ratio(config.window_steps)
        self._predecessor, self._probation = Cusum(-1, every, least_deviation=0.02), 0
        self._unspoken, self._shares = Cusum(1, every, least_deviation=0.005), _Ratio(config.window_tokens)
        self._mix = MixDetector(config.window_requests, every)
        self.accept_length: float | None = None

    def new_drafter(self, version: str) -> None:
        """`version` serves now: what its predecessor's drafts brought is no reference for it."""
        self._serving = version
        self.accept_length = None
        # A new drafter has no level of its own to fall from. It was promoted for being better, so for its first windows
        # its predecessor's level must do: a shift that comes with the swap, or a gate that was wrong, shows there.
        self._predecessor, self._accept = self._accept, self._predecessor
        self._predecessor.restart()
        self._probation = PROBATION
        self._accept.reset()
        self._lengths.reset()

    def new_vocabulary(self) -> None:
        """The map was rebuilt: the share outside it starts at a new level."""
        self._unspoken.reset()
        self._shares.reset()

    def add(self, seen: Observation) -> list[Drift]:
        """Take one record's numbers; the alarms they raise. A detector that alarms starts again from here."""
        alarms: list[Drift] = []
        # Records of requests that an older drafter served still arrive after a swap.
        if seen.verify_steps and seen.drafter_version == self._serving:
            length = self._lengths.add(seen.emitted, seen.verify_steps)
            alarms += self._check(self._accept, length, "accept_length", "train")
            if length is not None:
                alarms += self._on_probation(length)
                old = length if self.accept_length is None else self.accept_length
                self.accept_length = old + NEWEST_WINDOW_WEIGHT * (length - old)
        share = self._shares.add(seen.unspoken, seen.generated)
        alarms += self._check(self._unspoken, share, "out_of_vocabulary", "rebuild_vocabulary")
        changed = self._mix.add(seen.domain)
        if changed is not None:
            alarms.append(Drift("domain_mix", "train", 0.0, changed))
        return alarms

    def _on_probation(self, length: float) -> list[Drift]:
        if self._probation == 0:
            return []
        self._probation -= 1
        if not self._predecessor.add(length, learn=False):
            return []
        self._probation = 0
        return [Drift("accept_length", "train", self._predecessor.mean, length)]

    @staticmethod
    def _check(cusum: Cusum, value: float | None, signal: Signal, action: Action) -> list[Drift]:
        if value is None:
            return []
        before = cusum.mean
        if not cusum.add(value):
            return []
        cusum.reset()
        return [Drift(signal, action, before, value)]
