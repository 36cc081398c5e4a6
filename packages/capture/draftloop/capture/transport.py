"""From worker to trainer: batches of records as one checksummed payload each, delivered exactly once.

    worker   Outbox.offer ──► Delivery(source, sequence, reference) ──► trainer   fetch, journal, then answer
                 ▲                                                                      │
                 └───────────────── Receipt(source, sequence) ◄─────────────────────────┘

An outbox has one delivery under way and offers it again, with its number, until it gets its receipt; the journal
passes over a number that it has. So records on their way survive a trainer that dies; a worker that dies takes them
along: the trainer cannot fetch them and counts them as dropped.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftloop.capture.ledger import Counts
from draftloop.capture.record_file import pack_record, unpack_record
from draftloop.capture.wire import DamagedMessageError, pack_frame, unpack_frame
from draftloop.core.errors import DraftloopError
from draftloop.core.records import CaptureRecord


class TransportError(DraftloopError):
    """A payload cannot be fetched, arrived damaged, or the transport is not installed."""


class RecordTransport(Protocol):
    """Moves batches. A reference is small, and may be sent to any process of the cluster."""

    def send(self, records: Sequence[CaptureRecord]) -> Any:
        """Make a batch available; returns its reference."""

    def receive(self, reference: Any) -> list[CaptureRecord]:
        """Fetch a batch. Raises TransportError when it is gone or damaged."""

    def release(self, reference: Any) -> None:
        """The sender need not keep the batch any longer."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """source: the sender, a new name each time it starts.  sequence: 1, 2, ...  records: how many the batch has.
    dropped: captured records that the sender lost since its last delivery."""

    source: str
    sequence: int
    reference: Any
    records: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """The delivery with this number is safe. counts: the trainer's books after it."""

    source: str
    sequence: int
    counts: Counts

    def answers(self, delivery: Delivery) -> bool:
        return (self.source, self.sequence) == (delivery.source, delivery.sequence)


class Outbox:
    """The sender's end. take: gives up to so many records; they are the outbox's then.  lost: how many captured
    records were lost in all."""

    def __init__(
        self,
        transport: RecordTransport,
        name: str,
        take: Callable[[int], list[CaptureRecord]],
        lost: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._source = f"{name}-{uuid.uuid4().hex[:12]}"
        self._take = take
        self._lost = lost
        self._lost_told = 0
        self._sequence = 0
        self._under_way: Delivery | None = None

    def offer(self, most: int, receipt: Receipt | None = None) -> Delivery | None:
        """The delivery under way, else a new one of up to `most` records; None when there is nothing to tell.

        receipt: the last one that came; of another source or an older delivery, it changes nothing.
        """
        if self._under_way is not None and receipt is not None and receipt.answers(self._under_way):
            self._transport.release(self._under_way.reference)
            self._under_way = None
        if self._under_way is None:
            records, lost = self._take(most), self._lost()
            if records or lost > self._lost_told:
                self._sequence += 1
                reference = self._transport.send(records)
                self._under_way = Delivery(
                    self._source, self._sequence, reference, len(records), lost - self._lost_told
                )
                self._lost_told = lost
        return self._under_way


def pack_batch(records: Sequence[CaptureRecord]) -> list[bytes | memoryview]:
    """A payload in parts: a wire frame that lists the lengths of the records' frames, which follow."""
    frames = [pack_record(record) for record in records]
    lengths = [sum(map(len, frame)) for frame in frames]
    head = pack_frame("batch", {"lengths": lengths}, ())
    size = sum(map(len, head))
    return [size.to_bytes(8, "little"), *head, *(part for frame in frames for part in frame)]


def unpack_batch(payload: bytes | memoryview) -> list[CaptureRecord]:
    """The inverse of `pack_batch`; every frame's checksum is verified. Raises TransportError."""
    view = memoryview(payload).cast("B")
    records: list[CaptureRecord] = []
    try:
        end = 8 + int.from_bytes(view[:8], "little")
        lengths = unpack_frame(view[8:end])[1]["lengths"]
        if end + sum(lengths) != len(view):
            raise DamagedMessageError(f"{len(view)} bytes, {end + sum(lengths)} announced")
        for length in lengths:
            _, fields, arrays = unpack_frame(view[end : end + length])
            records.append(unpack_record(fields, arrays))
            end += length
    except (DamagedMessageError, KeyError, TypeError, ValueError) as err:
        raise TransportError(f"a batch of records arrived damaged after record {len(records)}: {err}") from None
    return records
