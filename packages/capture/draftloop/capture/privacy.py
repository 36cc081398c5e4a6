"""Privacy of captured records: redaction where they leave the worker, deletion on demand, and who taught which version.

Records hold token ids and hidden states, no text; both can be turned back into text by whoever has the target, so they
are treated as text. Request ids and tenant names outlive their records only as 64-bit hashes, which tell whether a
given name was there and no more (a tenant's name that can be guessed can be checked, too).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from draftloop.capture.wire import DamagedMessageError, pack_frame, unpack_frame
from draftloop.core.errors import ConfigError, DraftloopError
from draftloop.core.records import CaptureRecord

DELETIONS_FILE = "deletions.jsonl"
TAINT_REASON = "it learnt from records that were deleted since"
# A record may be so long on its way from the scheduler to the store.
_IN_FLIGHT_S = 300.0

SubjectKind = Literal["request", "tenant"]


class PrivacyError(DraftloopError):
    """A redactor, or a file about deletions or subjects, cannot be used."""


class Redactor(Protocol):
    """Called with each record before it leaves its worker; returns what may leave, None for nothing."""

    def __call__(self, record: CaptureRecord, **options: Any) -> CaptureRecord | None: ...


def load_redactor(name: str | None, options: Mapping[str, Any]) -> Callable[[CaptureRecord], CaptureRecord | None]:
    """The hook that 'module:function' names, with its options bound; without a name, one that changes nothing.

    Raises ConfigError in one line when it cannot be imported or called so.
    """
    if name is None:
        return lambda record: record
    redactor = _imported(name)
    try:
        inspect.signature(redactor).bind(None, **options)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"privacy.redactor {name} cannot be called with a record and its options: {err}") from None

    def redact(record: CaptureRecord) -> CaptureRecord | None:
        try:
            redacted = redactor(record, **options)
        except Exception as err:
            raise PrivacyError(f"redactor {name} failed on a record: {type(err).__name__}: {err}") from err
        if redacted is not None and not isinstance(redacted, CaptureRecord):
            raise PrivacyError(f"redactor {name} returned a {type(redacted).__name__}, not a record or None")
        return redacted

    return redact


class Redaction:
    """The one door out of a worker: what is sent, journaled or recorded came through here.

    withheld: records that did not leave, for the books.
    """

    def __init__(self, redact: Callable[[CaptureRecord], CaptureRecord | None]) -> None:
        self._redact = redact
        self.withheld = 0

    def let_out(self, records: Sequence[CaptureRecord]) -> list[CaptureRecord]:
        """Raises PrivacyError when the redactor fails on one; then none of them leaves."""
        try:
            out = [redacted for record in records if (redacted := self._redact(record)) is not None]
        except PrivacyError:
            self.withheld += len(records)
            raise
        self.withheld += len(records) - len(out)
        return out


def _imported(name: str) -> Redactor:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"privacy.redactor {name!r} must look like module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as err:
        raise ConfigError(f"privacy.redactor: cannot import {module_name}: {err}") from None
    found = vars(module).get(function_name)
    if not callable(found):
        raise ConfigError(f"privacy.redactor: {module_name} has no function {function_name}")
    return found


def subject_hash(kind: SubjectKind, name: str) -> int:
    """64 bits that stand for a request id or a tenant."""
    return int.from_bytes(hashlib.blake2b(f"{kind}\0{name}".encode(), digest_size=8).digest(), "little")


class Deletions:
    """Users' demands to be forgotten, in a run's folder: one JSON line each, only ever appended.

    The trainer that holds the records obeys them in its next turn. They stay, so that a late record of a deleted
    request is refused as well. Of a tenant, what arrives within five minutes is taken for captured before the demand;
    whether later traffic is captured is for the capture policy to say.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / DELETIONS_FILE
        self._bytes_read = 0
        self._until: dict[int, float] = {}

    def demand(self, kind: SubjectKind, name: str) -> None:
        """Add a demand; on disk when this returns. Raises PrivacyError when it cannot be written."""
        until = float("inf") if kind == "request" else time.time() + _IN_FLIGHT_S
        line = json.dumps([subject_hash(kind, name), until])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                # On a line of its own even after a writer that was killed in mid-line.
                file.write(f"\n{line}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            raise PrivacyError(f"cannot write {self._path}: {err.strerror}; nothing was deleted") from None

    def refresh(self) -> frozenset[int]:
        """Read what was demanded since the last time; returns its subjects' hashes. A torn line is no demand."""
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.stat().st_size != self._bytes_read else ""
        except FileNotFoundError:
            return frozenset()
        if text:
            self._bytes_read = len(text.encode())
        demanded: dict[int, float] = {}
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError, TypeError, ValueError):
                subject, until = json.loads(line)
                demanded[int(subject)] = float(until)
        news = {subject for subject, until in demanded.items() if self._until.get(subject) != until}
        self._until |= demanded
        return frozenset(news)

    def touch(self, subjects: Subjects) -> bool:
        """Whether anyone of them ever demanded to be forgotten."""
        return any(subject in subjects for subject in self._until)

    def cover(self, record: CaptureRecord, received: float) -> bool:
        """Whether a record, received at that time (seconds since the epoch), must be forgotten."""
        subjects = subject_hash("request", record.request_id), subject_hash("tenant", record.tenant)
        return any(received <= self._until.get(subject, float("-inf")) for subject in subjects)


class Subjects:
    """The requests and tenants whose records a drafter learnt from, as hashes; lies beside its checkpoint."""

    def __init__(self, hashes: Iterable[int] = ()) -> None:
        self._hashes = set(hashes)

    def add(self, record: CaptureRecord) -> None:
        self._hashes |= {subject_hash("request", record.request_id), subject_hash("tenant", record.tenant)}

    def __contains__(self, subject: int) -> bool:
        return subject in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def __iter__(self) -> Iterator[int]:
        """In increasing order."""
        return iter(sorted(self._hashes))

    def save(self, checkpoint: Path) -> None:
        """Write them beside `checkpoint`, whole or not at all."""
        path = subjects_path(checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        hashes = np.array(sorted(self._hashes), "<u8")
        partial.write_bytes(b"".join(pack_frame("subjects", {}, [hashes.view("<i4")])))
        partial.replace(path)

    @classmethod
    def load(cls, checkpoint: Path) -> Subjects:
        """Those of a checkpoint; none when it has no such file. Raises PrivacyError when it is damaged."""
        path = subjects_path(checkpoint)
        try:
            _, _, (halves,) = unpack_frame(path.read_bytes())
            return cls(halves.view("<u8").tolist())
        except FileNotFoundError:
            return cls()
        except (DamagedMessageError, ValueError) as err:
            raise PrivacyError(f"{path} is damaged ({err}); who taught that drafter is not known any more") from None


def subjects_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.subjects")
