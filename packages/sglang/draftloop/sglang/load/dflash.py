"""The controller in SGLang's DFLASH worker: how many slots of the drafter's block to draft and verify each step.

A shorter block is the same drafter with fewer masked slots. SGLang sizes a handful of buffers by the block; each
length keeps its own set, and a step begins by putting one set in place. Length 1 is plain decoding: nothing is
drafted, but the drafter's cache still receives the target's states, so it never has to catch up.
"""

from __future__ import annotations

from typing import Any

import torch

from draftloop.drafters.load.gains import BlockGains
from draftloop.sglang.hooks import DFLASH_WORKER, Hook
from draftloop.sglang.load.follower import Follower
from draftloop.sglang.load.settings import LoadSettings

# What `DFlashWorkerV2._ensure_draft_block_buffers` makes anew when the first is None.
BUFFERS = (
    "_draft_block_ids_buf",
    "_draft_block_positions_buf",
    "_draft_block_tokens_buf",
    "_draft_verify_out_cache_loc_buf",
    "_draft_block_end_buf",
    "_draft_seq_lens_cpu_buf",
)


class DflashFollower:
    """One lives in each scheduler process; its methods are hooks."""

    def __init__(self, settings: LoadSettings) -> None:
        self._gains = BlockGains(settings.shapes)
        self._follower = Follower(settings, self._gains)
        self._shape = settings.shapes[-1]
        self._resting_sets: dict[int, dict[str, Any]] = {}

    def hooks(self) -> tuple[Hook, ...]:
        return (
            Hook(f"{DFLASH_WORKER}.init_cuda_graphs", ("self",), "AFTER", self.start),
            Hook(f"{DFLASH_WORKER}.forward_batch_generation", ("self", "batch"), "AROUND", self.step),
        )

    def start(self, _result: None, worker: Any) -> None:
        self._follower.start(worker.target_worker.model_runner, worker.draft_model_runner)

    def step(self, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_decode():
            self._follower.interrupted()
            return original(worker, batch, *args, **kwargs)
        self._shape = self._follower.choose(batch, None)
        self._set_block(worker, self._shape.nodes)
        result = original(worker, batch, *args, **kwargs)
        self._gains.observe(self._shape.nodes - 1, result.accept_lens.numpy() - 1)
        self._follower.ran(self._shape)
        return result

    def _set_block(self, worker: Any, length: int) -> None:
        from sglang.srt.speculative.draft_worker_common import build_block_pos_offsets, make_draft_block_spec_info

        if worker.block_size == length:
            return
        names = (*BUFFERS, "_block_pos_offsets", "_draft_block_spec_info")
        self._resting_sets[worker.block_size] = {name: getattr(worker, name) for name in names}
        if length not in self._resting_sets:
            device: torch.device = worker.device
            self._resting_sets[length] = dict.fromkeys(BUFFERS) | {
                "_block_pos_offsets": build_block_pos_offsets(length=length, device=device),
                "_draft_block_spec_info": make_draft_block_spec_info(draft_token_num=length, device=device),
            }
        for name, value in self._resting_sets[length].items():
            setattr(worker, name, value)
        worker.block_size = worker.speculative_num_draft_tokens = length
        worker.draft_model.set_block_size(length)
