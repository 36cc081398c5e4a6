"""The assembler against a slow oracle, and each of its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftloop.capture.assembler import Assembler
from draftloop.capture.wire import Chunk, Finish
from draftloop.core.records import CaptureRecord, VerifyStep

Plain = tuple[str, int, list[int], list[float]]


def make_chunk(request_id: str, start: int, tokens: list[int], tag: float = 0.0, verify: bool = False) -> Chunk:
    """A chunk whose row t holds `tag` + t / 1000 in every state, so that a record tells where its rows came from."""
    rows = len(tokens)
    column = np.float32(tag) + np.arange(rows, dtype=np.float32) / np.float32(1000)
    states: NDArray[np.float32] = np.repeat(column[:, None], 3, axis=1)
    step = VerifyStep(start, np.zeros(1, np.int32), np.zeros(1, np.int32), 0, f"v{int(tag)}") if verify else None
    return Chunk(request_id, "chat", start, 4, np.array(tokens, np.int32), states, states[:, :2], step)


def plain(record: CaptureRecord) -> Plain:
    np.testing.assert_array_equal(record.fused[:, 0], record.last_hidden[:, 0])
    return record.request_id, record.start, record.token_ids.tolist(), record.fused[:, 0].tolist()


@dataclass
class Oracle:
    """Position by position, in plain dictionaries."""

    spans: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)

    def chunk(self, chunk: Chunk) -> list[Plain]:
        rows = {
            chunk.start + i: (int(chunk.token_ids[i]), float(chunk.fused[i, 0])) for i in range(len(chunk.token_ids))
        }
        span = self.spans.get(chunk.request_id, {})
        done: list[Plain] = []
        if span and (min(rows) > max(span) + 1 or max(rows) + 1 < min(span)):
            done = self.finish(chunk.request_id)
            span = {}
        for position in sorted(rows):
            if position in span and span[position][0] != rows[position][0]:
                span = {p: row for p, row in span.items() if p < position}
            span.setdefault(position, rows[position])
        self.spans[chunk.request_id] = span
        return done

    def finish(self, request_id: str) -> list[Plain]:
        span = self.spans.pop(request_id, {})
        if len(span) < 2:
            return []
        order = sorted(span)
        return [(request_id, order[0], [span[p][0] for p in order], [span[p][1] for p in order])]


_steps = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.one_of(
            st.sampled_from(["stop", "dropped"]),
            # (jump from the end of what was sent last, rows, whether the text changes)
            st.tuples(st.sampled_from([0, 0, 0, 0, 1, 3, -1, -2, -4, -7, -12]), st.integers(1, 6), st.booleans()),
        ),
    ),
    max_size=60,
)


@given(_steps)
@settings(max_examples=300, deadline=None)
def test_matches_the_oracle(steps: list[tuple[str, str | tuple[int, int, bool]]]) -> None:
    assembler, oracle = Assembler(), Oracle()
    at = {"a": 0, "b": 0}
    text = {"a": 0, "b": 0}
    for tag, (request_id, step) in enumerate(steps):
        if isinstance(step, str):
            got = assembler.feed(Finish(request_id, step))
            expected = oracle.finish(request_id)
            expected = [] if step == "dropped" else expected
            at[request_id] = 0
        else:
            jump, rows, changes = step
            start = max(0, at[request_id] + jump)
            # Rarely another text: a retraction nearly always re-computes the same tokens.
            text[request_id] += int(changes and jump < -3)
            at[request_id] = start + rows
            tokens = [position * 10 + text[request_id] // 2 for position in range(start, start + rows)]
            chunk = make_chunk(request_id, start, tokens, float(tag))
            got = assembler.feed(chunk)
            expected = oracle.chunk(chunk)
        assert [plain(record) for record in got] == expected
    held = {request_id: oracle.finish(request_id) for request_id in list(oracle.spans)}
    drained = [plain(record) for record in assembler.drain()]
    assert sorted(drained) == sorted(record for records in held.values() for record in records)
    assert assembler.open_bytes == assembler.open_requests == 0


def test_chunked_prefill_and_decode_steps_make_one_record() -> None:
    assembler = Assembler()
    assert assembler.feed(make_chunk("r", 0, [0, 1, 2])) == []
    assert assembler.feed(make_chunk("r", 3, [3, 4])) == []
    assert assembler.feed(make_chunk("r", 5, [5, 6], 1.0, verify=True)) == []
    assert assembler.feed(make_chunk("r", 7, [7], 2.0, verify=True)) == []
    (record,) = assembler.feed(Finish("r", "length"))
    assert record.token_ids.tolist() == list(range(8))
    assert (record.start, record.prompt_len, record.domain, record.drafter_version) == (0, 4, "chat", "v2")
    assert [step.position for step in record.verify_steps] == [5, 7]
    assert record.fused.flags.writeable


def test_retraction_keeps_verifications_and_a_changed_text_cuts_them() -> None:
    assembler = Assembler()
    assembler.feed(make_chunk("r", 2, [2, 3]))
    assembler.feed(make_chunk("r", 4, [4, 5], 1.0, verify=True))
    assembler.feed(make_chunk("r", 6, [6, 7], 2.0, verify=True))
    assembler.feed(make_chunk("r", 0, [0, 1, 2, 3, 4, 5, 60], 3.0))
    (record,) = assembler.feed(Finish("r", "stop"))
    assert record.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 60]
    assert [step.position for step in record.verify_steps] == [4]


def test_bfloat16_bits_become_floats() -> None:
    bits = np.full((2, 4), 0x3FC0, np.uint16)
    assembler = Assembler()
    assembler.feed(Chunk("r", "chat", 0, 1, np.arange(2, dtype=np.int32), bits, bits))
    (record,) = assembler.feed(Finish("r", "stop"))
    assert record.fused.dtype == np.float32
    assert (record.fused == 1.5).all()


def test_states_of_another_kind_open_another_span() -> None:
    assembler = Assembler()
    assembler.feed(make_chunk("r", 0, [0, 1]))
    half = np.zeros((2, 3), np.float16)
    (first,) = assembler.feed(Chunk("r", "chat", 2, 4, np.array([2, 3], np.int32), half, half[:, :2]))
    (second,) = assembler.feed(Finish("r", "stop"))
    assert (first.start, second.start) == (0, 2)


def test_nothing_useful_is_discarded_and_counted() -> None:
    assembler = Assembler()
    assembler.feed(make_chunk("short", 0, [1]))
    assert assembler.feed(Finish("short", "abort")) == []
    assert assembler.feed(Finish("unknown", "abort")) == []
    assembler.feed(make_chunk("lost", 0, [1, 2, 3]))
    assert assembler.feed(Finish("lost", "dropped")) == []
    assembler.feed(make_chunk("cut", 0, [1, 2, 3]))
    assert len(assembler.feed(Finish("cut", "abort"))) == 1
    counts = assembler.counts
    assert (counts.too_short, counts.discarded, counts.records, counts.finishes, counts.chunks) == (1, 1, 1, 4, 3)


def test_idle_requests_time_out_with_what_they_have() -> None:
    now = [0.0]
    assembler = Assembler(idle_seconds=10.0, clock=lambda: now[0])
    assembler.feed(make_chunk("old", 0, [0, 1]))
    now[0] = 6.0
    assembler.feed(make_chunk("new", 0, [0, 1]))
    now[0] = 10.5
    (record,) = assembler.expire()
    assert record.request_id == "old"
    now[0] = 20.0
    (record,) = assembler.feed(make_chunk("newest", 0, [0, 1]))
    assert record.request_id == "new"
    assert assembler.counts.timed_out == 2


def test_open_requests_and_bytes_are_bounded() -> None:
    by_count = Assembler(max_requests=3)
    closed = [r.request_id for i in range(5) for r in by_count.feed(make_chunk(str(i), 0, [0, 1]))]
    assert closed == ["0", "1"]
    assert (by_count.counts.evicted, by_count.open_requests) == (2, 3)
    one = make_chunk("x", 0, [0, 1]).nbytes
    by_bytes = Assembler(max_bytes=2 * one)
    for index in range(6):
        by_bytes.feed(make_chunk(str(index), 0, [0, 1]))
        by_bytes.feed(make_chunk(str(index), 2, [2]))
        assert by_bytes.open_bytes <= 2 * one
