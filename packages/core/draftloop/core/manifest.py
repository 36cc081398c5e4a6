"""The manifest that travels with every drafter: what it fits, where it came from, what it holds.

It is checked before a weight is loaded; `check_fits` names the first thing that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftloop.core.errors import ManifestError

MANIFEST_FILE = "draftloop_manifest.json"

DrafterKind = Literal["eagle1", "eagle2", "eagle3", "dflash"]


class TensorEntry(BaseModel):
    """Shape, dtype and checksum (sha256 of the raw bytes) of one stored tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: tuple[int, ...]
    dtype: str
    sha256: str


class TargetIdentity(BaseModel):
    """What of a target a drafter depends on. Hashes are sha256 hex.

    fingerprint: hash over the target's config and weight-file checksums.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    fingerprint: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    tokenizer_sha256: str
    chat_template_sha256: str


class Lineage(BaseModel):
    """The data a drafter was trained on."""

    model_config = ConfigDict(extra="forbid")

    records: int = 0
    tokens: int = 0
    train_steps: int = 0
    first_record_time: float | None = None
    last_record_time: float | None = None
    domains: dict[str, int] = Field(default_factory=dict)


class Manifest(BaseModel):
    """Everything needed to decide whether a drafter may be loaded beside a target.

    layer_ids: the target layers whose OUTPUT feeds the drafter (0-based, output of layer i). This is
        SGLang's `eagle_aux_hidden_state_layer_ids` convention.
    vocab_map_sha256: hash of the draft-to-target token map (empty map = full vocabulary).
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    kind: DrafterKind
    version: str
    parent: str | None
    target: TargetIdentity
    layer_ids: tuple[int, ...]
    layer_convention: Literal["output"] = "output"
    draft_vocab_size: int
    vocab_map_sha256: str
    dtype: str
    tensors: dict[str, TensorEntry]
    lineage: Lineage = Field(default_factory=Lineage)
    metrics: dict[str, float] = Field(default_factory=dict)
    created: float

    def save(self, folder: Path) -> None:
        (folder / MANIFEST_FILE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read `folder`'s manifest. Raises ManifestError in one line."""
        path = folder / MANIFEST_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ManifestError(
                f"{folder} has no {MANIFEST_FILE}: it is not a draftloop drafter; export it with draftloop"
            ) from None
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(str(p) for p in first["loc"])
            raise ManifestError(f"{path} is not a valid manifest: {where}: {first['msg']}") from None


def check_fits(manifest: Manifest, target: TargetIdentity, layer_ids: Iterable[int]) -> None:
    """Raise ManifestError when the drafter was made for something else."""
    if manifest.target.fingerprint != target.fingerprint:
        raise ManifestError(
            f"drafter {manifest.version} was trained for target {manifest.target.name} "
            f"({manifest.target.fingerprint[:12]}), not {target.name} ({target.fingerprint[:12]}); "
            "choose a drafter of this target or start without one"
        )
    if tuple(manifest.layer_ids) != tuple(layer_ids):
        raise ManifestError(
            f"drafter {manifest.version} reads target layers {list(manifest.layer_ids)}, the server captures "
            f"{list(layer_ids)}; restart the server with the drafter's layer ids"
        )
    if (
        manifest.target.tokenizer_sha256 != target.tokenizer_sha256
        or manifest.target.chat_template_sha256 != target.chat_template_sha256
    ):
        raise ManifestError(
            f"drafter {manifest.version} was trained with another tokenizer or chat template than {target.name} "
            "uses now; retrain it on this fleet's traffic"
        )


def sha256_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def vocab_map_sha256(draft_to_target: NDArray[np.int64]) -> str:
    """Hash of the map draft id -> target id, [Vd] int64 target ids (not offsets)."""
    return sha256_bytes(np.ascontiguousarray(draft_to_target, dtype="<i8").tobytes())
