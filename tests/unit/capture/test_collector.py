"""Records between the ring and the trainer, and the policy that holds for them too."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from draftloop.capture.collector import Collector
from draftloop.capture.ring import RingOwner, RingWriter
from draftloop.capture.tap_writer import TapWriter
from draftloop.capture.wire import Chunk
from draftloop.core.config import CapturePolicy

ROOM = 1 << 20


@pytest.fixture
def ring() -> Iterator[RingOwner]:
    owner = RingOwner.create(f"draftloop-test-{uuid.uuid4().hex}", ROOM)
    yield owner
    owner.close()


def capture(ring: RingOwner, *tenants: str) -> None:
    """One whole record of each tenant goes into the ring."""
    writer = RingWriter.attach(ring.name)
    tap = TapWriter(writer)
    for tenant in tenants:
        rows = np.ones((4, 2), np.float32)
        tap.offer(Chunk(f"of-{tenant}", "chat", 0, 2, np.arange(4, dtype=np.int32), rows, rows, tenant=tenant))
        tap.finish(f"of-{tenant}", "stop")
    writer.close()


def wait_for(collector: Collector, records: int) -> None:
    deadline = time.monotonic() + 10
    while collector.counts().records < records:
        assert time.monotonic() < deadline, collector.counts()
        time.sleep(0.01)


def test_records_that_wait_are_withdrawn_by_an_opt_out(ring: RingOwner) -> None:
    collector = Collector(ring.name, ROOM)
    capture(ring, "acme", "umbrella")
    wait_for(collector, 2)
    collector.set_policy(CapturePolicy(skip_tenants=frozenset({"acme"})))
    assert [record.tenant for record in collector.take(9)] == ["umbrella"]
    assert collector.counts().records_withdrawn == 1
    collector.close()


def test_what_an_earlier_policy_left_in_the_ring_is_judged_by_the_one_in_force(ring: RingOwner) -> None:
    collector = Collector(ring.name, ROOM)
    collector.set_policy(CapturePolicy(tenants=frozenset({"acme"})))
    capture(ring, "umbrella", "acme")
    wait_for(collector, 1)  # read in order
    assert [record.tenant for record in collector.take(9)] == ["acme"]
    collector.close()


def test_withdrawn_records_leave_their_room_to_others(ring: RingOwner) -> None:
    collector = Collector(ring.name, max_bytes=100)
    capture(ring, "acme")
    wait_for(collector, 1)
    collector.set_policy(CapturePolicy(skip_tenants=frozenset({"acme"})))
    capture(ring, "umbrella")
    wait_for(collector, 2)
    assert [record.tenant for record in collector.take(9)] == ["umbrella"]
    assert collector.counts().records_dropped == 0
    collector.close()
