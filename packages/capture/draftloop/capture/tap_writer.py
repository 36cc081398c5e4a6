"""The producer's rule for a full ring: a request loses its whole record or nothing of it, and is counted once."""

from __future__ import annotations

from collections import OrderedDict

from draftloop.capture.ring import RingWriter
from draftloop.capture.wire import DROPPED, WITHDRAWN, Chunk, Finish, encode

_MAX_REMEMBERED = 8192


class TapWriter:
    """Sends chunks and finishes of many requests through one ring; never blocks. Lost records are counted in the ring,
    where they can be read although nothing gets through it.

    Its memory is bounded: beyond 8192 dropped requests or unsent finishes the oldest is forgotten. That is safe, as
    the assembler ends a span at a hole and gives up an idle request by itself.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._unsent: OrderedDict[str, Finish] = OrderedDict()
        self.bytes_sent = 0

    def offer(self, chunk: Chunk) -> bool:
        """Send `chunk`; False when it, or an earlier chunk of its request, was not."""
        if self._unsent:
            self._send_finishes()
        if chunk.request_id in self._dropped:
            return False
        if self._ring.try_write(encode(chunk)):
            self.bytes_sent += chunk.nbytes
            return True
        self.drop(chunk.request_id)
        return False

    def drop(self, request_id: str) -> None:
        """Rows of the request were lost on the way, so its record is, too."""
        if request_id in self._dropped:
            return
        self._ring.count_dropped_record()
        self._dropped[request_id] = None
        if len(self._dropped) > _MAX_REMEMBERED:
            self._dropped.popitem(last=False)
        self._queue(Finish(request_id, DROPPED))

    def withdraw(self, request_id: str) -> None:
        """The request may not be captured any more, and its chunks end here: what was sent is to be forgotten."""
        if request_id in self._dropped:
            del self._dropped[request_id]
            return
        self._ring.count_withdrawn_record()
        self._queue(Finish(request_id, WITHDRAWN))

    def finish(self, request_id: str, reason: str) -> None:
        """Tell the consumer that the request ended; kept and sent later when the ring is full."""
        if request_id in self._dropped:
            # The consumer was told so, or will be: that finish is queued.
            del self._dropped[request_id]
            self._send_finishes()
        else:
            self._queue(Finish(request_id, reason))

    @property
    def has_unsent(self) -> bool:
        """Whether finishes wait for room."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send the finishes still kept, as far as there is room. Call it when the scheduler is idle."""
        self._send_finishes()

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
