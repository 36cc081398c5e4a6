"""Records from one Ray node to another, on this machine: two object stores, so that the payload really travels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from records import make_record

from draftloop.capture.ledger import Counts
from draftloop.capture.transport import Delivery, Outbox, Receipt, TransportError
from draftloop.core.records import CaptureRecord
from draftloop.trainer.ray_transport import RayTransport

RECORDS = 6
# Ray's workers cannot import a test module: its classes travel whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    for name in ("head", "worker", "trainer"):
        cluster.add_node(num_cpus=1, resources={name: 1}, object_store_memory=80 << 20, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Sender:
    """A worker with some records."""

    def __init__(self, records: list[CaptureRecord]) -> None:
        self._outbox = Outbox(
            RayTransport(), "worker", lambda most: [records.pop(0) for _ in records[:most]], lambda: 1
        )

    def offer(self, receipt: Receipt | None) -> Delivery | None:
        return self._outbox.offer(4, receipt)

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node


class Receiver:
    """A trainer's end."""

    def receive(self, delivery: Delivery) -> tuple[list[CaptureRecord], str]:
        return RayTransport().receive(delivery.reference), ray.get_runtime_context().get_node_id()

    def refused(self, delivery: Delivery) -> str:
        try:
            RayTransport().receive(delivery.reference)
        except TransportError as error:
            return str(error)
        return ""


def test_batches_travel_between_two_nodes(cluster: Cluster) -> None:
    mine = [make_record(i, tokens=20_000, steps=2, tenant="acme") for i in range(RECORDS)]
    sender = ray.remote(Sender).options(num_cpus=0, resources={"worker": 0.1}).remote(mine)
    receiver = ray.remote(Receiver).options(num_cpus=0, resources={"trainer": 0.1}).remote()
    theirs: list[CaptureRecord] = []
    deliveries = []
    receipt: Receipt | None = None
    while (delivery := ray.get(sender.offer.remote(receipt))) is not None:
        again = ray.get(sender.offer.remote(None))
        assert (again.source, again.sequence) == (delivery.source, delivery.sequence), "not acknowledged yet"
        records, node = ray.get(receiver.receive.remote(delivery))
        assert node != ray.get(sender.node.remote())
        theirs += records
        deliveries.append((delivery.sequence, delivery.records, delivery.dropped))
        receipt = Receipt(delivery.source, delivery.sequence, Counts())
    assert deliveries == [(1, 4, 1), (2, 2, 0)]
    for one, other in zip(mine, theirs, strict=True):
        assert (one.request_id, one.tenant, len(one.verify_steps)) == (
            other.request_id, other.tenant, len(other.verify_steps),
        )  # fmt: skip
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.fused, other.fused)


def test_what_cannot_be_fetched_or_is_damaged_is_one_line(cluster: Cluster) -> None:
    receiver = ray.remote(Receiver).options(num_cpus=0, resources={"trainer": 0.1}).remote()
    damaged: Any = [ray.put(np.zeros(1000, np.uint8))]
    assert "arrived damaged" in ray.get(receiver.refused.remote(Delivery("w", 1, damaged, 1, 0)))
    sender = ray.remote(Sender).options(num_cpus=0, resources={"worker": 0.1}).remote([make_record(1, tokens=20_000)])
    delivery = ray.get(sender.offer.remote(None))
    ray.kill(sender)
    assert "is gone" in ray.get(receiver.refused.remote(delivery))
