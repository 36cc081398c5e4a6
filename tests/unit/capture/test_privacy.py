"""Redactors by name, the example redactor, demands to be forgotten, and who taught a version."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import make_record

from draftloop.capture.mask_spans import mask_spans
from draftloop.capture.privacy import (
    DELETIONS_FILE,
    Deletions,
    PrivacyError,
    Redaction,
    Subjects,
    load_redactor,
    subject_hash,
    subjects_path,
)
from draftloop.core.errors import ConfigError
from draftloop.core.records import CaptureRecord, VerifyStep

MASK_SPANS = "draftloop.capture.mask_spans:mask_spans"


# --- redactors


def test_without_a_redactor_a_record_passes_unchanged() -> None:
    record = make_record(1)
    assert load_redactor(None, {})(record) is record


def test_a_redactor_is_found_by_name_and_gets_its_options() -> None:
    redact = load_redactor(MASK_SPANS, {"spans": [[3, 4]], "mask": 7})
    redacted = redact(make_record(1))
    assert redacted is not None
    assert redacted.token_ids.tolist() == [0, 1, 2, 7, 7, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mask_spans", {}, "must look like module:function"),
        (":mask_spans", {}, "must look like module:function"),
        ("no.such.module:hook", {}, "cannot import no.such.module: No module named 'no'"),
        ("draftloop.capture.mask_spans:missing", {}, "draftloop.capture.mask_spans has no function missing"),
        ("draftloop.capture.privacy:DELETIONS_FILE", {}, "has no function DELETIONS_FILE"),
        (MASK_SPANS, {}, "cannot be called with a record and its options: missing a required"),
        (MASK_SPANS, {"spans": [], "mask": 0, "extra": 1}, "got an unexpected keyword argument 'extra'"),
    ],
)
def test_a_bad_redactor_is_one_clear_line(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_redactor(name, options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("privacy.redactor")


def test_a_redactor_must_return_a_record_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_redactors")
    module.__dict__.update(nothing=lambda record: None, text=lambda record: "secret", fails=lambda record: 1 / 0)
    monkeypatch.setitem(sys.modules, "my_redactors", module)
    assert load_redactor("my_redactors:nothing", {})(make_record(1)) is None
    with pytest.raises(PrivacyError, match="my_redactors:text returned a str, not a record or None"):
        load_redactor("my_redactors:text", {})(make_record(1))
    with pytest.raises(PrivacyError, match="my_redactors:fails failed on a record: ZeroDivisionError"):
        load_redactor("my_redactors:fails", {})(make_record(1))


def test_what_a_redactor_withholds_is_counted_and_where_it_fails_nothing_leaves() -> None:
    def redact(record: CaptureRecord) -> CaptureRecord | None:
        if record.tenant == "odd":
            raise PrivacyError("no idea")
        return None if record.domain == "code" else record

    door = Redaction(redact)
    assert [record.domain for record in door.let_out([make_record(i, ["chat", "code"][i % 2]) for i in range(5)])] == [
        "chat"
    ] * 3
    assert door.withheld == 2
    with pytest.raises(PrivacyError, match="no idea"):
        door.let_out([make_record(1), make_record(2, tenant="odd"), make_record(3)])
    assert door.withheld == 5


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    spans=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_masked_spans_against_a_search_by_hand(tokens: list[int], spans: list[list[int]]) -> None:
    size = len(tokens)
    rows = np.arange(1, size + 1, dtype=np.float32)[:, None]
    step = VerifyStep(102, np.zeros(2, np.int32), np.zeros(2, np.int32), 1, "v1")
    record = CaptureRecord("a", "chat", 100, 2, np.array(tokens, np.int32), rows, rows, (step,))
    hidden = {
        begin + i
        for span in spans
        for begin in range(size - len(span) + 1)
        if tokens[begin : begin + len(span)] == span
        for i in range(len(span))
    }
    blank = hidden | {row - 1 for row in hidden}
    masked = mask_spans(record, spans=spans, mask=9)
    assert masked.token_ids.tolist() == [9 if i in hidden else token for i, token in enumerate(tokens)]
    expected = [0.0 if i in blank else i + 1.0 for i in range(size)]
    assert masked.fused[:, 0].tolist() == expected == masked.last_hidden[:, 0].tolist()
    assert (masked.token_ids.dtype, masked.fused.dtype) == (np.int32, np.float32)
    # The tree's root is row 2 and it is at most two tokens deep.
    assert len(masked.verify_steps) == (0 if hidden & {2, 3, 4} else 1)
    assert record.token_ids.tolist() == tokens


# --- demands to be forgotten


def test_a_deleted_request_is_covered_for_good_and_a_tenant_up_to_now(tmp_path: Path) -> None:
    deletions = Deletions(tmp_path)
    assert not deletions.refresh()
    Deletions(tmp_path).demand("request", "5")
    assert deletions.refresh()
    assert not deletions.refresh()
    assert deletions.cover(make_record(5), received=1e12)
    assert not deletions.cover(make_record(6), received=0.0)
    Deletions(tmp_path).demand("tenant", "acme")
    assert deletions.refresh() == {subject_hash("tenant", "acme")}
    Deletions(tmp_path).demand("tenant", "acme")
    assert deletions.refresh() == {subject_hash("tenant", "acme")}, "asked again, later"
    late, early = 1e12, 1e9
    assert deletions.cover(make_record(6, tenant="acme"), early)
    assert not deletions.cover(make_record(6, tenant="acme"), late)
    assert not deletions.cover(make_record(6, tenant="other"), early)


def test_a_request_named_like_a_tenant_is_not_that_tenant(tmp_path: Path) -> None:
    deletions = Deletions(tmp_path)
    deletions.demand("request", "acme")
    deletions.refresh()
    assert not deletions.cover(make_record(1, tenant="acme"), 0.0)


def test_no_name_is_written_down_and_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    Deletions(tmp_path).demand("request", "a-name-to-forget")
    path = tmp_path / DELETIONS_FILE
    assert "a-name-to-forget" not in path.read_text()
    path.write_text(path.read_text().rstrip("\n")[:-4])
    Deletions(tmp_path).demand("request", "another")
    deletions = Deletions(tmp_path)
    assert deletions.refresh() == {subject_hash("request", "another")}


def test_a_demand_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrivacyError, match="nothing was deleted"):
        Deletions(tmp_path / "file").demand("request", "1")


# --- who taught a version


def test_subjects_come_back_and_hold_no_names(tmp_path: Path) -> None:
    subjects = Subjects()
    for i in range(50):
        subjects.add(replace(make_record(i), tenant=f"tenant-{i % 3}"))
    subjects.save(tmp_path / "checkpoints" / "v1")
    path = subjects_path(tmp_path / "checkpoints" / "v1")
    assert path.stat().st_size < 8 * 53 + 100
    again = Subjects.load(tmp_path / "checkpoints" / "v1")
    assert len(again) == 53
    assert subject_hash("request", "7") in again
    assert subject_hash("tenant", "tenant-2") in again
    assert subject_hash("tenant", "7") not in again
    assert b"tenant-2" not in path.read_bytes()
    assert len(Subjects.load(tmp_path / "checkpoints" / "v0")) == 0


def test_damaged_subjects_are_one_clear_line(tmp_path: Path) -> None:
    Subjects([1, 2**64 - 1]).save(tmp_path / "v1")
    path = subjects_path(tmp_path / "v1")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(PrivacyError, match="is damaged"):
        Subjects.load(tmp_path / "v1")
