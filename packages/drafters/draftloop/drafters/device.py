"""Which device a config's 'auto' | 'cpu' | 'cuda' means on this machine."""

from __future__ import annotations

import torch


def use_cuda(device: str) -> bool:
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())
