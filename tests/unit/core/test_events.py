"""draftloop.core.events: what was said is kept, a torn line is not fatal."""

from __future__ import annotations

from pathlib import Path

from draftloop.core.events import EventLog, read_events


def test_events_read_back_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run" / "events.jsonl")
    sent = [log.emit("phase", t_s=0.0, phase="start"), log.emit("swap", t_s=3.5, version="v001", checksum_ok=True)]
    # Read while the writer is open: every line is flushed as it is said.
    assert list(read_events(log.path)) == sent
    log.close()


def test_a_second_log_appends(tmp_path: Path) -> None:
    for phase in ("first", "second"):
        log = EventLog(tmp_path / "events.jsonl")
        log.emit("phase", phase=phase)
        log.close()
    assert [event.data["phase"] for event in read_events(tmp_path / "events.jsonl")] == ["first", "second"]


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("phase", phase="kept")
    log.emit("phase", phase="torn")
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [event.data["phase"] for event in read_events(path)] == ["kept"]
