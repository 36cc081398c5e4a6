"""Which device and dtype a config's 'auto' means on this machine."""

from __future__ import annotations

import torch


def use_cuda(device: str) -> bool:
    """Whether 'auto' | 'cpu' | 'cuda' means a GPU."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def serving_dtype(dtype: str, cuda: bool) -> torch.dtype:
    """The dtype a server runs in. 'auto': bfloat16 on a GPU, float32 on a CPU."""
    if dtype == "auto":
        dtype = "bfloat16" if cuda else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
