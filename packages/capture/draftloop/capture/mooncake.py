"""Records through Mooncake's transfer engine: the receiver reads the sender's memory, over TCP or RDMA.

The wheel (`mooncake-transfer-engine`, or `mooncake-transfer-engine-non-cuda` where there is no CUDA; either needs the
system's libibverbs) is not among our dependencies: it is imported when this transport is chosen. Its ports carry no
token and no encryption: keep them on the cluster's private network.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftloop.capture.transport import TransportError, pack_batch, unpack_batch
from draftloop.core.records import CaptureRecord

# Engines find each other by address, without a metadata server.
_PEER_TO_PEER = "P2PHANDSHAKE"


@dataclass(frozen=True, slots=True)
class MooncakeReference:
    """Where a payload lies: the engine's "host:port", an address in that process, its length in bytes."""

    session: str
    address: int
    nbytes: int
    key: str


class MooncakeTransport:
    """One engine. host: the address at which others reach this machine.  protocol: "tcp" or "rdma".  device: names of
    RDMA devices, comma-separated, '' for all.

    Raises TransportError when the wheel is missing or the engine does not start.
    """

    def __init__(self, host: str, protocol: str, device: str) -> None:
        self._engine = _new_engine(host, protocol, device)
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._sent: dict[str, NDArray[np.uint8]] = {}

    def send(self, records: Sequence[CaptureRecord]) -> MooncakeReference:
        """Copies the batch into memory that others may read, until it is released."""
        payload = np.frombuffer(b"".join(pack_batch(records)), np.uint8).copy()
        self._register(payload)
        reference = MooncakeReference(self._session, payload.ctypes.data, payload.nbytes, uuid.uuid4().hex)
        self._sent[reference.key] = payload
        return reference

    def receive(self, reference: MooncakeReference) -> list[CaptureRecord]:
        """Reads the sender's memory. Raises TransportError when the sender is gone or the payload is damaged."""
        payload = np.empty(reference.nbytes, np.uint8)
        self._register(payload)
        try:
            status = self._engine.transfer_sync_read(
                reference.session, payload.ctypes.data, reference.address, reference.nbytes
            )
        finally:
            self._engine.unregister_memory(payload.ctypes.data)
        if status != 0:
            raise TransportError(f"Mooncake cannot read {reference.nbytes} bytes from {reference.session} ({status})")
        return unpack_batch(payload.data)

    def release(self, reference: MooncakeReference) -> None:
        payload = self._sent.pop(reference.key, None)
        if payload is not None:
            self._engine.unregister_memory(payload.ctypes.data)

    def _register(self, payload: NDArray[np.uint8]) -> None:
        status = self._engine.register_memory(payload.ctypes.data, payload.nbytes)
        if status != 0:
            raise TransportError(f"Mooncake cannot register {payload.nbytes} bytes of memory ({status})")


def _new_engine(host: str, protocol: str, device: str) -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as err:
        raise TransportError(
            f"transport.kind is mooncake, which cannot be imported ({err}): install mooncake-transfer-engine, or "
            "mooncake-transfer-engine-non-cuda, and libibverbs, or set transport.kind=ray"
        ) from None
    engine = TransferEngine()
    status = engine.initialize(host, _PEER_TO_PEER, protocol, device)
    if status != 0:
        raise TransportError(f"Mooncake's engine does not start on {host} over {protocol} ({status})")
    return engine
