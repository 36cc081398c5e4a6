"""`draftloop record`, `replay` and `delete`: what a run captured, kept, learnt again from, or forgotten."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from draftloop.capture.journal import JOURNAL_FOLDER, Journal, JournalInUseError, left, read_journal
from draftloop.capture.privacy import TAINT_REASON, Deletions, SubjectKind, Subjects, subject_hash
from draftloop.capture.record_file import TimedRecord, read_records, write_records
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError
from draftloop.core.events import EventLog
from draftloop.core.versions import VersionRegistry

_SEGMENT_BYTES = 64 << 20


def record(run: Path, file: Path, minutes: float) -> str:
    """Save what a run captured in its last `minutes` and still keeps, also while it goes on; returns what was saved.

    Raises DraftloopError in one line when there is nothing.
    """
    journal = run / JOURNAL_FOLDER
    if not journal.is_dir():
        raise DraftloopError(f"{run} has no journal of captured records: is it the folder of a run?")
    kept, _ = read_journal(journal)
    since = max((one.time for one in kept), default=0.0) - minutes * 60
    records = [TimedRecord(one.record, one.time, one.held_out) for one in kept if one.time >= since]
    if not records:
        raise DraftloopError(f"the journal of {run} holds no record: let it serve some traffic first")
    write_records(file, records)
    tokens = sum(one.record.num_tokens for one in records)
    domains = Counter(one.record.domain for one in records)
    shares = ", ".join(f"{name} {count}" for name, count in sorted(domains.items()))
    return f"{len(records)} records ({shares}), {tokens} tokens"


def replay(config: Config, file: Path, drafter: Path, out: Path, steps: int) -> list[str]:
    """Refresh from a file of records into the new folder `out`, with no server; returns a line for each version."""
    records = read_records(file)
    if out.exists():
        raise DraftloopError(f"{out} exists already: choose a new folder with --out")
    from draftloop.refresher.replay import Replay, checksums
    from draftloop.sglang.target import resolve_target

    log = EventLog(out / "events.jsonl")

    def emit(kind: Any, **data: Any) -> None:
        log.emit(kind, **data)

    try:
        Replay(resolve_target(config.target.path), drafter, config, out, steps, emit).run(records)
    finally:
        log.close()
    registry = VersionRegistry(out)
    sums = checksums(registry)
    return [
        f"{version.name:8} {version.state:12} weights {sums[version.name][:16]}  {version.reason}"
        for version in registry.all()
    ]


def delete(run: Path, kind: SubjectKind, name: str) -> list[str]:
    """Forget a request or a tenant: demand it, mark the versions that learnt from it, erase the records.

    Returns what was done, for people. Raises DraftloopError in one line.
    """
    journal = run / JOURNAL_FOLDER
    if not journal.is_dir():
        raise DraftloopError(f"{run} has no journal of captured records: is it the folder of a run?")
    deletions = Deletions(run)
    deletions.demand(kind, name)
    registry = VersionRegistry(run)
    subject = subject_hash(kind, name)
    tainted = registry.taint(lambda version: subject in Subjects.load(registry.checkpoint(version)), TAINT_REASON)
    said = [f"tainted: {', '.join(tainted)}" if tainted else f"no version learnt from this {kind}"]
    try:
        with Journal(journal, _SEGMENT_BYTES) as store:
            deletions.refresh()
            gone = [kept for kept in store.take_kept() if deletions.cover(kept.record, kept.time)]
            store.commit(left(gone, "deleted"))
            store.erase_dead()
    except JournalInUseError:
        return [*said, "the run goes on: its trainer erases the records in its next turn"]
    return [*said, f"erased {len(gone)} records; files made by `draftloop record` are yours to delete"]
