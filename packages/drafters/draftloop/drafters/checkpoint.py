"""Drafter checkpoints: the folder SGLang serves, with the manifest that says what it fits.

    config.json                  what SGLang reads: see `layouts`
    model.safetensors            every parameter, and the map `d2t` where there is one
    draftloop_manifest.json      target, layers, vocabulary map, checksums, lineage

A folder appears whole or not at all, and nothing is believed of it until every check has passed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.core.errors import CheckpointError
from draftloop.core.manifest import (
    Lineage,
    Manifest,
    TargetIdentity,
    TensorEntry,
    check_fits,
    sha256_bytes,
    vocab_map_sha256,
)
from draftloop.drafters.drafter import Drafter, Shape
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.layouts import (
    WEIGHT_DTYPES,
    build,
    draft_vocab,
    hf_config,
    kind_of,
    parse_hf_config,
    tensor_shapes,
)
from draftloop.drafters.vocab import check_draft_ids, ids_from_offsets

WEIGHTS_FILE = "model.safetensors"


def save_drafter(
    folder: Path,
    config: Shape,
    state: Mapping[str, Tensor],
    *,
    version: str,
    parent: str | None,
    target: TargetIdentity,
    lineage: Lineage | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Write `state` (a drafter's state dict) to the new folder `folder`, atomically."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; a drafter version is never overwritten")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    _check_tensors(folder, config, tensors)
    size, vocab_map = draft_vocab(config, tensors)
    manifest = Manifest(
        kind=kind_of(config),
        version=version,
        parent=parent,
        target=target,
        layer_ids=config.layer_ids,
        draft_vocab_size=size,
        vocab_map_sha256=draft_map_sha256(vocab_map),
        dtype=_dtype_name(_main_dtype(tensors)),
        tensors={name: _entry(tensor) for name, tensor in sorted(tensors.items())},
        lineage=lineage or Lineage(),
        metrics=dict(metrics or {}),
        created=time.time(),
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        staging.chmod(0o755)
        config_json = json.dumps(hf_config(config, manifest.dtype), indent=2) + "\n"
        (staging / "config.json").write_text(config_json, encoding="utf-8")
        save_file(tensors, staging / WEIGHTS_FILE)
        manifest.save(staging)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def load_any(folder: Path) -> tuple[Drafter, Manifest]:
    """Load a checked drafter of any kind. Raises CheckpointError or ManifestError in one line."""
    config, tensors, manifest = _read_checked(folder)
    with torch.device("meta"):
        drafter = build(config)
    drafter.load_state_dict(tensors, assign=True)
    return drafter, manifest


def load_drafter(folder: Path) -> tuple[Eagle3Drafter, Manifest]:
    """`load_any` where only an EAGLE-3 drafter will do."""
    drafter, manifest = load_any(folder)
    if not isinstance(drafter, Eagle3Drafter):
        raise CheckpointError(f"{folder} holds a drafter of kind {manifest.kind}, not eagle3; choose another")
    return drafter, manifest


def verify_checkpoint(folder: Path, target: TargetIdentity, layer_ids: Iterable[int] | None = None) -> Manifest:
    """Make every check of `load_any`, and that the drafter fits this target and server.

    layer_ids: what the server captures; None when it starts with this drafter, and so captures the drafter's own.
    """
    manifest = Manifest.load(folder)
    check_fits(manifest, target, manifest.layer_ids if layer_ids is None else layer_ids)
    return _read_checked(folder)[2]


def draft_map_sha256(draft_ids: Tensor) -> str:
    """The manifest's hash of a draft vocabulary, [Vd] int64 target ids."""
    return vocab_map_sha256(draft_ids.cpu().numpy())


def read_hf_config(folder: Path) -> Shape:
    """The shape that a drafter's `config.json` describes. Raises CheckpointError in one line."""
    path = folder / "config.json"
    try:
        return parse_hf_config(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json: it is not a drafter checkpoint") from None
    except KeyError as err:
        raise CheckpointError(f"{path} lacks {err}; export the drafter again") from None
    except ValueError:
        raise CheckpointError(f"{path} is not valid JSON; export the drafter again") from None


def _read_checked(folder: Path) -> tuple[Shape, dict[str, Tensor], Manifest]:
    manifest = Manifest.load(folder)
    config = read_hf_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}; export the drafter again") from None
    except SafetensorError as err:
        raise CheckpointError(f"{path} is damaged or cut short ({err}); export the drafter again") from None
    if kind_of(config) != manifest.kind:
        raise CheckpointError(
            f"{folder}: config.json describes a drafter of kind {kind_of(config)}, the manifest one of {manifest.kind}"
        )
    if config.layer_ids != manifest.layer_ids:
        raise CheckpointError(
            f"{folder}: config.json fuses layers {list(config.layer_ids)}, the manifest says "
            f"{list(manifest.layer_ids)}; export the drafter again"
        )
    _check_tensors(folder, config, tensors)
    _check_against_manifest(folder, config, tensors, manifest)
    return config, tensors, manifest


def _check_tensors(folder: Path, config: Shape, tensors: Mapping[str, Tensor]) -> None:
    shapes = tensor_shapes(config)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing; export the drafter again")
    if extra := sorted(tensors.keys() - shapes.keys()):
        raise CheckpointError(f"{folder}: tensor {extra[0]} does not belong to a drafter of kind {kind_of(config)}")
    dtype = _main_dtype(tensors)
    if dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"{folder}: weights are {_dtype_name(dtype)}; a drafter is kept in bf16, fp16 or fp32")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(tensor.shape)}, its config.json asks for {list(shapes[name])}"
            )
        expected = torch.int64 if name == "d2t" else dtype
        if tensor.dtype != expected or not (name == "d2t" or tensor.is_floating_point()):
            raise CheckpointError(
                f"{folder}: tensor {name} is {_dtype_name(tensor.dtype)}, not {_dtype_name(expected)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{folder}: tensor {name} holds NaN or infinite values; do not serve this drafter")
    if "d2t" in tensors:
        check_draft_ids(ids_from_offsets(tensors["d2t"]), config.vocab_size)


def _check_against_manifest(folder: Path, config: Shape, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{folder}: tensor {name} is not in the manifest; export the drafter again")
        if entry.dtype != _dtype_name(tensor.dtype) or entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder}: tensor {name} is {_dtype_name(tensor.dtype)} {list(tensor.shape)}, the manifest says "
                f"{entry.dtype} {list(entry.shape)}"
            )
        if entry.sha256 != _tensor_sha256(tensor):
            raise CheckpointError(f"{folder}: the checksum of tensor {name} is wrong: the file changed after export")
    if draft_map_sha256(draft_vocab(config, tensors)[1]) != manifest.vocab_map_sha256:
        raise CheckpointError(f"{folder}: d2t is not the vocabulary map the manifest names; export the drafter again")


def _entry(tensor: Tensor) -> TensorEntry:
    return TensorEntry(shape=tuple(tensor.shape), dtype=_dtype_name(tensor.dtype), sha256=_tensor_sha256(tensor))


def _tensor_sha256(tensor: Tensor) -> str:
    return sha256_bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _main_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of most weights; the odd one out is the wrong one."""
    return Counter(tensor.dtype for name, tensor in tensors.items() if name != "d2t").most_common(1)[0][0]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
