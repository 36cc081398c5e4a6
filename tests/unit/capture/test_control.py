"""The control block: what is read was written, whole, whatever the writer does meanwhile."""

from __future__ import annotations

import subprocess
import sys
import uuid
import zlib
from collections.abc import Iterator

import pytest

from draftloop.capture.control import CONTROL_BYTES, ControlBlock
from draftloop.capture.ring import RingOwner, RingReader, RingWriter
from draftloop.core.errors import ConfigError

_WRITER = """
import random, sys, zlib
from draftloop.capture.ring import RingReader
control = RingReader.attach(sys.argv[1]).control
rng = random.Random(3)
for number in range(20_000):
    body = number.to_bytes(4, "little") * rng.randrange(1, 400)
    control.publish(zlib.crc32(body).to_bytes(4, "little") + body)
"""


@pytest.fixture
def owner() -> Iterator[RingOwner]:
    ring = RingOwner.create(f"draftloop-test-{uuid.uuid4().hex}", 1 << 16)
    yield ring
    ring.close()


def test_nothing_was_said_at_first(owner: RingOwner) -> None:
    assert owner.control.version == 0
    assert owner.control.read() is None


def test_the_last_message_is_read_by_all(owner: RingOwner) -> None:
    writer, reader = RingWriter.attach(owner.name), RingReader.attach(owner.name)
    versions = []
    for message in (b"one", b"", b"a longer one" * 99, b"x"):
        owner.control.publish(message)
        assert writer.control.read() == reader.control.read() == (owner.control.version, message)
        versions.append(owner.control.version)
    assert versions == sorted(set(versions))
    writer.close()
    reader.close()


def test_control_and_frames_do_not_touch(owner: RingOwner) -> None:
    writer, reader = RingWriter.attach(owner.name), RingReader.attach(owner.name)
    longest = b"\xff" * (CONTROL_BYTES - 16)
    owner.control.publish(longest)
    assert writer.try_write([b"frame" * 1000])
    owner.control.publish(longest)
    assert reader.read() == b"frame" * 1000
    read = reader.control.read()
    assert read is not None
    assert read[1] == longest
    with pytest.raises(ConfigError, match="at most 65520 fit") as caught:
        owner.control.publish(longest + b"!")
    assert "\n" not in str(caught.value)
    assert reader.control.read() == read
    writer.close()
    reader.close()


def test_a_message_being_written_is_not_read() -> None:
    memory = memoryview(bytearray(CONTROL_BYTES))
    control = ControlBlock(memory)
    control.publish(b"good")
    version = control.version
    memory.cast("Q")[0] = version + 1  # a writer that died half way
    assert control.read() is None
    control.publish(b"again")
    assert control.read() == (version + 2, b"again")


def test_a_message_replaced_while_it_is_copied_is_not_read() -> None:
    """The reader's copy is interrupted by a whole other publication, at the worst place."""
    memory = memoryview(bytearray(CONTROL_BYTES))
    control, other = ControlBlock(memory), ControlBlock(memory)
    control.publish(b"first")

    class Interrupted:
        def __getitem__(self, part: slice) -> memoryview:
            copied = memoryview(bytes(memory[16:CONTROL_BYTES][part]))
            other.publish(b"other")
            return copied

    control._message = Interrupted()  # type: ignore[assignment]
    assert control.read() is None
    assert other.read() == (4, b"other")


def test_a_busy_writer_in_another_process_is_never_read_torn(owner: RingOwner) -> None:
    process = subprocess.Popen([sys.executable, "-c", _WRITER, owner.name])
    seen = 0
    while process.poll() is None:
        read = owner.control.read()
        if read is not None:
            _, message = read
            assert zlib.crc32(message[4:]) == int.from_bytes(message[:4], "little")
            seen += 1
    assert process.returncode == 0
    last = owner.control.read()
    assert last is not None
    assert last[0] == 40_000
    assert last[1][4:8] == (19_999).to_bytes(4, "little")
    assert seen > 0 or owner.control.version == 40_000
