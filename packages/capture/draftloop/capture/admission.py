"""Which requests are captured: the policy in force, and a budget of bytes.

A request's fate is decided when its first rows are computed and holds to its end, so that a record is whole or is not
there. Two things may end it early: the ring is full (`TapWriter`), or its tenant or domain opts out meanwhile.

The budget is a token bucket of one second's bytes. A record once begun is never cut, so it may leave the bucket in
debt; until that is paid, new records are refused. Over time the rate holds, and what is sent is whole.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from draftloop.capture.control import ControlBlock
from draftloop.core.config import CapturePolicy

# Every request ends in the scheduler's hooks; this bound only keeps an ending we do not know of from leaking.
MOST_REQUESTS = 65536


@dataclass(frozen=True, slots=True)
class Labels:
    """Whose request it is, and what kind of text."""

    tenant: str
    domain: str


class Verdict(Enum):
    """Of a request's first rows. THROTTLED: the policy wants it, the byte rate does not allow it."""

    CAPTURED = auto()
    UNWANTED = auto()
    THROTTLED = auto()


def wants(policy: CapturePolicy, labels: Labels) -> bool:
    """Whether tenant and domain are both open to capture. An opt-out wins over an opt-in."""
    return (
        labels.tenant not in policy.skip_tenants
        and labels.domain not in policy.skip_domains
        and (policy.tenants is None or labels.tenant in policy.tenants)
        and (policy.domains is None or labels.domain in policy.domains)
    )


def is_sampled(request_id: str, rate: float) -> bool:
    """A stable choice: the same in every process, and a higher rate keeps all of a lower one.

    The id is salted: the replay buffer also chooses by its hash, and the two choices must not go together.
    """
    return zlib.crc32(f"tap:{request_id}".encode()) < rate * 2**32


class ByteBudget:
    """A token bucket that may go into debt. rate: bytes a second, also the most it holds; None for no limit."""

    def __init__(self, rate: int | None, now: float, sent: int) -> None:
        self._rate = rate
        self._level = float(rate or 0)
        self._at = now
        self._sent = sent

    def allows(self, now: float, sent: int) -> bool:
        """Whether a new record may begin. sent: bytes ever sent; now: seconds, monotonic."""
        if self._rate is None:
            return True
        self._level = min(self._rate, self._level + (now - self._at) * self._rate - (sent - self._sent))
        self._at, self._sent = now, sent
        return self._level > 0


class Admission:
    """The fate of each running request, under the policy that `control` holds. Captures nothing before the first one.

    clock: seconds, monotonic.
    """

    def __init__(self, control: ControlBlock, clock: Callable[[], float] = time.monotonic) -> None:
        self._control = control
        self._clock = clock
        self._version = 0
        self._policy = CapturePolicy(sample_rate=0.0)
        self._budget = ByteBudget(None, 0.0, 0)
        self._fates: dict[str, Labels | None] = {}

    def refresh(self, sent: int) -> list[str]:
        """Take over a new policy, if there is one. Returns the running requests that it withdraws from capture."""
        if self._control.version == self._version:
            return []
        read = self._control.read()
        if read is None:
            return []
        self._version, message = read
        self._policy = CapturePolicy.model_validate_json(message)
        self._budget = ByteBudget(self._policy.max_bytes_per_s, self._clock(), sent)
        withdrawn = [
            request_id
            for request_id, labels in self._fates.items()
            if labels is not None and not wants(self._policy, labels)
        ]
        self._fates |= dict.fromkeys(withdrawn)
        return withdrawn

    def begin(self, request_id: str, labels: Labels, sent: int) -> Verdict:
        """Decide about a request that `knows` does not know. sent: bytes ever sent."""
        verdict = self._judge(request_id, labels, sent)
        if len(self._fates) == MOST_REQUESTS:
            del self._fates[next(iter(self._fates))]
        self._fates[request_id] = labels if verdict is Verdict.CAPTURED else None
        return verdict

    def _judge(self, request_id: str, labels: Labels, sent: int) -> Verdict:
        if not wants(self._policy, labels) or not is_sampled(request_id, self._policy.sample_rate):
            return Verdict.UNWANTED
        return Verdict.CAPTURED if self._budget.allows(self._clock(), sent) else Verdict.THROTTLED

    def knows(self, request_id: str) -> bool:
        """Whether the request's fate is decided, and it has not ended."""
        return request_id in self._fates

    def labels(self, request_id: str) -> Labels | None:
        """Of a running request that is captured, None for any other."""
        return self._fates.get(request_id)

    def end(self, request_id: str) -> bool:
        """Forget the request; whether it was captured."""
        return self._fates.pop(request_id, None) is not None
