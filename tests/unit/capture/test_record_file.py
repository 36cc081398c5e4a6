"""What a verification step refused, and whose request it was, come back from a file of records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftloop.capture.record_file import TimedRecord, read_records, write_records
from draftloop.core.records import CaptureRecord, VerifyStep


def step(number: int) -> VerifyStep:
    """Arrays of different lengths in each step, empty ones among them."""
    return VerifyStep(
        position=3 + number,
        draft_tokens=np.arange(number, number + 4, dtype=np.int32),
        parents=np.array([0, 1, 0, 2], np.int32),
        accepted=number % 2,
        drafter_version=f"v{number}",
        rejected=np.arange(number, dtype=np.int32),
        target_ids=np.arange(5 - number, dtype=np.int32),
        target_logits=np.array([3.5, 2, 0, -4, -np.inf], np.float32)[number:],
    )


def test_steps_and_labels_come_back(tmp_path: Path) -> None:
    states = np.random.default_rng(0).random((6, 8)).astype(np.float32)
    tokens = np.arange(6, dtype=np.int32)
    steps = tuple(step(number) for number in range(5))
    records = [
        CaptureRecord("r1", "code", 2, 3, tokens, states, states[:, :2], steps, "acme"),
        CaptureRecord("r2", "chat", 0, 3, tokens, states, states[:, :2]),
    ]
    write_records(tmp_path / "records", [TimedRecord(records[0], 5.0, True), TimedRecord(records[1], 6.0, False)])
    kept, other = read_records(tmp_path / "records")
    assert (kept.time, kept.held_out, other.held_out) == (5.0, True, False)
    first, second = kept.record, other.record
    assert (first.tenant, first.domain, second.tenant) == ("acme", "code", "default")
    assert second.verify_steps == ()
    for mine, theirs in zip(steps, first.verify_steps, strict=True):
        assert (mine.position, mine.accepted, mine.drafter_version) == (
            theirs.position, theirs.accepted, theirs.drafter_version,
        )  # fmt: skip
        for sent, got in (
            (mine.draft_tokens, theirs.draft_tokens),
            (mine.parents, theirs.parents),
            (mine.rejected, theirs.rejected),
            (mine.target_ids, theirs.target_ids),
            (mine.target_logits, theirs.target_logits),
        ):
            assert sent.dtype == got.dtype
            np.testing.assert_array_equal(sent, got)
