"""What the CPU platform adds to SGLang: an attention backend, kernels it lacks, and hooks."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend

from draftloop.sglang.cpu import fast_start, sampling
from draftloop.sglang.cpu.platform import BACKEND_NAME
from draftloop.sglang.hooks import Hook


def register_backend() -> None:
    """Make `draftloop_torch` an attention backend one may name."""
    fast_start.skip_gpu_packages()
    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        if BACKEND_NAME not in names:
            names.append(BACKEND_NAME)

    @register_attention_backend(BACKEND_NAME)
    def create(runner: Any) -> Any:
        from draftloop.sglang.cpu.attention import TorchAttnBackend

        return TorchAttnBackend(runner)


def supply_kernels() -> None:
    """Fill the kernels that SGLang leaves None on a CPU, and what torch lacks there."""
    sampling.supply_kernels()
    # DFlash tells the allocator which stream reads a tensor; on a CPU torch refuses the question.
    torch.Tensor.record_stream = _no_stream_to_record  # type: ignore[method-assign, assignment]


def _no_stream_to_record(tensor: torch.Tensor, stream: Any) -> None:
    """A CPU has one stream."""


def cpu_hooks() -> tuple[Hook, ...]:
    """The hooks of a CPU server, made in its first process."""
    return (
        Hook(
            "sglang.srt.speculative.eagle_utils._verify_uses_greedy",
            ("is_all_greedy", "is_cpu"),
            "REPLACE",
            sampling.verify_uses_greedy,
        ),
        Hook(
            "sglang.srt.entrypoints.engine._set_envs_and_config",
            ("server_args",),
            "AFTER",
            fast_start.fork_children,
        ),
        Hook(
            "sglang.srt.model_loader.utils.get_model_architecture",
            ("model_config",),
            "BEFORE",
            fast_start.register_served_model,
        ),
        Hook(
            "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
            ("self", "backend_name", "backend_map"),
            "AROUND",
            offer_backend,
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
            ("self", "forward_batch"),
            "AFTER",
            keep_embedding_dtype,
        ),
    )


def keep_embedding_dtype(arguments: dict[str, Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang casts given input embeddings (DFlash's block) to bfloat16 whatever the model's dtype; give them back."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        arguments["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)


def offer_backend(
    original: Any, factory: Any, name: str, backend_map: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Add ours to the factory's table, which is built inside its callers; only draft decoding stamps children."""
    from draftloop.sglang.cpu.attention import TorchAttnBackend, TorchMultiStepDraftBackend

    def create() -> tuple[str, Any]:
        runner = factory.draft_model_runner
        if kwargs.get("stamps_children"):
            return BACKEND_NAME, TorchMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return BACKEND_NAME, TorchAttnBackend(runner)

    return original(factory, name, {**backend_map, BACKEND_NAME: create}, *args, **kwargs)
