"""The replay buffer: bounds, quota, balance of counts, recency, held-out share, and its file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.capture.buffer import ReplayBuffer, is_held_out
from draftloop.capture.record_file import RecordFileError
from draftloop.core.records import CaptureRecord, VerifyStep

_BYTES_PER_TOKEN = 4 + 8 + 4


def make_record(index: int, domain: str = "chat", tokens: int = 10, steps: int = 0) -> CaptureRecord:
    """A record of `tokens` * 16 bytes whose request id is its index."""
    verify = tuple(VerifyStep(i, np.arange(3, dtype=np.int32), np.zeros(3, np.int32), i, f"v{i}") for i in range(steps))
    return CaptureRecord(
        request_id=str(index),
        domain=domain,
        start=index,
        prompt_len=2,
        token_ids=np.arange(tokens, dtype=np.int32),
        fused=np.full((tokens, 2), index, np.float32),
        last_hidden=np.full((tokens, 1), index, np.float32),
        verify_steps=verify,
    )


@given(
    adds=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=80),
    max_tokens=st.integers(20, 300),
    quota=st.floats(0.1, 1.0),
    fraction=st.floats(0.05, 0.45),
)
@settings(max_examples=100, deadline=None)
def test_bounds_balance_and_quota(adds: list[tuple[str, int]], max_tokens: int, quota: float, fraction: float) -> None:
    max_bytes = max_tokens * _BYTES_PER_TOKEN
    buffer = ReplayBuffer(max_bytes, quota, fraction, seed=1)
    training_bytes = max_bytes - int(max_bytes * fraction)
    before: dict[str, int] = {}
    for index, (domain, tokens) in enumerate(adds):
        record = make_record(index, domain, tokens)
        buffer.add(record)
        counts = buffer.counts
        assert counts.captured == index + 1 == counts.training + counts.held_out + counts.expired
        assert buffer.nbytes <= max_bytes
        after = buffer.domain_bytes()
        assert sum(after.values()) <= training_bytes
        # While a domain over its quota had something to give, no domain within its quota lost anything.
        size = {domain: record.nbytes}
        over = {name for name, held in after.items() if held > max(quota * training_bytes, size.get(name, 0))}
        for name, held in before.items():
            if over - {name} and after.get(name, 0) < held:
                assert held + size.get(name, 0) > quota * training_bytes
        before = after
    held_out = buffer.held_out(10**9)
    assert all(is_held_out(r.request_id, fraction) for r in held_out)
    sampled = buffer.sample(10**9)
    assert len(sampled) == buffer.counts.training == len({r.request_id for r in sampled})
    assert not any(is_held_out(r.request_id, fraction) for r in sampled)


def test_a_flood_of_one_domain_leaves_the_other_its_share() -> None:
    buffer = ReplayBuffer(400 * _BYTES_PER_TOKEN, 0.7, 0.05, seed=0)
    for index in range(60):
        buffer.add(make_record(index, "code"))
    assert set(buffer.domain_bytes()) == {"code"}
    for index in range(60, 2000):
        buffer.add(make_record(index, "chat" if index % 10 else "code"))
    held = buffer.domain_bytes()
    total = sum(held.values())
    assert 0.5 < held["chat"] / total <= 0.75
    for index in range(2000, 4000):
        buffer.add(make_record(index, "chat"))
    assert buffer.domain_bytes()["code"] / total >= 0.25


def test_same_seed_same_buffer_and_same_batches() -> None:
    def run(seed: int) -> list[list[str]]:
        buffer = ReplayBuffer(300 * _BYTES_PER_TOKEN, 0.7, 0.1, seed)
        batches = []
        for index in range(120):
            buffer.add(make_record(index, "ab"[index % 2]))
            batches.append([r.request_id for r in buffer.sample(50)])
        return batches

    assert run(3) == run(3) != run(4)


def test_recent_records_stay_and_are_drawn_more_often() -> None:
    buffer = ReplayBuffer(1000 * _BYTES_PER_TOKEN, 1.0, 0.1, seed=0)
    for index in range(400):
        buffer.add(make_record(index))
    ages = [r.start for r in buffer.sample(10**9)]
    assert np.mean(ages) > 250
    drawn: Counter[bool] = Counter()
    middle = float(np.median(ages))
    for _ in range(300):
        drawn.update(r.start > middle for r in buffer.sample(100))
    assert drawn[True] > 1.5 * drawn[False]


def test_sample_stops_at_the_tokens_asked_for() -> None:
    buffer = ReplayBuffer(1 << 20, 1.0, 0.1, seed=0)
    assert buffer.sample(10) == []
    assert buffer.held_out(10) == []
    for index in range(100):
        buffer.add(make_record(index, tokens=7))
    assert sum(r.num_tokens for r in buffer.sample(50)) == 56


def test_held_out_share_is_stable_and_of_the_size_asked_for() -> None:
    assert [is_held_out(f"chat--{i}", 0.5) for i in range(8)] == [False, False, True, False, False, True, False, True]
    share = sum(is_held_out(f"chat--{i}", 0.1) for i in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_held_out_window_is_recent_and_balanced() -> None:
    buffer = ReplayBuffer(1 << 20, 0.7, 0.3, seed=0)
    for index in range(600):
        buffer.add(make_record(index, "code" if index % 5 == 0 else "chat"))
    chosen = buffer.held_out(200)
    by_domain = Counter(r.domain for r in chosen)
    assert by_domain == {"chat": 10, "code": 10}
    newest = [i for i in range(600) if is_held_out(str(i), 0.3) and i % 5][-10:]
    assert sorted(r.start for r in chosen if r.domain == "chat") == newest
    assert len(buffer.held_out(1)) == 1


def test_a_record_larger_than_its_side_expires_alone() -> None:
    buffer = ReplayBuffer(100 * _BYTES_PER_TOKEN, 0.7, 0.1, seed=0)
    index = next(i for i in range(100) if not is_held_out(str(i), 0.1))
    buffer.add(make_record(index))
    buffer.add(make_record(index, tokens=200))
    assert buffer.counts.training == 1
    assert buffer.counts.expired == 1


def saved(path: Path) -> ReplayBuffer:
    buffer = ReplayBuffer(200 * _BYTES_PER_TOKEN, 0.7, 0.2, seed=0)
    for index in range(60):
        buffer.add(make_record(index, "ab"[index % 2], steps=index % 3))
    buffer.save(path)
    return buffer


def test_saved_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "records.bin"
    buffer = saved(path)
    again = ReplayBuffer(200 * _BYTES_PER_TOKEN, 0.7, 0.2, seed=5)
    again.load(path)
    assert again.counts == buffer.counts
    assert [p.name for p in tmp_path.iterdir()] == ["records.bin"]
    mine = {r.request_id: r for r in buffer.sample(10**9) + buffer.held_out(10**9)}
    theirs = {r.request_id: r for r in again.sample(10**9) + again.held_out(10**9)}
    assert mine.keys() == theirs.keys()
    for request_id, record in mine.items():
        other = theirs[request_id]
        assert (record.domain, record.start, record.prompt_len) == (other.domain, other.start, other.prompt_len)
        np.testing.assert_array_equal(record.token_ids, other.token_ids)
        np.testing.assert_array_equal(record.fused, other.fused)
        np.testing.assert_array_equal(record.last_hidden, other.last_hidden)
        assert [s.accepted for s in record.verify_steps] == [s.accepted for s in other.verify_steps]
        assert record.drafter_version == other.drafter_version


def test_held_out_stays_held_out_when_the_share_changes(tmp_path: Path) -> None:
    buffer = saved(tmp_path / "records.bin")
    again = ReplayBuffer(1 << 20, 0.7, 0.05, seed=0)
    again.load(tmp_path / "records.bin")
    assert {r.request_id for r in again.held_out(10**9)} == {r.request_id for r in buffer.held_out(10**9)}


def test_a_smaller_buffer_keeps_what_fits(tmp_path: Path) -> None:
    saved(tmp_path / "records.bin")
    small = ReplayBuffer(60 * _BYTES_PER_TOKEN, 0.7, 0.2, seed=0)
    small.load(tmp_path / "records.bin")
    counts = small.counts
    assert counts.captured == 60 == counts.training + counts.held_out + counts.expired
    assert small.nbytes <= 60 * _BYTES_PER_TOKEN


def test_every_truncation_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "records.bin"
    buffer = ReplayBuffer(1 << 20, 0.7, 0.2, seed=0)
    for index in range(3):
        buffer.add(make_record(index, tokens=3, steps=1))
    buffer.save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 5):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordFileError) as caught:
            buffer.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert buffer.counts.captured == 3
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(RecordFileError, match=r"truncated or damaged after record 0 \(checksum mismatch\)"):
        buffer.load(path)
    with pytest.raises(RecordFileError, match="cannot read records"):
        buffer.load(tmp_path / "absent")
    with pytest.raises(RecordFileError, match="cannot write records"):
        buffer.save(tmp_path / "no folder" / "records.bin")
