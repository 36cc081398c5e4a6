"""Make `draftloop_flashinfer` an attention backend one may name. Imports nothing that needs a GPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend

BACKEND_NAME = "draftloop_flashinfer"


def register_backend() -> None:
    """For the target only: drafts keep SGLang's own backend (`--speculative-draft-attention-backend flashinfer`)."""
    if BACKEND_NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.ATTENTION_BACKEND_CHOICES.append(BACKEND_NAME)

    @register_attention_backend(BACKEND_NAME)
    def create(runner: Any) -> Any:
        from draftloop.sglang.gpu.attention import CascadeVerifyBackend

        return CascadeVerifyBackend(runner)
