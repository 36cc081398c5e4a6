"""The replay buffer: bounds, quota, balance of counts, recency, replay share, held-out share, and its journal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from records import BYTES_PER_TOKEN, make_record

from draftloop.capture.buffer import ReplayBuffer, is_held_out
from draftloop.capture.journal import Journal


@given(
    adds=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=80),
    max_tokens=st.integers(20, 300),
    quota=st.floats(0.1, 1.0),
    fraction=st.floats(0.05, 0.45),
)
@settings(max_examples=100, deadline=None)
def test_bounds_balance_and_quota(adds: list[tuple[str, int]], max_tokens: int, quota: float, fraction: float) -> None:
    max_bytes = max_tokens * BYTES_PER_TOKEN
    buffer = ReplayBuffer(max_bytes, quota, fraction, 0.5, seed=1)
    training_bytes = max_bytes - int(max_bytes * fraction)
    before: dict[str, int] = {}
    for index, (domain, tokens) in enumerate(adds):
        record = make_record(index, domain, tokens)
        buffer.add([record])
        counts = buffer.counts
        assert counts.captured == index + 1
        assert counts.balanced
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
    assert len(sampled) == buffer.counts.pending == len({k.record.request_id for k in sampled})
    assert not any(is_held_out(k.record.request_id, fraction) for k in sampled)


def test_a_flood_of_one_domain_leaves_the_other_its_share() -> None:
    buffer = ReplayBuffer(400 * BYTES_PER_TOKEN, 0.7, 0.05, 0.5, seed=0)
    for index in range(60):
        buffer.add([make_record(index, "code")])
    assert set(buffer.domain_bytes()) == {"code"}
    for index in range(60, 2000):
        buffer.add([make_record(index, "chat" if index % 10 else "code")])
    held = buffer.domain_bytes()
    total = sum(held.values())
    assert 0.5 < held["chat"] / total <= 0.75
    for index in range(2000, 4000):
        buffer.add([make_record(index, "chat")])
    assert buffer.domain_bytes()["code"] / total >= 0.25


def test_same_seed_same_buffer_and_same_batches() -> None:
    def run(seed: int) -> list[list[str]]:
        buffer = ReplayBuffer(300 * BYTES_PER_TOKEN, 0.7, 0.1, 0.5, seed)
        batches = []
        for index in range(120):
            buffer.add([make_record(index, "ab"[index % 2])])
            batches.append([k.record.request_id for k in buffer.sample(50)])
        return batches

    assert run(3) == run(3) != run(4)


def test_recent_records_stay_and_are_drawn_more_often() -> None:
    buffer = ReplayBuffer(1000 * BYTES_PER_TOKEN, 1.0, 0.1, 0.5, seed=0)
    for index in range(400):
        buffer.add([make_record(index)])
    ages = [k.record.start for k in buffer.sample(10**9)]
    assert np.mean(ages) > 250
    drawn: Counter[bool] = Counter()
    middle = float(np.median(ages))
    for _ in range(300):
        drawn.update(k.record.start > middle for k in buffer.sample(100))
    assert drawn[True] > 1.5 * drawn[False]


def test_sample_stops_at_the_tokens_asked_for() -> None:
    buffer = ReplayBuffer(1 << 20, 1.0, 0.1, 0.5, seed=0)
    assert buffer.sample(10) == []
    assert buffer.held_out(10) == []
    for index in range(100):
        buffer.add([make_record(index, tokens=7)])
    assert sum(k.record.num_tokens for k in buffer.sample(50)) == 56


def test_held_out_share_is_stable_and_of_the_size_asked_for() -> None:
    assert [is_held_out(f"chat--{i}", 0.5) for i in range(8)] == [False, False, True, False, False, True, False, True]
    share = sum(is_held_out(f"chat--{i}", 0.1) for i in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_held_out_window_is_recent_and_balanced() -> None:
    buffer = ReplayBuffer(1 << 20, 0.7, 0.3, 0.5, seed=0)
    for index in range(600):
        buffer.add([make_record(index, "code" if index % 5 == 0 else "chat")])
    chosen = buffer.held_out(200)
    by_domain = Counter(r.domain for r in chosen)
    assert by_domain == {"chat": 10, "code": 10}
    newest = [i for i in range(600) if is_held_out(str(i), 0.3) and i % 5][-10:]
    assert sorted(r.start for r in chosen if r.domain == "chat") == newest
    assert len(buffer.held_out(1)) == 1


def test_a_record_larger_than_its_side_is_dropped() -> None:
    buffer = ReplayBuffer(100 * BYTES_PER_TOKEN, 0.7, 0.1, 0.5, seed=0)
    index = next(i for i in range(100) if not is_held_out(str(i), 0.1))
    buffer.add([make_record(index)])
    buffer.add([make_record(index, tokens=200)])
    counts = buffer.counts
    assert (counts.pending, counts.dropped, counts.expired, counts.captured) == (1, 1, 0, 2)


def test_replay_share_is_kept_while_there_is_enough_of_both() -> None:
    buffer = ReplayBuffer(1 << 20, 1.0, 0.1, 0.3, seed=0)
    buffer.add([make_record(i) for i in range(100)])
    first = buffer.sample(200)
    assert not any(kept.trained for kept in first)
    buffer.mark_trained(first)
    assert buffer.counts.trained == 20
    both = buffer.sample(200)
    assert sum(kept.trained for kept in both) == 6
    assert len(both) == 20
    buffer.mark_trained(buffer.sample(10**9))
    assert buffer.counts.pending == 0
    assert len(buffer.sample(200)) == 20, "without new records the batch is replayed ones"


@given(tokens=st.integers(1, 60), batch=st.integers(1, 100), share=st.floats(0.0, 0.9), seed=st.integers(0, 9))
def test_every_record_is_trained_on_however_long_it_is(tokens: int, batch: int, share: float, seed: int) -> None:
    """A batch that one replayed record fills must not be the rule: the first record would be the only one ever."""
    buffer = ReplayBuffer(1 << 20, 1.0, 0.1, share, seed)
    buffer.add([make_record(i, tokens=tokens) for i in range(60)])
    kept, drawn, replayed = len(buffer.entries), 0, 0
    while buffer.counts.pending:
        chosen = buffer.sample(batch)
        drawn += len(chosen)
        replayed += sum(one.trained for one in chosen)
        buffer.mark_trained(chosen)
        assert drawn - replayed <= kept
        # Batches of many records end with replayed ones once no other is left.
        most = share / (1.0 - share) * (drawn - replayed) + 1.0 / (1.0 - share) + batch / tokens + 1
        assert replayed <= most


def test_a_delivery_that_came_before_is_passed_over() -> None:
    buffer = ReplayBuffer(1 << 20, 1.0, 0.1, 0.5, seed=0)
    for sequence in (1, 2, 2, 1, 3):
        buffer.add([make_record(sequence)], dropped=1, source="worker", sequence=sequence)
    buffer.add([make_record(9)], source="another worker", sequence=1)
    buffer.add([make_record(10)])
    counts = buffer.counts
    assert (counts.captured, counts.dropped, counts.balanced) == (8, 3, True)


def test_old_records_expire_on_both_sides_and_deleted_ones_are_counted_apart() -> None:
    buffer = ReplayBuffer(1 << 20, 1.0, 0.3, 0.5, seed=0)
    for i in range(100):
        buffer.add([make_record(i, "ab"[i % 2])], now=float(i))
    buffer.mark_trained(buffer.entries[:20])
    assert buffer.expire(50.0) == 50
    counts = buffer.counts
    assert (counts.trained, counts.expired, counts.kept) == (20, 30, 50)
    assert buffer.delete(lambda kept: kept.record.domain == "a") == 25
    counts = buffer.counts
    assert (counts.deleted, counts.kept, counts.balanced) == (25, 25, True)
    assert set(buffer.domain_bytes()) == {"b"}


def small_buffer(folder: Path, tokens: int, holdout_fraction: float = 0.2) -> ReplayBuffer:
    journal = Journal(folder, 200 * BYTES_PER_TOKEN)
    return ReplayBuffer(tokens * BYTES_PER_TOKEN, 0.7, holdout_fraction, 0.5, seed=0, journal=journal)


def filled(folder: Path) -> ReplayBuffer:
    buffer = small_buffer(folder, 400)
    for index in range(60):
        buffer.add([make_record(index, "ab"[index % 2], steps=index % 3)])
    buffer.mark_trained(buffer.sample(100))
    return buffer


def test_a_buffer_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    buffer.close()
    again = small_buffer(tmp_path, 400)
    assert again.counts == buffer.counts
    assert again.counts.balanced
    assert again.counts.expired > 0
    for mine, theirs in zip(buffer.entries, again.entries, strict=True):
        assert (mine.id, mine.time, mine.trained, mine.held_out) == (
            theirs.id, theirs.time, theirs.trained, theirs.held_out,
        )  # fmt: skip
        one, other = mine.record, theirs.record
        assert (one.request_id, one.domain, one.tenant, one.start) == (
            other.request_id, other.domain, other.tenant, other.start,
        )  # fmt: skip
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.fused, other.fused)
        np.testing.assert_array_equal(one.last_hidden, other.last_hidden)
        assert [s.accepted for s in one.verify_steps] == [s.accepted for s in other.verify_steps]
        assert one.drafter_version == other.drafter_version


def test_held_out_stays_held_out_when_the_share_changes(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    buffer.close()
    again = small_buffer(tmp_path, 4000, holdout_fraction=0.05)
    assert {r.request_id for r in again.held_out(10**9)} == {r.request_id for r in buffer.held_out(10**9)}


def test_a_smaller_buffer_keeps_what_fits(tmp_path: Path) -> None:
    filled(tmp_path).close()
    small = small_buffer(tmp_path, 60)
    assert small.counts.captured == 60
    assert small.counts.balanced
    assert small.nbytes <= 60 * BYTES_PER_TOKEN
    small.close()
    assert small_buffer(tmp_path, 60).counts == small.counts
