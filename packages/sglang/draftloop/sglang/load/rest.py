"""What a resting drafter has missed, and how it catches up before it drafts again.

In plain decoding SGLang skips the drafter altogether, so its KV cache has a hole over the tokens decoded meanwhile.
The target's states at those tokens are kept here; one ragged pass of the drafter fills the hole, exactly as after a
prefill: many tokens at once cost a fraction of what one pass a step would have.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

# Longer holes keep their newest tokens only. The drafter then attends to stale keys before them, which costs
# acceptance and never correctness; 256 rows of 16 requests are 28 MiB for SmolLM2.
MOST_MISSED = 256


@dataclass(slots=True)
class _Hole:
    """end: the position after the last missed token.  rows: (token, states of the step [B, K*H], row) of each."""

    end: int
    rows: deque[tuple[int, torch.Tensor, int]] = field(default_factory=lambda: deque(maxlen=MOST_MISSED))


class MissedTokens:
    """The holes of all running requests, by request id."""

    def __init__(self) -> None:
        self._holes: dict[str, _Hole] = {}

    def forget(self, batch: Any) -> None:
        """A prefill has rebuilt these requests' drafter state."""
        for req in batch.reqs:
            self._holes.pop(req.rid, None)

    def note(self, batch: Any, hidden: torch.Tensor) -> None:
        """A plain step. batch.spec_info: its one-node trees; hidden: [B, K*H], the target's states at the roots."""
        tokens, lengths = batch.spec_info.draft_token.tolist(), batch.seq_lens.tolist()
        running: dict[str, _Hole] = {}
        for row, (req, token, position) in enumerate(zip(batch.reqs, tokens, lengths, strict=True)):
            hole = self._holes.get(req.rid)
            if hole is None or hole.end != position:
                hole = _Hole(position)
            hole.rows.append((token, hidden, row))
            hole.end = position + 1
            running[req.rid] = hole
        self._holes = running

    def catch_up(self, worker: Any, batch: Any) -> bool:
        """Fill the holes of `batch`, about to draft, and put the drafter's fresh state into it. True if any were."""
        lengths = batch.seq_lens.tolist()
        rows, holes = [], []
        for row, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            hole = self._holes.get(req.rid)
            if hole is not None and hole.end == length:
                rows.append(row)
                holes.append(hole)
        self._holes.clear()
        if not rows:
            return False
        index = torch.tensor(rows, device=batch.seq_lens.device)
        state = batch.spec_info
        # Past our own tap's hook: these rows were captured when they were decoded.
        extend = inspect.unwrap(type(worker.draft_worker)._draft_extend_for_prefill)
        states = torch.stack([hidden[at] for hole in holes for _, hidden, at in hole.rows])
        fresh = extend(worker.draft_worker, _prefill_of(batch, index, holes), states, state.bonus_tokens[index])
        for name in ("topk_p", "topk_index", "hidden_states"):
            merged = getattr(state, name).clone()
            merged[index] = getattr(fresh, name).to(merged.dtype)
            setattr(state, name, merged)
        return True


def _prefill_of(batch: Any, index: torch.Tensor, holes: list[_Hole]) -> Any:
    """A ScheduleBatch that looks like a prefill of the holes alone."""
    part = copy.copy(batch)
    rows = index.tolist()
    lengths = [len(hole.rows) for hole in holes]
    starts = [hole.end - length for hole, length in zip(holes, lengths, strict=True)]
    part.reqs = [batch.reqs[row] for row in rows]
    part.forward_mode = ForwardMode.EXTEND
    part.seq_lens, part.req_pool_indices = batch.seq_lens[index], batch.req_pool_indices[index]
    part.seq_lens_cpu = part.seq_lens.cpu()
    part.seq_lens_sum = int(part.seq_lens_cpu.sum())
    part.orig_seq_lens = part.seq_lens
    part.prefix_lens, part.extend_lens, part.extend_num_tokens = starts, lengths, sum(lengths)
    part.extend_logprob_start_lens = [0] * len(rows)
    part.multimodal_inputs = [None] * len(rows)
    part.return_logprob = False
    tokens = [token for hole in holes for token, _, _ in hole.rows]
    part.input_ids = torch.tensor(tokens, dtype=torch.int64, device=index.device)
    table = batch.req_to_token_pool.req_to_token
    spans = zip(part.req_pool_indices.tolist(), starts, holes, strict=True)
    part.out_cache_loc = torch.cat([table[pool, start : hole.end] for pool, start, hole in spans]).long()
    return part
