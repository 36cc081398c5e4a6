"""The smallest transport of records there is."""

from __future__ import annotations

from collections.abc import Sequence

from draftloop.capture.transport import pack_batch, unpack_batch
from draftloop.core.records import CaptureRecord


class Shelf:
    """Batches on a shelf of this process."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}

    def send(self, records: Sequence[CaptureRecord]) -> int:
        reference = len(self.payloads)
        self.payloads[reference] = b"".join(pack_batch(records))
        return reference

    def receive(self, reference: int) -> list[CaptureRecord]:
        return unpack_batch(self.payloads[reference])

    def release(self, reference: int) -> None:
        self.payloads[reference] = b""
