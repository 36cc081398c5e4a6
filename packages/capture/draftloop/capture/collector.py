"""The consumer's end of the tap: a thread that turns ring messages into records and holds a bounded number of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from draftloop.capture.admission import Labels, wants
from draftloop.capture.assembler import Assembler
from draftloop.capture.ring import RingReader
from draftloop.capture.wire import DamagedMessageError, decode
from draftloop.core.config import CapturePolicy
from draftloop.core.records import CaptureRecord

_IDLE_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class CollectorCounts:
    """records: whole records collected.  tokens: positions in them.  records_dropped: lost whole, because the ring
    or this collector was full.  records_throttled: never begun, to hold the byte rate.  records_withdrawn: given up
    because their tenant or domain opted out.  damaged: messages that failed their checksum.  open_requests: requests
    of which a part has come."""

    records: int = 0
    tokens: int = 0
    records_dropped: int = 0
    records_throttled: int = 0
    records_withdrawn: int = 0
    damaged: int = 0
    open_requests: int = 0


class Collector:
    """Reads the ring `name` until closed. When `max_bytes` of records wait to be taken, new ones are dropped.

    The ring may hold records of an earlier reader's policy, and records may wait here while an opt-out comes: what the
    policy in force does not want is not handed out.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        self._reader = RingReader.attach(name)
        self._assembler = Assembler()
        self._max_bytes = max_bytes
        self._waiting: deque[CaptureRecord] = deque()
        self._waiting_bytes = 0
        self._records = self._tokens = self._overflow = self._damaged = self._withdrawn = 0
        self._policy = CapturePolicy()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftloop-collector", daemon=True)
        self._thread.start()

    def set_policy(self, policy: CapturePolicy) -> None:
        """Change what the tap captures. Raises ConfigError when the policy names too many tenants."""
        self._reader.control.publish(policy.model_dump_json().encode())
        with self._lock:
            self._policy = policy
            waiting = [record for record in self._waiting if self._wanted(record)]
            self._withdrawn += len(self._waiting) - len(waiting)
            self._waiting = deque(waiting)
            self._waiting_bytes = sum(record.nbytes for record in waiting)

    def take(self, most: int) -> list[CaptureRecord]:
        """Up to `most` records, oldest first; they are the caller's now."""
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._waiting_bytes -= sum(record.nbytes for record in taken)
        return taken

    def counts(self) -> CollectorCounts:
        """The tap counts its losses in the ring itself, so they show even when nothing is read."""
        ring = self._reader.counters()
        with self._lock:
            return CollectorCounts(
                records=self._records,
                tokens=self._tokens,
                records_dropped=ring.records_dropped + self._overflow,
                records_throttled=ring.records_throttled,
                records_withdrawn=ring.records_withdrawn + self._withdrawn,
                damaged=self._damaged,
                open_requests=self._assembler.open_requests,
            )

    def close(self) -> None:
        """Read what is left in the ring, close open requests, stop."""
        self._closing.set()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()
            if self._read_one():
                continue
            if closing:
                self._keep(self._assembler.drain())
                return
            self._keep(self._assembler.expire())
            time.sleep(_IDLE_PAUSE_S)

    def _read_one(self) -> bool:
        data = self._reader.read()
        if data is None:
            return False
        try:
            self._keep(self._assembler.feed(decode(data)))
        except DamagedMessageError:
            with self._lock:
                self._damaged += 1
        return True

    def _wanted(self, record: CaptureRecord) -> bool:
        return wants(self._policy, Labels(record.tenant, record.domain))

    def _keep(self, records: list[CaptureRecord]) -> None:
        with self._lock:
            for record in records:
                if not self._wanted(record):
                    self._withdrawn += 1
                    continue
                if self._waiting_bytes + record.nbytes > self._max_bytes:
                    self._overflow += 1
                    continue
                self._waiting.append(record)
                self._waiting_bytes += record.nbytes
                self._records += 1
                self._tokens += record.num_tokens
