"""Runs inside the scheduler: loads a drafter from a file it can read, called by SGLang's `custom_weight_loader`.

The bytes never pass through HTTP: the request carries only the checkpoint's path (see `swap.py`), so the pause
covers a read from the page cache and a copy.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

LOADER = "draftloop.sglang.swap_loader.load"
PATH_TENSOR = "draftloop.checkpoint_path"

logger = logging.getLogger(__name__)


def path_tensor(path: Path) -> torch.Tensor:
    """A path as the uint8 tensor that `load` expects."""
    return torch.frombuffer(bytearray(str(path).encode()), dtype=torch.uint8)


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy the checkpoint's tensors into the running draft `model`.

    Must not raise: SGLang does not catch here and the scheduler would die with its requests. A refusal leaves the
    old weights, and the caller learns of it from the checksums.
    """
    (name, data), *_ = named_tensors
    try:
        if name != PATH_TENSOR:
            raise ValueError(f"expected the tensor {PATH_TENSOR}, got {name}")
        path = bytes(data.cpu().numpy()).decode()
        with safe_open(path, framework="pt") as file:
            # d2t is skipped: the worker keeps its own copy of the map, and `swap` refuses another one.
            tensors = {key: file.get_tensor(key) for key in file.keys() if key != "d2t"}  # noqa: SIM118
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise ValueError(f"{path} holds a NaN or an infinity")
        model.load_weights(tensors.items())
    except Exception:
        logger.exception("draftloop: drafter not loaded, the old one stays")
