"""The replay buffer: recent records to train on, and a held-out window that is never trained on.

The training side is a recency reservoir: when it is full a record chosen at random makes room, so that the chance to
be still there falls exponentially with age. While domains hold more than their quota, they alone make room. The
held-out side keeps its newest records, under the same quota.

A batch is drawn from both kinds of training records, so that the drafter learns what is new and forgets little:

    replay share of the tokens    records it was trained on before
    the rest                      pending records; replayed ones when there are too few

Every record is in the books (see `ledger`), which lie on disk when the buffer has a journal.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from draftloop.capture.journal import Journal, Kept, left
from draftloop.capture.ledger import Arrived, Counts, Ledger, Left, Trained
from draftloop.core.records import CaptureRecord

# The newest training record is drawn this many times as often as the oldest.
_RECENCY_RATIO = 8.0


class _Side:
    """Records in order of arrival, bounded in bytes, with a quota on what one domain may hold."""

    def __init__(self, max_bytes: int, domain_quota: float) -> None:
        self.records: list[Kept] = []
        self.nbytes = 0
        self.max_bytes = max_bytes
        self._domain_quota = domain_quota
        self._domain_bytes: Counter[str] = Counter()

    def add(self, kept: Kept, rng: np.random.Generator | None) -> list[Kept]:
        """Append `kept`, which fits alone; returns who made room for it.

        rng: picks who makes room; None: the oldest does.
        """
        self.records.append(kept)
        self._account(kept.record, 1)
        gone: list[Kept] = []
        while self.nbytes > self.max_bytes:
            candidates = self._candidates()
            victim = candidates[0] if rng is None else candidates[int(rng.integers(len(candidates)))]
            gone.append(self.records.pop(victim))
            self._account(gone[-1].record, -1)
        return gone

    def remove(self, matches: Callable[[Kept], bool]) -> list[Kept]:
        """Take out all that match."""
        gone = [kept for kept in self.records if matches(kept)]
        if gone:
            ids = {kept.id for kept in gone}
            self.records = [kept for kept in self.records if kept.id not in ids]
            for kept in gone:
                self._account(kept.record, -1)
        return gone

    def _candidates(self) -> list[int]:
        """Who may make room: domains over their quota, else everyone; never the newcomer, which fits alone."""
        older = range(len(self.records) - 1)
        quota = self._domain_quota * self.max_bytes
        over = [i for i in older if self._domain_bytes[self.records[i].record.domain] > quota]
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
    replay_share: of the sampled tokens, for records that were trained on before, while there are others.
    journal: keeps records and books on disk, and gives back what an earlier buffer left there; a smaller buffer than
    that keeps what fits, and the rest expires.  None: in memory only.
    """

    def __init__(
        self,
        max_bytes: int,
        domain_quota: float,
        holdout_fraction: float,
        replay_share: float,
        seed: int,
        journal: Journal | None = None,
    ) -> None:
        self._holdout_fraction = holdout_fraction
        self._replay_share = replay_share
        held_out_bytes = int(max_bytes * holdout_fraction)
        self._training = _Side(max_bytes - held_out_bytes, domain_quota)
        self._held_out = _Side(held_out_bytes, domain_quota)
        self._rng = np.random.default_rng(seed)
        self._replay_owed = 0.0
        self._journal = journal
        self._ledger = Ledger() if journal is None else journal.ledger
        if journal is not None:
            self._keep(journal.take_kept())

    @property
    def counts(self) -> Counts:
        return self._ledger.counts

    @property
    def nbytes(self) -> int:
        return self._training.nbytes + self._held_out.nbytes

    @property
    def entries(self) -> Sequence[Kept]:
        """The training side, oldest first."""
        return self._training.records

    def domain_bytes(self) -> dict[str, int]:
        """Bytes each domain holds on the training side."""
        return self._training.domain_bytes()

    @property
    def draws(self) -> dict[str, Any]:
        """What decides the next draws, plain JSON; set it to draw what another buffer would have drawn."""
        return {"generator": dict(self._rng.bit_generator.state), "replay_owed": self._replay_owed}

    @draws.setter
    def draws(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["generator"]
        self._replay_owed = state["replay_owed"]

    def has(self, source: str, sequence: int) -> bool:
        """Whether this delivery came before."""
        return self._ledger.has(source, sequence)

    def add(
        self,
        records: Iterable[CaptureRecord],
        now: float | None = None,
        dropped: int = 0,
        source: str = "",
        sequence: int = 0,
    ) -> None:
        """Take a delivery; acknowledge it when this returns. A delivery that came before is passed over.

        now: when it was received, seconds since the epoch.  dropped: records captured and lost on the way here.
        source, sequence: who delivers, and its running number from 1 on; 0: not numbered.
        All records of one request go to the same side; one that is larger than its side is dropped.
        Raises JournalError when it cannot be kept; the delivery then counts as never having come.
        """
        if self.has(source, sequence):
            return
        received = time.time() if now is None else now
        fitting: list[tuple[CaptureRecord, float, bool]] = []
        for record in records:
            held_out = is_held_out(record.request_id, self._holdout_fraction)
            if record.nbytes <= self._side(held_out).max_bytes:
                fitting.append((record, received, held_out))
            else:
                dropped += 1
        if fitting or dropped or sequence:
            self._keep(self._append(fitting, dropped, source, sequence))

    def _append(
        self, records: list[tuple[CaptureRecord, float, bool]], dropped: int, source: str, sequence: int
    ) -> list[Kept]:
        if self._journal is not None:
            return self._journal.append(records, dropped, source, sequence)
        first = self._ledger.next_id
        self._ledger.apply(Arrived(first, tuple(held_out for *_, held_out in records), dropped, source, sequence))
        return [Kept(first + i, when, record, held_out) for i, (record, when, held_out) in enumerate(records)]

    def _keep(self, kept: list[Kept]) -> None:
        gone: list[Kept] = []
        for one in kept:
            side = self._side(one.held_out)
            if one.record.nbytes <= side.max_bytes:
                gone += side.add(one, None if one.held_out else self._rng)
            else:
                gone.append(one)
        if gone:
            self._commit(left(gone, "expired"))

    def _side(self, held_out: bool) -> _Side:
        return self._held_out if held_out else self._training

    def _commit(self, entry: Trained | Left) -> None:
        if self._journal is None:
            self._ledger.apply(entry)
        else:
            self._journal.commit(entry)

    def training(self) -> list[CaptureRecord]:
        """The records of the training side, oldest first."""
        return [kept.record for kept in self._training.records]

    def sample(self, num_tokens: int) -> list[Kept]:
        """Training records, recent ones more often, no record twice, until `num_tokens` are reached or all are in.

        The last record may go beyond `num_tokens`. Empty when nothing was captured. The replay share holds over many
        draws, whatever the records' lengths: one long record may fill a batch, and the next ones make up for it.
        """
        replayed = self._by_luck([kept for kept in self._training.records if kept.trained])
        pending = self._by_luck([kept for kept in self._training.records if not kept.trained])
        chosen: list[Kept] = []
        tokens = 0
        while tokens < num_tokens and (replayed or pending):
            kept = self._next_of(replayed, pending)
            chosen.append(kept)
            tokens += kept.record.num_tokens
        return chosen

    def _next_of(self, replayed: deque[Kept], pending: deque[Kept]) -> Kept:
        """From the side that is behind its share; without a choice nothing is owed."""
        if not (replayed and pending):
            return (replayed or pending).popleft()
        replays = self._replay_owed > 0.0
        kept = (replayed if replays else pending).popleft()
        self._replay_owed += (self._replay_share - replays) * kept.record.num_tokens
        return kept

    def _by_luck(self, records: list[Kept]) -> deque[Kept]:
        """All of them in a random order, recent ones tending to the front."""
        count = len(records)
        # Gumbel top-k: sorting log-weight + Gumbel noise draws without replacement, in proportion to the weights.
        log_weights = np.linspace(-np.log(_RECENCY_RATIO), 0.0, count) if count > 1 else np.zeros(count)
        order = np.argsort(-(log_weights + self._rng.gumbel(size=count)))
        return deque(records[int(index)] for index in order)

    def mark_trained(self, records: Sequence[Kept]) -> None:
        """These were used in an optimiser step. Raises JournalError when that cannot be kept."""
        fresh = [kept for kept in records if not kept.trained]
        if fresh:
            self._commit(Trained(tuple(kept.id for kept in fresh)))
        for kept in records:
            kept.trained = kept.used = True

    def held_out(self, max_tokens: int) -> list[CaptureRecord]:
        """The newest held-out records within `max_tokens`, the domains taking turns by tokens taken so far.

        At least one record when there is any.
        """
        newest = [kept.record for kept in reversed(self._held_out.records)]
        queues: dict[str, Iterator[CaptureRecord]] = {}
        for domain in sorted({record.domain for record in newest}):
            queues[domain] = iter([record for record in newest if record.domain == domain])
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

    def expire(self, before: float) -> int:
        """Give up every record received before `before`, here and on disk; returns how many."""
        gone = self._remove(lambda kept: kept.time < before)
        if gone:
            self._commit(left(gone, "expired"))
        if self._journal is not None:
            self._journal.erase_dead(before)
        return len(gone)

    def delete(self, matches: Callable[[Kept], bool]) -> int:
        """Remove what matches, here and on disk; returns how many records were still kept."""
        gone = self._remove(matches)
        if gone:
            self._commit(left(gone, "deleted"))
        if self._journal is not None:
            # A record that had left for another reason may lie there still.
            self._journal.erase_dead()
        return len(gone)

    def _remove(self, matches: Callable[[Kept], bool]) -> list[Kept]:
        return self._training.remove(matches) + self._held_out.remove(matches)

    def close(self) -> None:
        """Let another process have the journal."""
        if self._journal is not None:
            self._journal.close()


def is_held_out(request_id: str, fraction: float) -> bool:
    """Whether a request belongs to the held-out share: the same in every process and run."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
