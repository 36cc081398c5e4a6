"""Capture records in a file: wire frames, each behind its length, closed by a trailer that proves the file whole."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from draftloop.capture.wire import (
    VERIFY_ARRAY_COUNT,
    DamagedMessageError,
    join_verify,
    pack_frame,
    split_verify,
    unpack_frame,
)
from draftloop.core.errors import DraftloopError
from draftloop.core.records import CaptureRecord

_MAGIC = b"DLREC2\n\0"
_LENGTH = struct.Struct("<Q")


class RecordFileError(DraftloopError):
    """A file of records is missing, truncated, damaged, or something else."""


@dataclass(frozen=True, slots=True)
class TimedRecord:
    """A record, when it was received (seconds since the epoch), and whether it is held out for the gate."""

    record: CaptureRecord
    time: float
    held_out: bool


def write_records(path: Path, records: Sequence[TimedRecord]) -> None:
    """Write `records`; `path` is replaced only when all is on disk. Raises RecordFileError when it cannot be."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_MAGIC)
            for kept in records:
                write_frame(file, pack_record(kept.record, time=kept.time, held_out=kept.held_out))
            write_frame(file, pack_frame("end", {"records": len(records)}, ()))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as err:
        partial.unlink(missing_ok=True)
        raise RecordFileError(f"cannot write records to {path}: {err.strerror}") from None


def read_records(path: Path) -> list[TimedRecord]:
    """What `write_records` wrote. Raises RecordFileError in one line."""
    records: list[TimedRecord] = []
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise RecordFileError(f"{path} is not a file of draftloop records")
            while True:
                kind, fields, arrays = unpack_frame(read_frame(file))
                if kind == "end":
                    break
                time, held_out = fields.pop("time"), fields.pop("held_out")
                records.append(TimedRecord(unpack_record(fields, arrays), time, held_out))
        if fields["records"] == len(records):
            return records
        raise DamagedMessageError(f"{len(records)} of {fields['records']} records")
    except OSError as err:
        raise RecordFileError(f"cannot read records from {path}: {err.strerror}") from None
    except (DamagedMessageError, KeyError, TypeError, ValueError) as err:
        raise RecordFileError(
            f"{path} is truncated or damaged after record {len(records)} ({err}); delete it to start without it"
        ) from None


def write_frame(file: BinaryIO, parts: Sequence[bytes | memoryview]) -> int:
    """Append a frame behind its length; returns the bytes written."""
    length = sum(map(len, parts))
    file.write(_LENGTH.pack(length))
    file.writelines(parts)
    return _LENGTH.size + length


def read_frame(file: BinaryIO) -> bytes:
    """The next frame. Raises DamagedMessageError when the file ends before it does."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise DamagedMessageError("it ends early")
    (length,) = _LENGTH.unpack(head)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if length > left:
        raise DamagedMessageError(f"{length} bytes announced, {left} left")
    return file.read(length)


def pack_record(record: CaptureRecord, **more: Any) -> list[bytes | memoryview]:
    """The frame of a record, in parts. more: plain values that travel with it."""
    arrays: list[NDArray[Any]] = [record.token_ids, record.fused, record.last_hidden]
    steps: list[dict[str, Any]] = []
    for step in record.verify_steps:
        fields, step_arrays = split_verify(step)
        steps.append(fields)
        arrays += step_arrays
    fields = {
        "request_id": record.request_id,
        "domain": record.domain,
        "tenant": record.tenant,
        "start": record.start,
        "prompt_len": record.prompt_len,
        "verify_steps": steps,
    }
    return pack_frame("record", fields | more, arrays)


def unpack_record(fields: dict[str, Any], arrays: list[NDArray[Any]]) -> CaptureRecord:
    """The record of an unpacked frame, `more` taken out of its fields. Raises as CaptureRecord does."""
    steps = fields.pop("verify_steps")
    first, width = 3, VERIFY_ARRAY_COUNT
    verify_steps = tuple(
        join_verify(step, arrays[first + width * i : first + width * (i + 1)]) for i, step in enumerate(steps)
    )
    token_ids, fused, last_hidden = (array.copy() for array in arrays[:3])
    return CaptureRecord(**fields, token_ids=token_ids, fused=fused, last_hidden=last_hidden, verify_steps=verify_steps)
