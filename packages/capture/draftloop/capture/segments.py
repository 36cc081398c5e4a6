"""Record frames on disk: appended to the newest segment, erased by writing a segment anew without them.

A segment is `<number>.segment`: a magic word, then frames of `pack_record` with the record's id and time. Frames whose
record is kept no more are dead. While they are more than the live ones and a segment's worth, the segment with the
largest dead share is rewritten, so that

    bytes on disk <= 2 * live bytes + one segment + a magic word each

and no byte is copied for which another has not gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from draftloop.capture.record_file import pack_record, read_frame, unpack_record, write_frame
from draftloop.capture.wire import DamagedMessageError, unpack_frame
from draftloop.core.records import CaptureRecord

_MAGIC = b"DLSEG1\n\0"
_SUFFIX = ".segment"
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a record lies. nbytes: with its length in front."""

    offset: int
    nbytes: int
    time: float


@dataclass
class _Segment:
    path: Path
    frames: dict[int, _Frame] = field(default_factory=dict)
    nbytes: int = 0
    live_bytes: int = 0
    oldest: float = float("inf")

    @property
    def dead_bytes(self) -> int:
        return self.nbytes - len(_MAGIC) - self.live_bytes

    def add(self, record_id: int, frame: _Frame) -> None:
        self.frames[record_id] = frame
        self.live_bytes += frame.nbytes
        self.oldest = min(self.oldest, frame.time)

    def remove(self, record_id: int) -> None:
        self.live_bytes -= self.frames.pop(record_id).nbytes


class Segments:
    """The segments in `folder`. One owner. segment_bytes: size from which on a new one is begun."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments: dict[int, _Segment] = {}
        self._home: dict[int, int] = {}
        self._open: BinaryIO | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(segment.nbytes for segment in self._segments.values())

    @property
    def live_bytes(self) -> int:
        return sum(segment.live_bytes for segment in self._segments.values())

    def load(self, is_live: Callable[[int], bool]) -> Iterator[tuple[int, float, CaptureRecord]]:
        """(id, time, record) of every live record that can be read, in order of arrival.

        What else a segment holds, be it torn, damaged or never acknowledged, is cut out of it when the iterator ends.
        """
        for leftover in self._folder.glob(f"*{_PARTIAL}"):
            leftover.unlink()
        for path in _segment_paths(self._folder):
            number = int(path.name.removesuffix(_SUFFIX))
            segment = self._segments[number] = _Segment(path, nbytes=path.stat().st_size)
            for record_id, frame, record in _scan(path):
                if is_live(record_id) and record_id not in self._home:
                    segment.add(record_id, frame)
                    self._home[record_id] = number
                    yield record_id, frame.time, record
            if segment.dead_bytes or not segment.frames:
                self._rewrite(number)

    def append(self, records: Iterator[tuple[int, float, CaptureRecord]]) -> None:
        """Write (id, time, record) triples; on disk when this returns.

        After an OSError some may be there: forget them all, and use their ids no more.
        """
        try:
            for record_id, time, record in records:
                number, segment, file = self._newest()
                nbytes = write_frame(file, pack_record(record, id=record_id, time=time))
                segment.add(record_id, _Frame(segment.nbytes, nbytes, time))
                segment.nbytes += nbytes
                self._home[record_id] = number
            if self._open is not None:
                sync(self._open)
        except OSError:
            # Nothing may follow half a frame: the next record begins a segment.
            self.close()
            for segment in list(self._segments.values())[-1:]:
                segment.nbytes = segment.path.stat().st_size
            raise

    def forget(self, ids: tuple[int, ...]) -> None:
        """These records are dead; their bytes go when it pays."""
        for record_id in ids:
            home = self._home.pop(record_id, None)
            if home is not None:
                self._segments[home].remove(record_id)
        while self.nbytes > 2 * self.live_bytes + self._segment_bytes + len(_MAGIC) * len(self._segments):
            self._rewrite(max(self._segments, key=lambda number: self._dead_share(self._segments[number])))

    def erase_dead(self, before: float = float("inf")) -> None:
        """Take dead frames off the disk now, in every segment that holds a frame from before the time `before`."""
        for number, segment in list(self._segments.items()):
            if segment.dead_bytes and segment.oldest < before:
                self._rewrite(number)

    def close(self) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.close()
            self._open = None

    def _newest(self) -> tuple[int, _Segment, BinaryIO]:
        """The segment that is written; a new one when it is full, or was written by an earlier process."""
        number = max(self._segments, default=0)
        if self._open is None or self._segments[number].nbytes >= self._segment_bytes:
            if self._open is not None:
                sync(self._open)
            self.close()
            number += 1
            path = self._folder / f"{number:08d}{_SUFFIX}"
            self._open = path.open("xb")
            self._open.write(_MAGIC)
            self._segments[number] = _Segment(path, nbytes=len(_MAGIC))
            sync_folder(self._folder)
        return number, self._segments[number], self._open

    def _dead_share(self, segment: _Segment) -> float:
        return segment.dead_bytes / segment.nbytes

    def _rewrite(self, number: int) -> None:
        """Write the segment anew with its live frames alone; without any, remove it."""
        old = self._segments[number]
        if number == max(self._segments):
            self.close()
        if old.frames:
            self._segments[number] = self._copy_live(old)
        else:
            old.path.unlink()
            del self._segments[number]
        sync_folder(self._folder)

    def _copy_live(self, old: _Segment) -> _Segment:
        new = _Segment(old.path, nbytes=len(_MAGIC))
        partial = old.path.with_suffix(_PARTIAL)
        with old.path.open("rb") as source, partial.open("wb") as target:
            target.write(_MAGIC)
            for record_id, frame in old.frames.items():
                source.seek(frame.offset)
                target.write(source.read(frame.nbytes))
                new.add(record_id, _Frame(new.nbytes, frame.nbytes, frame.time))
                new.nbytes += frame.nbytes
            sync(target)
        partial.replace(old.path)
        return new


def read_segments(folder: Path, is_live: Callable[[int], bool]) -> Iterator[tuple[int, float, CaptureRecord]]:
    """As `Segments.load`, for a folder that another process may be writing: nothing is changed."""
    for path in _segment_paths(folder):
        # A segment may go away while we look.
        with contextlib.suppress(FileNotFoundError):
            for record_id, frame, record in _scan(path):
                if is_live(record_id):
                    yield record_id, frame.time, record


def _segment_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"))


def _scan(path: Path) -> Iterator[tuple[int, _Frame, CaptureRecord]]:
    """Every frame of a segment that is whole; ends at a torn one, passes over a damaged one."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return
        while True:
            offset = file.tell()
            try:
                data = read_frame(file)
            except DamagedMessageError:
                return
            with contextlib.suppress(DamagedMessageError, KeyError, TypeError, ValueError):
                record_id, time, record = _unpack(data)
                yield record_id, _Frame(offset, file.tell() - offset, time), record


def _unpack(data: bytes) -> tuple[int, float, CaptureRecord]:
    fields: dict[str, Any]
    arrays: list[NDArray[Any]]
    _, fields, arrays = unpack_frame(data)
    record_id, time = fields.pop("id"), fields.pop("time")
    return record_id, time, unpack_record(fields, arrays)


def sync(file: BinaryIO) -> None:
    """All that was written to `file` is on disk when this returns."""
    file.flush()
    os.fdatasync(file.fileno())


def sync_folder(folder: Path) -> None:
    """New, renamed and removed names in `folder` are on disk when this returns."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
