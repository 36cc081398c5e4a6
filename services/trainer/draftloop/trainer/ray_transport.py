"""Records through Ray's object store: a reference is an ObjectRef, and a batch goes when nobody holds it any more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ray
from ray.exceptions import RayError

from draftloop.capture.mooncake import MooncakeTransport
from draftloop.capture.transport import RecordTransport, TransportError, pack_batch, unpack_batch
from draftloop.core.config import TransportConfig
from draftloop.core.records import CaptureRecord

# A batch whose owner died is not coming; Ray itself would wait longer to be sure.
_FETCH_TIMEOUT_S = 30.0


class RayTransport:
    """The payload is one flat array of bytes, which Ray keeps in shared memory and reads without copying."""

    def send(self, records: Sequence[CaptureRecord]) -> list[ray.ObjectRef]:
        # In a list, so that passing it to an actor passes the reference and not the payload.
        return [ray.put(np.frombuffer(b"".join(pack_batch(records)), np.uint8))]

    def receive(self, reference: list[ray.ObjectRef]) -> list[CaptureRecord]:
        try:
            payload = ray.get(reference[0], timeout=_FETCH_TIMEOUT_S)
        except RayError as err:
            raise TransportError(f"a batch of records is gone: {' '.join(str(err).split())[:160]}") from None
        return unpack_batch(payload.data)

    def release(self, reference: list[ray.ObjectRef]) -> None:
        """Ray counts references itself."""


def make_transport(config: TransportConfig) -> RecordTransport:
    """The transport that the config chooses. Raises TransportError when it is not installed."""
    if config.kind == "mooncake":
        return MooncakeTransport(config.host, config.protocol, config.device)
    return RayTransport()
