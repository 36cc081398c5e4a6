"""`draftloop record`, `replay` and `delete`: what a run captured, kept, learnt again from, or forgotten."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from draftloop.capture.journal import JOURNAL_FOLDER, Journal, JournalInUseError, left, read_journal
from draftloop.capture.privacy import TAINT_REASON, Deletions, SubjectKind, Subjects, subject_hash
from draftloop.capture.record_file import RecordFileError, TimedRecord, read_records, write_records
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError
from draftloop.core.events import EventLog
from draftloop.core.versions import VersionRegistry

_SEGMENT_BYTES = 64 << 20
# Where `record` wrote to, one JSON string a line: deletion follows it there.
EXPORTS_FILE = "exports.jsonl"


def record(run: Path, file: Path, minutes: float) -> str:
    """Save what a run captured in its last `minutes` and still keeps, also while it goes on; returns what was saved.

    Raises DraftloopError in one line when there is nothing.
    """
    journal = run / JOURNAL_FOLDER
    if not journal.is_dir():
        raise DraftloopError(f"{run} has no journal of captured records: is it the folder of a run?")
    # What is to be forgotten may not have left the journal yet.
    deletions = Deletions(run)
    deletions.refresh()
    kept = [one for one in read_journal(journal)[0] if not deletions.cover(one.record, one.time)]
    since = max((one.time for one in kept), default=0.0) - minutes * 60
    records = [TimedRecord(one.record, one.time, one.held_out) for one in kept if one.time >= since]
    if not records:
        raise DraftloopError(f"the journal of {run} holds no record: let it serve some traffic first")
    with (run / EXPORTS_FILE).open("a", encoding="utf-8") as exports:
        exports.write(json.dumps(str(file.resolve())) + "\n")
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
    deletions.refresh()
    said += _erase_from_exports(run, deletions)
    try:
        with Journal(journal, _SEGMENT_BYTES) as store:
            gone = [kept for kept in store.take_kept() if deletions.cover(kept.record, kept.time)]
            store.commit(left(gone, "deleted"))
            store.erase_dead()
    except JournalInUseError:
        return [*said, "the run goes on: its trainer erases the records in its next turn"]
    return [*said, f"erased {len(gone)} records"]


def _erase_from_exports(run: Path, deletions: Deletions) -> list[str]:
    """From the files that `record` made, where they still are; returns a line for each that held such records."""
    try:
        lines = (run / EXPORTS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    said = []
    for file in dict.fromkeys(Path(json.loads(line)) for line in lines):
        if not file.exists():
            continue
        try:
            records = read_records(file)
            left_over = [one for one in records if not deletions.cover(one.record, one.time)]
            if len(left_over) < len(records):
                write_records(file, left_over)
                said.append(f"erased {len(records) - len(left_over)} records from {file}")
        except RecordFileError as err:
            said.append(f"not erased from a file: {err}")
    return said
