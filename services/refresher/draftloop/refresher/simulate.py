"""A fleet under refresh as a discrete-event model: what would N workers gain, and what would cross the network?

A worker shares its steps among its running requests (at most `batch`, the others wait): with b running, each gets
accept_length / seconds(b) tokens a second, so only arrivals, departures and swaps are events. A request is routed to
the worker that has fewest. The trainer learns from captured tokens as fast as they come or as it can; at every gate
the accepted length follows from what it has learned, and a drafter that gained enough is rolled over the workers, a few
at a time, each standing still for the swap.

Not modelled: prefill, the router's cache affinity, failures.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from draftloop.drafters.load.cost_model import CostModel
from draftloop.drafters.load.shapes import PLAIN, Shape

DEFAULT_TREE = Shape(3, 4, 8)


@dataclass(frozen=True)
class LearningCurve:
    """Accepted length after n trained tokens: ceiling - (ceiling - day0) / (1 + n / half)."""

    day0: float
    ceiling: float
    half: float

    def accept_length(self, trained_tokens: float) -> float:
        return self.ceiling - (self.ceiling - self.day0) / (1.0 + trained_tokens / self.half)


@dataclass(frozen=True)
class Fleet:
    """What is simulated. Rates are per second, sizes in bytes.

    trainers: devices the trainer holds, which could serve instead.  clients: requests in flight over the whole fleet,
    each followed by the next (closed loop); None with `arrivals` a second (open loop).  tokens, lengths: of an answer,
    on average, and their law.  shape: of the served tree.
    trainer_rate: tokens a second one trainer device learns from; 0: nothing is ever learned.
    """

    workers: int
    costs: CostModel
    curve: LearningCurve
    clients: int | None = None
    arrivals: float = 0.0
    batch: int = 16
    tokens: float = 500.0
    lengths: Literal["exponential", "fixed"] = "exponential"
    shape: Shape = DEFAULT_TREE
    trainers: int = 1
    trainer_rate: float = 0.0
    sample_rate: float = 1.0
    bytes_per_token: float = 0.0
    drafter_bytes: float = 0.0
    gate_every: float = 60.0
    least_gain: float = 0.01
    swap_stall: float = 0.1
    swaps_at_once: int = 1


@dataclass
class Outcome:
    """What happened until the last request finished. Requests that arrive within `seconds` are all served.

    requests: that arrived.  finished: times the requests were done, in order.  tokens_done: [T], the fleet's tokens by
    each whole second.  area: integral of the requests in the system over time.  response: the sum of
    the requests' times in it.
    """

    seconds: float
    requests: int = 0
    finished: list[float] = field(default_factory=list)
    tokens_done: list[float] = field(default_factory=list)
    area: float = 0.0
    response: float = 0.0
    trained_tokens: float = 0.0
    captured_tokens: float = 0.0
    swaps: int = 0
    accept_length: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Over the second half, when the start has been forgotten."""
        half = len(self.tokens_done) // 2
        return (self.tokens_done[-1] - self.tokens_done[half]) / (len(self.tokens_done) - 1 - half)


class _Worker:
    """One worker. `served`: tokens that a request has got which runs since the beginning.  seconds: of a step, by the
    requests in it."""

    def __init__(self, fleet: Fleet, seconds: Sequence[float]) -> None:
        self._fleet = fleet
        self.accept = fleet.curve.accept_length(0.0)
        self.served = self.now = self.tokens = 0.0
        self.stalled_until = 0.0
        self.running: list[tuple[float, int, float]] = []
        self.waiting: deque[tuple[float, int, float]] = deque()
        self.stamp = 0
        self._seconds = seconds

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def advance(self, now: float) -> None:
        """Serve until `now`; the running requests do not change meanwhile."""
        active = max(0.0, now - max(self.now, self.stalled_until))
        if self.running and active > 0.0:
            got = active * self.accept / self._seconds[len(self.running)]
            self.served += got
            self.tokens += got * len(self.running)
        self.now = now

    def take(self, length: float, number: int, arrived: float) -> None:
        if len(self.running) < self._fleet.batch:
            heapq.heappush(self.running, (self.served + length, number, arrived))
        else:
            self.waiting.append((length, number, arrived))

    def finish(self) -> tuple[float, int, float]:
        """Let go of the request that is done, and admit the next one that waits."""
        done = heapq.heappop(self.running)
        if self.waiting:
            length, number, arrived = self.waiting.popleft()
            heapq.heappush(self.running, (self.served + length, number, arrived))
        return done

    def next_departure(self) -> float | None:
        if not self.running:
            return None
        wait = (self.running[0][0] - self.served) * self._seconds[len(self.running)] / self.accept
        return max(self.now, self.stalled_until) + max(0.0, wait)


_ARRIVAL, _DEPARTURE, _GATE, _SWAP, _SECOND = range(5)


class Simulation:
    """One run; deterministic by its seed. `run` may be called once."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self._rng = np.random.default_rng(seed)
        costs = fleet.costs
        seconds = [costs.seconds(fleet.shape, batch, costs.usual_context) for batch in range(1, fleet.batch + 1)]
        self._workers = [_Worker(fleet, [0.0, *seconds]) for _ in range(fleet.workers)]
        self._events: list[tuple[float, int, int, int, float]] = []
        self._order = 0
        # Who has how many requests, stale entries included; the worker's own number is the truth.
        self._loads = [(0, index) for index in range(fleet.workers)]
        self._in_system = 0
        self._requests = 0
        self._last = 0.0
        self._learned_at = self._learned_tokens = 0.0
        self._promoted = fleet.curve.accept_length(0.0)

    def run(self, seconds: float) -> Outcome:
        fleet, out = self.fleet, Outcome(seconds)
        if fleet.clients is not None:
            for _ in range(fleet.clients):
                self._arrive(0.0)
        else:
            self._push(self._rng.exponential(1.0 / fleet.arrivals), _ARRIVAL)
        if fleet.trainer_rate > 0.0:
            self._push(fleet.gate_every, _GATE)
        self._push(0.0, _SECOND)
        while self._events:
            now, _, kind, index, value = heapq.heappop(self._events)
            if kind == _DEPARTURE and value != self._workers[index].stamp:
                continue
            out.area += self._in_system * (now - self._last)
            self._last = now
            if kind == _DEPARTURE:
                self._depart(now, index, seconds, out)
            elif kind == _ARRIVAL and now < seconds:
                self._arrive(now)
                self._push(now + self._rng.exponential(1.0 / fleet.arrivals), _ARRIVAL)
            elif kind == _SECOND and now <= seconds:
                out.tokens_done.append(self._tokens(now))
                self._push(now + 1.0, _SECOND)
            elif kind == _GATE and now < seconds:
                self._gate(now, out)
                self._push(now + fleet.gate_every, _GATE)
            elif kind == _SWAP:
                self._swap(now, index, value)
        out.requests, out.accept_length = self._requests, self._promoted
        return out

    def _push(self, at: float, kind: int, index: int = 0, value: float = 0.0) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, index, value))

    def _arrive(self, now: float) -> None:
        length = self.fleet.tokens
        if self.fleet.lengths == "exponential":
            length = max(1.0, float(self._rng.exponential(length)))
        while self._loads[0][0] != self._workers[self._loads[0][1]].load:
            heapq.heappop(self._loads)
        index = self._loads[0][1]
        worker = self._workers[index]
        worker.advance(now)
        worker.take(length, self._requests, now)
        self._requests += 1
        self._in_system += 1
        self._reschedule(index)

    def _depart(self, now: float, index: int, seconds: float, out: Outcome) -> None:
        worker = self._workers[index]
        worker.advance(now)
        _, _, arrived = worker.finish()
        out.finished.append(now)
        out.response += now - arrived
        self._in_system -= 1
        self._reschedule(index)
        if self.fleet.clients is not None and now < seconds:
            self._arrive(now)

    def _reschedule(self, index: int) -> None:
        worker = self._workers[index]
        heapq.heappush(self._loads, (worker.load, index))
        worker.stamp += 1
        departure = worker.next_departure()
        if departure is not None:
            self._push(departure, _DEPARTURE, index, worker.stamp)

    def _tokens(self, now: float) -> float:
        for worker in self._workers:
            worker.advance(now)
        return math.fsum(worker.tokens for worker in self._workers)

    def _gate(self, now: float, out: Outcome) -> None:
        fleet = self.fleet
        tokens = self._tokens(now)
        captured = (tokens - self._learned_tokens) * fleet.sample_rate
        out.captured_tokens += captured
        out.trained_tokens += min(captured, (now - self._learned_at) * fleet.trainer_rate * fleet.trainers)
        self._learned_at, self._learned_tokens = now, tokens
        accept = fleet.curve.accept_length(out.trained_tokens)
        if accept - self._promoted < fleet.least_gain:
            return
        self._promoted = accept
        out.swaps += 1
        for index in range(fleet.workers):
            self._push(now + (index // fleet.swaps_at_once) * fleet.swap_stall, _SWAP, index, accept)

    def _swap(self, now: float, index: int, accept: float) -> None:
        worker = self._workers[index]
        worker.advance(now)
        worker.accept = accept
        worker.stalled_until = now + self.fleet.swap_stall
        self._reschedule(index)


@dataclass(frozen=True)
class Forecast:
    """One row of the table. shape: of the served tree.  speedup_*: tokens/s at the end against the same devices, the
    trainer's among them, with the day-0 drafter and without speculation.  break_even_requests: finished until the
    refreshed fleet had served as many tokens as that static one; None within the simulated time.  capture_bytes_per_s:
    into the trainer, at the end.  swap_bytes: of all roll-outs.  useful_sample_rate: the sampling at which the trainer
    still learns as fast."""

    workers: int
    shape: Shape
    tokens_per_s: float
    accept_length: float
    speedup_static: float
    speedup_plain: float
    break_even_requests: int | None
    capture_bytes_per_s: float
    swap_bytes: float
    useful_sample_rate: float


def forecast(fleet: Fleet, seconds: float, seed: int) -> Forecast:
    """Simulate the fleet, and the same devices with the day-0 drafter and without speculation, under the same load."""
    refreshed = Simulation(fleet, seed).run(seconds)
    same_devices = replace(fleet, workers=fleet.workers + fleet.trainers, trainer_rate=0.0)
    static = Simulation(same_devices, seed).run(seconds)
    plain = replace(same_devices, shape=PLAIN, curve=LearningCurve(1.0, 1.0, 1.0))
    speed = refreshed.tokens_per_s
    return Forecast(
        workers=fleet.workers,
        shape=fleet.shape,
        tokens_per_s=speed,
        accept_length=refreshed.accept_length,
        speedup_static=speed / static.tokens_per_s,
        speedup_plain=speed / Simulation(plain, seed).run(seconds).tokens_per_s,
        break_even_requests=_break_even(refreshed, static),
        capture_bytes_per_s=speed * fleet.sample_rate * fleet.bytes_per_token,
        swap_bytes=refreshed.swaps * fleet.workers * fleet.drafter_bytes,
        useful_sample_rate=min(1.0, fleet.trainer_rate * fleet.trainers / speed),
    )


def _break_even(refreshed: Outcome, static: Outcome) -> int | None:
    """Requests finished at the first whole second from which the refreshed fleet stays ahead."""
    ahead = [a >= b for a, b in zip(refreshed.tokens_done, static.tokens_done, strict=True)]
    if not ahead[-1]:
        return None
    behind = [second for second, is_ahead in enumerate(ahead) if not is_ahead]
    start = behind[-1] + 1 if behind else 0
    return sum(at <= start for at in refreshed.finished)
