"""Nothing unredacted leaves a worker: from its ring to transport, journal and record file, searched byte by byte."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shelf import Shelf
from typer.testing import CliRunner

from draftloop.capture.buffer import ReplayBuffer
from draftloop.capture.journal import JOURNAL_FOLDER, Journal
from draftloop.capture.mask_spans import mask_spans
from draftloop.capture.ring import RingWriter
from draftloop.capture.tap_writer import TapWriter
from draftloop.capture.transport import Receipt
from draftloop.capture.wire import Chunk
from draftloop.cli.main import app
from draftloop.core.config import Config
from draftloop.core.records import CaptureRecord
from draftloop.fleet import worker as worker_module
from draftloop.fleet.worker import Worker

SECRET = [70001, 70002, 70003]
PATTERN = np.array(SECRET, np.int32).tobytes()
REQUESTS = 6


def hide(record: CaptureRecord, mask: int) -> CaptureRecord | None:
    """A redactor, found by name."""
    return None if record.domain == "code" else mask_spans(record, spans=[SECRET], mask=mask)


def capture(worker: Worker) -> None:
    """What a server's tap would write: a secret in each request, every third of them in code."""
    tap = worker._open_tap("EAGLE3")
    writer = RingWriter.attach(tap.ring)
    for i in range(REQUESTS):
        tokens = np.array([5, i, *SECRET, 6, 7], np.int32)
        states = np.full((len(tokens), 2), i + 1.0, np.float32)
        domain = "code" if i % 3 == 2 else "chat"
        sent = TapWriter(writer)
        assert sent.offer(Chunk(f"r{i}", domain, 0, 3, tokens, states, states))
        sent.finish(f"r{i}", "length")
    writer.close()
    deadline = time.monotonic() + 30
    while worker._collector.counts().records < REQUESTS:  # type: ignore[union-attr]
        assert time.monotonic() < deadline, "the collector read nothing"
        time.sleep(0.01)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """The transport of this module's workers."""
    shelf = Shelf()
    monkeypatch.setattr(worker_module, "make_transport", lambda config: shelf)
    monkeypatch.setitem(sys.modules, "my_hooks", sys.modules[__name__])
    return shelf


def sent_by(worker: Worker, shelf: Shelf, run: Path) -> bytes:
    """Every byte that transport, journal and record file got."""
    buffer = ReplayBuffer(1 << 20, 1.0, 0.2, 0.5, seed=0, journal=Journal(run / JOURNAL_FOLDER, 1 << 16))
    seen, receipt = b"", None
    while (delivery := worker.offer(4, receipt)) is not None:
        seen += shelf.payloads[delivery.reference]
        buffer.add(shelf.receive(delivery.reference), 1000.0, delivery.dropped, delivery.source, delivery.sequence)
        receipt = Receipt(delivery.source, delivery.sequence, buffer.counts)
    counts = buffer.counts
    assert (counts.captured, counts.balanced) == (REQUESTS, True)
    assert counts.dropped == REQUESTS - counts.kept
    buffer.close()
    done = CliRunner().invoke(app, ["record", str(run / "file"), "--out", str(run)])
    assert done.exit_code == 0, done.output
    stored = [run / "file", *(path for path in (run / JOURNAL_FOLDER).iterdir() if path.is_file())]
    return seen + b"".join(path.read_bytes() for path in stored)


def test_nothing_unredacted_is_sent_or_stored(shelf: Shelf, tmp_path: Path) -> None:
    privacy: dict[str, Any] = {"redactor": "my_hooks:hide", "redactor_options": {"mask": 9}}
    found: dict[str, bytes] = {}
    for name, config in (("open", Config()), ("hidden", Config.model_validate({"privacy": privacy}))):
        worker = Worker(tmp_path, config, tmp_path / "server.log")
        capture(worker)
        found[name] = sent_by(worker, shelf, tmp_path / name)
        worker.stop()
    # Each request once in payload, journal and file; of the two in code nothing is left.
    assert found["open"].count(PATTERN) == 3 * REQUESTS
    assert found["hidden"].count(np.array([9, 9, 9], np.int32).tobytes()) == 3 * 4
    for trace in (PATTERN, b"code", b"r2", np.int32(SECRET[1]).tobytes()):
        assert trace in found["open"]
        assert trace not in found["hidden"]
