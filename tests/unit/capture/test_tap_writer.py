"""The tap's rule for a full ring, and what the assembler makes of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from draftloop.capture.assembler import Assembler
from draftloop.capture.ring import RingOwner, RingReader, RingWriter
from draftloop.capture.tap_writer import TapWriter
from draftloop.capture.wire import Chunk, Finish, decode
from draftloop.core.records import CaptureRecord


class Line:
    """A small ring with both its ends."""

    def __init__(self) -> None:
        self.owner = RingOwner.create(f"draftloop-test-{uuid.uuid4().hex}", 2048)
        self.writer = RingWriter.attach(self.owner.name)
        self.reader = RingReader.attach(self.owner.name)
        self.tap = TapWriter(self.writer)
        self.assembler = Assembler()

    def collect(self) -> tuple[list[Chunk | Finish], list[CaptureRecord]]:
        messages: list[Chunk | Finish] = []
        records: list[CaptureRecord] = []
        while (data := self.reader.read()) is not None:
            messages.append(decode(data))
            records += self.assembler.feed(messages[-1])
        return messages, records

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.owner.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def chunk(request_id: str, start: int, rows: int = 2) -> Chunk:
    tokens = np.arange(start, start + rows, dtype=np.int32)
    return Chunk(request_id, "chat", start, 2, tokens, np.ones((rows, 6), np.float32), np.ones((rows, 2), np.float32))


def test_nothing_dropped_means_everything_arrives(line: Line) -> None:
    assert line.tap.offer(chunk("a", 0))
    assert line.tap.offer(chunk("a", 2))
    line.tap.finish("a", "stop")
    messages, records = line.collect()
    assert [type(m).__name__ for m in messages] == ["Chunk", "Chunk", "Finish"]
    assert [r.token_ids.tolist() for r in records] == [[0, 1, 2, 3]]
    assert line.owner.counters().records_dropped == 0
    assert line.tap.bytes_sent == 2 * chunk("a", 0).nbytes


def test_a_request_that_lost_a_chunk_loses_its_record_and_is_counted_once(line: Line) -> None:
    assert line.tap.offer(chunk("a", 0))
    start = 0
    while line.tap.offer(chunk("b", start)):
        start += 2
    assert not line.tap.offer(chunk("b", start + 2))
    assert line.owner.counters().records_dropped == 1
    _, records = line.collect()
    assert records == []
    # There is room again, but b stays poisoned, and its end is told as "dropped" only.
    assert not line.tap.offer(chunk("b", start + 4))
    line.tap.finish("b", "stop")
    line.tap.finish("a", "stop")
    _, records = line.collect()
    assert [r.request_id for r in records] == ["a"]
    assert line.assembler.counts.discarded == 1
    assert line.assembler.open_requests == 0
    # The same id may be used again once it has ended.
    assert line.tap.offer(chunk("b", 0))


def test_finishes_wait_for_room_and_waiting_is_not_dropping(line: Line) -> None:
    assert line.tap.offer(chunk("a", 0))
    while line.writer.try_write([b"x" * 64]):
        pass
    dropped = line.owner.counters().dropped
    while line.writer.has_room([b""]):
        line.writer.try_write([b""])
    line.tap.finish("a", "stop")
    line.tap.flush()
    assert line.tap.has_unsent
    assert line.owner.counters().dropped == dropped
    while line.reader.read() is not None:
        pass
    line.tap.flush()
    assert not line.tap.has_unsent
    messages, _ = line.collect()
    assert messages == [Finish("a", "stop")]


def test_bookkeeping_is_bounded(line: Line) -> None:
    while line.writer.has_room([b""]):
        line.writer.try_write([b""])
    for index in range(8192 + 50):
        assert not line.tap.offer(chunk(str(index), 0))
    assert line.owner.counters().records_dropped == 8192 + 50
    assert len(line.tap._dropped) == len(line.tap._unsent) == 8192


def test_a_withdrawn_request_is_forgotten_and_counted_apart(line: Line) -> None:
    assert line.tap.offer(chunk("a", 0))
    assert line.tap.offer(chunk("b", 0))
    line.tap.withdraw("a")
    line.tap.finish("b", "stop")
    _, records = line.collect()
    assert [r.request_id for r in records] == ["b"]
    assert line.assembler.open_requests == 0
    counters = line.owner.counters()
    assert (counters.records_dropped, counters.records_withdrawn) == (0, 1)


def test_a_lost_copy_costs_the_record_once(line: Line) -> None:
    """Rows that never reached the writer (too many copies under way on a GPU)."""
    assert line.tap.offer(chunk("a", 0))
    line.tap.drop("a")
    line.tap.drop("a")
    assert not line.tap.offer(chunk("a", 4))
    line.tap.withdraw("a")
    _, records = line.collect()
    assert records == []
    counters = line.owner.counters()
    assert (counters.records_dropped, counters.records_withdrawn) == (1, 0)
    assert line.tap.offer(chunk("a", 0))
