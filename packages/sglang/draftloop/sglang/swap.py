"""Hot swap of a drafter in a running server: checked before, in place, verified after.

check manifest and tensors            (nothing sent yet)
pause in place                        running requests keep their KV and their place
  begin(draft) -> update -> end       SGLang's weight-update session, selector "draft"
continue
compare checksums                     the server's tensors against the checkpoint's
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # teaches ForkingPickler what a tensor is
from safetensors.torch import load_file

from draftloop.core.errors import CheckpointError, ServerError
from draftloop.core.manifest import DrafterKind, Manifest
from draftloop.drafters.checkpoint import WEIGHTS_FILE, verify_checkpoint
from draftloop.sglang.client import ServerClient
from draftloop.sglang.held_tensors import ALIASED, VOCAB_MAP, server_tensors
from draftloop.sglang.swap_loader import LOADER, path_entry


@dataclass(frozen=True, slots=True)
class ServingSlot:
    """What the running server's drafter must fit; a swap to anything else is refused before a byte is sent.

    serving: the manifest of the drafter that serves now; its name and weights stay when a swap is refused.
    dtype: what the server runs in; checkpoints are stored in fp32 and cast when they are loaded.
    cuda: whether the server's tensors are on a GPU, where SGLang hashes them another way.
    """

    serving: Manifest
    dtype: torch.dtype
    cuda: bool


@dataclass(frozen=True, slots=True)
class SwapReport:
    """paused_ms: from the pause request to the answer of continue; update_ms: the update call within it."""

    version: str
    paused_ms: float
    update_ms: float
    checksum_ok: bool


class SwapError(ServerError):
    """The swap did not happen, or cannot be shown to have happened; the message says which drafter serves."""


def swap(client: ServerClient, checkpoint: Path, slot: ServingSlot) -> SwapReport:
    """Put the drafter in folder `checkpoint` into the server behind `client`, under load, without a drain.

    A draft vocabulary of other tokens is carried along; one of another size is refused. Raises ManifestError or
    CheckpointError before anything is sent, SwapError afterwards.
    """
    manifest = verify_checkpoint(checkpoint, slot.serving.target, slot.serving.layer_ids)
    _check_same_shapes(checkpoint, manifest, slot.serving)
    expected = server_checksums(load_file(checkpoint / WEIGHTS_FILE), manifest.kind, slot.dtype, slot.cuda)
    before = client.draft_checksums(ALIASED[manifest.kind])
    if set(before) != set(expected):
        odd = sorted(set(before) ^ set(expected))
        raise SwapError(
            f"the server's drafter and {checkpoint} differ in tensor {odd[0]}; {slot.serving.version} serves on"
        )
    payload = {
        "serialized_named_tensors": [_serialized(checkpoint / WEIGHTS_FILE)],
        "load_format": LOADER,
        "flush_cache": False,
        "selector": "draft",
        "weight_version": manifest.version,
    }
    paused_ms, update_ms = _paused(client, lambda: _update(client, payload))
    after = client.draft_checksums(ALIASED[manifest.kind])
    if after != expected:
        raise SwapError(_diagnose(client, manifest, slot.serving.version, before, after))
    return SwapReport(manifest.version, paused_ms, update_ms, checksum_ok=True)


def end_forgotten_pause(client: ServerClient) -> None:
    """Let a server go on that a swap whose process was killed left paused; harmless to one that runs.

    A session that was left open is ended by the next swap, in its own pause: outside one SGLang would first drain.
    """
    client.post("/continue_generation", {"torch_empty_cache": False})


def _check_same_shapes(checkpoint: Path, manifest: Manifest, serving: Manifest) -> None:
    if manifest.kind != serving.kind:
        raise CheckpointError(f"{checkpoint} holds a drafter of kind {manifest.kind}, the server runs {serving.kind}")
    for name, entry in manifest.tensors.items():
        if name not in serving.tensors or serving.tensors[name].shape != entry.shape:
            raise CheckpointError(
                f"{checkpoint}: tensor {name} {list(entry.shape)} does not fit the running drafter "
                f"{serving.version}; start a server with this checkpoint instead"
            )


def _update(client: ServerClient, payload: dict[str, Any]) -> None:
    selector = {"selector": "draft"}
    try:
        client.post("/begin_weight_update", selector)
    except ServerError:  # a killed swap left its session open; anything else fails again
        client.post("/end_weight_update", {})
        client.post("/begin_weight_update", selector)
    try:
        client.post("/update_weights_from_tensor", payload)
    finally:
        client.post("/end_weight_update", {})


def _paused(client: ServerClient, update: Callable[[], None]) -> tuple[float, float]:
    """Run `update` while generation is paused; (ms paused, ms of the update). The server is always resumed."""
    start = time.perf_counter()
    client.post("/pause_generation", {"mode": "in_place"})
    try:
        before = time.perf_counter()
        update()
        updated = time.perf_counter()
    finally:
        client.post("/continue_generation", {"torch_empty_cache": False})
    return (time.perf_counter() - start) * 1e3, (updated - before) * 1e3


def _diagnose(
    client: ServerClient, manifest: Manifest, serving_version: str, before: dict[str, str], after: dict[str, str]
) -> str:
    """Say exactly what serves after a failed swap; give the old weights their old name back."""
    if after == before:
        client.post("/update_weight_version", {"new_version": serving_version, "abort_all_requests": False})
        return f"the server refused drafter {manifest.version} (see its log); {serving_version} serves on"
    client.post("/update_weight_version", {"new_version": f"torn-{manifest.version}", "abort_all_requests": False})
    changed = sorted(name for name in after if after[name] != before[name])
    return (
        f"drafter {manifest.version} reached the server only in part ({len(changed)} tensors changed): output is still "
        f"verified by the target, but restore {serving_version} by another swap"
    )


def _serialized(weights: Path) -> str:
    """The request's payload, written as SGLang's MultiprocessingSerializer does, whose import would cost ten seconds.

    SGLang reads it with its own restricted unpickler; it holds only the path.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([path_entry(weights.resolve())])
    return base64.b64encode(buffer.getvalue()).decode()


def server_checksums(
    state: Mapping[str, torch.Tensor], kind: DrafterKind, dtype: torch.dtype, cuda: bool
) -> dict[str, str]:
    """What `/weights_checker` should answer on a CPU: the first 8 bytes of each tensor's sha256, in hex.

    On a GPU SGLang hashes with its own kernel (`managers/mm_utils.tensor_hash`), so that is what is called there.
    """
    tensors = {
        name: tensor if name == VOCAB_MAP else tensor.to(dtype) for name, tensor in server_tensors(state, kind).items()
    }
    if cuda:
        from sglang.srt.managers.mm_utils import tensor_hash

        return {name: f"{tensor_hash(tensor.cuda()):016x}" for name, tensor in tensors.items()}
    return {name: _sha256_head(tensor) for name, tensor in tensors.items()}


def _sha256_head(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()[:8].hex()
