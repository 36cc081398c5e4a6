"""Runs inside the scheduler: loads a drafter from a file it can read, called by SGLang's `custom_weight_loader`.

The bytes never pass through HTTP: the request carries only the checkpoint's path (see `swap.py`), so the pause
covers a read from the page cache and a copy.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftloop.core.manifest import Manifest
from draftloop.sglang.held_tensors import VOCAB_MAP, server_tensors

LOADER = "draftloop.sglang.swap_loader.load"
PATH_PREFIX = "draftloop.checkpoint:"

logger = logging.getLogger(__name__)


def path_entry(path: Path) -> tuple[str, torch.Tensor]:
    """A path as the (name, tensor) pair that `load` expects.

    The tensor is empty: SGLang's serializer hands over one with bytes as a file descriptor, which only processes that
    share a multiprocessing key may take; a server that may not take it dies.
    """
    return f"{PATH_PREFIX}{path}", torch.empty(0, dtype=torch.uint8)


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy the checkpoint's tensors into the running draft `model`, all of them or none.

    Must not raise: SGLang does not catch here and the scheduler would die with its requests. A refusal leaves the
    old weights, and the caller learns of it from the checksums.
    """
    (name, _), *_ = named_tensors
    try:
        if not name.startswith(PATH_PREFIX):
            raise ValueError(f"expected a name that begins with {PATH_PREFIX}, got {name}")
        path = Path(name.removeprefix(PATH_PREFIX))
        tensors = load_file(path)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise ValueError(f"{path} holds a NaN or an infinity")
        held = server_tensors(tensors, Manifest.load(path.parent).kind)
        check_held(held, model)
        tensors.pop("d2t", None)
        model.load_weights(tensors.items())
        if VOCAB_MAP in held:
            # In place: the worker and a captured graph hold this very tensor (`swap_hooks.hold_vocab_map`).
            model.get_buffer(VOCAB_MAP).copy_(held[VOCAB_MAP])
    except Exception:
        logger.exception("draftloop: drafter not loaded, the old one stays")


def check_held(held: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Raise ValueError unless every tensor has a place of its shape in `model`: a copy must not fail half way."""
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in held.items():
        if name not in places:
            raise ValueError(f"the running drafter has no tensor {name}")
        if places[name].shape != tensor.shape:
            raise ValueError(f"tensor {name} is {list(tensor.shape)}, the running one {list(places[name].shape)}")
