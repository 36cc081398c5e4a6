"""draftloop.core.manifest: a drafter is refused beside anything it was not made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftloop.core.errors import ManifestError
from draftloop.core.manifest import MANIFEST_FILE, Lineage, Manifest, TargetIdentity, TensorEntry, check_fits

TARGET = TargetIdentity(
    name="tiny",
    fingerprint="a" * 64,
    hidden_size=8,
    vocab_size=32,
    num_layers=4,
    tokenizer_sha256="b" * 64,
    chat_template_sha256="c" * 64,
)
LAYERS = (0, 1, 2)
MAP = "d" * 64


def _manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "kind": "eagle3",
        "version": "v001",
        "parent": "v000",
        "target": TARGET,
        "layer_ids": LAYERS,
        "draft_vocab_size": 16,
        "vocab_map_sha256": MAP,
        "dtype": "float32",
        "tensors": {"fc.weight": TensorEntry(shape=(8, 24), dtype="float32", sha256="e" * 64)},
        "lineage": Lineage(records=3, tokens=90, train_steps=5, domains={"code": 3}),
        "created": 1.0,
    }
    return Manifest(**{**fields, **changes})


def test_round_trip(tmp_path: Path) -> None:
    _manifest().save(tmp_path)
    assert Manifest.load(tmp_path) == _manifest()


def test_a_fitting_drafter_passes() -> None:
    check_fits(_manifest(), TARGET, LAYERS)
    check_fits(_manifest(), TARGET, list(LAYERS))


@pytest.mark.parametrize(
    ("target", "layers", "says"),
    [
        ({"fingerprint": "f" * 64, "name": "other"}, LAYERS, "trained for target tiny"),
        ({}, (1, 2, 3), "layers [0, 1, 2]"),
        ({"tokenizer_sha256": "f" * 64}, LAYERS, "tokenizer or chat template"),
        ({"chat_template_sha256": "f" * 64}, LAYERS, "tokenizer or chat template"),
    ],
)
def test_a_mismatch_is_one_clear_line(target: dict[str, Any], layers: tuple[int, ...], says: str) -> None:
    with pytest.raises(ManifestError) as error:
        check_fits(_manifest(), TARGET.model_copy(update=target), layers)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=MANIFEST_FILE):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(("old", "new", "says"), [('"eagle3"', '"eagle9"', "kind"), ("{", "", "JSON")])
def test_a_damaged_manifest_is_one_clear_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    _manifest().save(tmp_path)
    path = tmp_path / MANIFEST_FILE
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ManifestError) as error:
        Manifest.load(tmp_path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
