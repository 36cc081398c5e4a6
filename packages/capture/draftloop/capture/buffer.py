"""The replay buffer: recent records to train on, and a held-out window that is never trained on.

The training side is a recency reservoir: when it is full a record chosen at random makes room, so that the chance to
be still there falls exponentially with age. While domains hold more than their quota, they alone make room. The
held-out side keeps its newest records, under the same quota.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftloop.capture.record_file import read_records, write_records
from draftloop.core.records import CaptureRecord

# The newest training record is drawn this many times as often as the oldest.
_RECENCY_RATIO = 8.0


@dataclass(frozen=True)
class Counts:
    """Records: captured == training + held_out + expired, always."""

    captured: int
    training: int
    held_out: int
    expired: int


class _Side:
    """Records in order of arrival, bounded in bytes, with a quota on what one domain may hold."""

    def __init__(self, max_bytes: int, domain_quota: float) -> None:
        self.records: list[CaptureRecord] = []
        self.nbytes = 0
        self.max_bytes = max_bytes
        self._domain_quota = domain_quota
        self._domain_bytes: Counter[str] = Counter()

    def add(self, record: CaptureRecord, rng: np.random.Generator | None) -> int:
        """Append `record`; returns how many records expired for it: the others who made room, or itself if too large.

        rng: picks who makes room; None: the oldest does.
        """
        if record.nbytes > self.max_bytes:
            return 1
        self.records.append(record)
        self._account(record, 1)
        expired = 0
        while self.nbytes > self.max_bytes:
            candidates = self._candidates()
            victim = candidates[0] if rng is None else candidates[int(rng.integers(len(candidates)))]
            self._account(self.records.pop(victim), -1)
            expired += 1
        return expired

    def _candidates(self) -> list[int]:
        """Who may make room: domains over their quota, else everyone; never the newcomer, which fits alone."""
        older = range(len(self.records) - 1)
        quota = self._domain_quota * self.max_bytes
        over = [i for i in older if self._domain_bytes[self.records[i].domain] > quota]
        return over or list(older)

    def _account(self, record: CaptureRecord, sign: int) -> None:
        self.nbytes += sign * record.nbytes
        self._domain_bytes[record.domain] += sign * record.nbytes
        if not self._domain_bytes[record.domain]:
            del self._domain_bytes[record.domain]

    def domain_bytes(self) -> dict[str, int]:
        return dict(self._domain_bytes)


class ReplayBuffer:
    """Bounded in bytes; deterministic for a seed and an order of calls. Not thread-safe: one owner.

    max_bytes: both sides together; the held-out side has `holdout_fraction` of it.
    domain_quota: largest share of a side that one domain keeps when other domains need room.
    """

    def __init__(self, max_bytes: int, domain_quota: float, holdout_fraction: float, seed: int) -> None:
        self._holdout_fraction = holdout_fraction
        held_out_bytes = int(max_bytes * holdout_fraction)
        self._training = _Side(max_bytes - held_out_bytes, domain_quota)
        self._held_out = _Side(held_out_bytes, domain_quota)
        self._rng = np.random.default_rng(seed)
        self._captured = 0
        self._expired = 0

    @property
    def counts(self) -> Counts:
        return Counts(self._captured, len(self._training.records), len(self._held_out.records), self._expired)

    @property
    def nbytes(self) -> int:
        return self._training.nbytes + self._held_out.nbytes

    def domain_bytes(self) -> dict[str, int]:
        """Bytes each domain holds on the training side."""
        return self._training.domain_bytes()

    def add(self, record: CaptureRecord) -> None:
        """Keep `record`; all records of one request go to the same side."""
        self._add(record, is_held_out(record.request_id, self._holdout_fraction))

    def _add(self, record: CaptureRecord, held_out: bool) -> None:
        self._captured += 1
        self._expired += self._held_out.add(record, None) if held_out else self._training.add(record, self._rng)

    def training(self) -> list[CaptureRecord]:
        """The records of the training side, oldest first."""
        return list(self._training.records)

    def sample(self, num_tokens: int) -> list[CaptureRecord]:
        """Training records, recent ones more often, no record twice, until `num_tokens` are reached or all are in.

        The last record may go beyond `num_tokens`. Empty when nothing was captured.
        """
        records = self._training.records
        count = len(records)
        if count == 0:
            return []
        # Gumbel top-k: sorting log-weight + Gumbel noise draws without replacement, in proportion to the weights.
        log_weights = np.linspace(-np.log(_RECENCY_RATIO), 0.0, count) if count > 1 else np.zeros(1)
        order = np.argsort(-(log_weights + self._rng.gumbel(size=count)))
        chosen: list[CaptureRecord] = []
        tokens = 0
        for index in order:
            if tokens >= num_tokens:
                break
            chosen.append(records[int(index)])
            tokens += chosen[-1].num_tokens
        return chosen

    def held_out(self, max_tokens: int) -> list[CaptureRecord]:
        """The newest held-out records within `max_tokens`, the domains taking turns by tokens taken so far.

        At least one record when there is any.
        """
        queues: dict[str, Iterator[CaptureRecord]] = {}
        for domain in sorted({record.domain for record in self._held_out.records}):
            queues[domain] = iter([r for r in reversed(self._held_out.records) if r.domain == domain])
        taken = dict.fromkeys(queues, 0)
        chosen: list[CaptureRecord] = []
        while queues:
            domain = min(queues, key=lambda name: taken[name])
            record = next(queues[domain], None)
            if record is None:
                del queues[domain]
            elif not chosen or sum(taken.values()) + record.num_tokens <= max_tokens:
                chosen.append(record)
                taken[domain] += record.num_tokens
            else:
                del queues[domain]
        return chosen

    def save(self, path: Path) -> None:
        """Write all records and counts to `path`, atomically."""
        records = [(record, False) for record in self._training.records]
        records += [(record, True) for record in self._held_out.records]
        write_records(path, records, {"captured": self._captured, "expired": self._expired})

    def load(self, path: Path) -> None:
        """Take over what `save` wrote; a held-out record stays held out. Raises RecordFileError in one line.

        A smaller buffer than the saved one keeps what fits, and counts the rest as expired.
        """
        records, counts = read_records(path)
        for record, held_out in records:
            self._add(record, held_out)
        self._captured += counts["captured"] - len(records)
        self._expired += counts["expired"]


def is_held_out(request_id: str, fraction: float) -> bool:
    """Whether a request belongs to the held-out share: the same in every process and run."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
