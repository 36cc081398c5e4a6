"""Capture records in a file: wire frames, each behind its length, closed by a trailer that proves the file whole."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
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


def write_records(path: Path, records: Sequence[tuple[CaptureRecord, bool]], counts: Mapping[str, int]) -> None:
    """Write (record, held out) pairs and `counts`; `path` is replaced only when all is on disk.

    Raises RecordFileError when it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_MAGIC)
            for record, held_out in records:
                _write_frame(file, _record_parts(record, held_out))
            _write_frame(file, pack_frame("end", {"records": len(records), "counts": dict(counts)}, ()))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as err:
        partial.unlink(missing_ok=True)
        raise RecordFileError(f"cannot write records to {path}: {err.strerror}") from None


def read_records(path: Path) -> tuple[list[tuple[CaptureRecord, bool]], dict[str, int]]:
    """What `write_records` wrote. Raises RecordFileError in one line."""
    records: list[tuple[CaptureRecord, bool]] = []
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise RecordFileError(f"{path} is not a file of draftloop records")
            while True:
                kind, fields, arrays = unpack_frame(_read_frame(file))
                if kind == "end":
                    break
                records.append(_record(fields, arrays))
        if fields["records"] == len(records):
            return records, fields["counts"]
        raise DamagedMessageError(f"{len(records)} of {fields['records']} records")
    except OSError as err:
        raise RecordFileError(f"cannot read records from {path}: {err.strerror}") from None
    except (DamagedMessageError, KeyError, TypeError, ValueError) as err:
        raise RecordFileError(
            f"{path} is truncated or damaged after record {len(records)} ({err}); delete it to start without it"
        ) from None


def _write_frame(file: BinaryIO, parts: Sequence[bytes | memoryview]) -> None:
    file.write(_LENGTH.pack(sum(map(len, parts))))
    file.writelines(parts)


def _read_frame(file: BinaryIO) -> bytes:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise DamagedMessageError("it ends early")
    (length,) = _LENGTH.unpack(head)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if length > left:
        raise DamagedMessageError(f"{length} bytes announced, {left} left")
    return file.read(length)


def _record_parts(record: CaptureRecord, held_out: bool) -> list[bytes | memoryview]:
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
        "held_out": held_out,
        "verify_steps": steps,
    }
    return pack_frame("record", fields, arrays)


def _record(fields: dict[str, Any], arrays: list[NDArray[Any]]) -> tuple[CaptureRecord, bool]:
    held_out = fields.pop("held_out")
    steps = fields.pop("verify_steps")
    first, width = 3, VERIFY_ARRAY_COUNT
    verify_steps = tuple(
        join_verify(step, arrays[first + width * i : first + width * (i + 1)]) for i, step in enumerate(steps)
    )
    token_ids, fused, last_hidden = (array.copy() for array in arrays[:3])
    return CaptureRecord(
        **fields, token_ids=token_ids, fused=fused, last_hidden=last_hidden, verify_steps=verify_steps
    ), held_out
