"""The journal: captured records and their books on disk. An acknowledged record is neither lost nor counted twice.

    <folder>/lock              held by the one process that writes
    <folder>/ledger            frames: a snapshot of the books, then every entry since
    <folder>/00000001.segment  records (see `segments`), newest segment last

`append` writes the records, then the ledger's entry, each flushed to disk, and only then returns; the caller may
acknowledge. So after a crash the ledger is the truth: a record without an entry was never acknowledged and is cut
out (its sender delivers it again), and a delivery that the ledger has is not taken twice. Only the mark "trained" is
left to the system to flush: it outlives the process, and a loss of power takes the step's weights too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from draftloop.capture.ledger import Arrived, Counts, Entry, Fate, Ledger, Left, Trained, entry_fields, entry_of
from draftloop.capture.record_file import read_frame, write_frame
from draftloop.capture.segments import Segments, read_segments, sync, sync_folder
from draftloop.capture.wire import DamagedMessageError, pack_frame, unpack_frame
from draftloop.core.errors import DraftloopError
from draftloop.core.records import CaptureRecord

_MAGIC = b"DLLDG1\n\0"
_FRAME_MAGIC = bytes(pack_frame("", {}, ())[0][:4])
_LEDGER, _LOCK = "ledger", "lock"
JOURNAL_FOLDER = "journal"
_SNAPSHOT = "snapshot"
# The ledger is written anew as a snapshot when it has grown by so much.
_MAX_ENTRY_BYTES = 1 << 20


class JournalError(DraftloopError):
    """The journal is in use, damaged, or cannot be written."""


class JournalInUseError(JournalError):
    """Another process writes the journal."""


@dataclass(slots=True)
class Kept:
    """A record that can still be read. time: when it was received, seconds since the epoch.

    trained: used in a step, by this process or an earlier one.  used: by this process.
    """

    id: int
    time: float
    record: CaptureRecord
    held_out: bool
    trained: bool = False
    used: bool = False


class Journal:
    """Opens or makes the journal in `folder`; `take_kept` then gives what it holds. One thread, one process.

    segment_bytes: see `Segments`.  Raises JournalInUseError when another process has it, JournalError when damaged.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder)
            try:
                self.ledger = _read_ledger(folder / _LEDGER)
                self._segments = Segments(folder, segment_bytes)
                self._recovered = self._recover()
                self._file = self._write_snapshot()
            except BaseException:
                self._lock.close()
                raise
        except OSError as err:
            raise JournalError(f"cannot open the journal {folder}: {err.strerror}") from None
        self._next_id = self.ledger.next_id

    @property
    def counts(self) -> Counts:
        return self.ledger.counts

    @property
    def nbytes(self) -> int:
        """Bytes of records on disk."""
        return self._segments.nbytes

    def take_kept(self) -> list[Kept]:
        """The records of earlier processes, in order of arrival. They are handed out once and not held here."""
        kept, self._recovered = self._recovered, []
        return kept

    def append(
        self, records: Sequence[tuple[CaptureRecord, float, bool]], dropped: int, source: str, sequence: int
    ) -> list[Kept]:
        """Take a delivery of (record, time, held out), and `dropped` more that are lost; acknowledge when it returns.

        Raises JournalError when it cannot be written; the delivery then counts as never having come.
        """
        first = self._next_id
        self._next_id += len(records)
        kept = [Kept(first + i, time, record, held_out) for i, (record, time, held_out) in enumerate(records)]
        entry = Arrived(first, tuple(k.held_out for k in kept), dropped, source, sequence)
        try:
            self._segments.append((k.id, k.time, k.record) for k in kept)
            self._commit(entry)
        except OSError as err:
            with contextlib.suppress(OSError):
                self._segments.forget(tuple(k.id for k in kept))
            raise self._unwritable(err) from None
        return kept

    def commit(self, entry: Trained | Left) -> None:
        """Note what became of kept records; it outlives this process when this returns.

        Raises KeyError when one is not kept.
        """
        if unknown := [record for record in entry.ids if record not in self.ledger.states]:
            raise KeyError(unknown[0])
        try:
            self._commit(entry)
            if isinstance(entry, Left):
                self._segments.forget(entry.ids)
        except OSError as err:
            raise self._unwritable(err) from None

    def erase_dead(self, before: float = float("inf")) -> None:
        """Take the bytes of records that left off the disk, those of segments with a record from before `before`."""
        try:
            self._segments.erase_dead(before)
        except OSError as err:
            raise self._unwritable(err) from None

    def close(self) -> None:
        """Let another process have it. Whatever was acknowledged is on disk already."""
        self._segments.close()
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self) -> list[Kept]:
        """Read what is kept; what the ledger has and the disk has not any more is dropped, and counted as that."""
        states = self.ledger.states
        kept = [
            Kept(record_id, time, record, states[record_id] == "held_out", states[record_id] == "trained")
            for record_id, time, record in self._segments.load(states.__contains__)
        ]
        lost = tuple(sorted(states.keys() - {k.id for k in kept}))
        self.ledger.apply(Left(lost, "dropped"))
        return kept

    def _commit(self, entry: Entry) -> None:
        kind, fields = entry_fields(entry)
        try:
            nbytes = write_frame(self._file, pack_frame(kind, fields, ()))
            if isinstance(entry, Trained):
                self._file.flush()
            else:
                sync(self._file)
        except OSError:
            # Nothing may follow half an entry.
            with contextlib.suppress(OSError):
                self._file.close()
            os.truncate(self._folder / _LEDGER, self._ledger_bytes)
            self._file = (self._folder / _LEDGER).open("ab")
            raise
        self._ledger_bytes += nbytes
        self.ledger.apply(entry)
        if self._ledger_bytes > self._snapshot_bytes * 2 + _MAX_ENTRY_BYTES:
            self._file.close()
            self._file = self._write_snapshot()

    def _write_snapshot(self) -> BinaryIO:
        """Replace the ledger by the books as they stand; returns it, open at its end."""
        path = self._folder / _LEDGER
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(_MAGIC)
            write_frame(file, pack_frame(_SNAPSHOT, self.ledger.to_fields(), ()))
            sync(file)
        partial.replace(path)
        sync_folder(self._folder)
        self._ledger_bytes = self._snapshot_bytes = path.stat().st_size
        return path.open("ab")

    def _unwritable(self, err: Exception) -> JournalError:
        why = err.strerror if isinstance(err, OSError) else str(err)
        return JournalError(f"cannot write the journal {self._folder}: {why}; free some space, nothing kept is lost")


def read_journal(folder: Path) -> tuple[list[Kept], Counts]:
    """What a journal holds, also while another process writes it: nothing is changed. Raises JournalError."""
    try:
        ledger = _read_ledger(folder / _LEDGER)
        states = ledger.states
        kept = [
            Kept(record_id, time, record, states[record_id] == "held_out", states[record_id] == "trained")
            for record_id, time, record in read_segments(folder, states.__contains__)
        ]
    except OSError as err:
        raise JournalError(f"cannot read the journal {folder}: {err.strerror}") from None
    return kept, ledger.counts


def read_counts(folder: Path) -> Counts:
    """The books of a journal alone, also while another process writes it. Raises JournalError."""
    try:
        return _read_ledger(folder / _LEDGER).counts
    except OSError as err:
        raise JournalError(f"cannot read the journal {folder}: {err.strerror}") from None


def _read_ledger(path: Path) -> Ledger:
    """The books as of the last whole entry: a torn one, when none follows it, was never acknowledged."""
    ledger = Ledger()
    if not path.exists():
        return ledger
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise JournalError(f"{path} is not a draftloop ledger; move its folder away to start anew")
        while True:
            start = file.tell()
            try:
                kind, fields, _ = unpack_frame(read_frame(file))
                if kind == _SNAPSHOT:
                    ledger = Ledger.from_fields(fields)
                else:
                    ledger.apply(entry_of(kind, fields))
            except (DamagedMessageError, KeyError, TypeError, ValueError) as err:
                file.seek(start)
                if file.read().count(_FRAME_MAGIC) <= 1:
                    return ledger
                raise JournalError(
                    f"{path} is damaged at byte {start} ({err}); move its folder away to start anew"
                ) from None


def _locked(folder: Path) -> BinaryIO:
    file = (folder / _LOCK).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(20).decode(errors="replace")
        file.close()
        raise JournalInUseError(f"the journal {folder} is in use by process {holder}; stop that one first") from None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def left(kept: Sequence[Kept], fate: Fate) -> Left:
    """The entry that says so."""
    return Left(tuple(k.id for k in kept), fate)
