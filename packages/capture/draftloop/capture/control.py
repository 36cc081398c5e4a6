"""A small message in shared memory that its writer may replace at any time and its reader polls with one load.

    word 0   version: odd while the message is being written, else even and higher than before
    word 1   length of the message in bytes
    then     the message

A sequence lock: the reader copies and then looks whether the version is still the one it began with. It never waits:
a message caught half written is read at the next poll, and until then the old one holds. (x86 keeps stores in order,
on which the ring relies as well.)
"""

from __future__ import annotations

from draftloop.core.errors import ConfigError

CONTROL_BYTES = 64 << 10
_HEAD_BYTES = 16
_VERSION, _LENGTH = 0, 1


class ControlBlock:
    """One writer, any number of readers. memory: CONTROL_BYTES bytes that start as zeros."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_HEAD_BYTES].cast("Q")
        self._message = memory[_HEAD_BYTES:CONTROL_BYTES]

    @property
    def version(self) -> int:
        """0 before the first message."""
        return self._words[_VERSION]

    def publish(self, message: bytes) -> None:
        """Replace the message. Raises ConfigError when it is too long."""
        if len(message) > len(self._message):
            raise ConfigError(
                f"the capture policy takes {len(message)} bytes, at most {len(self._message)} fit: name fewer tenants "
                "and domains"
            )
        # A writer that died half way left an odd version; the next one goes on from there.
        writing = self._words[_VERSION] | 1
        self._words[_VERSION] = writing
        self._words[_LENGTH] = len(message)
        self._message[: len(message)] = message
        self._words[_VERSION] = writing + 1

    def read(self) -> tuple[int, bytes] | None:
        """(version, message), or None when there is none or it is just being written."""
        version = self._words[_VERSION]
        if version == 0 or version % 2:
            return None
        message = self._message[: self._words[_LENGTH]].tobytes()
        return (version, message) if self._words[_VERSION] == version else None

    def release(self) -> None:
        self._message.release()
        self._words.release()
