"""The SGLang platform object: SGLang's in-tree CPU platform, with speculation allowed and weights packed."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

BACKEND_NAME = "draftloop_torch"
DISPATCH_KEY = "draftloop_cpu"


class DraftloopCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out of tree by its enum, so SGLang asks it; `SGLANG_USE_CPU_ENGINE=1` keeps the in-tree CPU branches on."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return BACKEND_NAME

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND_NAME

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == BACKEND_NAME

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_dispatch_key_name(self) -> str:
        return DISPATCH_KEY

    def post_load_model(self, model: torch.nn.Module) -> None:
        # The import needs SGLang's layers, which need the platform: too early at module level.
        from draftloop.sglang.cpu.linear import pack_model

        pack_model(model)

    def init_backend(self) -> None:
        from draftloop.sglang.cpu.ops import register_ops

        register_ops()
