"""Gathers the chunks of many interleaved requests into capture records.

A request has one open span of contiguous positions. A chunk may

    continue it       chunk.start == span.end: the usual case, prefill chunks and decode steps
    leave a hole      the span becomes a record of its own and the chunk opens the next one
    overlap it        a retracted request is prefilled again: rows the span knows already are trimmed from the chunk
                      when the tokens agree; where they first differ, the span is cut and the chunk goes on
    precede it        and touch it: the rows before the span are put in front
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftloop.capture.wire import DISCARDING, Chunk, Finish, Message, widen
from draftloop.core.records import CaptureRecord, VerifyStep

# One row predicts nothing the span itself can confirm.
_MIN_TOKENS = 2


@dataclass
class AssemblerCounts:
    """What became of what was fed.

    records: emitted.  discarded: requests given up because the ring was full or they were withdrawn.  too_short: spans
    of fewer than two tokens, discarded.  timed_out, evicted: requests closed early, for being idle or for want of room;
    what they had was emitted.
    """

    chunks: int = 0
    finishes: int = 0
    records: int = 0
    discarded: int = 0
    too_short: int = 0
    timed_out: int = 0
    evicted: int = 0


@dataclass
class _Span:
    """Contiguous rows of one request: piece i holds (token_ids, fused, last_hidden) of consecutive positions."""

    domain: str
    tenant: str
    prompt_len: int
    start: int
    end: int
    pieces: list[tuple[NDArray[Any], ...]]
    verify_steps: list[VerifyStep] = field(default_factory=list)

    @classmethod
    def of(cls, chunk: Chunk) -> _Span:
        rows = [_rows(chunk, chunk.start, chunk.end)]
        return cls(chunk.domain, chunk.tenant, chunk.prompt_len, chunk.start, chunk.end, rows)

    def takes(self, chunk: Chunk) -> bool:
        """Whether `chunk` touches the span and has states of the same kind."""
        _, fused, last_hidden = self.pieces[0]
        return (
            chunk.start <= self.end
            and chunk.end >= self.start
            and (fused.dtype, fused.shape[1]) == (chunk.fused.dtype, chunk.fused.shape[1])
            and (last_hidden.dtype, last_hidden.shape[1]) == (chunk.last_hidden.dtype, chunk.last_hidden.shape[1])
        )

    def add(self, chunk: Chunk) -> None:
        """Join the rows of a chunk that `takes` accepted."""
        if chunk.start < self.end:
            self._cut_where_tokens_differ(chunk)
        if chunk.start < self.start:
            self.pieces.insert(0, _rows(chunk, chunk.start, min(self.start, chunk.end)))
            self.start = chunk.start
        if chunk.end > self.end:
            self.pieces.append(_rows(chunk, self.end, chunk.end))
            self.end = chunk.end

    def _cut_where_tokens_differ(self, chunk: Chunk) -> None:
        low, high = max(self.start, chunk.start), min(self.end, chunk.end)
        pieces = self.joined()
        known = pieces[0][low - self.start : high - self.start]
        differ = np.flatnonzero(known != chunk.token_ids[low - chunk.start : high - chunk.start])
        if len(differ):
            # States after a changed token were computed from the old text.
            self.end = low + int(differ[0])
            pieces = tuple(rows[: self.end - self.start] for rows in pieces)
            self.verify_steps = [step for step in self.verify_steps if step.position < self.end]
        self.pieces = [pieces]

    def joined(self) -> tuple[NDArray[Any], ...]:
        """(token_ids, fused, last_hidden) of the whole span, copied out of the messages."""
        return tuple(np.concatenate(column) for column in zip(*self.pieces, strict=True))


@dataclass
class _Request:
    span: _Span
    nbytes: int
    last_seen: float


class Assembler:
    """Feed it decoded messages in the ring's order; it returns the records that became complete.

    max_requests, max_bytes: bound on what is open; the request idle longest is closed first.
    idle_seconds: a request that sends nothing for so long is closed.  clock: seconds, monotonic.
    """

    def __init__(
        self,
        max_requests: int = 1024,
        max_bytes: int = 512 << 20,
        idle_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._open: OrderedDict[str, _Request] = OrderedDict()
        self._open_bytes = 0
        self.counts = AssemblerCounts()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def open_bytes(self) -> int:
        return self._open_bytes

    def feed(self, message: Message) -> list[CaptureRecord]:
        """Take one message; return the records it completed, those of requests gone idle included."""
        records = self.expire()
        if isinstance(message, Finish):
            self.counts.finishes += 1
            records += self._finish(message)
        else:
            self.counts.chunks += 1
            records += self._add(message)
        return records

    def expire(self) -> list[CaptureRecord]:
        """Close the requests that have been idle too long. Call it when the ring is quiet."""
        records: list[CaptureRecord] = []
        oldest_allowed = self._clock() - self._idle_seconds
        while self._open and next(iter(self._open.values())).last_seen < oldest_allowed:
            self.counts.timed_out += 1
            records += self._close_oldest()
        return records

    def drain(self) -> list[CaptureRecord]:
        """Close every request with what it has: the scheduler is gone."""
        records: list[CaptureRecord] = []
        while self._open:
            records += self._close_oldest()
        return records

    def _add(self, chunk: Chunk) -> list[CaptureRecord]:
        records: list[CaptureRecord] = []
        request = self._open.get(chunk.request_id)
        if request is not None and request.span.takes(chunk):
            request.span.add(chunk)
        else:
            if request is not None:
                records += self._close(chunk.request_id)
            request = self._open[chunk.request_id] = _Request(_Span.of(chunk), 0, 0.0)
        if chunk.verify is not None:
            request.span.verify_steps.append(chunk.verify)
        request.last_seen = self._clock()
        self._open.move_to_end(chunk.request_id)
        self._recount(request, chunk)
        while len(self._open) > self._max_requests or self._open_bytes > self._max_bytes:
            self.counts.evicted += 1
            records += self._close_oldest()
        return records

    def _recount(self, request: _Request, chunk: Chunk) -> None:
        per_token = chunk.nbytes // len(chunk.token_ids)
        nbytes = per_token * (request.span.end - request.span.start)
        self._open_bytes += nbytes - request.nbytes
        request.nbytes = nbytes

    def _finish(self, message: Finish) -> list[CaptureRecord]:
        if message.reason not in DISCARDING:
            return self._close(message.request_id) if message.request_id in self._open else []
        self.counts.discarded += 1
        request = self._open.pop(message.request_id, None)
        if request is not None:
            self._open_bytes -= request.nbytes
        return []

    def _close_oldest(self) -> list[CaptureRecord]:
        return self._close(next(iter(self._open)))

    def _close(self, request_id: str) -> list[CaptureRecord]:
        request = self._open.pop(request_id)
        self._open_bytes -= request.nbytes
        span = request.span
        if span.end - span.start < _MIN_TOKENS:
            self.counts.too_short += 1
            return []
        token_ids, fused, last_hidden = span.joined()
        self.counts.records += 1
        return [
            CaptureRecord(
                request_id=request_id,
                domain=span.domain,
                tenant=span.tenant,
                start=span.start,
                prompt_len=span.prompt_len,
                token_ids=token_ids,
                fused=widen(fused),
                last_hidden=widen(last_hidden),
                verify_steps=tuple(span.verify_steps),
            )
        ]


def _rows(chunk: Chunk, start: int, end: int) -> tuple[NDArray[Any], ...]:
    rows = slice(start - chunk.start, end - chunk.start)
    return chunk.token_ids[rows], chunk.fused[rows], chunk.last_hidden[rows]
