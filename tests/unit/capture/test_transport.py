"""Batches on their way: checksums, one delivery each through crashes of either side, and Mooncake if installed."""

from __future__ import annotations

import importlib
import importlib.util
import random
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from records import make_record
from shelf import Shelf

from draftloop.capture.buffer import ReplayBuffer
from draftloop.capture.journal import Journal
from draftloop.capture.ledger import Counts
from draftloop.capture.mooncake import MooncakeReference, MooncakeTransport
from draftloop.capture.transport import Delivery, Outbox, Receipt, TransportError, pack_batch, unpack_batch
from draftloop.core.records import CaptureRecord


def assert_same(mine: Sequence[CaptureRecord], theirs: Sequence[CaptureRecord]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert (one.request_id, one.domain, one.tenant) == (other.request_id, other.domain, other.tenant)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.fused, other.fused)
        assert [s.accepted for s in one.verify_steps] == [s.accepted for s in other.verify_steps]


def test_a_batch_comes_out_as_it_went_in() -> None:
    records = [make_record(i, "ab"[i % 2], tokens=1 + i, steps=i % 3, tenant="acme") for i in range(5)]
    assert_same(records, unpack_batch(b"".join(pack_batch(records))))
    assert unpack_batch(b"".join(pack_batch([]))) == []


def test_every_flipped_byte_and_every_cut_is_noticed() -> None:
    payload = bytearray(b"".join(pack_batch([make_record(i, tokens=2, steps=1) for i in range(2)])))
    for at in range(0, len(payload), 3):
        with pytest.raises(TransportError, match="arrived damaged"):
            unpack_batch(payload[:at])
        payload[at] ^= 16
        with pytest.raises(TransportError, match="arrived damaged"):
            unpack_batch(payload)
        payload[at] ^= 16


def test_each_record_arrives_once_whoever_fails_between(tmp_path: Path) -> None:
    """The receiver may die before the delivery, after the journal, or before its answer arrives."""
    rng = random.Random(5)
    waiting = deque(make_record(i) for i in range(60))
    lost = 0
    shelf = Shelf()

    def take(most: int) -> list[CaptureRecord]:
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    outbox = Outbox(shelf, "worker", take, lambda: lost)
    buffer = open_buffer(tmp_path)
    receipt: Receipt | None = None
    while (delivery := outbox.offer(rng.randint(1, 5), receipt)) is not None:
        receipt = None
        lost += rng.randint(0, 1) * bool(waiting)
        end = rng.choice(["before", "after", "unheard", "heard", "heard"])
        if end == "before":
            buffer.close()
            buffer = open_buffer(tmp_path)
            continue
        deliver(buffer, shelf, delivery)
        if end == "after":
            buffer.close()
            buffer = open_buffer(tmp_path)
        receipt = Receipt(delivery.source, delivery.sequence, buffer.counts) if end == "heard" else None
    counts = buffer.counts
    assert (counts.captured, counts.dropped, counts.balanced) == (60 + lost, lost, True)
    ids = [kept.record.request_id for kept in buffer.entries] + [r.request_id for r in buffer.held_out(10**9)]
    assert sorted(ids, key=int) == [str(i) for i in range(60)]
    assert lost > 3
    assert set(shelf.payloads.values()) == {b""}
    buffer.close()


def open_buffer(folder: Path) -> ReplayBuffer:
    return ReplayBuffer(1 << 20, 1.0, 0.2, 0.5, seed=0, journal=Journal(folder, 1 << 16))


def deliver(buffer: ReplayBuffer, shelf: Shelf, delivery: Delivery) -> None:
    records = shelf.receive(delivery.reference)
    assert len(records) == delivery.records
    buffer.add(records, 0.0, delivery.dropped, delivery.source, delivery.sequence)


def test_an_idle_outbox_offers_nothing_and_an_old_answer_changes_nothing() -> None:
    waiting = [make_record(1)]
    outbox = Outbox(Shelf(), "worker", lambda most: [waiting.pop()] if waiting else [], lambda: 0)
    first = outbox.offer(8)
    assert first is not None
    for source, sequence in ((first.source, 2), (first.source, 0), ("another", 1)):
        assert outbox.offer(8, Receipt(source, sequence, Counts())) is first
    assert outbox.offer(8, Receipt(first.source, 1, Counts())) is None


# --- Mooncake


def _mooncake_works() -> bool:
    if importlib.util.find_spec("mooncake") is None:
        return False
    try:
        importlib.import_module("mooncake.engine")
    except ImportError:
        return False
    return True


@pytest.mark.skipif(_mooncake_works(), reason="Mooncake is installed")
def test_without_mooncake_one_line_says_what_to_install() -> None:
    with pytest.raises(TransportError, match=r"install mooncake-transfer-engine.*or set transport.kind=ray") as caught:
        MooncakeTransport("127.0.0.1", "tcp", "")
    assert "\n" not in str(caught.value)


_RECEIVER = """
import sys
from draftloop.capture.mooncake import MooncakeReference, MooncakeTransport
from draftloop.capture.transport import TransportError
transport = MooncakeTransport("127.0.0.1", "tcp", "")
try:
    records = transport.receive(MooncakeReference(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), ""))
    print(";".join(f"{r.request_id}:{r.num_tokens}:{r.fused.sum()}" for r in records))
except TransportError as error:
    print(error)
"""


@pytest.mark.skipif(not _mooncake_works(), reason="Mooncake is not installed")
def test_another_process_reads_a_batch_through_mooncake() -> None:
    transport = MooncakeTransport("127.0.0.1", "tcp", "")
    records = [make_record(i, tokens=1000 + i) for i in range(4)]
    reference = transport.send(records)
    assert received(reference) == ";".join(f"{r.request_id}:{r.num_tokens}:{r.fused.sum()}" for r in records)
    transport._sent[reference.key][-1] ^= 1
    assert "arrived damaged after record 3: checksum mismatch" in received(reference)
    transport.release(reference)
    transport.release(reference)


def received(reference: MooncakeReference) -> str:
    command = [sys.executable, "-c", _RECEIVER, reference.session, str(reference.address), str(reference.nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip().splitlines()[-1]
