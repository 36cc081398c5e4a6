"""`draftloop versions`, `record` and `delete` on a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import make_record
from typer.testing import CliRunner

from draftloop.capture.buffer import ReplayBuffer
from draftloop.capture.journal import Journal, read_counts
from draftloop.capture.privacy import Subjects, subject_hash
from draftloop.capture.record_file import read_records
from draftloop.cli.main import app
from draftloop.core.manifest import Lineage, Manifest, TargetIdentity
from draftloop.core.versions import VersionRegistry

_TARGET = TargetIdentity(
    name="tiny",
    fingerprint="f" * 64,
    hidden_size=4,
    vocab_size=8,
    num_layers=2,
    tokenizer_sha256="",
    chat_template_sha256="",
)


def draftloop(*command: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(command), env={"COLUMNS": "200"})
    return done.exit_code, done.output


def add_version(run: Path, name: str, parent: str | None, taught_by: list[int]) -> None:
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    Manifest(
        kind="eagle3",
        version=name,
        parent=parent,
        target=_TARGET,
        layer_ids=(0, 1),
        draft_vocab_size=8,
        vocab_map_sha256="",
        dtype="float32",
        tensors={},
        lineage=Lineage(records=len(taught_by), domains={"chat": len(taught_by)}),
        metrics={"accept_length": 1.5 + len(taught_by)},
        created=0.0,
    ).save(folder)
    Subjects(subject_hash("request", str(i)) for i in taught_by).save(folder)
    VersionRegistry(run).add(folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Records 0 to 9, one a minute; v1 learnt from 0 to 3, v2 from 4 and 5 more, v3 is refused."""
    run = tmp_path / "run"
    buffer = open_buffer(run)
    for i in range(10):
        buffer.add([make_record(i, "ab"[i % 2], tenant=f"t{i % 3}")], now=1000.0 + 60 * i)
    buffer.close()
    add_version(run, "v0", None, [])
    add_version(run, "v1", "v0", [0, 1, 2, 3])
    add_version(run, "v2", "v1", [0, 1, 2, 3, 4, 5])
    add_version(run, "v3", "v2", [0, 1, 2, 3, 4, 5])
    registry = VersionRegistry(run)
    for name in ("v0", "v1", "v2"):
        registry.move(name, "promoted", f"{name} is better")
    registry.move("v3", "refused", "worse")
    return run


def open_buffer(run: Path) -> ReplayBuffer:
    return ReplayBuffer(1 << 20, 1.0, 0.2, 0.5, seed=0, journal=Journal(run / "journal", 1 << 16))


def test_versions_are_listed_and_compared(run: Path) -> None:
    code, output = draftloop("versions", "--out", str(run))
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["v0", "v1", "v2 *", "v3"]
    assert rows[2][1:3] == ["v1", "promoted"]
    assert rows[2][4:6] == ["6", "chat 6"]
    assert rows[2][7:9] == ["7.50", "v2 is better"]
    assert rows[3][2] == "refused"
    code, output = draftloop("versions", "diff", "v1", "v2", "--out", str(run))
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert ["records of chat", "4", "6"] in rows
    assert ["gate accept_length", "5.5", "7.5"] in rows
    assert ["parent", "v0", "v1"] in rows


def test_record_saves_the_last_minutes_also_of_a_run_that_goes_on(run: Path, tmp_path: Path) -> None:
    live = open_buffer(run)
    code, output = draftloop("record", str(tmp_path / "file"), "--out", str(run), "--minutes", "3.5")
    assert (code, "4 records (a 2, b 2), 40 tokens" in output) == (0, True)
    records = read_records(tmp_path / "file")
    assert [(r.record.start, r.time) for r in records] == [(i, 1000.0 + 60 * i) for i in (6, 7, 8, 9)]
    assert [r.record.tenant for r in records] == ["t0", "t1", "t2", "t0"]
    live.close()


def test_delete_erases_records_and_taints_versions(run: Path) -> None:
    code, output = draftloop("delete", "--request-id", "4", "--out", str(run))
    assert code == 0
    assert output.splitlines()[0] == "tainted: v2, v3"
    assert "erased 1 records" in output
    assert [v.tainted is not None for v in VersionRegistry(run).all()] == [False, False, True, True]
    counts = read_counts(run / "journal")
    assert (counts.deleted, counts.kept, counts.balanced) == (1, 9, True)
    code, output = draftloop("delete", "--tenant", "t2", "--out", str(run))
    assert (code, "erased 3 records" in output) == (0, True)
    assert "no version learnt from this tenant" in output
    segments = b"".join(path.read_bytes() for path in (run / "journal").glob("*.segment"))
    assert segments.count(b"request_id") == 6
    assert "promoted, tainted" in draftloop("versions", "--out", str(run))[1]


def test_delete_reaches_what_was_recorded_where_it_was_written(run: Path, tmp_path: Path) -> None:
    here, moved, torn = tmp_path / "here", tmp_path / "moved", tmp_path / "torn"
    for file in (here, here, moved, torn):
        assert draftloop("record", str(file), "--out", str(run))[0] == 0
    copy = moved.rename(tmp_path / "elsewhere")
    torn.write_bytes(torn.read_bytes()[:-9])
    code, output = draftloop("delete", "--tenant", "t1", "--out", str(run))
    assert code == 0
    assert f"erased 3 records from {here}\n" in output
    assert f"not erased from a file: {torn} is truncated" in output
    assert "erased 3 records\n" in output
    assert [one.record.request_id for one in read_records(here)] == list("0235689")
    assert len(read_records(copy)) == 10, "a file that was moved is not found"
    live = open_buffer(run)
    draftloop("delete", "--tenant", "t0", "--out", str(run))
    draftloop("record", str(tmp_path / "late"), "--out", str(run))
    assert [one.record.request_id for one in read_records(tmp_path / "late")] == list("258"), (
        "not yet erased, but to be"
    )
    live.close()


def test_delete_leaves_the_records_of_a_live_run_to_its_trainer(run: Path) -> None:
    live = open_buffer(run)
    code, output = draftloop("delete", "--request-id", "1", "--out", str(run))
    assert code == 0
    assert output.splitlines() == [
        "tainted: v1, v2, v3",
        "the run goes on: its trainer erases the records in its next turn",
    ]
    assert read_counts(run / "journal").deleted == 0
    live.close()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["versions"], "has no versions.jsonl: is it the folder of a run?"),
        (["versions", "diff", "v0", "v1"], "has no versions.jsonl"),
        (["record", "file"], "has no journal of captured records"),
        (["delete", "--tenant", "t"], "has no journal of captured records"),
        (["delete"], "give --request-id or --tenant, one of them"),
        (["delete", "--tenant", "t", "--request-id", "r"], "give --request-id or --tenant, one of them"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, command: list[str], message: str) -> None:
    code, output = draftloop(*command, "--out", str(tmp_path))
    assert (code, message in output, output.count("\n")) == (2, True, 1)
    assert list(tmp_path.iterdir()) == []
