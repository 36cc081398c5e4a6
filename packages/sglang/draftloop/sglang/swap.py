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
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftloop.core.errors import ServerError
from draftloop.core.manifest import DrafterKind, Manifest, TargetIdentity
from draftloop.drafters.checkpoint import WEIGHTS_FILE, verify_checkpoint
from draftloop.sglang.client import ServerClient
from draftloop.sglang.swap_loader import LOADER, path_entry

# The drafter's embedding is the target's own tensor: never pushed, never hashed here.
ALIASED = ("embed_tokens",)
# SGLang pads a head's rows to this multiple (layers/vocab_parallel_embedding.py).
VOCAB_PADDING = 64
# Projections that SGLang keeps as one matrix, found by their first part.
FUSED = re.compile(r"\.(q|k|v|gate|up)_proj\.weight$")
FIRST_PARTS = {"q": ("q", "k", "v"), "gate": ("gate", "up")}


@dataclass(frozen=True, slots=True)
class ServingSlot:
    """What the running server's drafter must fit; a swap to anything else is refused before a byte is sent.

    dtype: what the server runs in; checkpoints are stored in fp32 and cast when they are loaded.
    """

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    vocab_map_sha256: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SwapReport:
    """paused_ms: from the pause request to the answer of continue; update_ms: the update call within it."""

    version: str
    paused_ms: float
    update_ms: float
    checksum_ok: bool


class SwapError(ServerError):
    """The swap did not happen, or cannot be shown to have happened; the message says which drafter serves."""


def swap(client: ServerClient, checkpoint: Path, slot: ServingSlot, serving_version: str) -> SwapReport:
    """Put the drafter in folder `checkpoint` into the server behind `client`, under load, without a drain.

    serving_version: what serves now; it keeps serving (and keeps its name) when the checksums disagree. Raises
    ManifestError or CheckpointError before anything is sent, SwapError afterwards.
    """
    manifest = verify_checkpoint(checkpoint, slot.target, slot.layer_ids, slot.vocab_map_sha256)
    expected = server_checksums(load_file(checkpoint / WEIGHTS_FILE), manifest.kind, slot.dtype)
    before = client.draft_checksums(ALIASED)
    if set(before) != set(expected):
        odd = sorted(set(before) ^ set(expected))
        raise SwapError(f"the server's drafter and {checkpoint} differ in tensor {odd[0]}; {serving_version} serves on")
    payload = {
        "serialized_named_tensors": [_serialized(checkpoint / WEIGHTS_FILE)],
        "load_format": LOADER,
        "flush_cache": False,
        "selector": "draft",
        "weight_version": manifest.version,
    }
    paused_ms, update_ms = _paused(client, lambda: _update(client, payload))
    after = client.draft_checksums(ALIASED)
    if after != expected:
        raise SwapError(_diagnose(client, manifest, serving_version, before, after))
    return SwapReport(manifest.version, paused_ms, update_ms, checksum_ok=True)


def _update(client: ServerClient, payload: dict[str, Any]) -> None:
    client.post("/begin_weight_update", {"selector": "draft"})
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
    """The request's payload: SGLang deserialises it with its own restricted unpickler; it holds only the path."""
    from sglang.srt.utils import MultiprocessingSerializer

    data: bytes = MultiprocessingSerializer.serialize([path_entry(weights.resolve())])
    return base64.b64encode(data).decode()


def server_tensors(state: Mapping[str, torch.Tensor], kind: DrafterKind) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as SGLang's draft model holds them: projections fused, head padded, names prefixed."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        fused = FUSED.search(name)
        if fused is None:
            held[name] = tensor
        elif fused[1] in FIRST_PARTS:
            parts = FIRST_PARTS[fused[1]]
            whole = name.replace(f"{fused[1]}_proj", f"{'qkv' if fused[1] == 'q' else 'gate_up'}_proj")
            held[whole] = torch.cat([state[name.replace(f"{fused[1]}_proj", f"{part}_proj")] for part in parts])
    if kind == "dflash":
        return held
    held.pop("d2t", None)
    head = held.pop("lm_head.weight")
    named = {f"model.{name.replace('midlayer', 'layers.0')}": tensor for name, tensor in held.items()}
    named["lm_head.weight"] = torch.nn.functional.pad(head, (0, 0, 0, -head.shape[0] % VOCAB_PADDING))
    return named


def server_checksums(state: Mapping[str, torch.Tensor], kind: DrafterKind, dtype: torch.dtype) -> dict[str, str]:
    """What `/weights_checker` should answer on a CPU: the first 8 bytes of each tensor's sha256, in hex.

    On a GPU SGLang hashes with its own kernel (`managers/mm_utils.tensor_hash`), so that is what is called there.
    """
    tensors = {name: tensor.to(dtype) for name, tensor in server_tensors(state, kind).items()}
    if torch.cuda.is_available():
        from sglang.srt.managers.mm_utils import tensor_hash

        return {name: f"{tensor_hash(tensor.cuda()):016x}" for name, tensor in tensors.items()}
    return {name: _sha256_head(tensor) for name, tensor in tensors.items()}


def _sha256_head(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()[:8].hex()
