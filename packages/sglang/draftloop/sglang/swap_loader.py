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
PATH_PREFIX = "draftloop.checkpoint:"

logger = logging.getLogger(__name__)


def path_entry(path: Path) -> tuple[str, torch.Tensor]:
    """A path as the (name, tensor) pair that `load` expects.

    The tensor is empty: SGLang's serializer hands over one with bytes as a file descriptor, which only processes that
    share a multiprocessing key may take; a server that may not take it dies.
    """
    return f"{PATH_PREFIX}{path}", torch.empty(0, dtype=torch.uint8)


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy the checkpoint's tensors into the running draft `model`.

    Must not raise: SGLang does not catch here and the scheduler would die with its requests. A refusal leaves the
    old weights, and the caller learns of it from the checksums.
    """
    (name, _), *_ = named_tensors
    try:
        if not name.startswith(PATH_PREFIX):
            raise ValueError(f"expected a name that begins with {PATH_PREFIX}, got {name}")
        path = name.removeprefix(PATH_PREFIX)
        with safe_open(path, framework="pt") as file:
            # d2t is skipped: the worker keeps its own copy of the map, and `swap` refuses another one.
            tensors = {key: file.get_tensor(key) for key in file.keys() if key != "d2t"}  # noqa: SIM118
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise ValueError(f"{path} holds a NaN or an infinity")
        model.load_weights(tensors.items())
    except Exception:
        logger.exception("draftloop: drafter not loaded, the old one stays")
