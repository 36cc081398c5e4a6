"""Make SGLang know the attention backend `draftloop_torch`, for the target and for the draft."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from draftloop.sglang.cpu import fast_start
from draftloop.sglang.cpu.platform import BACKEND_NAME


def register_backend() -> None:
    """Register the backend's name, its factory, and its multi-step form for draft decoding."""
    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        if BACKEND_NAME not in names:
            names.append(BACKEND_NAME)

    @register_attention_backend(BACKEND_NAME)
    def create(runner: Any) -> Any:
        from draftloop.sglang.cpu.attention import TorchAttnBackend

        return TorchAttnBackend(runner)

    HookRegistry.register(fast_start.HOOK_TARGET, fast_start.register_served_model, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", offer_backend, HookType.AROUND
    )


def offer_backend(
    original: Any, factory: Any, name: str, backend_map: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Add ours to the factory's table, which is built inside its callers (`DraftBackendFactory`)."""
    from draftloop.sglang.cpu.attention import TorchAttnBackend, TorchMultiStepDraftBackend

    def create() -> tuple[str, Any]:
        runner = factory.draft_model_runner
        if name == "decode_attention_backend" and "flashinfer" in backend_map and kwargs.get("stamps_children"):
            return BACKEND_NAME, TorchMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return BACKEND_NAME, TorchAttnBackend(runner)

    return original(factory, name, {**backend_map, BACKEND_NAME: create}, *args, **kwargs)
