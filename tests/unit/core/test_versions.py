"""The registry of versions: states, rollback, taint, torn lines, several processes, differences."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.manifest import Lineage, Manifest, TargetIdentity
from draftloop.core.versions import VERSIONS_FILE, VersionError, VersionRegistry, differences

_TARGET = TargetIdentity(
    name="tiny",
    fingerprint="f" * 64,
    hidden_size=4,
    vocab_size=8,
    num_layers=2,
    tokenizer_sha256="",
    chat_template_sha256="",
)


def make_checkpoint(root: Path, name: str, parent: str | None, records: int = 0) -> Path:
    """A folder with a manifest: all that the registry reads of a drafter."""
    folder = root / "checkpoints" / name
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
        lineage=Lineage(records=records, domains={"chat": records}),
        metrics={"accept_length": 1.0 + records},
        created=float(len(name)),
    ).save(folder)
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> VersionRegistry:
    """v0 and v1 served, v2 serves; v3 is a candidate."""
    registry = VersionRegistry(tmp_path / "run")
    for i in range(4):
        registry.add(make_checkpoint(tmp_path / "run", f"v{i}", f"v{i - 1}" if i else None, i))
        if i < 3:
            registry.move(f"v{i}", "promoted", "better")
    return registry


def test_a_version_tells_its_parent_data_metrics_and_state(registry: VersionRegistry) -> None:
    version = VersionRegistry(registry.folder).get("v2")
    assert (version.parent, version.kind, version.state, version.reason) == ("v1", "eagle3", "promoted", "better")
    assert (version.lineage.records, version.lineage.domains, version.metrics) == (2, {"chat": 2}, {"accept_length": 3})
    assert registry.checkpoint("v2").samefile(registry.folder / "checkpoints" / "v2")
    assert [v.name for v in registry.all()] == ["v0", "v1", "v2", "v3"]


def test_the_newest_promotion_serves_until_it_is_rolled_back(registry: VersionRegistry) -> None:
    def serving() -> str:
        version = registry.serving()
        assert version is not None
        return version.name

    assert serving() == "v2"
    registry.move("v3", "canary", "one worker has it")
    assert serving() == "v2"
    registry.move("v3", "promoted", "all have it")
    assert serving() == "v3"
    registry.roll_back("v1", "accepted length fell")
    assert serving() == "v1"
    assert [v.state for v in registry.all()] == ["promoted", "promoted", "rolled_back", "rolled_back"]
    registry.roll_back("v3", "it was the traffic")
    assert serving() == "v3"
    registry.move("v3", "rolled_back", "no")
    assert serving() == "v1"


def test_nothing_is_known_of_an_empty_folder(tmp_path: Path) -> None:
    registry = VersionRegistry(tmp_path)
    assert registry.all() == []
    assert registry.serving() is None
    with pytest.raises(VersionError, match="there is no version v1; the newest known: none yet"):
        registry.get("v1")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_allowed_is_one_clear_line_and_changes_nothing(registry: VersionRegistry, tmp_path: Path) -> None:
    registry.add(make_checkpoint(registry.folder, "v4", "v2"))
    registry.move("v4", "refused", "worse")
    before = (registry.folder / VERSIONS_FILE).read_bytes()
    with pytest.raises(VersionError, match="v4 is refused and cannot become promoted"):
        registry.move("v4", "promoted", "")
    with pytest.raises(VersionError, match=r"v3 never served \(it is candidate\)"):
        registry.check_restorable("v3")
    with pytest.raises(VersionError, match="v4 is refused and cannot become promoted"):
        registry.roll_back("v4", "")
    with pytest.raises(VersionError, match="there is no version v9"):
        registry.move("v9", "canary", "")
    with pytest.raises(VersionError, match="has a version v1 already"):
        registry.add(registry.checkpoint("v1"))
    registry.checkpoint("v0").rename(tmp_path / "gone")
    with pytest.raises(VersionError, match="v0 has lost its checkpoint"):
        registry.check_restorable("v0")
    assert registry.restorable() == ["v1", "v2"]
    assert (registry.folder / VERSIONS_FILE).read_bytes() == before


def test_taint_reaches_all_descendants_and_forbids_restoring(registry: VersionRegistry) -> None:
    assert registry.taint(lambda name: name == "v1", "records of 1 request were deleted") == ["v1", "v2", "v3"]
    assert registry.taint(lambda name: True, "again") == ["v0"]
    assert registry.get("v3").tainted == "records of 1 request were deleted"
    with pytest.raises(VersionError, match="version v2 is tainted: records of 1 request were deleted"):
        registry.check_restorable("v2")
    assert registry.restorable() == []
    assert registry.add(make_checkpoint(registry.folder, "v4", "v3")).tainted is not None
    assert registry.get("v4").tainted == "records of 1 request were deleted"


@given(cut=st.integers(0, 3000))
@settings(max_examples=40, deadline=None)
def test_a_file_cut_anywhere_is_read_up_to_the_cut_and_written_on(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("run")
    registry = VersionRegistry(root)
    states = [[]]
    for i in range(4):
        registry.add(make_checkpoint(root, f"v{i}", f"v{i - 1}" if i else None))
        states.append(registry.all())
        registry.move(f"v{i}", "promoted", "")
        states.append(registry.all())
    path = root / VERSIONS_FILE
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    assert registry.all() == states[data.count(b"\n")]
    whole = states[data.count(b"\n")]
    registry.add(make_checkpoint(root, "v9", whole[-1].name if whole else None))
    assert [v.name for v in VersionRegistry(root).all()] == [*(v.name for v in whole), "v9"]


def test_a_damaged_line_is_an_error_not_a_guess(registry: VersionRegistry) -> None:
    path = registry.folder / VERSIONS_FILE
    path.write_text(path.read_text().replace('"moved"', '"mooved"', 1))
    with pytest.raises(VersionError, match="line 2 is not a version entry"):
        registry.all()


def _add_many(root: Path, first: int) -> None:
    registry = VersionRegistry(root)
    for i in range(first, first + 20):
        registry.add(make_checkpoint(root, f"v{i}", "v0"))
        registry.move(f"v{i}", "canary", "")


def test_two_processes_write_without_losing_a_line(tmp_path: Path) -> None:
    VersionRegistry(tmp_path).add(make_checkpoint(tmp_path, "v0", None))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(tmp_path, first)) for first in (100, 200)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    versions = VersionRegistry(tmp_path).all()
    assert {v.name for v in versions[1:]} == {f"v{i}" for first in (100, 200) for i in range(first, first + 20)}
    assert {v.state for v in versions[1:]} == {"canary"}


def test_differences_name_what_changed(registry: VersionRegistry) -> None:
    rows = {what: (one, other) for what, one, other in differences(registry.get("v1"), registry.get("v2"))}
    assert rows["name"] == ("v1", "v2")
    assert rows["records of chat"] == ("1", "2")
    assert rows["gate accept_length"] == ("2", "3")
    assert "kind" not in rows
    assert differences(registry.get("v1"), registry.get("v1")) == []
