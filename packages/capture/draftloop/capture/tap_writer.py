"""The producer's rule for a full ring: a request loses its whole record or nothing of it, and is counted once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from draftloop.capture.ring import RingWriter
from draftloop.capture.wire import Chunk, Finish, encode

_DROPPED = "dropped"
_MAX_REMEMBERED = 8192


@dataclass
class TapCounts:
    """chunks_sent: chunks in the ring.  records_dropped: requests that lost a chunk and with it their record."""

    chunks_sent: int = 0
    records_dropped: int = 0


class TapWriter:
    """Sends chunks and finishes of many requests through one ring; never blocks.

    Its memory is bounded: beyond 8192 poisoned requests or unsent finishes the oldest is forgotten. That is safe, as
    the assembler ends a span at a hole and gives up an idle request by itself.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._poisoned: OrderedDict[str, None] = OrderedDict()
        self._unsent: OrderedDict[str, Finish] = OrderedDict()
        self.counts = TapCounts()

    def offer(self, chunk: Chunk) -> bool:
        """Send `chunk`; False when it, or an earlier chunk of its request, found the ring full."""
        if self._unsent:
            self._send_finishes()
        if chunk.request_id in self._poisoned:
            return False
        if self._ring.try_write(encode(chunk)):
            self.counts.chunks_sent += 1
            return True
        self.counts.records_dropped += 1
        self._poisoned[chunk.request_id] = None
        if len(self._poisoned) > _MAX_REMEMBERED:
            self._poisoned.popitem(last=False)
        self._queue(Finish(chunk.request_id, _DROPPED))
        return False

    def finish(self, request_id: str, reason: str) -> None:
        """Tell the consumer that the request ended; kept and sent later when the ring is full."""
        if request_id in self._poisoned:
            # The consumer was told "dropped", or will be: that finish is queued.
            del self._poisoned[request_id]
            self._send_finishes()
        else:
            self._queue(Finish(request_id, reason))

    def flush(self) -> bool:
        """Send the finishes still kept; True when none is left. Call it when the scheduler is idle."""
        self._send_finishes()
        return not self._unsent

    def _queue(self, message: Finish) -> None:
        self._unsent[message.request_id] = message
        if len(self._unsent) > _MAX_REMEMBERED:
            self._unsent.popitem(last=False)
        self._send_finishes()

    def _send_finishes(self) -> None:
        while self._unsent:
            request_id, message = next(iter(self._unsent.items()))
            parts = encode(message)
            # Asked first: a finish that waits is not a dropped message.
            if not self._ring.has_room(parts):
                return
            self._ring.try_write(parts)
            del self._unsent[request_id]
