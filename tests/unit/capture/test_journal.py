"""The journal: killed at random moments, cut at every byte, full disks, against an oracle that keeps everything."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import journal_writer
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from records import make_record

from draftloop.capture.journal import Journal, JournalError, Kept, left, read_counts, read_journal
from draftloop.capture.ledger import Counts, Trained
from draftloop.core.records import CaptureRecord

SEGMENT_BYTES = 3000


def write(journal: Journal, *indices: int, sequence: int = 0) -> list[Kept]:
    return journal.append([(make_record(i, steps=i % 2), float(i), i % 5 == 0) for i in indices], 0, "w", sequence)


def indices(kept: list[Kept]) -> list[int]:
    return [k.record.start for k in kept]


# --- kill -9


def test_killed_at_random_moments_nothing_acknowledged_is_lost_or_repeated(tmp_path: Path) -> None:
    """Six processes one after the other, each killed in the middle of a step chosen at random."""
    rng = random.Random(11)
    fates: dict[str, set[int]] = {"deliver": set(), "train": set(), "delete": set()}
    sequence = 1
    for round_ in range(6):
        lines = run_and_kill(tmp_path, round_, sequence, rng.randint(4, 30))
        for word, step, of in lines:
            if word == "ack":
                note(fates, step, of)
        word, step, of = lines[-1]
        sequence = check_recovered(tmp_path, fates, (step, of) if word == "try" else None)


def run_and_kill(folder: Path, seed: int, sequence: int, after: int) -> list[tuple[str, str, int]]:
    """What the writer said until it was killed, some time after its line number `after`."""
    command = [sys.executable, journal_writer.__file__, str(folder), str(seed), str(sequence)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = b"".join(process.stdout.readline() for _ in range(after))
        process.send_signal(signal.SIGKILL)
        said += process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    words = [line.split() for line in said.decode().splitlines()]
    return [(word, step, int(of)) for word, step, of in words]


def note(fates: dict[str, set[int]], step: str, of: int) -> None:
    """What is done to a delivery that is not there changes nothing."""
    if step == "deliver" or of in fates["deliver"] - fates["delete"]:
        fates[step].add(of)


def check_recovered(folder: Path, fates: dict[str, set[int]], unsure: tuple[str, int] | None) -> int:
    """All that was acknowledged is so, and the one step that was not is done or not done; returns what to send next."""
    with Journal(folder, SEGMENT_BYTES) as journal:
        kept = journal.take_kept()
        counts = journal.counts
        has = [journal.ledger.has(journal_writer.SOURCE, s) for s in (max(fates["deliver"], default=0), 10**6)]
    assert has[0] or not fates["deliver"]
    assert not has[1]
    assert counts.balanced
    assert len({k.record.request_id for k in kept}) == len(kept) == counts.kept
    if unsure is not None:
        step, of = unsure
        mine = [k for k in kept if k.time == of]
        done = {"deliver": bool(mine), "delete": not mine, "train": any(k.trained for k in mine)}
        if done[step]:
            note(fates, step, of)
    delivered = fates["deliver"]
    expected = {r.request_id: r for s in delivered - fates["delete"] for r in journal_writer.delivery(s)}
    assert {k.record.request_id for k in kept} == expected.keys()
    for k in kept:
        np.testing.assert_array_equal(k.record.token_ids, expected[k.record.request_id].token_ids)
        np.testing.assert_array_equal(k.record.fused, expected[k.record.request_id].fused)
        assert k.trained == (not k.held_out and k.time in fates["train"])
    assert counts.captured == 4 * len(delivered)
    assert counts.dropped == len(delivered)
    assert counts.deleted == 3 * len(delivered & fates["delete"])
    return max(delivered, default=0) + 1


# --- against an oracle


class JournalMachine(RuleBasedStateMachine):
    """The oracle keeps every record and its fate in a dictionary; reopening may follow a crash in mid-write."""

    def __init__(self) -> None:
        super().__init__()
        self._temporary = TemporaryDirectory()
        self.folder = Path(self._temporary.name) / "journal"
        self.journal = Journal(self.folder, SEGMENT_BYTES)
        self.kept: dict[int, Kept] = {}
        self.fates: Counter[str] = Counter()
        self.index = 0
        self.sequence = 0

    @rule(tokens=st.lists(st.integers(1, 60), max_size=5), dropped=st.integers(0, 2))
    def deliver(self, tokens: list[int], dropped: int) -> None:
        self.sequence += 1
        records: list[tuple[CaptureRecord, float, bool]] = []
        for count in tokens:
            self.index += 1
            records.append((make_record(self.index, "ab"[count % 2], count, count % 3), float(self.index), count > 40))
        for kept in self.journal.append(records, dropped, "w", self.sequence):
            self.kept[kept.id] = kept
        self.fates["captured"] += len(tokens) + dropped
        self.fates["dropped"] += dropped

    @rule(which=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def train(self, which: random.Random, share: float) -> None:
        chosen = [kept for kept in self.kept.values() if not kept.held_out and which.random() < share]
        self.journal.commit(Trained(tuple(kept.id for kept in chosen)))
        for kept in chosen:
            self.fates["trained"] += not kept.trained
            kept.trained = True

    @rule(which=st.randoms(use_true_random=False), share=st.floats(0, 1), fate=st.sampled_from(["expired", "deleted"]))
    def leave(self, which: random.Random, share: float, fate: str) -> None:
        chosen = [kept for kept in self.kept.values() if which.random() < share]
        self.journal.commit(left(chosen, fate))  # type: ignore[arg-type]
        for kept in chosen:
            del self.kept[kept.id]
            if not kept.trained or fate == "deleted":
                self.fates[fate] += 1
                self.fates["trained"] -= kept.trained

    @rule()
    def erase(self) -> None:
        """Only the kept records' bytes are on disk then."""
        self.journal.erase_dead()
        on_disk = b"".join(path.read_bytes() for path in self.folder.glob("*.segment"))
        assert on_disk.count(b"request_id") == len(self.kept)

    @rule(
        end=st.sampled_from(["closed", "killed", "torn ledger", "torn segment", "unacknowledged"]),
        garbage=st.binary(min_size=1, max_size=30),
    )
    def reopen(self, end: str, garbage: bytes) -> None:
        before = {path: path.read_bytes() for path in self.folder.iterdir()}
        if end == "unacknowledged":
            # The records reached the disk, the ledger's entry did not.
            self.journal.append([(make_record(-1), 0.0, False)], 1, "w", self.sequence + 1)
            (self.folder / "ledger").write_bytes(before[self.folder / "ledger"])
        self.journal.close()
        if end == "torn ledger":
            with (self.folder / "ledger").open("ab") as file:
                file.write((1000).to_bytes(8, "little") + garbage)
        elif end == "torn segment" and (segments := sorted(self.folder.glob("*.segment"))):
            with segments[-1].open("ab") as file:
                file.write((1000).to_bytes(8, "little") + garbage)
        self.journal = Journal(self.folder, SEGMENT_BYTES)
        for kept in self.journal.take_kept():
            mine = self.kept[kept.id]
            assert (kept.time, kept.held_out, kept.trained) == (mine.time, mine.held_out, mine.trained)
            np.testing.assert_array_equal(kept.record.fused, mine.record.fused)
            assert len(kept.record.verify_steps) == len(mine.record.verify_steps)

    @invariant()
    def books_balance(self) -> None:
        counts = self.journal.counts
        held_out = sum(kept.held_out for kept in self.kept.values())
        pending = sum(not kept.held_out and not kept.trained for kept in self.kept.values())
        assert counts == Counts(held_out=held_out, pending=pending, kept=len(self.kept), **self.fates)
        assert counts.balanced
        assert self.journal.ledger.has("w", self.sequence) == (self.sequence > 0)
        assert not self.journal.ledger.has("w", self.sequence + 1)

    @invariant()
    def disk_is_bounded(self) -> None:
        paths = list(self.folder.glob("*.segment"))
        nbytes = sum(path.stat().st_size for path in paths)
        assert nbytes == self.journal.nbytes
        # A record's frame is its arrays and less than 250 bytes beside them and each verification step.
        live = sum(k.record.nbytes + 250 * (1 + len(k.record.verify_steps)) for k in self.kept.values())
        assert nbytes <= 2 * live + SEGMENT_BYTES + 8 * len(paths)

    def teardown(self) -> None:
        self.journal.close()
        self._temporary.cleanup()


JournalMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestJournalMachine = JournalMachine.TestCase


# --- damage, full disks, two owners


@pytest.mark.parametrize("name", ["ledger", "00000001.segment"])
def test_cut_at_any_byte_it_opens_with_what_was_whole(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "journal"
    with Journal(folder, 1 << 20) as journal:
        for i in range(1, 5):
            write(journal, i, 10 + i, sequence=i)
    whole = (folder / name).read_bytes()
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    seen = set()
    for length in range(8, len(whole), len(whole) // 50):
        for other, data in contents.items():
            (folder / other).write_bytes(data if other != name else whole[:length])
        with Journal(folder, 1 << 20) as journal:
            kept, counts = journal.take_kept(), journal.counts
        assert counts.balanced
        assert len(kept) == counts.kept
        assert indices(kept) == [1, 11, 2, 12, 3, 13, 4, 14][: len(kept)]
        if name == "ledger":
            assert counts.captured == len(kept), "what has no entry never came"
        else:
            assert counts.captured == 8
            assert counts.dropped == 8 - len(kept), "an acknowledged record that the disk lost is counted"
        seen.add(len(kept))
    assert seen == (set(range(0, 9, 2)) - {8} if name == "ledger" else set(range(8)))


def test_a_damaged_record_is_dropped_alone(tmp_path: Path) -> None:
    with Journal(tmp_path, 1 << 20) as journal:
        write(journal, 1, 2, 3)
    path = tmp_path / "00000001.segment"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with Journal(tmp_path, 1 << 20) as journal:
        assert indices(journal.take_kept()) == [1, 3]
        assert (journal.counts.dropped, journal.counts.balanced) == (1, True)


def test_a_ledger_damaged_before_its_end_is_one_clear_line(tmp_path: Path) -> None:
    with Journal(tmp_path, 1 << 20) as journal:
        for i in range(1, 4):
            write(journal, i)
    path = tmp_path / "ledger"
    data = bytearray(path.read_bytes())
    for byte in (20, len(data) // 2, len(data) // 2 + 4):
        data[byte] ^= 1
        path.write_bytes(data)
        with pytest.raises(JournalError, match=r"ledger is damaged at byte \d+ \(.*\); move its folder away"):
            Journal(tmp_path, 1 << 20)
        data[byte] ^= 1
    path.write_bytes(b"something else")
    with pytest.raises(JournalError, match="is not a draftloop ledger"):
        Journal(tmp_path, 1 << 20)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file may grow beyond `nbytes`: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_the_delivery_whole_and_is_survived(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1 << 20)
    write(journal, 1, 2, sequence=1)
    before = journal.counts
    with file_size_limit(1200), pytest.raises(JournalError, match="cannot write the journal"):
        write(journal, *range(3, 9), sequence=2)
    assert journal.counts == before
    write(journal, *range(3, 9), sequence=2)
    ledger_bytes = (tmp_path / "ledger").stat().st_size
    full = journal.counts
    with file_size_limit(ledger_bytes + 10), pytest.raises(JournalError, match="cannot write the journal"):
        journal.commit(Trained((1,)))
    assert journal.counts == full
    journal.commit(Trained((1,)))
    journal.close()
    with Journal(tmp_path, 1 << 20) as again:
        assert indices(again.take_kept()) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert again.counts == Counts(captured=8, trained=1, held_out=1, pending=6, kept=8)


def test_one_owner_and_any_number_of_readers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", SEGMENT_BYTES)
    write(journal, 1, 2)
    with pytest.raises(JournalError, match=r"is in use by process \d+; stop that one first"):
        Journal(tmp_path / "journal", SEGMENT_BYTES)
    kept, counts = read_journal(tmp_path / "journal")
    assert indices(kept) == [1, 2]
    assert counts == read_counts(tmp_path / "journal") == journal.counts
    journal.close()
    Journal(tmp_path / "journal", SEGMENT_BYTES).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot open the journal"):
        Journal(tmp_path / "file", SEGMENT_BYTES)


def test_the_ledger_stays_small(tmp_path: Path) -> None:
    with Journal(tmp_path, 1 << 20) as journal:
        kept = write(journal, *range(1, 9))
        ids = tuple(k.id for k in kept) * 3000
        for _ in range(40):
            journal.commit(Trained(ids))
        assert (tmp_path / "ledger").stat().st_size < 1_200_000
        assert journal.counts.trained == 7
