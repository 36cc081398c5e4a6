"""A bounded byte ring in shared memory: one producer, one consumer, whole messages or nothing.

Layout: three 64-byte header lines, a control block (see `control`), then `capacity` bytes of frames.

    line 0   magic, capacity                                  written once by the owner
    line 1   head, written, dropped, dropped bytes,           written by the producer only
             records dropped, throttled, withdrawn
    line 2   tail, read                                       written by the consumer only
    control  the capture policy                               written by the consumer

`head` and `tail` count bytes ever published and consumed; their difference is what the ring holds. A frame is a
16-byte header (payload length, sequence number), the payload, and padding to 16 bytes, so that a frame's header
never wraps. The producer writes the frame first and then publishes `head` with one aligned 8-byte store; x86 keeps
stores in that order. (On a weaker machine a torn message would fail the wire checksum.)

The position lives in the header: a consumer may come late, die and come back. It moves `tail` after it has copied a
message, so a message cut short by its death is read again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from draftloop.capture.control import CONTROL_BYTES, ControlBlock
from draftloop.core.errors import DraftloopError

_MAGIC = int.from_bytes(b"DLRING02", "little")
_ALIGN = 16
_LINE_WORDS = 8
_LINES_BYTES = 3 * 64
_HEADER_BYTES = _LINES_BYTES + CONTROL_BYTES
_CAPACITY = 1
_HEAD, _WRITTEN, _DROPPED, _DROPPED_BYTES = range(_LINE_WORDS, _LINE_WORDS + 4)
_RECORDS_DROPPED, _RECORDS_THROTTLED, _RECORDS_WITHDRAWN = range(_LINE_WORDS + 4, _LINE_WORDS + 7)
_TAIL, _READ = range(2 * _LINE_WORDS, 2 * _LINE_WORDS + 2)
_NAME_PREFIX = "draftloop-"
_SHM_DIR = Path("/dev/shm")


class RingError(DraftloopError):
    """The shared-memory ring cannot be made, found or trusted."""


@dataclass(frozen=True)
class RingCounters:
    """Messages written, read and dropped since the ring was made; bytes dropped, held now, and at most held.

    records_dropped: requests that found the ring full and lost their record.  records_throttled: requests refused
    for the byte rate.  records_withdrawn: requests whose tenant or domain opted out while they ran.
    """

    written: int
    read: int
    dropped: int
    dropped_bytes: int
    bytes_used: int
    capacity: int
    records_dropped: int = 0
    records_throttled: int = 0
    records_withdrawn: int = 0

    @property
    def pending(self) -> int:
        """Messages written and not yet read."""
        return self.written - self.read


def new_ring_name() -> str:
    """A name that tells its owner's process; rings of owners that are dead are removed on the way.

    Python's resource tracker removes a killed owner's ring, unless whoever kills takes its whole process group.
    """
    for file, owner in _owned():
        if not Path(f"/proc/{owner}").exists():
            file.unlink(missing_ok=True)
    return f"{_NAME_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"


def rings_of(pids: Collection[int]) -> list[str]:
    """Names of the rings that these processes made."""
    return sorted(file.name for file, owner in _owned() if owner in pids)


def _owned() -> Iterator[tuple[Path, int]]:
    """Each ring with a name of `new_ring_name`, and its owner's process."""
    for file in _SHM_DIR.glob(f"{_NAME_PREFIX}*-*"):
        owner = file.name.removeprefix(_NAME_PREFIX).partition("-")[0]
        if owner.isdigit():
            yield file, int(owner)


class _Ring:
    """The mapped memory, seen as header words and as frame bytes. Raises RingError when there is no such ring."""

    def __init__(self, name: str) -> None:
        try:
            fd = os.open(_SHM_DIR / name, os.O_RDWR)
        except OSError as err:
            raise RingError(f"no capture ring named {name}: {err.strerror}") from None
        try:
            size = os.fstat(fd).st_size
            mapping = mmap.mmap(fd, size) if size > _HEADER_BYTES else None
        finally:
            os.close(fd)
        if mapping is None or int.from_bytes(mapping[:8], "little") != _MAGIC:
            raise RingError(f"shared memory {name} is not a draftloop capture ring")
        self.name = name
        self._mapping = mapping
        self._memory = memoryview(mapping)
        self._words = self._memory[:_LINES_BYTES].cast("Q")
        self.control = ControlBlock(self._memory[_LINES_BYTES:_HEADER_BYTES])
        self._capacity = self._words[_CAPACITY]
        self._data = self._memory[_HEADER_BYTES : _HEADER_BYTES + self._capacity]

    def close(self) -> None:
        """Unmap; the ring stays."""
        self._data.release()
        self.control.release()
        self._words.release()
        self._memory.release()
        self._mapping.close()

    def counters(self) -> RingCounters:
        """A snapshot; the consumer's side is sampled first, so `pending` is never negative."""
        words = self._words
        tail, read = words[_TAIL], words[_READ]
        return RingCounters(
            written=words[_WRITTEN],
            read=read,
            dropped=words[_DROPPED],
            dropped_bytes=words[_DROPPED_BYTES],
            bytes_used=words[_HEAD] - tail,
            capacity=self._capacity,
            records_dropped=words[_RECORDS_DROPPED],
            records_throttled=words[_RECORDS_THROTTLED],
            records_withdrawn=words[_RECORDS_WITHDRAWN],
        )


class RingOwner(_Ring):
    """Makes the ring and removes it: held by the process that launches the scheduler.

    Only the owner is known to Python's resource tracker, which removes the memory if the owner is killed. The others
    map the file themselves, because in Python 3.11 an attached `SharedMemory` is unlinked when its process exits.
    """

    def __init__(self, shm: SharedMemory) -> None:
        super().__init__(shm.name)
        self._shm = shm

    @classmethod
    def create(cls, name: str, capacity: int) -> RingOwner:
        """Make a ring of `capacity` bytes (rounded up to 16). Raises RingError when it exists or does not fit."""
        capacity = -(-max(capacity, _ALIGN) // _ALIGN) * _ALIGN
        size = _HEADER_BYTES + capacity
        try:
            shm = SharedMemory(name, create=True, size=size)
        except FileExistsError:
            raise RingError(f"shared memory {_SHM_DIR / name} exists already; is another draftloop running?") from None
        except OSError as err:
            raise RingError(f"cannot make shared memory {name}: {err.strerror}") from None
        shm.close()
        try:
            _prepare(name, capacity)
        except OSError:
            shm.unlink()
            raise RingError(
                f"a capture ring of {size >> 20} MiB does not fit in {_SHM_DIR} ({_free_shared_memory() >> 20} MiB "
                "free); lower capture.ring_mib or give the container more --shm-size"
            ) from None
        return cls(shm)

    def close(self) -> None:
        """Unmap and remove the ring; those still attached keep their mapping until they close."""
        super().close()
        self._shm.unlink()


class RingWriter(_Ring):
    """The producer's end. One process, one thread."""

    @classmethod
    def attach(cls, name: str) -> RingWriter:
        """Raises RingError when there is no such ring."""
        return cls(name)

    def has_room(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Whether `try_write(parts)` would succeed now; counts nothing."""
        words = self._words
        return words[_HEAD] + _frame_bytes(sum(map(len, parts))) - words[_TAIL] <= self._capacity

    def try_write(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Write one message, the parts joined, or count it as dropped when there is no room. Never blocks.

        parts: byte buffers (memoryviews of format "B").
        """
        words = self._words
        length = sum(map(len, parts))
        head = words[_HEAD]
        frame = _frame_bytes(length)
        if head + frame - words[_TAIL] > self._capacity:
            words[_DROPPED] += 1
            words[_DROPPED_BYTES] += length
            return False
        sequence = words[_WRITTEN]
        at = head % self._capacity
        self._data[at : at + _ALIGN] = length.to_bytes(8, "little") + sequence.to_bytes(8, "little")
        at += _ALIGN
        for part in parts:
            at = self._put(at, part)
        words[_WRITTEN] = sequence + 1
        words[_HEAD] = head + frame
        return True

    def count_dropped_record(self) -> None:
        self._words[_RECORDS_DROPPED] += 1

    def count_throttled_record(self) -> None:
        self._words[_RECORDS_THROTTLED] += 1

    def count_withdrawn_record(self) -> None:
        self._words[_RECORDS_WITHDRAWN] += 1

    def _put(self, at: int, part: bytes | memoryview) -> int:
        """Copy `part` to offset `at`, wrapping at the end; returns the offset after it."""
        if at >= self._capacity:
            at -= self._capacity
        end = at + len(part)
        if end <= self._capacity:
            self._data[at:end] = part
            return end
        room = self._capacity - at
        rest = memoryview(part)
        self._data[at:] = rest[:room]
        self._data[: len(part) - room] = rest[room:]
        return len(part) - room


class RingReader(_Ring):
    """The consumer's end. One process, one thread: a second one is refused, as each would get half the messages."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = (_SHM_DIR / name).open("rb")
        try:
            # The kernel frees it when this process dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RingError(f"something else reads the capture ring {name}: stop the other draftloop first") from None
        # A consumer killed between its two stores leaves `read` one ahead of `tail`; the frames know the truth.
        words = self._words
        written, head = words[_WRITTEN], words[_HEAD]
        words[_READ] = written if words[_TAIL] == head else self._frame_at(words[_TAIL])[1]

    @classmethod
    def attach(cls, name: str) -> RingReader:
        """Raises RingError when there is no such ring, or it has a reader."""
        return cls(name)

    def close(self) -> None:
        """Unmap; the ring stays, for another reader."""
        super().close()
        self._lock.close()

    def read(self) -> bytes | None:
        """The next message, or None when there is none.

        Raises RingError, after skipping all that is pending, when a frame's header makes no sense.
        """
        words = self._words
        tail, head = words[_TAIL], words[_HEAD]
        if tail == head:
            return None
        length, sequence = self._frame_at(tail)
        frame = _frame_bytes(length)
        if frame > head - tail:
            words[_READ] = words[_WRITTEN]
            words[_TAIL] = head
            raise RingError(f"capture ring {self.name} is damaged at byte {tail}; its pending messages are lost")
        at = (tail + _ALIGN) % self._capacity
        first = self._data[at : at + length].tobytes()
        message = first if len(first) == length else first + self._data[: length - len(first)].tobytes()
        words[_READ] = sequence + 1
        words[_TAIL] = tail + frame
        return message

    def _frame_at(self, position: int) -> tuple[int, int]:
        """(payload length, sequence number) of the frame that starts at byte `position` of the stream."""
        at = position % self._capacity
        header = bytes(self._data[at : at + _ALIGN])
        return int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")


def _frame_bytes(length: int) -> int:
    return _ALIGN + -(-length // _ALIGN) * _ALIGN


def _prepare(name: str, capacity: int) -> None:
    """Take the pages now, as one that cannot be had later would kill the writer with SIGBUS. Raises OSError."""
    fd = os.open(_SHM_DIR / name, os.O_RDWR)
    try:
        os.posix_fallocate(fd, 0, _HEADER_BYTES + capacity)
        os.pwrite(fd, capacity.to_bytes(8, "little"), 8 * _CAPACITY)
        os.pwrite(fd, _MAGIC.to_bytes(8, "little"), 0)
    finally:
        os.close(fd)


def _free_shared_memory() -> int:
    stats = os.statvfs(_SHM_DIR)
    return stats.f_bavail * stats.f_frsize
