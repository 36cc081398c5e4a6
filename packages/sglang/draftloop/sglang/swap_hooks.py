"""What a swap needs of the scheduler: copies that SGLang derives from a drafter's weights must follow them.

drafter   derived at start-up                        here
EAGLE-3   hot_token_id, target ids of the head's rows  becomes a buffer of the model: replaced and checksummed
DFlash    K/V weights of all layers, stacked (GPU)     stacked again after each update, into the same tensors
"""

from __future__ import annotations

from typing import Any

from draftloop.sglang.held_tensors import VOCAB_MAP
from draftloop.sglang.hooks import EAGLE_WORKER, Hook

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def swap_hooks() -> tuple[Hook, ...]:
    """The hooks of any server whose drafter may be swapped."""
    return (
        Hook(f"{EAGLE_WORKER}.init_lm_head", ("self",), "AFTER", hold_vocab_map),
        Hook(f"{UPDATER}.end_weight_update", ("self", "recv_req"), "AFTER", refresh_fused_kv),
    )


def hold_vocab_map(_result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
    """Register the map that `worker` reads as a buffer of its draft model, so that `/weights_checker` covers it."""
    model = worker.draft_runner.model
    if VOCAB_MAP in vars(model) and worker.hot_token_id is not None:
        delattr(model, VOCAB_MAP)
        model.register_buffer(VOCAB_MAP, worker.hot_token_id, persistent=False)


def refresh_fused_kv(_result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """Stack DFlash's K/V weights anew. In place: a captured graph reads the old tensors' addresses."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    worker = updater.draft_worker
    if not isinstance(worker, DFlashWorkerV2) or worker._fused_kv_helper is None:
        return
    held = worker._fused_kv_helper
    worker._init_fused_kv_helper()
    fresh = worker._fused_kv_helper
    held.flat_kv_weight_t.copy_(fresh.flat_kv_weight_t)
    held.k_norm_weights.copy_(fresh.k_norm_weights)
    worker._fused_kv_helper = held
